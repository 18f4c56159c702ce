//! What recipes change of how a network is trained: the options for accuracy.

use std::fmt;

use anyhow::{Result, ensure};
use candle_amp::{
    Parameters,
    dist::DataParallel,
    ops,
    optim::{Ema, EmaConfig, Group, Schedule, ScheduleShape, SgdConfig},
};
use candle_core::Tensor;
use clap::{Args, ValueEnum};
use serde::{Serialize, Serializer};

use crate::{
    common::{
        self,
        optimizer::Optimizer,
        options::{Usage, positive},
    },
    options::{Options, fraction},
};

const RECIPE: &str = "Recipe";

/// The options of a recipe, all off by default.
#[derive(Clone, Copy, Debug, PartialEq, Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Recipe {
    /// How the learning rate goes: up over a twentieth of the steps and down along a cosine, or up over
    /// 23 % and down to 7 % of --lr, along straight lines
    #[arg(long, value_enum, default_value_t = Rates::Cosine)]
    #[arg(help_heading = RECIPE)]
    pub(crate) schedule: Rates,

    /// Nesterov momentum: gradients are those ahead along the momentum
    #[arg(long)]
    #[arg(help_heading = RECIPE)]
    pub(crate) nesterov: bool,

    /// Factor on the learning rate of biases; their weight decay is divided by it
    #[arg(long, value_name = "X", default_value = "1", value_parser = positive)]
    #[arg(help_heading = RECIPE)]
    pub(crate) bias_lr: f64,

    /// How much of a label goes to all classes alike
    #[arg(long, value_name = "X", default_value = "0", value_parser = fraction)]
    #[arg(help_heading = RECIPE)]
    pub(crate) label_smoothing: f64,

    /// Test with a moving average of weights and running statistics; this is its decay: 0 for none
    #[arg(long, value_name = "X", default_value = "0", value_parser = fraction)]
    #[arg(help_heading = RECIPE)]
    pub(crate) ema: f64,

    /// The largest shift of an image in training, in pixels
    #[arg(long, value_name = "N", default_value = "4", value_parser = shift)]
    #[arg(help_heading = RECIPE)]
    pub(crate) shift: u8,

    /// Flip each image in every other epoch, instead of at random
    #[arg(long)]
    #[arg(help_heading = RECIPE)]
    pub(crate) alternate_flips: bool,

    /// Test with the mean of the logits of an image and of its mirror image
    #[arg(long)]
    #[arg(help_heading = RECIPE)]
    pub(crate) flip_test: bool,
}

/// How the learning rate goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Rates {
    Cosine,
    Triangle,
}

impl fmt::Display for Rates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cosine => "cosine",
            Self::Triangle => "triangle",
        })
    }
}

impl Serialize for Rates {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A shift that leaves half of an image to see.
fn shift(text: &str) -> Result<u8, String> {
    let number = text.parse().ok().filter(|number| (0..=16).contains(number));
    number.ok_or_else(|| "expected a whole number from 0 to 16".to_owned())
}

impl Recipe {
    pub(crate) fn check(&self, momentum: f64) -> Result<()> {
        ensure!(
            !self.nesterov || momentum > 0.,
            Usage("--nesterov needs --momentum above 0".to_owned())
        );
        Ok(())
    }

    /// The learning rates of so many steps.
    pub(crate) fn rates(&self, steps: usize) -> Schedule {
        match self.schedule {
            Rates::Cosine => common::rates(steps),
            Rates::Triangle => {
                let warm_up = 23 * steps / 100;
                let rest = (steps - warm_up).max(1) as u64;
                let shape = ScheduleShape::Linear { steps: rest, end: 0.07 };
                Schedule { warm_up: warm_up as u64, shape }
            }
        }
    }

    /// Of an image's logits.
    pub(crate) fn loss(&self, logits: &Tensor, labels: &Tensor) -> candle_core::Result<Tensor> {
        match self.label_smoothing {
            0. => ops::cross_entropy(logits, labels),
            smoothing => ops::cross_entropy_smoothed(logits, labels, smoothing),
        }
    }

    /// The average to test with. Running statistics are averaged as weights are: they go together.
    pub(crate) fn average(&self, parameters: &Parameters) -> Result<Option<Ema>> {
        if self.ema == 0. {
            return Ok(None);
        }
        let all = parameters.iter().chain(parameters.buffers());
        let all = Parameters::named(all.map(|(name, var)| (name, var.clone())))?;
        let config = EmaConfig { decay: self.ema, warm_up: true };
        Ok(Some(Ema::new(&all, config)?))
    }

    /// Those that are not the defaults, for a table.
    pub(crate) fn summary(&self) -> Option<String> {
        let mut parts = Vec::new();
        let mut add = |is_on: bool, part: String| parts.extend(is_on.then_some(part));
        add(self.schedule != Rates::Cosine, format!("{} schedule", self.schedule));
        add(self.nesterov, "nesterov".to_owned());
        add(self.bias_lr != 1., format!("{} x lr of biases", self.bias_lr));
        add(self.label_smoothing > 0., format!("label smoothing {}", self.label_smoothing));
        add(self.ema > 0., format!("ema {}", self.ema));
        add(self.shift != 4, format!("shifts to {}", self.shift));
        add(self.alternate_flips, "alternate flips".to_owned());
        add(self.flip_test, "flip test".to_owned());
        (!parts.is_empty()).then(|| parts.join(", "))
    }
}

/// SGD of the variables that are not frozen; with `--sharded` in parts over the ranks of `parallel`.
pub(crate) fn optimizer(
    options: &Options,
    parameters: &Parameters,
    parallel: Option<&DataParallel>,
) -> Result<Optimizer<SgdConfig>> {
    let Options { lr, momentum, weight_decay, .. } = *options;
    let Recipe { nesterov, bias_lr, .. } = options.recipe;
    let config = SgdConfig { lr, momentum, weight_decay, nesterov, ..Default::default() };
    let trainable = parameters.trainable();
    let parallel = parallel.filter(|_| options.sharded);
    if bias_lr == 1. {
        return Optimizer::new(vec![Group::new(&trainable, config)], parallel);
    }
    let is_bias = |name: &str| name.ends_with("bias");
    let biases = SgdConfig { lr: lr * bias_lr, weight_decay: weight_decay / bias_lr, ..config };
    let groups = vec![
        Group::new(trainable.filter(|name| !is_bias(name)), config),
        Group::new(trainable.filter(is_bias), biases),
    ];
    Optimizer::new(groups, parallel)
}

#[cfg(test)]
mod tests;
