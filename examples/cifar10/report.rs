//! What a run ended with, and the file of `--report`.

use std::{
    fs::{self, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use serde::{Deserialize, Deserializer, Serialize};

use crate::{
    common::options::Usage,
    data::{CLASSES, Dataset},
    evaluation::Score,
    history::{Epoch, History},
    memory::peak_rss_bytes,
    options::Options,
};

/// What a run ended with: the JSON of `--report`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) model: String,
    pub(crate) precision: String,
    pub(crate) device: String,
    pub(crate) data: String,
    pub(crate) train_images: usize,
    pub(crate) epochs: usize,
    pub(crate) batch_size: usize,
    pub(crate) lr: f64,
    pub(crate) seed: u64,
    pub(crate) master_weights: bool,
    pub(crate) channels_last: bool,
    pub(crate) loss_scale: String,
    /// Steps begun, skipped ones included.
    pub(crate) steps: usize,
    pub(crate) skipped_steps: usize,
    /// The loss scale after the last step; 1 without a scaler.
    pub(crate) final_scale: f32,
    /// The mean of the last ten steps.
    #[serde(deserialize_with = "number")]
    pub(crate) final_loss: f64,
    /// The mean of every epoch.
    #[serde(deserialize_with = "numbers")]
    pub(crate) losses: Vec<f64>,
    pub(crate) test_accuracy: f64,
    pub(crate) test_accuracy_per_epoch: Vec<f64>,
    pub(crate) test_accuracy_per_class: [f64; CLASSES],
    /// Test images of which the network computed NaN: none unless training has diverged. Not recognised.
    #[serde(default)]
    pub(crate) test_images_of_nan: usize,
    /// From making the batch to moving the scale.
    pub(crate) median_step_seconds: f64,
    /// Of all steps together, without evaluation.
    pub(crate) images_per_second: f64,
    /// Of the process or, in a comparison, of this run. `null` where the system does not tell.
    pub(crate) peak_rss_bytes: Option<u64>,
    /// All trainable variables, as the model stores them.
    pub(crate) weight_bytes: usize,
    /// True when Ctrl-C ended the training.
    pub(crate) interrupted: bool,
}

/// A number, or NaN where JSON has `null`: it has no infinite numbers and no NaN.
fn number<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::NAN))
}

fn numbers<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<f64>, D::Error> {
    let numbers = Vec::<Option<f64>>::deserialize(from)?.into_iter();
    Ok(numbers.map(|number| number.unwrap_or(f64::NAN)).collect())
}

impl Report {
    /// Of a run of `options` on `data` that ended with `score`.
    pub(crate) fn new(
        options: &Options,
        data: &Dataset,
        history: &History,
        score: &Score,
        weight_bytes: usize,
        interrupted: bool,
    ) -> Self {
        let each = |value: fn(&Epoch) -> f64| history.epochs.iter().map(value).collect();
        Self {
            model: options.model.to_string(),
            precision: options.precision.to_string(),
            device: if options.gpu { "cuda" } else { "cpu" }.to_owned(),
            data: data.name.clone(),
            train_images: data.train.len(),
            epochs: history.epochs.len(),
            batch_size: options.batch_size(),
            lr: options.lr,
            seed: options.seed,
            master_weights: options.master_weights,
            channels_last: options.channels_last,
            loss_scale: options.loss_scale().to_string(),
            steps: history.steps.count(),
            skipped_steps: history.steps.skipped,
            final_scale: history.steps.scale,
            final_loss: history.steps.recent_loss(10),
            losses: each(|epoch| epoch.loss),
            test_accuracy: score.accuracy(),
            test_accuracy_per_epoch: each(|epoch| epoch.test_accuracy),
            test_accuracy_per_class: score.by_class(),
            test_images_of_nan: score.unanswered(),
            median_step_seconds: history.median_step().as_secs_f64(),
            images_per_second: history.steps.rate(usize::MAX) * options.batch_size() as f64,
            peak_rss_bytes: peak_rss_bytes(),
            weight_bytes,
            interrupted,
        }
    }

    /// Writes the report to `path`, as JSON.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        write(path, &json(self)?)
    }
}

/// `value` as lines of JSON.
pub(crate) fn json(value: &impl Serialize) -> Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}

/// What a path leads to, behind links.
#[derive(Debug)]
enum Target {
    /// A regular file, there or not. Another one takes its place, so that it is never half written.
    File(PathBuf),
    /// A pipe or a device, which takes bytes, and stays.
    Stream,
}

impl Target {
    /// That of `path`, or why nothing can be written there.
    fn of(path: &Path) -> Result<Self, &'static str> {
        match fs::metadata(path) {
            Ok(found) if found.is_dir() => Err("this is a folder"),
            Ok(found) if found.is_file() && !is_standard(path) => {
                let file = fs::canonicalize(path).map_err(|_| "this link cannot be followed")?;
                Ok(Self::File(file))
            }
            Ok(_) => Ok(Self::Stream),
            Err(_) if path.is_symlink() => Err("this link leads to no file"),
            Err(_) => Ok(Self::File(path.to_owned())), // if it cannot be made, writing says why
        }
    }
}

/// Whether `path` is what the program prints to.
fn is_standard(path: &Path) -> bool {
    matches!(path.to_str(), Some("/dev/stdout" | "/dev/stderr"))
}

/// Writes `text`, or other bytes, to `path`. A file holds all of it or what it held before.
pub(crate) fn write(path: &Path, text: impl AsRef<[u8]>) -> Result<()> {
    let shown = path.display();
    let target = Target::of(path).map_err(|why| Usage(format!("cannot write {shown}: {why}")))?;
    let written = match target {
        Target::Stream => stream(path, text.as_ref()),
        Target::File(file) => {
            let scratch = scratch_file(&file)?;
            let written = fs::write(&scratch, text).and_then(|()| fs::rename(&scratch, &file));
            written.inspect_err(|_| drop(fs::remove_file(&scratch)))
        }
    };
    written.with_context(|| format!("cannot write {shown}"))
}

fn stream(path: &Path, bytes: &[u8]) -> io::Result<()> {
    match path.to_str() {
        // Redirected to a file and opened again, they would be written from the file's start.
        Some("/dev/stdout") => io::stdout().write_all(bytes),
        Some("/dev/stderr") => io::stderr().write_all(bytes),
        _ => OpenOptions::new().write(true).open(path)?.write_all(bytes),
    }
}

/// Checks, before hours of training, that the file of `option` can be written.
pub(crate) fn check_writable(option: &str, path: &Path) -> Result<()> {
    let shown = path.display();
    let target = Target::of(path).map_err(|why| Usage(format!("{option} {shown}: {why}")))?;
    // Opening a pipe would wait for its reader.
    let Target::File(file) = target else { return Ok(()) };
    let scratch = scratch_file(&file)?;
    fs::write(&scratch, "")
        .and_then(|()| fs::remove_file(&scratch))
        .with_context(|| format!("{option} {shown}: cannot write there"))
}

/// A file beside `path`, so that renaming it to `path` replaces it at once.
fn scratch_file(path: &Path) -> Result<PathBuf> {
    let name = path.file_name().with_context(|| format!("{}: no file name", path.display()))?;
    let scratch = format!(".{}.{}.tmp", name.to_string_lossy(), std::process::id());
    Ok(path.with_file_name(scratch))
}

#[cfg(test)]
pub(crate) mod tests;
