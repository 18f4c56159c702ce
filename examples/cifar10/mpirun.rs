//! The program as two ranks that `mpirun` starts.

use std::{
    io::{BufRead, BufReader, Read},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use candle_amp::checkpoints::Checkpointer;

use crate::{
    common::{
        mpirun::{TWO_RANKS, assert_near, command, run, text},
        testing,
    },
    out::{Row, tests::rows_without_times},
    testing::Folder,
};

const PROGRAM: &str = "ends::program";

/// The rows of the only run in the folder.
fn rows(dir: &Path) -> Result<Vec<Row>> {
    rows_without_times(&run_folder(dir)?)
}

fn run_folder(dir: &Path) -> Result<PathBuf> {
    let entries = std::fs::read_dir(dir)?.map(|entry| anyhow::Ok(entry?.path()));
    let entries = entries.collect::<Result<Vec<_>>>()?;
    entries.into_iter().find(|path| path.join("checkpoints").is_dir()).context("a run")
}

/// The largest distance of a step's loss and of a test's from those of `alone`, of their size.
fn distances(two: &[Row], alone: &[Row]) -> (f64, f64) {
    let (mut step, mut test) = (0., 0.);
    assert_eq!((alone.len(), two.len()), (8, 8));
    for (number, (own, expected)) in (1..).zip(two.iter().zip(alone)) {
        let (worst, [own, expected]) = match (own, expected) {
            (Row::Step(own), Row::Step(expected)) => {
                assert_eq!((own.step, own.lr), (expected.step, expected.lr));
                (&mut step, [own.loss, expected.loss].map(|loss| loss.map(f64::from)))
            }
            (Row::Epoch(own), Row::Epoch(expected)) => {
                (&mut test, [own.test_loss, expected.test_loss])
            }
            _ => panic!("{own:?} for {expected:?}"),
        };
        let (own, expected) = (own.expect("a loss"), expected.expect("a loss"));
        let distance = (own - expected).abs() / expected;
        let allowed = match number {
            1 => 1e-5, // of a loss before any update
            2 => 1e-4,
            _ => 0.02,
        };
        assert!(distance <= allowed, "row {number}: {own}, expected {expected}");
        *worst = distance.max(*worst);
    }
    (step, test)
}

/// Sums in another order move an activation across ReLU's edge in four of ten seeds, which moves
/// later losses by up to 2e-3, tests by up to 1e-2. In the others losses agree to 1e-6. A gradient
/// that is not the mean of both ranks' shows in every seed.
#[test]
fn two_ranks_train_as_one() -> Result<()> {
    let folder = Folder::new()?;
    let train = |ranks: usize, seed: usize, more: &str| {
        let dir = folder.path(&format!("{ranks}{seed}{more}"));
        let line = format!(
            "--smoke --model resnet8 --precision f32 --seed {seed} {more} --out {}",
            dir.display()
        );
        let text = run(PROGRAM, &line, ranks)?;
        anyhow::Ok((text, rows(&dir)?))
    };
    let mut all = Vec::new();
    for seed in 0..5 {
        let (_, alone) = train(1, seed, "")?;
        let (text, two) = train(2, seed, "")?;
        assert!(text.contains("2 ranks, each cpu, 1 thread\n"), "{text}");
        assert_eq!(text.matches("test accuracy").count(), 1, "printed once: {text}");
        all.push(distances(&two, &alone));
        if seed == 0 {
            let (_, sharded) = train(2, seed, "--sharded")?;
            let same = without_gradients(sharded).eq(without_gradients(two));
            assert!(same, "parts train as the whole does");
        }
    }
    assert!(all.iter().any(|&(step, test)| step <= 1e-4 && test <= 1e-3), "{all:?}");
    Ok(())
}

/// Of gradients' exponents, no rank of a sharded run has all.
fn without_gradients(rows: Vec<Row>) -> impl Iterator<Item = Row> {
    rows.into_iter().map(|row| match row {
        Row::Epoch(mut epoch) => {
            epoch.gradients = None;
            Row::Epoch(epoch)
        }
        step => step,
    })
}

/// One of two ranks is asked to end. Both save, and two or one go on.
#[test]
fn ranks_end_together_and_go_on() -> Result<()> {
    let folder = Folder::new()?;
    let (straight, broken) = (folder.path("straight"), folder.path("broken"));
    let begin = |dir: &Path| {
        let length = "--smoke --batch-size 4 --steps 40";
        format!("{length} --model mlp --lr 0.01 --sharded --master-weights --out {}", dir.display())
    };
    run(PROGRAM, &begin(&straight), 2)?;

    let mut child = command(PROGRAM, &begin(&broken), 2)?.stdout(Stdio::piped()).spawn()?;
    let mut stdout = BufReader::new(child.stdout.take().context("a pipe")?);
    let mut text = String::new();
    while !text.contains("\ntraining ") {
        ensure!(stdout.read_line(&mut text)? > 0, "it ended before training: {text}");
    }
    let processes: Vec<&str> =
        text.lines().filter_map(|line| line.strip_prefix("process ")).collect();
    assert_eq!(processes.len(), 2, "{text}");
    let killed = Command::new("kill").args(["-TERM", processes[1]]).status()?;
    ensure!(killed.success(), "no signal was sent");
    stdout.read_to_string(&mut text)?;
    assert_eq!(child.wait()?.code(), Some(130), "{text}");
    assert_eq!(text.matches("after this step and a test; Ctrl-C").count(), 1, "{text}");
    let launch = "mpirun -n 2 cargo run --release --example cifar10 --features mpi -- --resume";
    assert!(text.contains(launch), "{text}");
    let saved = Checkpointer::new(run_folder(&broken)?.join("checkpoints"))?.latest()?;
    let step = saved.context("a checkpoint")?.step();
    assert!((1..40).contains(&step), "{step}");

    let copy = folder.path("copy");
    ensure!(Command::new("cp").arg("-r").args([&broken, &copy]).status()?.success(), "no copy");
    run(PROGRAM, &format!("--resume {}", broken.display()), 2)?;
    let straight = rows(&straight)?;
    assert!(rows(&broken)? == straight, "to the bit");

    run(PROGRAM, &format!("--resume {}", copy.display()), 1)?;
    let alone = rows(&copy)?;
    assert_eq!(alone.len(), straight.len());
    for (own, expected) in alone.iter().zip(&straight) {
        if let (Row::Epoch(own), Row::Epoch(expected)) = (own, expected) {
            let losses = [own, expected].map(|row| row.train_loss.expect("one"));
            assert_near("an epoch", losses[0], losses[1], 0.1); // in BF16
        }
    }
    Ok(())
}

#[test]
fn an_error_is_reported_once() -> Result<()> {
    let fails = |line: &str, other: Option<&str>, message: &str| -> Result<()> {
        // Rank 1 takes another line, if there is one.
        let script = TWO_RANKS.replace(
            "exec \"$0\"",
            "test $OMPI_COMM_WORLD_RANK = 0 || test -z \"$OTHER\" || \
             export CANDLE_AMP_COMMAND_LINE=\"$OTHER\"; exec \"$0\"",
        );
        let mut command = testing::command(PROGRAM, line, Some(&script))?;
        let other = other.unwrap_or_default().split_whitespace().collect::<Vec<_>>().join("\n");
        let output = command.env("OTHER", other).output()?;
        let text = text(&output);
        assert_eq!(output.status.code(), Some(2), "{text}");
        let errors: Vec<&str> = text.lines().filter(|line| line.starts_with("error: ")).collect();
        assert_eq!(errors.len(), 1, "{text}");
        assert!(errors[0].starts_with(&format!("error: {message}")), "{text}");
        Ok(())
    };
    let smoke = "--smoke --model mlp --steps 1";
    fails("--smoke --steps-a 1", None, "unexpected argument '--steps-a'")?;
    fails(
        &format!("{smoke} --batch-size 15"),
        None,
        "--batch-size is 15, of all ranks together, and 2 ranks do not divide it",
    )?;
    fails(
        smoke,
        Some(&format!("{smoke} --lr 0.2")),
        "ranks differ in --lr: rank 1 has `0.2`, and rank 0 has `0.1`",
    )?;
    fails(smoke, Some("--smoke --model none"), "invalid value 'none' for '--model <NAME>'")
}
