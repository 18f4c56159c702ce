//! What a run prints.

use crate::{
    common::{
        options::Precision,
        progress::{self, Display, RECENT, count, counted, device, short, table},
        steps::Steps,
    },
    data::Corpus,
    options::{Options, Size},
    report::Outcome,
};

/// Shows how training goes.
#[derive(Debug)]
pub(crate) struct Progress {
    steps: usize,
    /// Characters a step.
    tokens: usize,
    display: Display,
}

impl Progress {
    pub(crate) fn new(steps: usize, tokens: usize) -> Self {
        Self { steps, tokens, display: Display::new(steps) }
    }

    /// After every step.
    pub(crate) fn step(&mut self, history: &Steps) {
        let line = line(history, self.steps, self.tokens, None);
        let status = status(history, self.tokens, None);
        self.display.step(history.count(), String::new(), status, &line);
    }

    /// After a look at the held-out text.
    pub(crate) fn pause(&mut self, history: &Steps, held_out: f64) {
        self.display.line(&line(history, self.steps, self.tokens, Some(held_out)));
    }
}

fn line(history: &Steps, steps: usize, tokens: usize, held_out: Option<f64>) -> String {
    let (width, step) = (steps.to_string().len(), history.count());
    format!("step {step:>width$}/{steps}  {}\n", status(history, tokens, held_out))
}

/// The last steps in a few words.
fn status(history: &Steps, tokens: usize, held_out: Option<f64>) -> String {
    let held_out = held_out.map_or(String::new(), |loss| format!("held-out {loss:.3}  "));
    progress::status(history, RECENT, &held_out, tokens, "tokens")
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
    let precision = progress::precision(precision, options.master_weights, scale);
    let (train, held_out) = (count(corpus.train.len()), count(corpus.held_out.len()));
    let characters = count(corpus.characters());
    let steps = counted(options.steps(), "step");
    let batch = counted(options.batch_size(), "window");
    let context = counted(context, "character");
    let parameters = count(parameters);
    table(&[
        ("model", format!("{layers} layers of {width}, {heads} heads, {parameters} parameters")),
        ("precision", precision),
        ("device", device(options.gpu)),
        ("text", format!("{}, {characters} different characters", corpus.name)),
        ("", format!("{train} to train on, {held_out} held out")),
        ("training", format!("{steps} of {batch} of {context}")),
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
