//! What a run prints and writes.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::Value;

use crate::list::{Peer, Row};
use crate::measure::{Times, Workload};

/// A line of the table.
#[derive(Debug, Serialize)]
pub struct Line {
    name: String,
    unit: Unit,
    ours: f64,
    /// What the other side is, and what it has.
    peer: Option<(String, f64)>,
    ratio: Option<f64>,
    target: Option<f64>,
    ok: Option<bool>,
    /// What the crate gets through in a second, and in which unit.
    rate: Option<(f64, &'static str)>,
}

/// What a line's numbers are.
#[derive(Clone, Copy, Debug, Serialize)]
pub enum Unit {
    /// Of time.
    Seconds,
    /// Of memory.
    Bytes,
    /// A number of something.
    Count,
}

impl Line {
    /// `ours` beside the number of a named peer; `target` is the largest ratio that is good enough.
    pub fn new(
        name: String,
        unit: Unit,
        ours: f64,
        peer: Option<(String, f64)>,
        target: Option<f64>,
    ) -> Self {
        let ratio = peer.as_ref().map(|(_, theirs)| ours / theirs);
        let ok = ratio.zip(target).map(|(ratio, target)| ratio <= target);
        Self { name, unit, ours, peer, ratio, target, ok, rate: None }
    }

    /// A line, or one for each PyTorch process; the first is what counts, the others are called by
    /// `notes`.
    ///
    /// # Errors
    ///
    /// Where `times` lack the row.
    pub fn of<W: Workload>(row: &Row<W>, times: &[Times<W>], notes: &[&str]) -> Result<Vec<Self>> {
        let find = |spec: W| times.iter().find(|times| times.spec == spec).context("not measured");
        let ours = find(row.ours)?;
        let line = |name: String, peer, target| {
            let mut line = Self::new(name, Unit::Seconds, ours.ours, peer, target);
            line.rate = row.ours.amount().map(|(amount, unit)| (amount / ours.ours, unit));
            line
        };
        let name = row.name.clone();
        Ok(match row.peer {
            Peer::Nothing => vec![line(name, None, None)],
            Peer::Bound(bound) => vec![line(name, Some(("bound".into(), bound)), row.target)],
            Peer::Rate(rate, what) => {
                let peer = row.ours.amount().map(|(amount, _)| (what.into(), amount / rate));
                vec![line(name, peer, row.target)]
            }
            Peer::Own(spec, what) => {
                vec![line(name, Some((what.into(), find(spec)?.ours)), row.target)]
            }
            Peer::Torch if ours.torch.is_empty() => vec![line(name, None, row.target)],
            Peer::Torch => {
                let lines = ours.torch.iter().enumerate().map(|(i, torch)| {
                    let target = row.target.filter(|_| i == 0);
                    let peer = format!("{}{}", torch.how, notes.get(i).unwrap_or(&""));
                    line(name.clone(), Some((peer, torch.seconds)), target)
                });
                lines.collect()
            }
        })
    }

    fn show(&self, value: f64) -> String {
        match self.unit {
            Unit::Count => format!("{value}"),
            Unit::Bytes => format!("{:.0} MiB", value / f64::from(1 << 20)),
            Unit::Seconds if value.abs() < 1e-6 => format!("{:.0} ns", value * 1e9),
            Unit::Seconds if value < 1e-3 => format!("{:.1} µs", value * 1e6),
            Unit::Seconds => format!("{:.2} ms", value * 1e3),
        }
    }
}

/// Prints lines as they come, and writes them to a file with each, so that a run that is cut short leaves what it has.
#[derive(Debug)]
pub struct Table {
    file: Option<PathBuf>,
    /// Lines of the file that an earlier process wrote.
    earlier: Vec<Value>,
    lines: Vec<Line>,
}

impl Table {
    /// A table whose lines are also written to `file`, as JSON.
    ///
    /// # Errors
    ///
    /// Where the file cannot be written: now, not at the end of a long run.
    pub fn new(file: Option<&Path>) -> Result<Self> {
        if let Some(path) = file {
            File::create(path).with_context(|| format!("writing {}", path.display()))?;
        }
        Ok(Self { file: file.map(Path::to_path_buf), earlier: Vec::new(), lines: Vec::new() })
    }

    /// A table that goes on after the lines in `file`.
    ///
    /// # Errors
    ///
    /// Where there is no such file, or it has no lines.
    pub fn go_on(file: &Path) -> Result<Self> {
        let reading = || format!("reading {}", file.display());
        let text = fs::read_to_string(file).with_context(reading)?;
        // A process that ended before its first line left an empty file.
        let earlier = match text.is_empty() {
            true => Vec::new(),
            false => serde_json::from_str(&text).with_context(reading)?,
        };
        Ok(Self { file: Some(file.to_path_buf()), earlier, lines: Vec::new() })
    }

    /// Prints a line, after the head if it is the first.
    ///
    /// # Errors
    ///
    /// Where the file cannot be written.
    pub fn print(&mut self, line: Line) -> Result<()> {
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
        let rate = line.rate.map(|(rate, unit)| match rate {
            large if large >= 1000.0 => format!("{large:.0} {unit}"),
            small => format!("{small:.1} {unit}"),
        });
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
        let Some(path) = &self.file else { return Ok(()) };
        let lines = self.lines.iter().map(serde_json::to_value);
        let all = self.earlier.iter().cloned().map(Ok).chain(lines);
        let json = serde_json::to_string_pretty(&all.collect::<Result<Vec<_>, _>>()?)?;
        fs::write(path, json).with_context(|| format!("writing {}", path.display()))
    }

    /// Says how many targets were met.
    pub fn finish(self) {
        let judged: Vec<bool> = self.lines.iter().filter_map(|line| line.ok).collect();
        let good = judged.iter().filter(|ok| **ok).count();
        if !judged.is_empty() {
            println!("\n{good} of {} targets met", judged.len());
        }
    }
}
