//! What the run prints and writes.

use std::fs::{self, File};
use std::path::PathBuf;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::Options;
use crate::list::{Peer, Row};
use crate::measure::Times;

/// A line of the table.
#[derive(Debug, Serialize)]
pub(crate) struct Line {
    name: String,
    unit: Unit,
    ours: f64,
    /// What the other side is, and what it has.
    peer: Option<(String, f64)>,
    ratio: Option<f64>,
    target: Option<f64>,
    ok: Option<bool>,
    gigabytes_per_second: Option<f64>,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) enum Unit {
    Seconds,
    Bytes,
}

impl Line {
    pub(crate) fn new(
        name: String,
        unit: Unit,
        ours: f64,
        peer: Option<(String, f64)>,
        target: Option<f64>,
    ) -> Self {
        let ratio = peer.as_ref().map(|(_, theirs)| ours / theirs);
        let ok = ratio.zip(target).map(|(ratio, target)| ratio <= target);
        Self { name, unit, ours, peer, ratio, target, ok, gigabytes_per_second: None }
    }

    /// A line, or one for each of PyTorch's allocators; the first is what counts.
    pub(crate) fn of(row: &Row, times: &[Times]) -> Result<Vec<Self>> {
        let find = |spec| times.iter().find(|times| times.spec == spec).context("not measured");
        let ours = find(row.ours)?;
        let line = |name: String, peer, target| {
            let mut line = Self::new(name, Unit::Seconds, ours.ours, peer, target);
            line.gigabytes_per_second =
                row.ours.bytes().map(|bytes| bytes as f64 / ours.ours / 1e9);
            line
        };
        let name = row.name.clone();
        Ok(match row.peer {
            Peer::Nothing => vec![line(name, None, None)],
            Peer::Bound(bound) => vec![line(name, Some(("bound".into(), bound)), row.target)],
            Peer::Own(spec, what) => {
                vec![line(name, Some((what.into(), find(spec)?.ours)), row.target)]
            }
            Peer::Torch if ours.torch.is_empty() => vec![line(name, None, row.target)],
            Peer::Torch => {
                let lines = ours.torch.iter().enumerate().map(|(i, torch)| {
                    let (note, target) = match i {
                        0 => ("", row.target),
                        _ => (", its default allocator", None),
                    };
                    let peer = format!("{}{note}", torch.how);
                    line(name.clone(), Some((peer, torch.seconds)), target)
                });
                lines.collect()
            }
        })
    }

    fn show(&self, value: f64) -> String {
        match self.unit {
            Unit::Bytes => format!("{:.0} MiB", value / f64::from(1 << 20)),
            Unit::Seconds if value.abs() < 1e-6 => format!("{:.0} ns", value * 1e9),
            Unit::Seconds if value < 1e-3 => format!("{:.1} µs", value * 1e6),
            Unit::Seconds => format!("{:.2} ms", value * 1e3),
        }
    }
}

/// Prints lines as they come, and keeps them for a file.
#[derive(Debug)]
pub(crate) struct Table {
    file: Option<PathBuf>,
    lines: Vec<Line>,
}

impl Table {
    pub(crate) fn new(options: &Options) -> Result<Self> {
        let file = options.json.clone();
        if let Some(path) = &file {
            // Not at the end of a long run.
            File::create(path).with_context(|| format!("writing {}", path.display()))?;
        }
        Ok(Self { file, lines: Vec::new() })
    }

    pub(crate) fn print(&mut self, line: Line) {
        if self.lines.is_empty() {
            println!(
                "{:<38} {:>11} {:>11} {:>6} {:>6}",
                "workload", "crate", "peer", "ratio", "target"
            );
        }
        let number = |number: Option<f64>| number.map_or_else(String::new, |n| format!("{n:.2}"));
        let theirs = line.peer.as_ref().map_or_else(String::new, |(_, peer)| line.show(*peer));
        let verdict = line.ok.map_or("", |ok| if ok { "ok" } else { "miss" });
        let what = line.peer.as_ref().map_or("", |(what, _)| what.trim_start_matches(", "));
        let rate = line.gigabytes_per_second.map(|rate| format!("{rate:.1} GB/s"));
        let notes = [rate.as_deref().unwrap_or_default(), what].map(str::to_string);
        let notes: Vec<_> = notes.into_iter().filter(|note| !note.is_empty()).collect();
        let text = format!(
            "{:<38} {:>11} {theirs:>11} {:>6} {:>6} {verdict:<4} {}",
            line.name,
            line.show(line.ours),
            number(line.ratio),
            number(line.target),
            notes.join(", "),
        );
        println!("{}", text.trim_end());
        self.lines.push(line);
    }

    pub(crate) fn finish(self) -> Result<()> {
        let judged: Vec<bool> = self.lines.iter().filter_map(|line| line.ok).collect();
        let good = judged.iter().filter(|ok| **ok).count();
        if !judged.is_empty() {
            println!("\n{good} of {} targets met", judged.len());
        }
        if let Some(path) = &self.file {
            let json = serde_json::to_string_pretty(&self.lines)?;
            fs::write(path, json).with_context(|| format!("writing {}", path.display()))?;
        }
        Ok(())
    }
}
