//! A folder of checkpoints: the last ones and the best.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::checkpoint::{Checkpoint, SavedCheckpoint};
use super::file::Written;
use super::names;
use super::state::Stateful;
use super::verified::{self, Verdict};
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
/// Only regular files of such names count; whatever else is in the folder is left alone.
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
/// let resumed = checkpointer.resume(&mut [("loop", &mut epoch)])?;
/// assert_eq!(resumed.map_or(0, |resumed| resumed.step()), 400); // 0 in an empty folder
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

/// What a run went on from, from [`Checkpointer::resume`].
#[derive(Debug)]
pub struct Resumed {
    saved: SavedCheckpoint,
    set_aside: Vec<PathBuf>,
}

impl Resumed {
    /// The number of steps that the run had taken.
    pub fn step(&self) -> u64 {
        self.saved.step()
    }

    /// The checkpoint that was loaded: to load other parts of it, say.
    pub fn checkpoint(&self) -> &SavedCheckpoint {
        &self.saved
    }

    /// Later checkpoints that were damaged, under the names they have now.
    pub fn set_aside(&self) -> &[PathBuf] {
        &self.set_aside
    }
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
    /// None is removed on the word of a file that was not read whole: the others that it counts are
    /// verified, once per process. A damaged one counts as neither the last nor the best; in the way
    /// of the new one, or older than the last, it is renamed to `*.damaged`. What cannot be removed
    /// or renamed stays, with a warning through `tracing`: the checkpoint is saved all the same.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::StepBehind`] where a whole checkpoint of a later step is in the folder: a run that
    /// went back, which [`discard_after`](Self::discard_after) clears the way for. [`Error::File`];
    /// the checkpoints before are all there then.
    pub fn save(&self, checkpoint: &Checkpoint) -> Result<PathBuf> {
        for later in self.steps()?.into_iter().rev().filter(|later| *later > checkpoint.step) {
            match verified::verdict(&self.path(later))? {
                Verdict::Damaged => drop(self.set_aside(later)),
                Verdict::Whole(_) => {
                    let (folder, step) = (self.folder.clone(), checkpoint.step);
                    return Err(CheckpointError::StepBehind { folder, step, latest: later }.into());
                }
            }
        }
        let path = self.path(checkpoint.step);
        let written = checkpoint.write(&path)?;
        verified::written(&path, checkpoint.metric);
        // Nothing goes for a file that may not be there tomorrow.
        let tidied = match written {
            Written::ToLast => self.tidy(),
            Written::ForNow => Ok(()),
        };
        if let Err(error) = tidied {
            let path = path.display();
            tracing::warn!("saved {path}, and cannot tidy: {error}");
        }
        Ok(path)
    }

    /// Removes what is neither among the last, nor the best, nor whole.
    fn tidy(&self) -> Result<()> {
        let steps = self.steps()?;
        let mut whole = 0;
        let first_kept = steps.iter().rev().find(|step| {
            whole += usize::from(self.is_whole(**step));
            whole == self.keep
        });
        let old = match first_kept {
            Some(first) => &steps[..steps.partition_point(|step| step < first)],
            None => &[],
        };
        let best = if old.is_empty() { None } else { self.best_step(&steps) };
        for step in old.iter().filter(|step| best != Some(**step)) {
            // The word of a damaged file that it is not the best counts for nothing.
            let verdict = self.best.map(|_| verified::verdict(&self.path(*step))).transpose();
            match verdict {
                Ok(None | Some(Verdict::Whole(_))) => self.remove(&self.path(*step)),
                Ok(Some(Verdict::Damaged)) => drop(self.set_aside(*step)),
                Err(error) => tracing::warn!(step, "a checkpoint is kept: {error}"),
            }
        }
        for name in self.files()?.iter().filter(|name| names::is_temporary(name)) {
            self.remove(&self.folder.join(name));
        }
        Ok(())
    }

    fn remove(&self, path: &Path) {
        verified::forget(path);
        if let Err(error) = fs::remove_file(path) {
            tracing::warn!("cannot remove {}: {error}", path.display());
        }
    }

    /// Renames a damaged checkpoint, so that it is in nobody's way. Where it is then.
    fn set_aside(&self, step: u64) -> Option<PathBuf> {
        let from = self.path(step);
        let to = names::aside(&from);
        verified::forget(&from);
        match fs::rename(&from, &to) {
            Ok(()) => {
                let (old, new) = (from.display(), to.display());
                tracing::warn!(step, "{old} is damaged, and is now called {new}");
                Some(to)
            }
            Err(error) => {
                tracing::warn!(step, "cannot rename {}, which is damaged: {error}", from.display());
                None
            }
        }
    }

    /// The steps there are checkpoints of, in order. They may be damaged.
    ///
    /// # Errors
    ///
    /// [`Error::File`].
    pub fn steps(&self) -> Result<Vec<u64>> {
        let mut steps: Vec<u64> =
            self.files()?.iter().filter_map(|name| names::step(name)).collect();
        steps.sort_unstable();
        Ok(steps)
    }

    /// Loads the parts named of the last checkpoint that is whole, as [`SavedCheckpoint::load`]
    /// does; `None` in an empty folder. Later ones, which are damaged, are renamed to `*.damaged`
    /// with a warning through `tracing`, so that the run can save its next steps.
    ///
    /// # Errors
    ///
    /// [`Error::File`]; what is wrong with the last one, where none is whole;
    /// [`SavedCheckpoint::load`]'s. Nothing is changed or renamed then.
    pub fn resume(&self, parts: &mut [(&str, &mut dyn Stateful)]) -> Result<Option<Resumed>> {
        let Some(saved) = self.latest()? else { return Ok(None) };
        let steps = self.steps()?;
        saved.load(parts)?;
        let mut set_aside = Vec::new();
        for later in steps.into_iter().filter(|step| *step > saved.step()) {
            match verified::verdict(&self.path(later)) {
                Ok(Verdict::Damaged) => set_aside.extend(self.set_aside(later)),
                Ok(Verdict::Whole(_)) => {}
                Err(error) => tracing::warn!(step = later, "a checkpoint is passed over: {error}"),
            }
        }
        Ok(Some(Resumed { saved, set_aside }))
    }

    /// The last checkpoint that is whole; `None` in an empty folder. A damaged one is passed over,
    /// with a warning through `tracing`, and stays where it is.
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

    /// Removes the checkpoints after `step`, damaged or not: to go on from an earlier one.
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
            match verified::open(&self.path(step)) {
                Ok(saved) => return Ok(Some(saved)),
                Err(error) => {
                    tracing::warn!(step, "a checkpoint is passed over: {error}");
                    first.get_or_insert(error);
                }
            }
        }
        first.map_or(Ok(None), Err)
    }

    /// What cannot be read is not.
    fn is_whole(&self, step: u64) -> bool {
        matches!(verified::verdict(&self.path(step)), Ok(Verdict::Whole(_)))
    }

    fn best_step(&self, steps: &[u64]) -> Option<u64> {
        self.by_metric(steps).into_iter().find(|step| self.is_whole(*step))
    }

    /// Best first, by what they claim. What cannot be read has no metric.
    fn by_metric(&self, steps: &[u64]) -> Vec<u64> {
        let Some(best) = self.best else { return Vec::new() };
        let metric = |&step: &u64| {
            let metric = verified::claim(&self.path(step))?;
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
        self.folder.join(names::file(step))
    }

    /// The names of the regular files in the folder. Names that are not UTF-8 are none of ours.
    fn files(&self) -> Result<Vec<String>> {
        let failed = self.failed("cannot look into");
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.folder).map_err(&failed)? {
            let entry = entry.map_err(&failed)?;
            // What another process has removed meanwhile is not there.
            let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
            files.extend(entry.file_name().into_string().ok().filter(|_| is_file));
        }
        Ok(files)
    }

    fn failed(&self, action: &'static str) -> impl Fn(io::Error) -> Error {
        let path: &Path = &self.folder;
        move |source| Error::File { action, path: path.to_owned(), source }
    }
}
