//! What a run prints: a bar on a terminal, plain lines elsewhere.

use std::{
    io::{IsTerminal, Write, stdout},
    time::{Duration, Instant},
};

use indicatif::{HumanCount, ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::{
    data::Corpus,
    history::History,
    options::{Options, Precision, Size},
    report::Outcome,
};

/// Time between two plain lines.
const QUIET: Duration = Duration::from_secs(10);

/// Steps whose loss and speed are averaged for display.
const RECENT: usize = 20;

/// Shows how training goes.
#[derive(Debug)]
pub(crate) struct Progress {
    steps: usize,
    /// Characters a step.
    tokens: usize,
    display: Display,
}

#[derive(Debug)]
enum Display {
    Bar(ProgressBar),
    Lines { last: Instant },
}

impl Progress {
    pub(crate) fn new(steps: usize, tokens: usize) -> Self {
        let display = if interactive() {
            let target = ProgressDrawTarget::stdout_with_hz(10);
            let bar = ProgressBar::with_draw_target(Some(steps as u64), target);
            let style = ProgressStyle::with_template("{wide_bar} {pos}/{len}  {msg}")
                .unwrap_or_else(|_| ProgressStyle::default_bar());
            bar.set_style(style.progress_chars("=> "));
            Display::Bar(bar)
        } else {
            Display::Lines { last: Instant::now() }
        };
        Self { steps, tokens, display }
    }

    /// After every step.
    pub(crate) fn step(&mut self, history: &History) {
        let line = || line(history, self.steps, self.tokens, None);
        match &mut self.display {
            Display::Bar(bar) => {
                bar.set_message(status(history, self.tokens, None));
                bar.set_position(history.steps() as u64);
            }
            Display::Lines { last } if last.elapsed() >= QUIET => {
                print(&line());
                *last = Instant::now();
            }
            Display::Lines { .. } => {}
        }
    }

    /// After a look at the held-out text.
    pub(crate) fn pause(&mut self, history: &History, held_out: f64) {
        let line = line(history, self.steps, self.tokens, Some(held_out));
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

fn line(history: &History, steps: usize, tokens: usize, held_out: Option<f64>) -> String {
    let (width, step) = (steps.to_string().len(), history.steps());
    format!("step {step:>width$}/{steps}  {}\n", status(history, tokens, held_out))
}

/// The last steps in a few words.
fn status(history: &History, tokens: usize, held_out: Option<f64>) -> String {
    let (loss, speed) = (history.recent_loss(RECENT), history.rate(RECENT) * tokens as f64);
    let held_out = held_out.map_or(String::new(), |loss| format!("held-out {loss:.3}  "));
    let (scale, skipped) = (short(history.scale), history.skipped);
    format!("loss {loss:.3}  {held_out}{speed:.0} tokens/s  scale {scale}  skipped {skipped}")
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
    corpus: &Corpus,
    precision: Precision,
    parameters: usize,
) -> String {
    let Size { context, layers, heads, width } = options.size();
    let scale = if precision == Precision::F16 { "dynamic" } else { "none" };
    let precision = match (precision, options.master_weights) {
        (Precision::F32, _) => format!("f32, loss scale {scale}"),
        (half, false) => format!("{half}, f32 variables under autocast, loss scale {scale}"),
        (half, true) => format!("{half}, {half} variables with f32 masters, loss scale {scale}"),
    };
    let threads = rayon::current_num_threads();
    let device = match options.gpu {
        true => "cuda".to_owned(),
        false => format!("cpu, {threads} thread{}", if threads == 1 { "" } else { "s" }),
    };
    let (train, held_out) = (count(corpus.train.len()), count(corpus.held_out.len()));
    let characters = count(corpus.characters());
    let (steps, batch) = (count(options.steps()), options.batch_size());
    let parameters = count(parameters);
    table(&[
        ("model", format!("{layers} layers of {width}, {heads} heads, {parameters} parameters")),
        ("precision", precision),
        ("device", device),
        ("text", format!("{}, {characters} different characters", corpus.name)),
        ("", format!("{train} to train on, {held_out} held out")),
        ("training", format!("{steps} steps of {batch} windows of {context} characters")),
    ]) + "\n"
}

/// The table after the last step.
pub(crate) fn closing(outcome: &Outcome) -> String {
    let Outcome { train_loss, held_out_loss, steps, skipped, .. } = outcome;
    let interrupted = if outcome.interrupted { ", then interrupted" } else { "" };
    let scale = short(outcome.scale);
    let text = table(&[
        ("train loss", format!("{train_loss:.4}")),
        ("held-out loss", format!("{held_out_loss:.4}")),
        ("speed", format!("{:.0} tokens/s", outcome.tokens_per_second)),
        ("steps", format!("{steps}, {skipped} skipped, scale {scale}{interrupted}")),
    ]);
    format!("\n{text}")
}

/// What to try next.
pub(crate) fn hint(options: &Options) -> String {
    let text = if options.text.is_none() { " --text FILE for a text of yours, or" } else { "" };
    format!("\nTry{text} --report to compare f32, bf16 and f16.\n")
}

#[cfg(test)]
mod tests;
