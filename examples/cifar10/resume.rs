//! A run on disk: what it takes to go on with it, bit for bit.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use candle_amp::{
    GradScaler, Parameters,
    checkpoints::{Checkpoint, State},
    optim::{Scheduler, Sgd},
    random::Generator,
};
use candle_core::{Device, Tensor};

use crate::{
    common::{options::Usage, steps::Steps},
    config,
    data::Dataset,
    history::{Epoch, History},
    options::Options,
};

/// The options that the run began with.
pub(crate) fn options_file(dir: &Path) -> PathBuf {
    dir.join("options.toml")
}

/// The state after the last epoch, or where the run was cut short.
pub(crate) fn checkpoint_file(dir: &Path) -> PathBuf {
    dir.join("checkpoints").join("latest.safetensors")
}

/// Makes the folder of a new run, and writes its options there.
pub(crate) fn create(dir: &Path, options: &Options) -> Result<()> {
    let shown = dir.display();
    ensure!(
        !options_file(dir).exists(),
        Usage(format!(
            "--out {shown}: there is a run in this folder; choose another one, or go on with \
             --resume {shown}"
        ))
    );
    let checkpoints = checkpoint_file(dir);
    let checkpoints = checkpoints.parent().unwrap_or(dir);
    fs::create_dir_all(checkpoints).with_context(|| format!("--out {shown}: cannot make it"))?;
    config::save(options, &options_file(dir)).with_context(|| format!("--out {shown}"))
}

/// All that changes from step to step. The order of images and their crops follow from the seed, the epoch
/// and the place in it, and these from the history.
#[derive(Debug)]
pub(crate) struct Training {
    /// Weights, and the running statistics of batch norms.
    pub(crate) parameters: Parameters,
    /// With momentum and, of 16-bit weights, the masters.
    pub(crate) optimizer: Sgd,
    pub(crate) scheduler: Scheduler,
    pub(crate) scaler: GradScaler,
    pub(crate) history: History,
}

impl Training {
    /// Writes it to the folder of a run of `options` on `data`, over the last one in one step.
    pub(crate) fn save(&self, dir: &Path, options: &Options, data: &Dataset) -> Result<()> {
        let run = origin(options, data).into_iter();
        let run = run.fold(State::default(), |run, (name, value)| run.with(name, value));
        Checkpoint::new(self.history.steps.count() as u64)
            .with("run", &run)?
            .with("model", &self.parameters)?
            .with("optimizer", &self.optimizer)?
            .with("scheduler", &self.scheduler)?
            .with("scaler", &self.scaler)?
            .with("random", &Generator)?
            .with("history", &history_state(&self.history)?)?
            .save(checkpoint_file(dir))?;
        Ok(())
    }

    /// Takes over what a run of `options` on `data` has left in its folder.
    pub(crate) fn load(&mut self, dir: &Path, options: &Options, data: &Dataset) -> Result<()> {
        let path = checkpoint_file(dir);
        ensure!(
            path.exists(),
            Usage(format!(
                "--resume {}: there is no {}; the run ended before its first epoch, so start it anew",
                dir.display(),
                path.display()
            ))
        );
        let saved = Checkpoint::open(&path)?;
        let (mut run, mut history) = (State::default(), State::default());
        saved.load(&mut [("run", &mut run)])?;
        for (name, here) in origin(options, data) {
            let there: String = run.value(name)?;
            ensure!(
                there == here,
                Usage(format!(
                    "--resume {}: the {name} of that run is {there}, and here it is {here}",
                    dir.display()
                ))
            );
        }
        saved.load(&mut [
            ("model", &mut self.parameters),
            ("optimizer", &mut self.optimizer),
            ("scheduler", &mut self.scheduler),
            ("scaler", &mut self.scaler),
            ("random", &mut Generator),
            ("history", &mut history),
        ])?;
        self.history = history_from(&history)?;
        Ok(())
    }
}

/// What must be the same where a run goes on, besides its options.
fn origin(options: &Options, data: &Dataset) -> [(&'static str, String); 3] {
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

fn history_state(History { steps, epochs }: &History) -> Result<State> {
    let mut state = State::default().with("skipped", steps.skipped).with("scale", steps.scale);
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
    Ok(History { steps, epochs: epochs.collect() })
}

/// How to go on with a run that Ctrl-C has ended.
pub(crate) fn advice(options: &Options) -> String {
    let Some(dir) = &options.out else {
        return "\nNothing was saved to go on from: --out DIR would have.\n".to_owned();
    };
    let dir = dir.display().to_string();
    let plain = dir.chars().all(|c| c.is_alphanumeric() || "/._-+".contains(c));
    let dir = if plain { dir } else { format!("'{}'", dir.replace('\'', r"'\''")) };
    let features = if options.gpu { " --features cuda" } else { "" };
    format!("\nTo go on:\n  cargo run --release --example cifar10{features} -- --resume {dir}\n")
}

#[cfg(test)]
mod tests;
