use candle_amp::random;
use clap::Parser;

use super::*;
use crate::report::Outcome;

fn options(arguments: &str) -> Options {
    Options::parse_from(["gpt", "--smoke"].into_iter().chain(arguments.split_whitespace()))
}

fn outcome(arguments: &str) -> Result<Outcome> {
    let (options, _fork) = (options(arguments), random::fork_rng_guard());
    let corpus = load(&options)?;
    Ok(train::train(&options, &corpus, options.precision, &Device::Cpu)?.outcome)
}

#[test]
fn one_loop_trains_in_every_precision() -> Result<()> {
    for (arguments, scale) in [
        ("--precision f32", 1.),
        ("--precision bf16", 1.),
        ("--precision bf16 --master-weights", 1.),
        ("--precision f16", 65536.),
        ("--precision f16 --master-weights --init-scale 512", 512.),
    ] {
        let outcome = outcome(&format!("{arguments} --steps 30 --lr 1e-2"))?;
        assert_eq!((outcome.steps, outcome.skipped, outcome.scale), (30, 0, scale), "{arguments}");
        // Guessing among 62 characters is worth ln 62 = 4.13, their frequencies 3.3.
        let losses = [outcome.train_loss, outcome.held_out_loss];
        assert!(losses.iter().all(|loss| (2.2..3.7).contains(loss)), "{arguments}: {losses:?}");
    }
    Ok(())
}

#[test]
fn a_seed_gives_the_same_losses_again() -> Result<()> {
    let losses = |seed: u64| {
        let outcome = outcome(&format!("--steps 3 --seed {seed}"))?;
        anyhow::Ok([outcome.train_loss, outcome.held_out_loss])
    };
    assert_eq!(losses(5)?, losses(5)?);
    assert_ne!(losses(5)?, losses(6)?);
    Ok(())
}

#[test]
fn a_step_that_overflows_is_skipped_and_halves_the_scale() -> Result<()> {
    let outcome = outcome("--precision f16 --init-scale 16777216 --steps 3")?;
    assert_eq!((outcome.skipped, outcome.scale), (3, 2097152.));
    Ok(())
}

#[test]
fn a_sample_is_as_long_as_asked_and_the_same_for_the_same_seed() -> Result<()> {
    let sample = |arguments: &str| {
        let (options, _fork) = (options(arguments), random::fork_rng_guard());
        let corpus = load(&options)?;
        let trained = train::train(&options, &corpus, options.precision, &Device::Cpu)?;
        train::sample(&options, &corpus, &trained, &Device::Cpu)
    };
    let tokens = sample("--steps 1 --sample 50")?;
    assert_eq!(tokens.len(), 50); // past the context
    assert!(tokens.iter().all(|&token| token < 62));
    assert_eq!(sample("--steps 1 --sample 50")?, tokens);
    assert_ne!(sample("--steps 1 --sample 50 --seed 1")?, tokens);
    assert!(sample("--steps 1 --sample 0")?.is_empty());
    Ok(())
}

#[test]
fn the_program_runs_alone_and_as_a_report() -> Result<()> {
    let _fork = random::fork_rng_guard();
    run(&options(""))?;
    run(&options("--report --master-weights --steps 2"))
}

/// The program, where a test runs it.
#[test]
fn program() {
    if let Some(line) = common::testing::command_line() {
        std::process::exit(common::start(|| crate::options(line), crate::run).into());
    }
}

#[test]
fn each_failure_has_a_line_and_a_code() -> Result<()> {
    for (line, code, message) in [
        ("--smoke --width 30", 2, "error: --width is 30, not a multiple of the 4 of --heads\n"),
        ("--smoke --text no/such/file", 3, "error: cannot read no/such/file: "),
    ] {
        let output = common::testing::command("tests::program", line, None)?.output()?;
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{line}: {text}");
        assert!(text.starts_with(message), "{line}: {text}");
    }
    Ok(())
}
