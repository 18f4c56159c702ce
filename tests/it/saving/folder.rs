//! What a folder keeps, and what is left when it cannot be written to.

use std::fs;
use std::path::Path;
use std::process::Command;

use candle_amp::checkpoints::{Best, Checkpoint, Checkpointer, State};
use candle_amp::error::CheckpointError;
use candle_amp::{Error, Parameters, Result};
use candle_core::{DType, Device, Var};

use super::Folder;
use crate::bad_input::assert_says;

fn checkpoint(step: u64) -> Result<Checkpoint> {
    Checkpoint::new(step).with("loop", &State::default().with("step", step))
}

fn steps_after(
    checkpointer: &Checkpointer,
    metrics: impl IntoIterator<Item = (u64, f64)>,
) -> Result<Vec<u64>> {
    for (step, metric) in metrics {
        checkpointer.save(&checkpoint(step)?.metric(metric))?;
    }
    checkpointer.steps()
}

#[test]
fn the_last_and_the_best_are_kept() -> Result<()> {
    let metrics = || [(1, 3.0), (2, f64::NAN), (3, 1.0), (4, 9.0), (5, 1.0), (6, 2.0), (7, 2.0)];
    for (best, keep, expected, best_step) in [
        (None, 3, vec![5, 6, 7], None),
        (None, 1, vec![7], None),
        (None, 0, vec![7], None),
        (Some(Best::Lowest), 2, vec![3, 6, 7], Some(3)),
        (Some(Best::Highest), 2, vec![4, 6, 7], Some(4)),
        (Some(Best::Highest), 5, vec![3, 4, 5, 6, 7], Some(4)),
    ] {
        let folder = Folder::new();
        let mut checkpointer = Checkpointer::new(&folder.0)?.keep_last(keep);
        if let Some(best) = best {
            checkpointer = checkpointer.keep_best(best);
        }
        assert!(checkpointer.latest()?.is_none() && checkpointer.best()?.is_none());
        assert_eq!(steps_after(&checkpointer, metrics())?, expected, "{best:?}, last {keep}");
        assert_eq!(checkpointer.latest()?.map(|saved| saved.step()), Some(7));
        assert_eq!(checkpointer.best()?.map(|saved| saved.step()), best_step);
    }
    Ok(())
}

#[test]
fn a_run_that_goes_back_is_asked_what_it_means() -> Result<()> {
    let folder = Folder::new();
    let checkpointer = Checkpointer::new(&folder.0)?;
    steps_after(&checkpointer, [(10, 0.0), (20, 0.0), (30, 0.0)])?;
    let back = checkpointer.save(&checkpoint(15)?);
    assert_says(back, &["step 30", "of step 15", "discard_after"]);
    assert_eq!(checkpointer.steps()?, [10, 20, 30]);
    checkpointer.discard_after(10)?;
    checkpointer.save(&checkpoint(15)?)?;
    checkpointer.save(&checkpoint(15)?)?; // over itself
    assert_eq!(checkpointer.steps()?, [10, 15]);
    Ok(())
}

#[test]
fn a_damaged_checkpoint_is_passed_over_and_leftovers_are_removed() -> Result<()> {
    let folder = Folder::new();
    let checkpointer = Checkpointer::new(&folder.0)?.keep_best(Best::Lowest);
    steps_after(&checkpointer, [(1, 1.0), (2, 0.5)])?;
    fs::write(folder.file("step-00000003.safetensors"), "cut off").unwrap();
    fs::write(folder.file(".step-00000004.safetensors.17.0.tmp"), "half").unwrap();
    fs::write(folder.file("notes.txt"), "not ours").unwrap();
    assert_eq!(checkpointer.latest()?.map(|saved| saved.step()), Some(2));
    assert_eq!(checkpointer.best()?.map(|saved| saved.step()), Some(2));
    assert_eq!(folder.names().len(), 5, "looking removes nothing");
    steps_after(&checkpointer, [(4, 0.7)])?;
    // The last three that are whole, of which 3 is none.
    let kept = [1, 2, 3, 4].map(|step| format!("step-0000000{step}.safetensors"));
    assert_eq!(folder.names()[0], "notes.txt");
    assert_eq!(folder.names()[1..], kept);
    for step in [1, 2, 4] {
        fs::remove_file(folder.file(&format!("step-0000000{step}.safetensors"))).unwrap();
    }
    assert!(matches!(
        checkpointer.latest(),
        Err(Error::Checkpoint(CheckpointError::Damaged { .. }))
    ));
    Ok(())
}

/// Saving to `path` fails, says so, and leaves the folder as it was.
fn assert_refused(checkpoint: &Checkpoint, path: &Path, folder: &Path) {
    let list = || {
        let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let mut files: Vec<_> = entries.map(|path| (fs::read(&path).ok(), path)).collect();
        files.sort();
        files
    };
    let before = list();
    let refused = checkpoint.save(path);
    assert!(matches!(refused, Err(Error::File { .. })), "{refused:?}");
    assert_says(refused, &["cannot write", &path.display().to_string()]);
    assert!(list() == before, "something has changed in {}", folder.display());
}

#[test]
fn a_place_that_cannot_be_written_is_an_error() -> Result<()> {
    let folder = Folder::new();
    let file = folder.file("file");
    fs::write(&file, "a file").unwrap();
    fs::create_dir(folder.file("folder")).unwrap();
    let one = checkpoint(1)?;
    assert_refused(&one, &file.join("below"), &folder.0);
    assert_refused(&one, &folder.file("folder"), &folder.0);
    assert_refused(&one, &folder.file("missing").join("x"), &folder.0);
    assert_refused(&one, Path::new("/"), &folder.0);
    assert!(matches!(Checkpoint::open(folder.file("none")), Err(Error::File { .. })));
    assert!(matches!(Checkpointer::new(file.join("below")), Err(Error::File { .. })));
    Ok(())
}

/// Unmounts on the way out.
struct Mounted<'a>(&'a Path);

impl Mounted<'_> {
    fn mount(&self, options: &str) -> bool {
        let status = Command::new("mount")
            .args(["-t", "tmpfs", "-o", options, "tmpfs"])
            .arg(self.0)
            .output();
        status.is_ok_and(|output| output.status.success())
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0).output();
    }
}

#[test]
fn a_full_disk_and_a_read_only_one_leave_the_old_checkpoint() -> Result<()> {
    let folder = Folder::new();
    let disk = Mounted(&folder.0);
    if !disk.mount("size=256k") {
        eprintln!("skipped: this system lets nobody but root mount a small disk");
        return Ok(());
    }
    let path = folder.file("run.safetensors");
    let parameters =
        |size: usize| Parameters::named([("w", Var::ones(size, DType::F32, &Device::Cpu)?)]);
    let small = Checkpoint::new(1).with("model", &parameters(1000)?)?;
    small.save(&path)?;
    let large = Checkpoint::new(2).with("model", &parameters(1_000_000)?)?;
    assert_refused(&large, &path, &folder.0);
    assert_eq!(Checkpoint::open(&path)?.step(), 1);
    small.save(&path)?; // there is room again
    if disk.mount("remount,ro") {
        assert_refused(&small, &path, &folder.0);
        assert_eq!(Checkpoint::open(&path)?.step(), 1);
    }
    Ok(())
}
