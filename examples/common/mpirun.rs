//! What the tests share that start this program several times. scripts/mpi.sh runs them.

use std::process::{Command, Output};

use anyhow::{Result, ensure};

use super::testing;

/// As root too, with more ranks than cores. Each rank prints its process.
pub(crate) const TWO_RANKS: &str = r#"exec mpirun --allow-run-as-root --oversubscribe --bind-to none -n 2 \
    sh -c 'echo "process $$"; exec "$0" "$@"' "$0" "$@""#;

/// The program with this command line, as two ranks or alone: `test` runs it.
pub(crate) fn command(test: &str, line: &str, ranks: usize) -> Result<Command> {
    let mut command = testing::command(test, line, (ranks == 2).then_some(TWO_RANKS))?;
    command.env("RAYON_NUM_THREADS", "1");
    Ok(command)
}

/// Runs it to its end, which must be a good one. What it printed.
pub(crate) fn run(test: &str, line: &str, ranks: usize) -> Result<String> {
    let output = command(test, line, ranks)?.output()?;
    let text = text(&output);
    ensure!(output.status.success(), "{line}, {ranks} ranks: {text}");
    Ok(text)
}

/// All that it printed.
pub(crate) fn text(output: &Output) -> String {
    let streams = [&output.stdout, &output.stderr];
    streams.map(|stream| String::from_utf8_lossy(stream)).concat()
}

/// Asserts that two numbers differ by at most `tolerance` of the second one.
#[track_caller]
pub(crate) fn assert_near(what: &str, number: f64, expected: f64, tolerance: f64) {
    let near = (number - expected).abs() <= tolerance * expected.abs();
    assert!(near, "{what}: {number}, expected {expected}");
}
