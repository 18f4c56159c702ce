//! The command line.

use std::{collections::BTreeMap, path::PathBuf};

use anyhow::{Result, ensure};
use clap::Parser;
use serde::Serialize;
use serde_json::Value;

use crate::common::options::{
    INIT_SCALE, Precision, Usage, check_gpu, check_init_scale, positive, up_to_a_million,
};

/// What stands below the options in `--help`.
const MORE: &str = "\
Several processes train one model, each on its part of a batch, after mpirun -n 2, in a build with
--features mpi. Set RAYON_NUM_THREADS to the cores that each may use.";

/// Trains a small GPT, character by character, in mixed precision: on Shakespeare or your text.
#[derive(Clone, Debug, Parser, Serialize)]
#[command(name = "gpt", max_term_width = 100, allow_negative_numbers = true, after_help = MORE)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Options {
    /// Text to learn, in UTF-8; its last tenth is held out [default: 200 kB of Shakespeare]
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub(crate) text: Option<PathBuf>,

    /// What matrix products and attention compute in
    #[arg(long, value_enum, default_value_t = Precision::Bf16)]
    pub(crate) precision: Precision,

    /// Train in f32, bf16 and f16, one after the other, and fail if bf16 or f16 is more than 2 % off
    #[arg(long, conflicts_with_all = ["precision", "sample"])]
    pub(crate) report: bool,

    /// Keep the model in 16 bits, and F32 masters of its weights in the optimizer
    #[arg(long)]
    pub(crate) master_weights: bool,

    /// Recompute each block in backward instead of keeping it: less memory, more time
    #[arg(long)]
    pub(crate) checkpoint: bool,

    /// Steps to train [default: 1000, 500 with --report, 6 with --smoke]
    #[arg(long, value_name = "N", value_parser = up_to_a_million)]
    steps: Option<usize>,

    /// Windows of text a step, of all ranks together, which must divide them [default: 12, or 2 with --smoke]
    #[arg(long, value_name = "N", value_parser = up_to_a_million)]
    batch_size: Option<usize>,

    /// Characters the model sees at once [default: 128, or 32 with --smoke]
    #[arg(long, value_name = "N", value_parser = up_to_a_million)]
    context: Option<usize>,

    /// Blocks of attention and perceptron [default: 4, or 2 with --smoke]
    #[arg(long, value_name = "N", value_parser = up_to_a_million)]
    layers: Option<usize>,

    /// Heads of the attention [default: 4]
    #[arg(long, value_name = "N", value_parser = up_to_a_million)]
    heads: Option<usize>,

    /// Numbers a character becomes, a multiple of the heads [default: 128, or 32 with --smoke]
    #[arg(long, value_name = "N", value_parser = up_to_a_million)]
    width: Option<usize>,

    /// The highest learning rate of the schedule
    #[arg(long, value_name = "X", default_value = "2e-3", value_parser = positive)]
    pub(crate) lr: f64,

    /// Of AdamW
    #[arg(long, value_name = "X", default_value = "0.1", value_parser = not_negative)]
    pub(crate) weight_decay: f64,

    /// The longest gradient, over all weights together
    #[arg(long, value_name = "X", default_value = "1", value_parser = positive)]
    pub(crate) clip: f64,

    /// Where the loss scale of f16 starts
    #[arg(long, value_name = "X", default_value_t = INIT_SCALE, value_parser = positive)]
    pub(crate) init_scale: f64,

    /// Of initial weights, windows and the sample
    #[arg(long, value_name = "N", default_value = "0")]
    pub(crate) seed: u64,

    /// Characters to write after training [default: 400, or 40 with --smoke]
    #[arg(long, value_name = "N")]
    sample: Option<usize>,

    /// Below 1, the sample keeps to what is likely
    #[arg(long, value_name = "X", default_value = "0.8", value_parser = positive)]
    pub(crate) temperature: f64,

    /// Train on the first CUDA device
    #[arg(long)]
    pub(crate) gpu: bool,

    /// Under mpirun, keep masters and moments in parts, one on each rank (ZeRO, stage 1)
    #[arg(long)]
    pub(crate) sharded: bool,

    /// A few steps of a tiny model, to see that everything works
    #[arg(long)]
    pub(crate) smoke: bool,
}

/// A number that is not below zero.
fn not_negative(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|&x: &f64| x >= 0. && x.is_finite());
    number.ok_or_else(|| "expected a number not below zero".to_owned())
}

/// The sizes of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Size {
    pub(crate) context: usize,
    pub(crate) layers: usize,
    pub(crate) heads: usize,
    pub(crate) width: usize,
}

impl Options {
    /// Checks what clap cannot: options that do not go together.
    pub(crate) fn check(&self) -> Result<()> {
        let Size { heads, width, .. } = self.size();
        ensure!(
            width.is_multiple_of(heads),
            Usage(format!("--width is {width}, not a multiple of the {heads} of --heads"))
        );
        ensure!(
            !(self.master_weights && self.precision == Precision::F32) || self.report,
            Usage("--master-weights needs --precision bf16 or f16: f32 weights are masters".into())
        );
        check_init_scale(self.init_scale, self.precisions().contains(&Precision::F16))?;
        check_gpu(self.gpu)
    }

    /// What ranks that train one model must have in common; the text is compared itself.
    pub(crate) fn facts(&self) -> Result<BTreeMap<String, String>> {
        let facts: BTreeMap<String, Value> = serde_json::from_value(serde_json::to_value(self)?)?;
        Ok(facts
            .into_iter()
            .map(|(name, value)| (format!("--{name}"), value.to_string()))
            .collect())
    }

    /// The precisions to train in, one after the other.
    pub(crate) fn precisions(&self) -> Vec<Precision> {
        match self.report {
            true => vec![Precision::F32, Precision::Bf16, Precision::F16],
            false => vec![self.precision],
        }
    }

    fn or(&self, chosen: Option<usize>, whole: usize, smoke: usize) -> usize {
        chosen.unwrap_or(if self.smoke { smoke } else { whole })
    }

    pub(crate) fn steps(&self) -> usize {
        self.or(self.steps, if self.report { 500 } else { 1000 }, 6)
    }

    pub(crate) fn batch_size(&self) -> usize {
        self.or(self.batch_size, 12, 2)
    }

    pub(crate) fn size(&self) -> Size {
        Size {
            context: self.or(self.context, 128, 32),
            layers: self.or(self.layers, 4, 2),
            heads: self.or(self.heads, 4, 4),
            width: self.or(self.width, 128, 32),
        }
    }

    /// Characters a step.
    pub(crate) fn tokens(&self) -> usize {
        self.batch_size() * self.size().context
    }

    /// Characters to write after training.
    pub(crate) fn sample(&self) -> usize {
        self.or(self.sample, 400, 40)
    }

    /// Windows a loss is taken over after training.
    pub(crate) fn judged(&self) -> usize {
        if self.smoke { 8 } else { 256 }
    }
}

#[cfg(test)]
mod tests;
