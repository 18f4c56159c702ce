//! What a run prints.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use indicatif::BinaryBytes;

use crate::{
    common::progress::{Display, RECENT, count, counted, device, precision, print, status, table},
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
    /// What every line begins with.
    prefix: String,
    /// When it began, and after how many steps of an earlier process.
    began: Instant,
    begun: usize,
    display: Display,
}

impl Progress {
    /// Of a training that goes on after `begun` steps.
    pub(crate) fn new(schedule: Schedule, batch_size: usize, prefix: String, begun: usize) -> Self {
        let (began, display) = (Instant::now(), Display::new(schedule.steps));
        if begun > 0 {
            print(&format!("{prefix}going on after {begun} of {} steps\n", schedule.steps));
        }
        Self { schedule, batch_size, prefix, began, begun, display }
    }

    /// After every step.
    pub(crate) fn step(&mut self, history: &History) {
        let (step, epoch) = (history.steps.count(), history.epochs.len() + 1);
        let status = status(&history.steps, RECENT, "", self.batch_size, "images");
        let (done, left) = (step - self.begun, self.schedule.steps - step);
        let mut remaining = remaining(self.began.elapsed(), done, left);
        if !(self.prefix.is_empty() || remaining.is_empty()) {
            remaining += " of this run"; // of several
        }
        let (prefix, schedule) = (&self.prefix, &self.schedule);
        let line = format!("{prefix}  step {step}/{}  {status}{remaining}\n", schedule.steps);
        let prefix = format!("{prefix}epoch {epoch}/{} ", schedule.epochs);
        let remaining = remaining.trim_start();
        let gap = if remaining.is_empty() { "" } else { "  " };
        self.display.step(step, prefix, format!("{remaining}{gap}{status}"), &line);
    }

    /// After every epoch and its test.
    pub(crate) fn epoch(&mut self, history: &History) {
        let line = epoch_line(history, &self.schedule, self.batch_size);
        self.display.line(&format!("{}{line}", self.prefix));
    }

    /// Anything else, in lines of its own.
    pub(crate) fn note(&mut self, text: &str) {
        self.display.line(text);
    }
}

/// How long the steps that are `left` take if they go on as those that are `done`, tests included.
fn remaining(elapsed: Duration, done: usize, left: usize) -> String {
    if done == 0 || left == 0 {
        return String::new();
    }
    let seconds = (elapsed.as_secs_f64() * left as f64 / done as f64).ceil() as u64;
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    match (hours, minutes) {
        (0, 0) => format!("  {seconds} s left"),
        (0, minutes) => format!("  {minutes} min {} s left", seconds % 60),
        (hours, minutes) => format!("  {hours} h {minutes} min left"),
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
    let steps = counted(schedule.steps, "step");
    let images = counted(options.batch_size(), "image");
    let epochs = counted(schedule.epochs, "epoch");
    let mut rows = vec![("model", format!("{}, {} parameters", options.model, count(parameters)))];
    for (index, run) in options.runs().take(options.precisions().len()).enumerate() {
        let text = precision(run.precision, run.master_weights, run.loss_scale());
        rows.push((if index == 0 { "precision" } else { "" }, text));
    }
    rows.extend([
        ("device", device(options.gpu)),
        ("data", format!("{}, {train} to train on, {test} to test with", data.name)),
        ("training", format!("{steps} of {images}, {epochs}")),
    ]);
    if let Some(asked) = options.steps.filter(|&asked| asked > schedule.steps) {
        let asked = counted(asked, "step");
        rows.push(("", format!("--epochs ends it before the {asked} of --steps")));
    }
    if let Some(recipe) = options.recipe.summary() {
        rows.push(("recipe", recipe));
    }
    if let Some(path) = &options.out {
        rows.push(("folder", path.display().to_string()));
    }
    if options.compares() {
        let (first, count) = (options.seed, options.seeds);
        let seeds = match count {
            1 => format!("seed {first}"),
            more => format!("seeds {first} to {}", first.wrapping_add(more as u64 - 1)),
        };
        rows.push(("runs", format!("{}, {seeds}", options.run_count())));
    }
    table(&rows) + "\n"
}

/// The table after the last step.
pub(crate) fn closing(report: &Report, classes: &[&str]) -> String {
    let interrupted = if report.interrupted { ", then interrupted" } else { "" };
    let memory = report.peak_rss_bytes.map_or("unknown".into(), |b| BinaryBytes(b).to_string());
    let (steps, skipped) = (report.steps, report.skipped_steps);
    let mut rows = vec![("test accuracy", format!("{:.2} %", 100. * report.test_accuracy))];
    if report.test_images_of_nan > 0 {
        let nan = count(report.test_images_of_nan);
        rows.push(("diverged", format!("NaN for {nan} test images; lower --lr")));
    }
    rows.extend([
        ("median step", format!("{:.1} ms", 1000. * report.median_step_seconds)),
        ("speed", format!("{:.0} images/s", report.images_per_second)),
        ("peak memory", memory),
        ("steps", format!("{steps}, {skipped} skipped{interrupted}")),
    ]);
    let mut text = table(&rows);
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

/// Of a run that ended before, what the options ask for in vain: it has no step left to measure.
pub(crate) fn of_ended(run: &Options) -> String {
    let asked = [(run.profile.is_some(), "--profile"), (run.trace, "--trace")];
    let asked: Vec<_> = asked.iter().filter(|(asked, _)| *asked).map(|(_, name)| *name).collect();
    if asked.is_empty() {
        return String::new();
    }
    let (asked, precision, seed) = (asked.join(" and "), run.precision, run.seed);
    format!(
        "{precision}, seed {seed} had ended: {asked} need a new run, whose --out has another folder\n"
    )
}

/// Where the page of pictures is, as short as that can be said.
pub(crate) fn page(path: &Path) -> String {
    let here = std::env::current_dir().unwrap_or_default();
    format!("\nA page with pictures: {}\n", path.strip_prefix(here).unwrap_or(path).display())
}

/// What to try next.
pub(crate) fn hint(options: &Options) -> String {
    let mut text = String::new();
    if !options.compares() {
        text += "\nTo compare precisions, try --compare f32,bf16,f16.\n";
    }
    if options.out.is_none() {
        text += "\nFor a page with pictures, try --out DIR.\n";
    }
    if options.data.is_none() {
        text += "\nFor the real CIFAR-10, get its binary version from\n\
                 https://www.cs.toronto.edu/~kriz/cifar.html and try --data DIR --epochs 30.\n";
    }
    text
}

#[cfg(test)]
mod tests;
