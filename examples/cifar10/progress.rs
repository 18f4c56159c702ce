//! What a run prints.

use indicatif::BinaryBytes;

use crate::{
    common::{
        options::Precision,
        progress::{Display, RECENT, count, device, precision, status, table},
    },
    data::Dataset,
    history::History,
    options::Options,
    report::Report,
    schedule::Schedule,
};

/// Shows how training goes.
#[derive(Debug)]
pub(crate) struct Progress {
    schedule: Schedule,
    batch_size: usize,
    display: Display,
}

impl Progress {
    pub(crate) fn new(schedule: Schedule, batch_size: usize) -> Self {
        Self { schedule, batch_size, display: Display::new(schedule.steps) }
    }

    /// After every step.
    pub(crate) fn step(&mut self, history: &History) {
        let (step, epoch) = (history.steps.count(), history.epochs.len() + 1);
        let status = status(&history.steps, RECENT, "", self.batch_size, "images");
        let line = format!("  step {step}/{}  {status}\n", self.schedule.steps);
        let prefix = format!("epoch {epoch}/{} ", self.schedule.epochs);
        self.display.step(step, prefix, status, &line);
    }

    /// After every epoch and its test.
    pub(crate) fn epoch(&mut self, history: &History) {
        self.display.line(&epoch_line(history, &self.schedule, self.batch_size));
    }
}

/// The last epoch in one line.
fn epoch_line(history: &History, schedule: &Schedule, batch_size: usize) -> String {
    let (done, of) = (history.epochs.len(), schedule.epochs);
    let accuracy = history.epochs.last().map_or(0., |epoch| epoch.test_accuracy);
    let steps = history.epochs.last().map_or(0, |epoch| epoch.steps);
    let status = status(&history.steps, steps, "", batch_size, "images");
    let width = of.to_string().len();
    format!("epoch {done:>width$}/{of}  test {:5.2} %  {status}\n", 100. * accuracy)
}

/// The table before the first step.
pub(crate) fn opening(
    options: &Options,
    data: &Dataset,
    schedule: &Schedule,
    parameters: usize,
) -> String {
    let (train, test) = (count(data.train.len()), count(data.test.len()));
    let steps = count(schedule.steps);
    let epochs = match schedule.epochs {
        1 => "1 epoch".to_owned(),
        more => format!("{more} epochs"),
    };
    table(&[
        ("model", format!("{}, {} parameters", options.model, count(parameters))),
        ("precision", precision(options.precision, options.master_weights, options.loss_scale())),
        ("device", device(options.gpu)),
        ("data", format!("{}, {train} to train on, {test} to test with", data.name)),
        ("training", format!("{steps} steps of {} images, {epochs}", options.batch_size())),
    ]) + "\n"
}

/// The table after the last step.
pub(crate) fn closing(report: &Report, classes: &[&str]) -> String {
    let interrupted = if report.interrupted { ", then interrupted" } else { "" };
    let memory = report.peak_rss_bytes.map_or("unknown".into(), |b| BinaryBytes(b).to_string());
    let (steps, skipped) = (report.steps, report.skipped_steps);
    let mut text = table(&[
        ("test accuracy", format!("{:.2} %", 100. * report.test_accuracy)),
        ("median step", format!("{:.1} ms", 1000. * report.median_step_seconds)),
        ("speed", format!("{:.0} images/s", report.images_per_second)),
        ("peak memory", memory),
        ("steps", format!("{steps}, {skipped} skipped{interrupted}")),
    ]);
    text += "\nCorrect by class, in per cent:\n";
    let accuracies = report.test_accuracy_per_class.chunks(5);
    for (classes, accuracies) in classes.chunks(5).zip(accuracies) {
        let cells = classes.iter().zip(accuracies);
        let cells = cells.map(|(class, accuracy)| format!("{class:<10} {:>3.0}", 100. * accuracy));
        text += &cells.collect::<Vec<_>>().join("  ");
        text.push('\n');
    }
    format!("\n{text}")
}

/// What to try next.
pub(crate) fn hint(options: &Options) -> String {
    let other = if options.precision == Precision::F32 { "bf16" } else { "f32" };
    let mut text = format!("\nTo compare, try --precision {other} with the same --seed.\n");
    if options.data.is_none() {
        text += "For the real CIFAR-10, get its binary version from\n\
                 https://www.cs.toronto.edu/~kriz/cifar.html and try --data DIR --epochs 30.\n";
    }
    text
}

#[cfg(test)]
mod tests;
