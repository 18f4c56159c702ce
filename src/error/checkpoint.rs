//! Errors of saving and loading.

use std::fmt::Write;
use std::path::PathBuf;

/// A checkpoint or a saved state cannot be loaded or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// A value of a saved state that does not fit.
    #[error("cannot load the state: {name} is {got}, expected {expected}")]
    State {
        /// What of the state.
        name: String,
        /// What was found.
        got: String,
        /// What would do.
        expected: String,
    },
    /// A file that is no whole checkpoint of this crate.
    #[error("{} is not a whole checkpoint: {fault}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What shows it.
        fault: String,
    },
    /// A checkpoint of another version of the format.
    #[error(
        "{} is a checkpoint of version {got}, written by candle-amp {by}; this candle-amp reads \
         version {supported}",
        path.display()
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        got: u64,
        /// The version of the crate that wrote it.
        by: String,
        /// The version that can be read.
        supported: u32,
    },
    /// A checkpoint without a part that is asked for.
    #[error("the checkpoint has no part `{name}`, but {found:?}")]
    NoPart {
        /// The part.
        name: String,
        /// Those there are.
        found: Vec<String>,
    },
    /// A name that a part of a checkpoint cannot have.
    #[error("a part of a checkpoint cannot be called `{name}`: give it another name, without dots")]
    PartName {
        /// The name.
        name: String,
    },
    /// A saved state that does not fit what it is loaded into.
    #[error("the saved state{} does not fit:{}", of_part(part), lists(missing, extra, wrong))]
    Mismatch {
        /// The part of a checkpoint; empty where it is not known.
        part: String,
        /// What it lacks.
        missing: Vec<String>,
        /// What it has too much.
        extra: Vec<String>,
        /// What has another shape, dtype or kind, and which.
        wrong: Vec<String>,
    },
    /// A checkpoint of an earlier step than those in its folder.
    #[error(
        "{} has a checkpoint of step {latest}, and this one is of step {step}: use another folder, \
         or call `discard_after` first",
        folder.display()
    )]
    StepBehind {
        /// The folder.
        folder: PathBuf,
        /// The step to save.
        step: u64,
        /// The last step there.
        latest: u64,
    },
    /// A weight that F16 cannot hold.
    #[error("`{name}` has {count} elements that F16 would make infinite, beyond 65504: use BF16")]
    TooLarge {
        /// The variable.
        name: String,
        /// How many of its elements.
        count: u64,
    },
}

fn of_part(part: &str) -> String {
    if part.is_empty() { String::new() } else { format!(" of `{part}`") }
}

/// A line for each list that has something in it.
fn lists(missing: &[String], extra: &[String], wrong: &[String]) -> String {
    /// As many as a terminal shows.
    const SHOWN: usize = 20;
    let mut text = String::new();
    for (title, list) in [("missing", missing), ("unexpected", extra), ("different", wrong)] {
        if !list.is_empty() {
            let shown = list[..list.len().min(SHOWN)].join(", ");
            let _ = write!(text, "\n  {title}: {shown}");
        }
        if list.len() > SHOWN {
            let _ = write!(text, " and {} more", list.len() - SHOWN);
        }
    }
    text
}
