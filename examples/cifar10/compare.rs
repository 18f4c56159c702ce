//! Runs side by side: one column for each precision, as text, Markdown and JSON.

use std::path::Path;

use anyhow::Result;
use indicatif::BinaryBytes;
use serde::Serialize;

use crate::{
    common::progress::{count, counted, short},
    report::{self, Report},
};

/// Runs of one training in several precisions, with several seeds.
#[derive(Clone, Debug)]
pub(crate) struct Comparison {
    /// Those that ended, in their order. Ctrl-C may have cut the last one short.
    runs: Vec<Report>,
    planned: usize,
}

/// The mean over runs, and the sample standard deviation of two or more.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Spread {
    mean: f64,
    standard_deviation: Option<f64>,
}

impl Spread {
    fn of(values: &[f64]) -> Self {
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        let deviation = (values.len() > 1).then(|| (squares / (n - 1.)).sqrt());
        Self { mean, standard_deviation: deviation }
    }

    /// With `digits` after the point, and the unit.
    fn show(&self, factor: f64, digits: usize, unit: &str) -> String {
        let mut text = format!("{:.digits$}", factor * self.mean);
        if let Some(deviation) = self.standard_deviation {
            text += &format!(" ± {:.digits$}", factor * deviation);
        }
        text + unit
    }

    /// As seconds.
    fn duration(&self) -> String {
        match self.mean {
            mean if !mean.is_finite() => "-".to_owned(),
            ..0.9995 => self.show(1000., 0, " ms"),
            ..9.995 => self.show(1., 2, " s"),
            ..59.95 => self.show(1., 1, " s"),
            mean => {
                let seconds = mean.round() as u64;
                let text = format!("{} min {} s", seconds / 60, seconds % 60);
                let spread =
                    self.standard_deviation.map(|deviation| format!(" ± {deviation:.0} s"));
                text + &spread.unwrap_or_default()
            }
        }
    }
}

/// The complete runs of one precision.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Summary {
    precision: String,
    seeds: Vec<u64>,
    /// Of its training steps, without the test after it.
    epoch_seconds: Spread,
    images_per_second: Spread,
    weight_bytes: usize,
    /// The highest; `null` if that of a run is unknown.
    peak_rss_bytes: Option<u64>,
    test_accuracy: Spread,
    /// Of all seeds together, skipped ones included.
    steps: usize,
    skipped_steps: usize,
    /// By seed.
    final_scales: Vec<f32>,
}

impl Summary {
    /// Of one or more runs of one precision.
    fn of(runs: &[&Report]) -> Self {
        let spread = |value: fn(&Report) -> f64| {
            Spread::of(&runs.iter().map(|run| value(run)).collect::<Vec<_>>())
        };
        let peaks: Option<Vec<u64>> = runs.iter().map(|run| run.peak_rss_bytes).collect();
        Self {
            precision: runs.first().map_or_else(String::new, |run| run.precision.clone()),
            seeds: runs.iter().map(|run| run.seed).collect(),
            epoch_seconds: spread(epoch_seconds),
            images_per_second: spread(|run| run.images_per_second),
            weight_bytes: runs.first().map_or(0, |run| run.weight_bytes),
            peak_rss_bytes: peaks.and_then(|peaks| peaks.into_iter().max()),
            test_accuracy: spread(|run| run.test_accuracy),
            steps: runs.iter().map(|run| run.steps).sum(),
            skipped_steps: runs.iter().map(|run| run.skipped_steps).sum(),
            final_scales: runs.iter().map(|run| run.final_scale).collect(),
        }
    }

    /// The column of the table, below the precision.
    fn cells(&self) -> [String; ROWS.len()] {
        let bytes = |bytes: u64| BinaryBytes(bytes).to_string();
        let digits = if self.images_per_second.mean < 99.95 { 1 } else { 0 };
        let lowest = self.final_scales.iter().copied().fold(f32::INFINITY, f32::min);
        let highest = self.final_scales.iter().copied().fold(0., f32::max);
        let scale = if lowest == highest {
            short(highest)
        } else {
            format!("{} to {}", short(lowest), short(highest))
        };
        [
            self.seeds.len().to_string(),
            self.epoch_seconds.duration(),
            self.images_per_second.show(1., digits, ""),
            bytes(self.weight_bytes as u64),
            self.peak_rss_bytes.map_or("-".to_owned(), bytes),
            self.test_accuracy.show(100., 2, " %"),
            format!("{} of {}", self.skipped_steps, self.steps),
            scale,
        ]
    }
}

/// What the rows of the table are called.
const ROWS: [&str; 8] = [
    "seeds",
    "time an epoch",
    "images a second",
    "weights",
    "peak memory",
    "test accuracy",
    "skipped steps",
    "final scale",
];

/// The time that all full batches of the training images take at the speed of the run: the last
/// epoch of `--steps` may be shorter.
fn epoch_seconds(run: &Report) -> f64 {
    let images = run.train_images / run.batch_size * run.batch_size;
    images as f64 / run.images_per_second
}

impl Comparison {
    pub(crate) fn new(planned: usize) -> Self {
        Self { runs: Vec::new(), planned }
    }

    /// A table of a single run.
    pub(crate) fn of(run: Report) -> Self {
        Self { runs: vec![run], planned: 1 }
    }

    pub(crate) fn add(&mut self, run: Report) {
        self.runs.push(run);
    }

    pub(crate) fn runs(&self) -> &[Report] {
        &self.runs
    }

    fn complete(&self) -> impl Iterator<Item = &Report> {
        self.runs.iter().filter(|run| !run.interrupted)
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.complete().count() == self.planned
    }

    /// True if the last run did not end by itself.
    pub(crate) fn is_cut_short(&self) -> bool {
        self.runs.last().is_some_and(|run| run.interrupted)
    }

    /// Of every precision with a complete run.
    fn summaries(&self) -> Vec<Summary> {
        let mut groups: Vec<Vec<&Report>> = Vec::new();
        for run in self.complete() {
            match groups.iter_mut().find(|group| group[0].precision == run.precision) {
                Some(group) => group.push(run),
                None => groups.push(vec![run]),
            }
        }
        groups.iter().map(|group| Summary::of(group)).collect()
    }

    /// The table, row by row, with names of rows and columns.
    pub(crate) fn rows(&self) -> Vec<Vec<String>> {
        let summaries = self.summaries();
        let columns: Vec<_> = summaries.iter().map(Summary::cells).collect();
        let names = summaries.iter().map(|summary| summary.precision.clone());
        let mut rows = vec![std::iter::once(String::new()).chain(names).collect::<Vec<_>>()];
        for (index, name) in ROWS.iter().enumerate() {
            let cells = columns.iter().map(|column| column[index].clone());
            rows.push(std::iter::once((*name).to_owned()).chain(cells).collect());
        }
        rows
    }

    /// What a reader of the table must know, in sentences.
    pub(crate) fn notes(&self) -> Vec<String> {
        let complete = self.complete().count();
        let mut notes = Vec::new();
        if self.summaries().iter().any(|summary| summary.seeds.len() > 1) {
            notes.push("± is the standard deviation over seeds.".to_owned());
        }
        for run in self.runs.iter().filter(|run| run.test_images_of_nan > 0) {
            let (precision, seed, nan) = (&run.precision, run.seed, count(run.test_images_of_nan));
            notes.push(format!(
                "{precision}, seed {seed}: NaN for {nan} test images. Training has diverged; lower --lr."
            ));
        }
        if complete < self.planned {
            notes.push(format!("Cut short: {complete} of {} runs are complete.", self.planned));
        }
        notes
    }

    /// What was trained, in a sentence.
    pub(crate) fn caption(&self) -> Option<String> {
        let Report { model, device, data, epochs, batch_size, train_images, .. } =
            self.runs.first()?;
        let images = counted(*train_images, "training image");
        let epochs = counted(*epochs, "epoch");
        let masters = self.runs.iter().any(|run| run.master_weights);
        let masters = if masters { ", F32 masters of 16-bit weights" } else { "" };
        Some(format!(
            "{model} on {data}: {images}, batches of {batch_size}, {epochs}, \
             {device}{masters}."
        ))
    }

    /// For a terminal.
    pub(crate) fn text(&self) -> String {
        let (rows, mut text) = (self.rows(), String::new());
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
        let widths: Vec<_> = (0..rows[0].len()).map(|column| width(column).unwrap_or(0)).collect();
        if widths.len() > 1 {
            for row in &rows {
                let mut line = format!("{:<1$}", row[0], widths[0]);
                for (cell, width) in row.iter().zip(&widths).skip(1) {
                    line += &format!("  {cell:>width$}");
                }
                text += &(line + "\n");
            }
        }
        for note in self.notes() {
            text += &(note + "\n");
        }
        text
    }

    /// For a page: what was trained, the table, and its notes.
    pub(crate) fn markdown(&self) -> String {
        let mut parts: Vec<String> = self.caption().into_iter().collect();
        let rows = self.rows();
        if rows[0].len() > 1 {
            let mut lines: Vec<_> =
                rows.iter().map(|row| format!("| {} |", row.join(" | "))).collect();
            lines[0] = lines[0].replacen("|  |", "| |", 1);
            lines.insert(1, format!("|---|{}", "--:|".repeat(rows[0].len() - 1)));
            parts.push(lines.join("\n"));
        }
        parts.extend(self.notes());
        parts.join("\n\n") + "\n"
    }

    /// All runs, and their summaries.
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "runs": self.runs,
            "planned_runs": self.planned,
            "summary": self.summaries(),
        })
    }

    /// Writes the comparison to `path`: Markdown if its name ends in `.md`, otherwise JSON.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let markdown = is_markdown(path);
        let text = if markdown { self.markdown() } else { report::json(&self.json())? };
        report::write(path, &text)
    }
}

pub(crate) fn is_markdown(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("md"))
}

#[cfg(test)]
mod tests;
