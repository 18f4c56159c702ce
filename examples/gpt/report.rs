//! What runs ended with, side by side.

use std::fmt::Write as _;

use anyhow::{Result, ensure};

use crate::common::options::Precision;

/// How far, relatively, a half may end from F32.
const TOLERANCE: f64 = 0.02;

/// What a run ended with.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    pub(crate) precision: Precision,
    /// The mean over many windows of each part, after training.
    pub(crate) train_loss: f64,
    pub(crate) held_out_loss: f64,
    /// Of all steps together, without evaluation.
    pub(crate) seconds: f64,
    pub(crate) tokens_per_second: f64,
    /// Steps begun, skipped ones included.
    pub(crate) steps: usize,
    pub(crate) skipped: usize,
    /// The loss scale after the last step; 1 without a scaler.
    pub(crate) scale: f32,
    /// True when Ctrl-C ended the training.
    pub(crate) interrupted: bool,
}

/// The outcomes of one training in several precisions, F32 first.
#[derive(Debug, Default)]
pub(crate) struct Report(Vec<Outcome>);

impl Report {
    pub(crate) fn add(&mut self, outcome: Outcome) {
        self.0.push(outcome);
    }

    /// How far training and held-out loss of `outcome` are from F32's, relatively.
    fn off(&self, outcome: &Outcome) -> [f64; 2] {
        let full = self.0.first().unwrap_or(outcome);
        [outcome.train_loss / full.train_loss - 1., outcome.held_out_loss / full.held_out_loss - 1.]
    }

    pub(crate) fn table(&self) -> String {
        let mut text = format!(
            "{:<11}{:>10}{:>10}{:>15}{:>10}{:>11}{:>9}\n",
            "precision", "train loss", "off f32", "held-out loss", "off f32", "time", "skipped"
        );
        for outcome in &self.0 {
            let Outcome { precision, train_loss, held_out_loss, seconds, skipped, .. } = outcome;
            let off = self.off(outcome).map(|off| match precision {
                Precision::F32 => String::new(),
                _ => format!("{:+.2} %", 100. * off),
            });
            let _ = writeln!(
                text,
                "{precision:<11}{train_loss:>10.4}{:>10}{held_out_loss:>15.4}{:>10}{seconds:>9.1} s\
                 {skipped:>9}",
                off[0], off[1]
            );
        }
        text
    }

    /// An error where a half ended too far from F32, or not all runs came to their end.
    pub(crate) fn judge(&self) -> Result<()> {
        let interrupted = self.0.iter().any(|outcome| outcome.interrupted) || self.0.len() < 3;
        ensure!(!interrupted, "interrupted: not all runs came to their end");
        for outcome in &self.0 {
            for (what, off) in ["training", "held-out"].into_iter().zip(self.off(outcome)) {
                ensure!(
                    off.abs() <= TOLERANCE,
                    "the {what} loss of {} is {:+.2} % off that of f32, more than {} %",
                    outcome.precision,
                    100. * off,
                    100. * TOLERANCE
                );
            }
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests;
