//! A folder of checkpoints: the last ones and the best.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::checkpoint::{Checkpoint, SavedCheckpoint};
use crate::error::CheckpointError;
use crate::{Error, Result};

/// Which metric is the best.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Best {
    /// The lowest, as of a loss.
    Lowest,
    /// The highest, as of an accuracy.
    Highest,
}

/// A folder that keeps the last checkpoints of a run, and the best: files called
/// `step-00000100.safetensors`. One process at a time saves in it; others may read.
///
/// ```
/// use candle_amp::checkpoints::{Best, Checkpoint, Checkpointer, State};
///
/// # let folder = std::env::temp_dir().join(format!("candle-amp-keeps-{}", std::process::id()));
/// let checkpointer = Checkpointer::new(&folder)?.keep_last(2).keep_best(Best::Lowest);
/// for (step, loss) in [(100, 0.9), (200, 0.2), (300, 0.4), (400, 0.3)] {
///     let epoch = State::default().with("epoch", step / 100); // and the model, the optimizer ...
///     checkpointer.save(&Checkpoint::new(step).metric(loss).with("loop", &epoch)?)?;
/// }
/// assert_eq!(checkpointer.steps()?, [200, 300, 400]);
/// assert_eq!(checkpointer.best()?.map(|saved| saved.step()), Some(200));
/// let mut epoch = State::default();
/// if let Some(saved) = checkpointer.latest()? {
///     saved.load(&mut [("loop", &mut epoch)])?;
/// }
/// assert_eq!(epoch.value::<u64>("epoch")?, 4);
/// # std::fs::remove_dir_all(&folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Checkpointer {
    folder: PathBuf,
    keep: usize,
    best: Option<Best>,
}

impl Checkpointer {
    /// Keeps the last three checkpoints in `folder`, which it makes.
    ///
    /// # Errors
    ///
    /// [`Error::File`].
    pub fn new(folder: impl Into<PathBuf>) -> Result<Self> {
        let this = Self { folder: folder.into(), keep: 3, best: None };
        fs::create_dir_all(&this.folder).map_err(this.failed("cannot make"))?;
        Ok(this)
    }

    /// How many of the last checkpoints to keep; at least 1.
    #[must_use]
    pub fn keep_last(self, count: usize) -> Self {
        Self { keep: count.max(1), ..self }
    }

    /// Keeps the checkpoint with the best metric too; of several, the first.
    #[must_use]
    pub fn keep_best(self, best: Best) -> Self {
        Self { best: Some(best), ..self }
    }

    /// Saves `checkpoint`, and then removes those that are neither the last nor the best, and what
    /// a process that was stopped left half written. Where it is.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::StepBehind`] where a later step is in the folder: a run that went back, which
    /// [`discard_after`](Self::discard_after) clears the way for. [`Error::File`]; the checkpoints
    /// before are all there then.
    pub fn save(&self, checkpoint: &Checkpoint) -> Result<PathBuf> {
        if let Some(&latest) = self.steps()?.last().filter(|latest| **latest > checkpoint.step) {
            let (folder, step) = (self.folder.clone(), checkpoint.step);
            return Err(CheckpointError::StepBehind { folder, step, latest }.into());
        }
        let path = self.path(checkpoint.step);
        checkpoint.save(&path)?;
        let steps = self.steps()?;
        let last = &steps[steps.len().saturating_sub(self.keep)..];
        let best = self.best_step(&steps);
        for step in steps.iter().filter(|step| !last.contains(step) && best != Some(**step)) {
            fs::remove_file(self.path(*step)).map_err(self.failed("cannot tidy"))?;
        }
        for path in self.files()? {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with(".step-") && name.ends_with(".tmp") {
                fs::remove_file(&path).map_err(self.failed("cannot tidy"))?;
            }
        }
        Ok(path)
    }

    /// The steps there are checkpoints of, in order.
    ///
    /// # Errors
    ///
    /// [`Error::File`].
    pub fn steps(&self) -> Result<Vec<u64>> {
        let step = |path: PathBuf| {
            let name = path.file_name()?.to_str()?;
            name.strip_prefix("step-")?.strip_suffix(".safetensors")?.parse::<u64>().ok()
        };
        let mut steps: Vec<u64> = self.files()?.into_iter().filter_map(step).collect();
        steps.sort_unstable();
        Ok(steps)
    }

    /// The last checkpoint that is whole; `None` in an empty folder. A damaged one is passed over,
    /// with a warning through `tracing`.
    ///
    /// # Errors
    ///
    /// [`Error::File`]; what is wrong with the last one, where none is whole.
    pub fn latest(&self) -> Result<Option<SavedCheckpoint>> {
        self.first_whole(self.steps()?.into_iter().rev())
    }

    /// The whole checkpoint with the best metric; `None` where none has one, or
    /// [`keep_best`](Self::keep_best) was not asked for.
    ///
    /// # Errors
    ///
    /// As [`latest`](Self::latest).
    pub fn best(&self) -> Result<Option<SavedCheckpoint>> {
        let steps = self.steps()?;
        self.first_whole(self.by_metric(&steps).into_iter())
    }

    /// Removes the checkpoints after `step`: to go on from an earlier one.
    ///
    /// # Errors
    ///
    /// [`Error::File`].
    pub fn discard_after(&self, step: u64) -> Result<()> {
        for later in self.steps()?.into_iter().rev().filter(|later| *later > step) {
            fs::remove_file(self.path(later)).map_err(self.failed("cannot tidy"))?;
        }
        Ok(())
    }

    fn first_whole(&self, steps: impl Iterator<Item = u64>) -> Result<Option<SavedCheckpoint>> {
        let mut first = None;
        for step in steps {
            match Checkpoint::open(self.path(step)) {
                Ok(saved) => return Ok(Some(saved)),
                Err(error) => {
                    tracing::warn!(step, "a checkpoint is passed over: {error}");
                    first.get_or_insert(error);
                }
            }
        }
        first.map_or(Ok(None), Err)
    }

    fn best_step(&self, steps: &[u64]) -> Option<u64> {
        self.by_metric(steps).first().copied()
    }

    /// Best first. What cannot be read has no metric.
    fn by_metric(&self, steps: &[u64]) -> Vec<u64> {
        let Some(best) = self.best else { return Vec::new() };
        let metric = |&step: &u64| {
            let metric = SavedCheckpoint::peek(&self.path(step)).ok()?.metric()?;
            (!metric.is_nan()).then_some((step, metric))
        };
        let mut metrics: Vec<(u64, f64)> = steps.iter().filter_map(metric).collect();
        metrics.sort_by(|(_, a), (_, b)| match best {
            Best::Lowest => a.total_cmp(b),
            Best::Highest => b.total_cmp(a),
        });
        metrics.into_iter().map(|(step, _)| step).collect()
    }

    fn path(&self, step: u64) -> PathBuf {
        self.folder.join(format!("step-{step:08}.safetensors"))
    }

    fn files(&self) -> Result<Vec<PathBuf>> {
        let entries = fs::read_dir(&self.folder).map_err(self.failed("cannot look into"))?;
        entries
            .map(|entry| entry.map(|entry| entry.path()).map_err(self.failed("cannot look into")))
            .collect()
    }

    fn failed(&self, action: &'static str) -> impl Fn(io::Error) -> Error {
        let path: &Path = &self.folder;
        move |source| Error::File { action, path: path.to_owned(), source }
    }
}
