//! Which checkpoints are removed: none on the word of a file that nobody has verified.

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, SystemTime};

use candle_amp::checkpoints::{Best, Checkpoint, Checkpointer, State};
use candle_amp::error::CheckpointError;
use candle_amp::{Error, Result};

use super::{Folder, signed};

fn checkpointer(folder: &Folder) -> Result<Checkpointer> {
    Ok(Checkpointer::new(&folder.0)?.keep_last(2).keep_best(Best::Lowest))
}

fn saves(folder: &Folder, metrics: &[(u64, f64)]) -> Result<Vec<u64>> {
    for (step, metric) in metrics {
        let state = State::default().with("step", step);
        let checkpoint = Checkpoint::new(*step).metric(*metric).with("loop", &state)?;
        checkpointer(folder)?.save(&checkpoint)?;
    }
    checkpointer(folder)?.steps()
}

fn best(folder: &Folder) -> Result<Option<u64>> {
    Ok(checkpointer(folder)?.best()?.map(|saved| saved.step()))
}

/// Puts `new` where `old` is in a file, which was modified then, or a while ago.
fn change(path: &Path, old: &str, new: &str, modified: Option<SystemTime>) {
    let mut bytes = fs::read(path).unwrap();
    let at = bytes.windows(old.len()).position(|window| window == old.as_bytes()).unwrap();
    bytes[at..at + new.len()].copy_from_slice(new.as_bytes());
    fs::write(path, bytes).unwrap();
    let modified = modified.unwrap_or_else(|| SystemTime::now() - Duration::from_secs(100));
    File::options().write(true).open(path).unwrap().set_modified(modified).unwrap();
}

/// One byte of a file that another process has written, or of one that this one knows.
#[test]
fn a_damaged_metric_does_not_cost_the_best() -> Result<()> {
    for known in [false, true] {
        let folder = Folder::new();
        saves(&folder, &[(1, 0.10), (2, 0.5), (3, 0.6)])?;
        let path = folder.file("step-00000003.safetensors");
        let modified = fs::metadata(&path).unwrap().modified().unwrap();
        change(&path, "\"metric\":\"0.6", "\"metric\":\"0.0", known.then_some(modified));
        let steps = saves(&folder, &[(4, 0.7), (5, 0.8), (6, 0.9)])?;
        assert_eq!(steps, [1, 5, 6], "{:?}", folder.names());
        assert_eq!(best(&folder)?, Some(1));
    }
    Ok(())
}

/// The best, when its own metric is damaged, is renamed and not removed: its weights may be whole.
#[test]
fn a_damaged_checkpoint_is_not_removed_for_what_it_says() -> Result<()> {
    let folder = Folder::new();
    saves(&folder, &[(1, 0.1), (2, 0.5), (3, 0.6)])?;
    change(&folder.file("step-00000001.safetensors"), "\"0.1\"", "\"9.1\"", None);
    assert_eq!(saves(&folder, &[(4, 0.7), (5, 0.8)])?, [2, 4, 5], "2 is the best that is whole");
    assert!(folder.names().contains(&"step-00000001.safetensors.damaged".to_owned()));
    Ok(())
}

#[test]
fn a_damaged_checkpoint_is_not_one_of_the_last() -> Result<()> {
    let folder = Folder::new();
    saves(&folder, &[(1, 0.1), (2, 0.5), (3, 0.6)])?;
    change(&folder.file("step-00000003.safetensors"), "\"0.6\"", "\"0.7\"", None);
    assert_eq!(saves(&folder, &[(4, 0.7)])?, [1, 2, 3, 4], "the last two are 2 and 4");
    assert_eq!(saves(&folder, &[(5, 0.8)])?, [1, 4, 5]);
    assert_eq!(folder.names().len(), 4, "3 is called otherwise: {:?}", folder.names());
    Ok(())
}

/// What was read or written once is known by its size and time. Only `open` always reads.
#[test]
fn a_file_is_verified_once() -> Result<()> {
    for (known, expected) in [(true, 3), (false, 4)] {
        let folder = Folder::new();
        saves(&folder, &[(1, 0.1), (2, 0.5), (3, 0.6)])?;
        let path = folder.file("step-00000002.safetensors");
        let modified = fs::metadata(&path).unwrap().modified().unwrap();
        change(&path, "loop.step\":\"2", "loop.step\":\"7", known.then_some(modified));
        assert!(matches!(
            Checkpoint::open(&path),
            Err(Error::Checkpoint(CheckpointError::Damaged { .. }))
        ));
        assert_eq!(saves(&folder, &[(4, 0.7), (5, 0.8)])?, [1, 4, 5]);
        // Renamed, where it was found to be damaged.
        assert_eq!(folder.names().len(), expected, "{:?}", folder.names());
    }
    Ok(())
}

/// A checkpoint of a later crate is not damaged: it is neither removed nor written over.
#[test]
fn a_checkpoint_of_another_version_is_kept() -> Result<()> {
    let folder = Folder::new();
    saves(&folder, &[(1, 0.1), (2, 0.5)])?;
    let path = folder.file("step-00000002.safetensors");
    change(&path, "version\":\"1", "version\":\"2", None);
    fs::write(&path, signed(fs::read(&path).unwrap())).unwrap();
    change(&path, "version\":\"2", "version\":\"2", None);
    assert_eq!(saves(&folder, &[(3, 0.6), (4, 0.7), (5, 0.8)])?, [1, 2, 4, 5]);
    fs::rename(&path, folder.file("step-00000009.safetensors")).unwrap();
    let refused = saves(&folder, &[(6, 0.5)]);
    assert!(
        matches!(refused, Err(Error::Checkpoint(CheckpointError::Version { .. }))),
        "{refused:?}"
    );
    Ok(())
}
