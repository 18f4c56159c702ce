//! What a run prints: a bar on a terminal, plain lines elsewhere.

use std::{
    io::{IsTerminal, Write, stdout},
    time::{Duration, Instant},
};

use indicatif::{BinaryBytes, HumanCount, ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::{
    choices::Precision, data::Dataset, history::History, options::Options, report::Report,
    schedule::Schedule,
};

/// Time between two plain lines.
const QUIET: Duration = Duration::from_secs(10);

/// Steps whose loss and speed are averaged for display.
const RECENT: usize = 20;

/// Shows how training goes.
#[derive(Debug)]
pub(crate) struct Progress {
    schedule: Schedule,
    batch_size: usize,
    display: Display,
}

#[derive(Debug)]
enum Display {
    Bar(ProgressBar),
    Lines { last: Instant },
}

impl Progress {
    pub(crate) fn new(schedule: Schedule, batch_size: usize) -> Self {
        let display = if interactive() {
            let target = ProgressDrawTarget::stdout_with_hz(10);
            let bar = ProgressBar::with_draw_target(Some(schedule.steps as u64), target);
            let style = ProgressStyle::with_template("{prefix} {wide_bar} {pos}/{len}  {msg}")
                .unwrap_or_else(|_| ProgressStyle::default_bar());
            bar.set_style(style.progress_chars("=> "));
            Display::Bar(bar)
        } else {
            Display::Lines { last: Instant::now() }
        };
        Self { schedule, batch_size, display }
    }

    /// After every step.
    pub(crate) fn step(&mut self, history: &History) {
        let (step, of) = (history.steps(), self.schedule.steps);
        let status = || status(history, RECENT, self.batch_size);
        match &mut self.display {
            Display::Bar(bar) => {
                let epoch = history.epochs.len() + 1;
                bar.set_prefix(format!("epoch {epoch}/{}", self.schedule.epochs));
                bar.set_message(status());
                bar.set_position(step as u64);
            }
            Display::Lines { last } if last.elapsed() >= QUIET => {
                print(&format!("  step {step}/{of}  {}\n", status()));
                *last = Instant::now();
            }
            Display::Lines { .. } => {}
        }
    }

    /// After every epoch and its test.
    pub(crate) fn epoch(&mut self, history: &History) {
        let line = epoch_line(history, &self.schedule, self.batch_size);
        match &mut self.display {
            Display::Bar(bar) => bar.suspend(|| print(&line)),
            Display::Lines { last } => {
                print(&line);
                *last = Instant::now();
            }
        }
    }
}

impl Drop for Progress {
    /// Leaves the terminal clean, after an error too.
    fn drop(&mut self) {
        if let Display::Bar(bar) = &self.display {
            bar.finish_and_clear();
        }
    }
}

/// True when a bar can be drawn, and redrawn, on the standard output.
fn interactive() -> bool {
    let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
    stdout().is_terminal() && !dumb && !cfg!(test)
}

/// Prints `text`. That nobody listens any more is no reason to stop training.
pub(crate) fn print(text: &str) {
    if cfg!(test) {
        return print!("{text}"); // which a test's harness captures
    }
    let mut stdout = stdout().lock();
    let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
}

/// The last `recent` steps in a few words.
fn status(history: &History, recent: usize, batch_size: usize) -> String {
    let loss = history.recent_loss(recent);
    let speed = history.rate(recent) * batch_size as f64;
    let (scale, skipped) = (short(history.scale), history.skipped);
    format!("loss {loss:.3}  {speed:.0} images/s  scale {scale}  skipped {skipped}")
}

/// The last epoch in one line.
fn epoch_line(history: &History, schedule: &Schedule, batch_size: usize) -> String {
    let (done, of) = (history.epochs.len(), schedule.epochs);
    let accuracy = history.epochs.last().map_or(0., |epoch| epoch.test_accuracy);
    let steps = history.epochs.last().map_or(0, |epoch| epoch.steps);
    let status = status(history, steps, batch_size);
    let width = of.to_string().len();
    format!("epoch {done:>width$}/{of}  test {:5.2} %  {status}\n", 100. * accuracy)
}

/// A scale in few characters: 65536, 0.5, 1.5e-5, 1.7e7.
fn short(scale: f32) -> String {
    if (1e-3..1e7).contains(&scale) { format!("{scale}") } else { format!("{scale:.1e}") }
}

fn count(number: usize) -> HumanCount {
    HumanCount(number as u64)
}

/// Rows of two columns.
fn table(rows: &[(&str, String)]) -> String {
    rows.iter().map(|(name, value)| format!("{name:<15}{value}\n")).collect()
}

/// The table before the first step.
pub(crate) fn opening(
    options: &Options,
    data: &Dataset,
    schedule: &Schedule,
    parameters: usize,
) -> String {
    let scale = options.loss_scale();
    let precision = match (options.precision, options.master_weights) {
        (Precision::F32, _) => format!("f32, loss scale {scale}"),
        (half, false) => format!("{half}, f32 variables under autocast, loss scale {scale}"),
        (half, true) => format!("{half}, {half} variables with f32 masters, loss scale {scale}"),
    };
    let threads = rayon::current_num_threads();
    let device = match options.gpu {
        true => "cuda".to_owned(),
        false => format!("cpu, {threads} thread{}", if threads == 1 { "" } else { "s" }),
    };
    let (train, test) = (count(data.train.len()), count(data.test.len()));
    let steps = count(schedule.steps);
    let epochs = match schedule.epochs {
        1 => "1 epoch".to_owned(),
        more => format!("{more} epochs"),
    };
    table(&[
        ("model", format!("{}, {} parameters", options.model, count(parameters))),
        ("precision", precision),
        ("device", device),
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
