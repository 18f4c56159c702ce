//! What the tests of the examples share.

use std::{env, ffi::OsString, process::Command};

use clap::Parser;

/// What `PROGRAM ARGUMENTS` parses to.
pub(crate) fn parse<O: Parser>(arguments: &str) -> Result<O, clap::Error> {
    O::try_parse_from(std::iter::once("program").chain(arguments.split_whitespace()))
}

/// In a child of a test, its command line, an argument a line.
pub(crate) const LINE: &str = "CANDLE_AMP_COMMAND_LINE";

/// The command line of the program, where `test` is run as a child.
pub(crate) fn command_line() -> Option<Vec<OsString>> {
    let line = env::var(LINE).ok()?;
    Some(["program"].into_iter().chain(line.lines()).map(Into::into).collect())
}

/// The program with this command line, by way of `shell` if there is one: `test` runs it.
pub(crate) fn command(test: &str, line: &str, shell: Option<&str>) -> std::io::Result<Command> {
    let this = env::current_exe()?;
    let mut command = match shell {
        None => Command::new(this),
        Some(script) => {
            let mut command = Command::new("sh");
            command.args(["-c", script]).arg(this);
            command
        }
    };
    let line: Vec<&str> = line.split_whitespace().collect();
    command.args([test, "--exact", "--nocapture"]).env(LINE, line.join("\n"));
    Ok(command)
}

/// The first line of what clap says to `arguments`.
#[track_caller]
pub(crate) fn refusal<O: Parser + std::fmt::Debug>(arguments: &str) -> String {
    let error = parse::<O>(arguments).expect_err("bad arguments");
    assert_eq!(error.exit_code(), 2);
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

/// Asserts that `text` is plain and fits a terminal of 80 columns.
#[track_caller]
pub(crate) fn assert_plain(text: &str) {
    assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text:?}");
    for line in text.lines() {
        assert!(line.chars().count() < 80, "{line:?}");
        assert_eq!(line, line.trim_end());
    }
}
