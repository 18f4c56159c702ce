//! What is in a folder of checkpoints and is none: in nobody's way, and left alone.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use candle_amp::Result;
use candle_amp::checkpoints::{Best, Checkpoint, Checkpointer, State};

use super::Folder;

/// Saves these steps, and keeps the last three of them and the best, the first.
fn saves(folder: &Path, steps: std::ops::Range<u64>) -> Result<Vec<u64>> {
    let checkpointer = Checkpointer::new(folder)?.keep_last(3).keep_best(Best::Lowest);
    for step in steps {
        let state = State::default().with("step", step);
        let checkpoint = Checkpoint::new(step).metric(step as f64).with("loop", &state)?;
        let path = checkpointer.save(&checkpoint)?;
        assert_eq!(Checkpoint::open(path)?.step(), step);
    }
    checkpointer.steps()
}

/// Each alone, so that one does not hide another.
#[test]
fn what_is_no_checkpoint_stops_no_save_and_stays() -> Result<()> {
    type Make = fn(&Path);
    let file: Make = |path| fs::write(path, "x").unwrap();
    let directory: Make = |path| {
        fs::create_dir(path).unwrap();
        fs::write(path.join("inside"), "x").unwrap();
    };
    let cases: [(&str, Make); 9] = [
        ("step-5.safetensors", file),
        ("step-+0000005.safetensors", file),
        ("step-000000005.safetensors", file),
        ("step-99999999999999999999.safetensors", file),
        ("step-18446744073709551615.safetensors", directory),
        ("step-00000005.safetensors", directory),
        (".step-00000005.safetensors.1.0.tmp", directory),
        (".step-notes.tmp", file),
        (".step-5.safetensors.1.0.tmp", file),
    ];
    for (name, make) in cases {
        let folder = Folder::new();
        make(&folder.file(name));
        assert_eq!(saves(&folder.0, 10..16)?, [10, 13, 14, 15], "{name}");
        assert!(folder.names().contains(&name.to_owned()), "{name} is gone");
        assert_eq!(folder.names().len(), 5, "{name}: {:?}", folder.names());
        let latest = Checkpointer::new(&folder.0)?.latest()?;
        assert_eq!(latest.map(|saved| saved.step()), Some(15), "{name}");
    }
    Ok(())
}

/// A name of the last step there can be, and nothing in it.
#[test]
fn an_empty_file_of_a_later_step_stops_no_save() -> Result<()> {
    let folder = Folder::new();
    let name = format!("step-{}.safetensors", u64::MAX);
    fs::write(folder.file(&name), "").unwrap();
    assert_eq!(saves(&folder.0, 10..16)?, [10, 13, 14, 15]);
    assert!(folder.names().contains(&format!("{name}.damaged")), "{:?}", folder.names());
    Ok(())
}

#[cfg(unix)]
#[test]
fn names_that_are_no_text_and_links_are_left_alone() -> Result<()> {
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::symlink;
    let (folder, elsewhere) = (Folder::new(), Folder::new());
    for name in [b"step-\xff\xfe5.safetensors".as_slice(), b".step-\xff.tmp"] {
        fs::write(folder.0.join(std::ffi::OsStr::from_bytes(name)), "x").unwrap();
    }
    let precious = elsewhere.file("precious");
    fs::write(&precious, "precious").unwrap();
    for step in [4, 12, 99] {
        symlink(&precious, folder.file(&format!("step-{step:08}.safetensors"))).unwrap();
    }
    assert_eq!(saves(&folder.0, 10..16)?, [10, 13, 14, 15]);
    assert_eq!(fs::read(&precious).unwrap(), b"precious");
    assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 8, "step 12 is saved, and then removed");
    Ok(())
}

/// Whoever opens a pipe waits for the other end.
#[cfg(unix)]
#[test]
fn a_pipe_is_not_waited_for() {
    let folder = Folder::new();
    for step in [3, 20] {
        let pipe = folder.file(&format!("step-{step:08}.safetensors"));
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    }
    let (done, wait) = mpsc::channel();
    let path = folder.0.clone();
    std::thread::spawn(move || {
        let saved = saves(&path, 10..16).map_err(|error| error.to_string());
        let checkpointer = Checkpointer::new(&path).unwrap();
        let latest = checkpointer.latest().unwrap().map(|saved| saved.step());
        let opened = Checkpoint::open(path.join("step-00000003.safetensors")).is_ok();
        done.send((saved, latest, opened)).unwrap();
    });
    let found = wait.recv_timeout(Duration::from_secs(60)).expect("it waits for the pipe");
    assert_eq!(found, (Ok(vec![10, 13, 14, 15]), Some(15), false));
}

/// A file that cannot be removed, as something is mounted there.
#[cfg(target_os = "linux")]
#[test]
fn what_cannot_be_removed_stops_no_save() -> Result<()> {
    struct Mounted(std::path::PathBuf);
    impl Drop for Mounted {
        fn drop(&mut self) {
            let _ = Command::new("umount").arg(&self.0).output();
        }
    }
    let folder = Folder::new();
    saves(&folder.0, 8..9)?;
    let stays = folder.file("step-00000009.safetensors");
    fs::copy(folder.file("step-00000008.safetensors"), &stays).unwrap();
    let mount = Command::new("mount").arg("--bind").args([&stays, &stays]).output();
    if !mount.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: this system lets nobody but root mount a file");
        return Ok(());
    }
    let mounted = Mounted(stays);
    // Step 9 is neither the best nor the last, and cannot go; the steps after it do.
    assert_eq!(saves(&folder.0, 10..16)?, [8, 9, 13, 14, 15]);
    drop(mounted);
    assert_eq!(saves(&folder.0, 16..17)?, [8, 14, 15, 16], "it goes as soon as it can");
    Ok(())
}
