//! A run that goes on after its last checkpoint was damaged.

use std::fs;

use candle_amp::checkpoints::{Checkpoint, Checkpointer, State};
use candle_amp::error::CheckpointError;
use candle_amp::{Error, Result};

use super::Folder;
use crate::bad_input::assert_says;

fn checkpoint(step: u64) -> Result<Checkpoint> {
    Checkpoint::new(step).with("loop", &State::default().with("step", step))
}

fn name(step: u64) -> String {
    format!("step-{step:08}.safetensors")
}

fn damage(folder: &Folder, step: u64) {
    let path = folder.file(&name(step));
    let mut bytes = fs::read(&path).unwrap();
    bytes.pop();
    fs::write(path, bytes).unwrap();
}

/// A folder with these steps, some of them damaged.
fn folder(steps: &[u64], damaged: &[u64]) -> Result<(Folder, Checkpointer)> {
    let folder = Folder::new();
    let checkpointer = Checkpointer::new(&folder.0)?;
    for step in steps {
        checkpointer.save(&checkpoint(*step)?)?;
    }
    damaged.iter().for_each(|step| damage(&folder, *step));
    Ok((folder, checkpointer))
}

#[test]
fn resuming_clears_the_way_for_the_next_save() -> Result<()> {
    let (folder, checkpointer) = folder(&[10, 20, 30], &[20, 30])?;
    let mut own = State::default();
    let resumed = checkpointer.resume(&mut [("loop", &mut own)])?.expect("10 is whole");
    assert_eq!((resumed.step(), own.value::<u64>("step")?), (10, 10));
    assert_eq!(resumed.checkpoint().path(), folder.file(&name(10)));
    let aside = [20, 30].map(|step| folder.file(&format!("{}.damaged", name(step))));
    assert_eq!(resumed.set_aside(), aside);
    assert!(aside.iter().all(|path| path.is_file()));
    for step in [15, 20] {
        checkpointer.save(&checkpoint(step)?)?;
    }
    assert_eq!(checkpointer.steps()?, [10, 15, 20]);
    // Another one of the same name does not take the place of the first.
    damage(&folder, 20);
    let resumed = checkpointer.resume(&mut [("loop", &mut own)])?.expect("15 is whole");
    assert_eq!((resumed.step(), own.value::<u64>("step")?), (15, 15));
    assert_eq!(resumed.set_aside(), [folder.file(&format!("{}.damaged-2", name(20)))]);
    assert_eq!(folder.names().len(), 5, "{:?}", folder.names());
    let nothing = checkpointer.resume(&mut [("loop", &mut own)])?.expect("15 is whole");
    assert!(nothing.set_aside().is_empty());
    Ok(())
}

/// As a loop does that loads for itself.
#[test]
fn a_damaged_later_checkpoint_stops_no_save() -> Result<()> {
    for (steps, damaged, next) in [(vec![1, 2, 3], 3, 3), (vec![10, 20], 20, 15)] {
        let (folder, checkpointer) = folder(&steps, &[damaged])?;
        let step = checkpointer.latest()?.map(|saved| saved.step());
        assert_eq!(step, steps.iter().rev().nth(1).copied());
        checkpointer.save(&checkpoint(next)?)?;
        assert_eq!(checkpointer.latest()?.map(|saved| saved.step()), Some(next));
        let moved = folder.names().contains(&format!("{}.damaged", name(damaged)));
        assert_eq!(moved, damaged > next, "what is written over is gone: {:?}", folder.names());
    }
    Ok(())
}

#[test]
fn nothing_is_renamed_where_nothing_is_resumed() -> Result<()> {
    let mut own = State::default();
    let (empty, checkpointer) = folder(&[], &[])?;
    assert!(checkpointer.resume(&mut [("loop", &mut own)])?.is_none());
    assert!(empty.names().is_empty());
    // None is whole: not a new run, without a word.
    let (folder_of_two, checkpointer) = folder(&[1, 2], &[1, 2])?;
    let names = folder_of_two.names();
    let refused = checkpointer.resume(&mut [("loop", &mut own)]);
    assert!(
        matches!(refused, Err(Error::Checkpoint(CheckpointError::Damaged { .. }))),
        "{refused:?}"
    );
    assert_eq!(folder_of_two.names(), names);
    // What is whole does not fit.
    let (mixed, checkpointer) = folder(&[1, 2], &[2])?;
    let names = mixed.names();
    assert_says(checkpointer.resume(&mut [("other", &mut own)]), &["no part `other`"]);
    assert_eq!(mixed.names(), names);
    assert!(own.values.is_empty());
    Ok(())
}
