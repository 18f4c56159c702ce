//! How the program ends: exit codes, messages and Ctrl-C, in a process of its own.

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    process::{Command, Output, Stdio, exit},
};

use anyhow::{Context, Result, ensure};
use candle_amp::checkpoints::Checkpointer;

use crate::{
    common::{
        self,
        testing::{self, parse},
    },
    run_until,
    testing::Folder,
};

/// The program, where a test runs it.
#[test]
fn program() {
    if let Some(line) = testing::command_line() {
        exit(common::start(|| crate::options(line), crate::run).into());
    }
}

/// The program with this command line, by way of `shell` if there is one.
pub(crate) fn command(line: &str, shell: Option<&str>) -> Result<Command> {
    Ok(testing::command("ends::program", line, shell)?)
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Asserts that the program fails with `code` and one line that begins so.
#[track_caller]
fn fails(line: &str, shell: Option<&str>, code: i32, message: &str) {
    let output = command(line, shell).and_then(|mut command| Ok(command.output()?));
    let output = output.expect("the program runs");
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(code), "{line}: {text}");
    assert!(text.starts_with(&format!("error: {message}")), "{line}: {text}");
    assert_eq!(text.lines().count(), 1, "{line}: {text}");
}

#[test]
fn each_failure_has_a_line_and_a_code() -> Result<()> {
    let folder = Folder::new()?;
    let shown = |name: &str| folder.path(name).display().to_string();
    let smoke = "--smoke --model mlp --steps 1";
    fails(&format!("{smoke} --report {}", shown("no/x.json")), None, 1, "--report ");
    fails("--smoke --batch-size 0", None, 2, "invalid value '0' for '--batch-size <N>'");
    fails("--smoke --batch-size 65", None, 2, "--batch-size is 65, but the set has 64 training");
    let tip =
        "unexpected argument '--steps-a' found; a similar argument exists: '--steps'; for more";
    fails("--steps-a 1", None, 2, tip);
    fails("--smoke --sharded", None, 2, "--sharded divides");
    fs::write(folder.path("file"), "")?;
    fails(&format!("{smoke} --out {}", shown("file/run")), None, 1, "--out ");
    fails(&format!("--resume {}", shown("none")), None, 2, "--resume ");

    fails(
        &format!("--data {}", shown("none")),
        None,
        3,
        &format!("{}: no such folder", shown("none")),
    );
    fs::write(folder.path("data_batch_1.bin"), [0; 3073])?;
    fs::write(folder.path("test_batch.bin"), [0; 3000])?;
    let message = format!("{} has 3000 bytes, expected", shown("test_batch.bin"));
    fails(&format!("--data {}", shown("")), None, 3, &message);
    fs::write(folder.path("test_batch.bin"), [0; 3073])?;
    let message = format!("{} has 1 of 50,000 training images, in 1 of 5 files", shown(""));
    fails(&format!("--data {}", shown("")), None, 3, &message);
    let message = format!("{} has 1 training image, fewer than a batch of 16", shown(""));
    fails(&format!("--smoke --data {}", shown("")), None, 3, &message);
    let message = format!("--train-images is 2, but {} has 1 training image", shown(""));
    fails(&format!("--train-images 2 --data {}", shown("")), None, 2, &message);
    let message = "--batch-size is 128, but the set has 1 training image";
    fails(&format!("--train-images 1 --data {}", shown("")), None, 2, message);

    let output = command(smoke, None)?.output()?;
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let output = command("--help", None)?.output()?;
    assert_eq!((output.status.code(), stderr(&output)), (Some(0), String::new()));
    Ok(())
}

/// A disk that is full while the run goes on: the last checkpoint stays, and the run can go on from it.
#[cfg(unix)]
#[test]
fn a_full_disk_loses_nothing() -> Result<()> {
    let folder = Folder::new()?;
    let dir = folder.path("run");
    let line = format!("--model resnet8 --smoke --epochs 2 --out {}", dir.display());
    // Not within a fork, whose generator the other processes would refuse.
    run_until(&parse(&line)?, |step| step == 1)?;
    let checkpoints = dir.join("bf16-seed-0").join("checkpoints");
    let path = checkpoints.join("step-00000001.safetensors");
    let before = fs::read(&path)?;
    // Files may have at most 8 KiB. The signal that says so would end the program.
    let full = "trap '' XFSZ; ulimit -f 16; exec \"$0\" \"$@\"";
    let again = format!("--resume {}", dir.display());
    let next = checkpoints.join("step-00000004.safetensors");
    fails(&again, Some(full), 1, &format!("cannot write {}: ", next.display()));
    assert!(fs::read(&path)? == before, "the checkpoint is what it was");
    assert_eq!(fs::read_dir(&checkpoints)?.count(), 1, "nothing half written stays behind");
    let output = command(&again, None)?.output()?;
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(Checkpointer::new(checkpoints)?.steps()?.last(), Some(&6));
    Ok(())
}

/// Begins a long training, and presses Ctrl-C once it runs. The exit code, and all that it printed.
#[cfg(unix)]
fn interrupted(more: &str) -> Result<(Option<i32>, String)> {
    let line = format!("--smoke --model mlp --batch-size 1 --steps 900000 {more}");
    let mut child = command(&line, None)?.stdout(Stdio::piped()).spawn()?;
    let mut stdout = BufReader::new(child.stdout.take().context("a pipe")?);
    let mut text = String::new();
    while !text.contains("\ntraining ") {
        ensure!(stdout.read_line(&mut text)? > 0, "it ended before training: {text}");
    }
    let killed = Command::new("kill").args(["-INT", &child.id().to_string()]).status()?;
    ensure!(killed.success(), "no signal was sent");
    stdout.read_to_string(&mut text)?;
    Ok((child.wait()?.code(), text))
}

#[cfg(unix)]
#[test]
fn ctrl_c_saves_and_says_how_to_go_on() -> Result<()> {
    let folder = Folder::new()?;
    let dir = folder.path("run");
    let (code, text) = interrupted(&format!("--out {}", dir.display()))?;
    assert_eq!(code, Some(130), "{text}");
    assert!(text.contains("after this step and a test; Ctrl-C"), "{text}");
    let advice = format!("cargo run --release --example cifar10 -- --resume {}\n", dir.display());
    assert!(text.ends_with(&advice), "{text}");
    let checkpoints = Checkpointer::new(dir.join("bf16-seed-0").join("checkpoints"))?;
    let saved = checkpoints.latest()?.context("a checkpoint")?;
    let step = saved.step();
    assert!((1..900_000).contains(&step));
    let steps = format!("steps          {step}, 0 skipped, then interrupted");
    assert!(text.contains(&steps), "{text}");
    let page = format!("A page with pictures: {}", dir.join("index.html").display());
    assert!(text.contains(&page) && dir.join("index.html").exists(), "{text}");

    let (code, text) = interrupted("")?;
    assert_eq!(code, Some(130), "{text}");
    assert!(text.ends_with("Nothing was saved to go on from: --out DIR would have.\n"), "{text}");
    Ok(())
}
