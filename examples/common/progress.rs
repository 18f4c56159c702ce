//! What a run prints: a bar on a terminal, plain lines elsewhere.

use std::{
    fmt,
    io::{IsTerminal, Write, stdout},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use indicatif::{HumanCount, ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::{options::Precision, ranks, steps::Steps};

/// Time between two plain lines.
const QUIET: Duration = Duration::from_secs(10);

/// Steps whose loss and speed are averaged for display.
pub(crate) const RECENT: usize = 20;

/// The bar on the terminal: whatever else is printed makes it step aside, from whatever thread, or it would be drawn over.
static BAR: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Shows how training goes.
#[derive(Debug)]
pub(crate) enum Display {
    Bar(ProgressBar),
    Lines { last: Instant },
}

impl Display {
    pub(crate) fn new(steps: usize) -> Self {
        if !interactive() {
            return Self::Lines { last: Instant::now() };
        }
        let target = ProgressDrawTarget::stdout_with_hz(10);
        let bar = ProgressBar::with_draw_target(Some(steps as u64), target);
        // In one row: what does not fit is left out.
        let style = ProgressStyle::with_template("{prefix}{bar:12} {pos}/{len}  {wide_msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "));
        *BAR.lock().unwrap_or_else(PoisonError::into_inner) = Some(bar.clone());
        Self::Bar(bar)
    }

    /// Shows `step`: a bar between `prefix` and `status`, or now and then `line`.
    pub(crate) fn step(&mut self, step: usize, prefix: String, status: String, line: &str) {
        match self {
            Self::Bar(bar) => {
                bar.set_prefix(prefix);
                bar.set_message(status);
                bar.set_position(step as u64);
            }
            Self::Lines { last } if last.elapsed() >= QUIET => self.line(line),
            Self::Lines { .. } => {}
        }
    }

    /// Prints a line that stays.
    pub(crate) fn line(&mut self, line: &str) {
        match self {
            Self::Bar(_) => print(line),
            Self::Lines { last } => {
                print(line);
                *last = Instant::now();
            }
        }
    }
}

impl Drop for Display {
    /// Leaves the terminal clean, after an error too.
    fn drop(&mut self) {
        if let Self::Bar(bar) = self {
            *BAR.lock().unwrap_or_else(PoisonError::into_inner) = None;
            bar.finish_and_clear();
        }
    }
}

/// True when a bar can be drawn, and redrawn, on the standard output.
fn interactive() -> bool {
    let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
    ranks::is_first() && stdout().is_terminal() && !dumb && !cfg!(test)
}

/// Prints `text`, once for all ranks. That nobody listens any more is no reason to stop training.
pub(crate) fn print(text: &str) {
    if !ranks::is_first() {
        return;
    }
    if cfg!(test) {
        return print!("{text}"); // which a test's harness captures
    }
    let write = || {
        let mut stdout = stdout().lock();
        let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    };
    match &*BAR.lock().unwrap_or_else(PoisonError::into_inner) {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}

/// The last `recent` steps, each of `items` that `unit` names, in a few words, with `more` after the
/// loss.
pub(crate) fn status(steps: &Steps, recent: usize, more: &str, items: usize, unit: &str) -> String {
    let (loss, speed) = (steps.recent_loss(recent), steps.rate(recent) * items as f64);
    let (scale, skipped) = (short(steps.scale), steps.skipped);
    format!("loss {loss:.3}  {more}{speed:.0} {unit}/s  scale {scale}  skipped {skipped}")
}

/// A scale in few characters: 65536, 0.5, 1.5e-5, 1.7e7.
pub(crate) fn short(scale: f32) -> String {
    if (1e-3..1e7).contains(&scale) { format!("{scale}") } else { format!("{scale:.1e}") }
}

pub(crate) fn count(number: usize) -> HumanCount {
    HumanCount(number as u64)
}

/// `1 step`, `2 steps`.
pub(crate) fn counted(number: usize, what: &str) -> String {
    format!("{} {what}{}", count(number), if number == 1 { "" } else { "s" })
}

/// What a run computes in, for a table.
pub(crate) fn precision(
    precision: Precision,
    master_weights: bool,
    scale: impl fmt::Display,
) -> String {
    match (precision, master_weights) {
        (Precision::F32, _) => format!("f32, loss scale {scale}"),
        (half, false) => format!("{half}, f32 variables under autocast, loss scale {scale}"),
        (half, true) => format!("{half}, {half} variables with f32 masters, loss scale {scale}"),
    }
}

/// What a run computes on, for a table.
pub(crate) fn device(gpu: bool) -> String {
    let threads = rayon::current_num_threads();
    let device = match gpu {
        true => "cuda".to_owned(),
        false => format!("cpu, {}", counted(threads, "thread")),
    };
    match ranks::count() {
        1 => device,
        count => format!("{count} ranks, each {device}"),
    }
}

/// Rows of two columns.
pub(crate) fn table(rows: &[(&str, String)]) -> String {
    rows.iter().map(|(name, value)| format!("{name:<15}{value}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_short() {
        for (scale, text) in
            [(1., "1"), (65536., "65536"), (0.5, "0.5"), (16777216., "1.7e7"), (0.000015, "1.5e-5")]
        {
            assert_eq!(short(scale), text);
        }
    }
}
