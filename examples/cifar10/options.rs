//! The command line.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use clap::Parser;
use serde::{Serialize, Serializer};

use crate::{
    choices::LossScale,
    common::options::{
        INIT_SCALE, Precision, Usage, check_gpu, check_init_scale, positive, up_to_a_million,
    },
    models::{self, Architecture},
    recipe::Recipe,
};

/// Synthetic images to train on when nobody says how many.
const SYNTHETIC_IMAGES: usize = 5_000;

/// What stands below the options in `--help`.
const MORE: &str = "\
Examples, after cargo run --release --example cifar10 --
  --smoke                            see that everything works, in seconds
  --model resnet8 --epochs 2         a first result, in seconds
  --compare f32,bf16,f16 --seeds 3   what a precision costs, and what it saves
  --model resnet20 --out runs/a      keep the run, with a page; Ctrl-C ends it, and
  --resume runs/a                    goes on with it, bit for bit
  --smoke --profile                  where the time of a step goes
  --data DIR --epochs 30             the real CIFAR-10
  --data DIR --config examples/cifar10/recipes/airbench.toml   a fast recipe

Several processes train one model, each on its part of a batch, after mpirun -n 2, in a build with
--features mpi. Set RAYON_NUM_THREADS to the cores that each may use.

A run in f16 prints its loss scale: the loss is multiplied by it, so that small gradients are not
lost. When gradients overflow, the step is skipped and the scale halved. A few skipped steps at the
start are normal. bf16 needs no scale.

Exit codes: 0 done, 1 failed, 2 wrong use of options, 3 bad data, 130 ended by Ctrl-C.";

const DATA: &str = "Data";
const NETWORK: &str = "Network";
const PRECISION: &str = "Precision";
const TRAINING: &str = "Training";
const RESULTS: &str = "Results";
const INSIGHT: &str = "Insight";
const FILES: &str = "Options in a file";

/// Trains a small network in mixed precision on CIFAR-10 or, without a download, on synthetic images.
#[derive(Clone, Debug, Parser, Serialize)]
#[command(name = "cifar10", max_term_width = 100, allow_negative_numbers = true, after_help = MORE)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Options {
    /// Folder of CIFAR-10's binary version, data_batch_*.bin and test_batch.bin; hub downloads it,
    /// once, in a build with --features hub [default: synthetic images]
    #[arg(long, value_name = "DIR")]
    #[arg(help_heading = DATA)]
    pub(crate) data: Option<PathBuf>,

    #[arg(long, value_name = "NAME", default_value = "resnet20", help = models::help())]
    #[arg(help_heading = NETWORK)]
    pub(crate) model: Architecture,

    /// List the models, with what an image costs each, and end. FLOPs are two for each multiply-add of
    /// products, convolutions and attention, forward. Activations are the bytes that operators keep
    /// for backward, without statistics, masks and 16-bit copies of weights; f16 keeps what bf16 keeps
    #[arg(long)]
    #[arg(help_heading = NETWORK)]
    #[serde(skip)]
    pub(crate) list_models: bool,

    /// What convolutions and matrix products compute in. bf16 has the range of f32 in half the bytes;
    /// f16 has more digits, and needs a loss scale. Without any option but --smoke, f32 and bf16 are
    /// compared
    #[arg(long, value_enum, default_value_t = Precision::Bf16)]
    #[arg(help_heading = PRECISION)]
    pub(crate) precision: Precision,

    /// Train in each of these precisions, f32, f16 or bf16, and print them side by side
    #[arg(help_heading = PRECISION)]
    #[arg(
        long,
        value_enum,
        value_name = "LIST",
        value_delimiter = ',',
        hide_possible_values = true
    )]
    #[arg(conflicts_with = "precision")]
    pub(crate) compare: Vec<Precision>,

    /// Train with this many seeds, from --seed on, and print means and standard deviations
    #[arg(long, value_name = "N", default_value = "1", value_parser = up_to_a_million)]
    #[arg(help_heading = PRECISION)]
    pub(crate) seeds: usize,

    /// Keep the model in 16 bits, and F32 masters of its weights in the optimizer
    #[arg(long)]
    #[arg(help_heading = PRECISION)]
    pub(crate) master_weights: bool,

    /// Transpose images once, to (n, height, width, channels), for a network in that order: any but mlp
    #[arg(long)]
    #[arg(help_heading = NETWORK)]
    pub(crate) channels_last: bool,

    /// dynamic, none, or a number to stay at [default: dynamic for f16, none otherwise]
    #[arg(long, value_name = "SCALE")]
    #[arg(help_heading = PRECISION)]
    pub(crate) loss_scale: Option<LossScale>,

    /// Where a dynamic scale starts
    #[arg(long, value_name = "X", default_value_t = INIT_SCALE, value_parser = positive)]
    #[arg(help_heading = PRECISION)]
    pub(crate) init_scale: f64,

    /// Passes over the training images [default: 8, or what --steps needs]
    #[arg(long, value_name = "N", value_parser = count)]
    #[arg(help_heading = TRAINING)]
    pub(crate) epochs: Option<usize>,

    /// Stop after this many steps, if --epochs does not end before
    #[arg(long, value_name = "N", value_parser = count)]
    #[arg(help_heading = TRAINING)]
    pub(crate) steps: Option<usize>,

    /// Images a step, of all ranks together, which must divide them [default: 128, or 16 with --smoke]
    #[arg(long, value_name = "N", value_parser = count)]
    #[arg(help_heading = TRAINING)]
    pub(crate) batch_size: Option<usize>,

    /// The highest learning rate of the schedule
    #[arg(long, value_name = "X", default_value = "0.1", value_parser = positive)]
    #[arg(help_heading = TRAINING)]
    pub(crate) lr: f64,

    /// How much of its last update SGD repeats: 0 for none
    #[arg(long, value_name = "X", default_value = "0.9", value_parser = fraction)]
    #[arg(help_heading = TRAINING)]
    pub(crate) momentum: f64,

    /// How much SGD shrinks weights, times the learning rate, in each step
    #[arg(long, value_name = "X", default_value = "5e-4", value_parser = fraction)]
    #[arg(help_heading = TRAINING)]
    pub(crate) weight_decay: f64,

    #[command(flatten)]
    #[serde(flatten)]
    pub(crate) recipe: Recipe,

    /// Of initial weights, order, augmentation and synthetic images; all runs of --seeds have the same
    /// images
    #[arg(long, value_name = "N", default_value = "0", value_parser = seed)]
    #[arg(help_heading = TRAINING)]
    #[serde(serialize_with = "whole_number")]
    pub(crate) seed: u64,

    /// Train on the first CUDA device
    #[arg(long)]
    #[arg(help_heading = TRAINING)]
    pub(crate) gpu: bool,

    /// Write what was measured to this file, as JSON; as a table in Markdown if it ends in .md
    #[arg(long, value_name = "FILE")]
    #[arg(help_heading = RESULTS)]
    pub(crate) report: Option<PathBuf>,

    /// Write options, history, checkpoints, report and a page with pictures to this folder, which must
    /// be new or empty [default: a new one in cargo's target folder if no option but --smoke is given,
    /// otherwise none]
    #[arg(long, value_name = "DIR")]
    #[arg(help_heading = RESULTS)]
    #[serde(skip)]
    pub(crate) out: Option<PathBuf>,

    /// Go on with the runs in this folder of --out: they end as if they had not been cut short, bit for
    /// bit
    #[arg(long, value_name = "DIR", conflicts_with_all = ["out", "config"])]
    #[arg(help_heading = RESULTS)]
    #[serde(skip)]
    pub(crate) resume: Option<PathBuf>,

    /// Train on this many images only, or make this many [default: all, or 5000 synthetic ones]
    #[arg(long, value_name = "N", value_parser = up_to_a_million)]
    #[arg(help_heading = DATA)]
    pub(crate) train_images: Option<usize>,

    /// Under mpirun, keep masters and momentum in parts, one on each rank (ZeRO, stage 1)
    #[arg(long)]
    #[arg(help_heading = TRAINING)]
    pub(crate) sharded: bool,

    /// A few steps on few images, to see that everything works
    #[arg(long)]
    #[arg(help_heading = TRAINING)]
    pub(crate) smoke: bool,

    /// Measure ten steps, operator by operator, forward and backward; with =FILE, or with --out in the
    /// run's folder as profile.json, also as a trace for https://ui.perfetto.dev
    #[arg(long, value_name = "FILE", require_equals = true)]
    #[arg(help_heading = INSIGHT)]
    #[serde(skip)]
    pub(crate) profile: Option<Option<PathBuf>>,

    /// Print which operators of the first step ran in which dtype, and by which algorithm
    #[arg(long)]
    #[arg(help_heading = INSIGHT)]
    #[serde(skip)]
    pub(crate) trace: bool,

    /// Take options from this TOML file, such as lr = 0.05 in a line. The command line wins over it;
    /// --smoke=false turns off what it turns on
    #[arg(long, value_name = "FILE")]
    #[arg(help_heading = FILES)]
    #[serde(skip)]
    pub(crate) config: Option<PathBuf>,

    /// Write the options of this run to a file for --config, and train
    #[arg(long, value_name = "FILE")]
    #[arg(help_heading = FILES)]
    #[serde(skip)]
    pub(crate) save_config: Option<PathBuf>,
}

/// What the folder of a run is called.
pub(crate) fn run_name(precision: &str, seed: u64) -> String {
    format!("{precision}-seed-{seed}")
}

/// A number, or its digits where it is beyond TOML's numbers.
fn whole_number<S: Serializer>(number: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    match i64::try_from(*number) {
        Ok(number) => serializer.serialize_i64(number),
        Err(_) => serializer.collect_str(number),
    }
}

/// A whole number above zero.
fn count(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|&number| number > 0);
    number.ok_or_else(|| "expected a whole number above zero".to_owned())
}

fn seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("expected a whole number from 0 to {}", u64::MAX))
}

/// A number from 0 up to, but not including, 1.
pub(crate) fn fraction(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| (0. ..1.).contains(number));
    number.ok_or_else(|| "expected a number from 0 to below 1".to_owned())
}

impl Options {
    /// Checks what clap cannot: options that do not go together.
    pub(crate) fn check(&self) -> Result<()> {
        let precisions = self.precisions();
        for (index, precision) in precisions.iter().enumerate() {
            ensure!(
                !precisions[..index].contains(precision),
                Usage(format!("--compare has {precision} twice"))
            );
        }
        ensure!(
            !self.master_weights || precisions.iter().any(|&one| one != Precision::F32),
            Usage(
                "--master-weights needs --precision f16 or bf16, or one of them in --compare: f32 \
                 weights are masters"
                    .into()
            )
        );
        ensure!(
            !self.channels_last || self.model.has_channels(),
            Usage(
                "--channels-last needs a network with convolutions: an mlp has no channels".into()
            )
        );
        ensure!(
            !self.compares() || !matches!(self.profile, Some(Some(_))),
            Usage("--profile=FILE has room for one run: leave --compare and --seeds out".into())
        );
        let mut each = self.runs().take(precisions.len());
        check_init_scale(self.init_scale, each.any(|run| run.loss_scale() == LossScale::Dynamic))?;
        self.recipe.check(self.momentum)?;
        ensure!(
            !self.downloads() || cfg!(feature = "hub"),
            Usage(
                "--data hub needs a build that can download: add --features hub to cargo's \
                 options; a folder of that name is ./hub"
                    .into()
            )
        );
        check_gpu(self.gpu)
    }

    /// Whether the images are to be downloaded.
    pub(crate) fn downloads(&self) -> bool {
        self.data.as_deref() == Some(Path::new("hub"))
    }

    /// Where the trace of `--profile` goes, of a run with these options.
    pub(crate) fn profile_file(&self) -> Option<PathBuf> {
        let named = self.profile.as_ref()?.clone();
        let run = run_name(&self.precision.to_string(), self.seed);
        named.or_else(|| Some(self.out.as_ref()?.join(run).join("profile.json")))
    }

    /// True for runs to print side by side, rather than one to print alone.
    pub(crate) fn compares(&self) -> bool {
        !self.compare.is_empty() || self.seeds > 1
    }

    pub(crate) fn precisions(&self) -> &[Precision] {
        if self.compare.is_empty() { std::slice::from_ref(&self.precision) } else { &self.compare }
    }

    pub(crate) fn run_count(&self) -> usize {
        self.seeds * self.precisions().len()
    }

    /// The options of each run. Precisions alternate, so that whatever else slows the machine down
    /// meets all of them.
    pub(crate) fn runs(&self) -> impl Iterator<Item = Self> {
        let seeds = (0..self.seeds as u64).map(|index| self.seed.wrapping_add(index));
        let each = seeds.flat_map(|seed| self.precisions().iter().map(move |&one| (seed, one)));
        each.map(|(seed, precision)| {
            let master_weights = self.master_weights && precision != Precision::F32;
            Self { precision, seed, master_weights, compare: vec![], seeds: 1, ..self.clone() }
        })
    }

    pub(crate) fn loss_scale(&self) -> LossScale {
        self.loss_scale.unwrap_or(match self.precision {
            Precision::F16 => LossScale::Dynamic,
            Precision::F32 | Precision::Bf16 => LossScale::None,
        })
    }

    pub(crate) fn batch_size(&self) -> usize {
        self.batch_size.unwrap_or(if self.smoke { 16 } else { 128 })
    }

    /// How many training and test images to make, or to keep of those there are.
    pub(crate) fn images(&self) -> (Option<usize>, Option<usize>) {
        let smoke = |len| self.smoke.then_some(len);
        (self.train_images.or(smoke(64)), smoke(40))
    }

    /// How many training and test images to make.
    pub(crate) fn synthetic_images(&self) -> (usize, usize) {
        let (train, test) = self.images();
        (train.unwrap_or(SYNTHETIC_IMAGES), test.unwrap_or(1_000))
    }
}

#[cfg(test)]
mod tests;
