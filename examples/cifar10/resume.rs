//! What it takes to go on with a run, bit for bit.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use candle_amp::{
    GradScaler, Parameters,
    checkpoints::{Checkpoint, SavedCheckpoint, State, Stateful},
    optim::{Ema, Scheduler, SgdConfig},
    random::Generator,
};
use candle_core::{Device, Tensor};

use crate::{
    common::{optimizer::Optimizer, options::Usage, steps::Steps},
    data::Dataset,
    history::{Epoch, History},
    options::Options,
    ranks,
};

/// All that changes from step to step. The order of images and their crops follow from the seed, the epoch
/// and the place in it, and these from the history.
#[derive(Debug)]
pub(crate) struct Training {
    /// Weights, and the running statistics of batch norms.
    pub(crate) parameters: Parameters,
    /// With momentum and, of 16-bit weights, the masters.
    pub(crate) optimizer: Optimizer<SgdConfig>,
    /// What to test with instead of the weights.
    pub(crate) average: Option<Ema>,
    pub(crate) scheduler: Scheduler,
    pub(crate) scaler: GradScaler,
    pub(crate) history: History,
}

impl Training {
    /// Of a run of `options` on `data`.
    pub(crate) fn checkpoint(&self, options: &Options, data: &Dataset) -> Result<Checkpoint> {
        let run = origin(options, data).into_iter();
        let run = run.fold(State::default(), |run, (name, value)| run.with(name, value));
        let checkpoint = Checkpoint::new(self.history.steps.count() as u64)
            .with("run", &run)?
            .with("model", &self.parameters)?
            .with("optimizer", &self.optimizer)?
            .with("scheduler", &self.scheduler)?
            .with("scaler", &self.scaler)?
            .with("random", &Generator)?
            .with("history", &history_state(&self.history)?)?;
        Ok(match &self.average {
            Some(average) => checkpoint.with("average", average)?,
            None => checkpoint,
        })
    }

    /// Takes over what a run has saved.
    pub(crate) fn load(&mut self, saved: &SavedCheckpoint) -> Result<()> {
        let (mut history, mut generator) = (State::default(), Generator);
        let mut all: Vec<(&str, &mut dyn Stateful)> = vec![
            ("model", &mut self.parameters),
            ("optimizer", &mut self.optimizer),
            ("scheduler", &mut self.scheduler),
            ("scaler", &mut self.scaler),
            ("random", &mut generator),
            ("history", &mut history),
        ];
        if let Some(average) = &mut self.average {
            all.push(("average", average));
        }
        saved.load(&mut all)?;
        self.history = history_from(&history)?;
        Ok(())
    }
}

/// Checks that a checkpoint is of a run of `options` on `data`, by this version of the crate.
pub(crate) fn check_origin(
    saved: &SavedCheckpoint,
    options: &Options,
    data: &Dataset,
) -> Result<()> {
    let mut run = State::default();
    saved.load(&mut [("run", &mut run)])?;
    for (name, here) in origin(options, data) {
        let there: String = run.value(name)?;
        ensure!(
            there == here,
            Usage(format!(
                "{}: the {name} of that run is {there}, and here it is {here}",
                saved.path().display()
            ))
        );
    }
    Ok(())
}

/// What must be the same where a run goes on, besides its options.
pub(crate) fn origin(options: &Options, data: &Dataset) -> [(&'static str, String); 3] {
    let mut checksum = crc32fast::Hasher::new();
    for images in [&data.train, &data.test] {
        checksum.update(images.pixels());
        checksum.update(images.labels());
    }
    let (train, test, checksum) = (data.train.len(), data.test.len(), checksum.finalize());
    [
        ("version of candle-amp", env!("CARGO_PKG_VERSION").to_owned()),
        ("model", options.model.to_string()),
        ("data", format!("{train} and {test} images of checksum {checksum:08x}")),
    ]
}

fn history_state(History { steps, epochs, gradients }: &History) -> Result<State> {
    let mut state = State::default()
        .with("skipped", steps.skipped)
        .with("scale", steps.scale)
        .with("gradients", serde_json::to_string(gradients)?);
    let mut put = |name: &str, tensor: candle_core::Result<Tensor>| {
        state.tensors.insert(name.to_owned(), tensor?);
        candle_core::Result::Ok(())
    };
    let epoch = |value: fn(&Epoch) -> f64| {
        let values: Vec<f64> = epochs.iter().map(value).collect();
        Tensor::from_vec(values, epochs.len(), &Device::Cpu)
    };
    let nanoseconds: Vec<i64> = steps.times.iter().map(|time| time.as_nanos() as i64).collect();
    let losses = steps.losses.clone();
    put("losses", Tensor::from_vec(losses, steps.count(), &Device::Cpu))?;
    put("nanoseconds", Tensor::from_vec(nanoseconds, steps.count(), &Device::Cpu))?;
    put("epoch_steps", epoch(|epoch| epoch.steps as f64))?;
    put("epoch_loss", epoch(|epoch| epoch.loss))?;
    put("epoch_test_accuracy", epoch(|epoch| epoch.test_accuracy))?;
    Ok(state)
}

fn history_from(state: &State) -> Result<History> {
    let tensor = |name: &str| {
        state.tensors.get(name).with_context(|| format!("the saved history has no {name}"))
    };
    let times = tensor("nanoseconds")?.to_vec1::<i64>()?;
    let steps = Steps {
        losses: tensor("losses")?.to_vec1()?,
        times: times.into_iter().map(|time| Duration::from_nanos(time as u64)).collect(),
        skipped: state.value("skipped")?,
        scale: state.value("scale")?,
    };
    let column = |name: &str| anyhow::Ok(tensor(name)?.to_vec1::<f64>()?);
    let rows = column("epoch_steps")?.into_iter().zip(column("epoch_loss")?);
    let rows = rows.zip(column("epoch_test_accuracy")?);
    let epochs = rows.map(|((steps, loss), test_accuracy)| Epoch {
        steps: steps as usize,
        loss,
        test_accuracy,
    });
    let gradients = serde_json::from_str(&state.value::<String>("gradients")?)?;
    Ok(History { steps, epochs: epochs.collect(), gradients })
}

/// How to go on with a run that Ctrl-C has ended.
pub(crate) fn advice(options: &Options) -> String {
    let Some(dir) = &options.out else {
        return "\nNothing was saved to go on from: --out DIR would have.\n".to_owned();
    };
    let dir = dir.display().to_string();
    let plain = dir.chars().all(|c| c.is_alphanumeric() || "/._-+".contains(c));
    let dir = if plain { dir } else { format!("'{}'", dir.replace('\'', r"'\''")) };
    let launcher = match ranks::count() {
        1 => String::new(),
        count => format!("mpirun -n {count} "),
    };
    let features = features(options, ranks::count());
    format!(
        "\nTo go on:\n  {launcher}cargo run --release --example cifar10{features} -- --resume {dir}\n"
    )
}

/// cargo's option for the features that a run on so many ranks needs.
fn features(options: &Options, ranks: usize) -> String {
    let gpu = if cfg!(feature = "cudnn") { "cudnn" } else { "cuda" };
    let all = [(options.gpu, gpu), (ranks > 1, "mpi"), (options.downloads(), "hub")];
    let needed: Vec<&str> =
        all.iter().filter(|(needed, _)| *needed).map(|(_, name)| *name).collect();
    if needed.is_empty() { String::new() } else { format!(" --features {}", needed.join(",")) }
}

#[cfg(test)]
mod tests;
