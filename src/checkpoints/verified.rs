//! Which files were read whole, so that none is read twice.

use std::collections::HashMap;
use std::fs::Metadata;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, MutexGuard};
use std::time::SystemTime;

use super::checkpoint::{Checkpoint, SavedCheckpoint};
use crate::Error;
use crate::Result;
use crate::error::CheckpointError;
use crate::error::lock::lock;

/// What a file was found to be, all of it read and its checksum compared.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Verdict {
    /// A checkpoint with this metric.
    Whole(Option<f64>),
    Damaged,
}

/// What a file was when it was read. A file that is written again has another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    size: u64,
    modified: Option<SystemTime>,
}

impl Stamp {
    fn of(path: &Path) -> Option<Self> {
        let metadata: Metadata = path.symlink_metadata().ok()?;
        Some(Self { size: metadata.len(), modified: metadata.modified().ok() })
    }
}

/// More than there are in any folder that tidies itself.
const MOST: usize = 4096;

/// Of the process, so that a `Checkpointer` that is made anew for each save reads no file again.
static SEEN: LazyLock<Mutex<HashMap<PathBuf, (Stamp, Verdict)>>> = LazyLock::new(Mutex::default);

fn seen() -> MutexGuard<'static, HashMap<PathBuf, (Stamp, Verdict)>> {
    lock(&SEEN)
}

/// The same for every working folder.
fn key(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Notes what was found of the file as it was before it was read, or is after it was written.
fn note(path: &Path, stamp: Option<Stamp>, verdict: Verdict) {
    let mut seen = seen();
    if seen.len() >= MOST {
        seen.clear();
    }
    match stamp {
        Some(stamp) if stamp.modified.is_some() => drop(seen.insert(key(path), (stamp, verdict))),
        _ => drop(seen.remove(&key(path))),
    }
}

/// Notes that the file was written a moment ago, with this metric.
pub(super) fn written(path: &Path, metric: Option<f64>) {
    note(path, Stamp::of(path), Verdict::Whole(metric));
}

/// Forgets a file that is there no more.
pub(super) fn forget(path: &Path) {
    seen().remove(&key(path));
}

/// Opens and checks a checkpoint, and notes what was found.
pub(super) fn open(path: &Path) -> Result<SavedCheckpoint> {
    let stamp = Stamp::of(path);
    let opened = Checkpoint::open(path);
    match &opened {
        Ok(saved) => note(path, stamp, Verdict::Whole(saved.metric())),
        Err(Error::Checkpoint(CheckpointError::Damaged { .. })) => {
            note(path, stamp, Verdict::Damaged)
        }
        Err(_) => forget(path),
    }
    opened
}

/// The metric that a checkpoint claims to have: that of the whole file, where it was read or written
/// before and has not changed since. Else it is what the header says, which nobody has verified.
pub(super) fn claim(path: &Path) -> Option<f64> {
    match known(path) {
        Some(Verdict::Whole(metric)) => metric,
        Some(Verdict::Damaged) => None,
        None => SavedCheckpoint::peek(path).ok()?.metric(),
    }
}

fn known(path: &Path) -> Option<Verdict> {
    let now = Stamp::of(path)?;
    let (stamp, verdict) = seen().get(&key(path)).copied()?;
    (stamp == now).then_some(verdict)
}

/// What a file is. Reads it, unless it was read or written before and has not changed since.
///
/// # Errors
///
/// A file that cannot be read, or that only another version of the crate can judge.
pub(super) fn verdict(path: &Path) -> Result<Verdict> {
    if let Some(verdict) = known(path) {
        return Ok(verdict);
    }
    match open(path) {
        Ok(saved) => Ok(Verdict::Whole(saved.metric())),
        Err(Error::Checkpoint(CheckpointError::Damaged { .. })) => Ok(Verdict::Damaged),
        Err(error) => Err(error),
    }
}
