//! What a program ends with: its exit code, and one line if it failed.

use std::fmt;

use anyhow::{Error, Result};

use super::{interrupted, options::Usage};

/// Data that are missing, truncated or not what they should be.
#[derive(Debug)]
pub(crate) struct BadData(String);

impl BadData {
    /// What went wrong while data were read. Ctrl-C and a wrong option stay what they are.
    pub(crate) fn of(error: Error) -> Error {
        if error.is::<Interrupted>() || error.is::<Usage>() {
            error
        } else {
            Self(format!("{error:#}")).into()
        }
    }
}

impl fmt::Display for BadData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BadData {}

/// Ctrl-C, before there was anything to save.
#[derive(Debug)]
pub(crate) struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

/// The exit code of Ctrl-C, as a shell says it.
const INTERRUPTED: u8 = 130;

/// An error that another rank reports, with its exit code.
#[derive(Debug)]
pub(crate) struct PeerFailure(pub(crate) u8);

impl fmt::Display for PeerFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("another rank failed")
    }
}

impl std::error::Error for PeerFailure {}

/// The exit code of a program that ended so.
pub(crate) fn code(result: &Result<()>, interrupted: bool) -> u8 {
    match result {
        Ok(()) if interrupted => INTERRUPTED,
        Ok(()) => 0,
        Err(error) => code_of(error),
    }
}

/// The exit code of a program that failed so.
pub(crate) fn code_of(error: &Error) -> u8 {
    match error.downcast_ref::<clap::Error>() {
        Some(error) => error.exit_code() as u8, // 0 for --help, 2 otherwise
        None if error.is::<Usage>() => 2,
        None if error.is::<BadData>() => 3,
        None if error.is::<Interrupted>() => INTERRUPTED,
        None => error.downcast_ref::<PeerFailure>().map_or(1, |failure| failure.0),
    }
}

/// What clap finds wrong, what would do, and its tip.
pub(crate) fn one_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let ends = |line: &str| line.starts_with("Usage: ") || line.starts_with("For more information");
    let mut all = String::new();
    for line in lines.take_while(|line| !ends(line)) {
        let starts = ["error: ", "tip: "].iter();
        let said = starts.filter_map(|start| line.strip_prefix(start)).next().unwrap_or(line);
        all += if all.is_empty() || said.starts_with('[') { " " } else { "; " };
        all += said;
    }
    all.trim_start().to_owned()
}

/// Prints what went wrong, if anything did. The exit code.
pub(crate) fn end(result: &Result<()>) -> u8 {
    if let Err(error) = result {
        match error.downcast_ref::<clap::Error>() {
            Some(help) if !help.use_stderr() => drop(help.print()),
            Some(error) => eprintln!("error: {}; for more, try --help", one_line(error)),
            None if error.is::<PeerFailure>() => {}
            None => eprintln!("error: {error:#}"),
        }
    }
    code(result, interrupted())
}

#[cfg(test)]
mod tests {
    use anyhow::{Context, anyhow};
    use clap::{Arg, Command};

    use super::*;

    #[test]
    fn every_end_has_its_code() {
        let of = |error: Error| code(&Err(error), false);
        assert_eq!((code(&Ok(()), false), code(&Ok(()), true)), (0, 130));
        assert_eq!(of(anyhow!("no space left")), 1);
        assert_eq!(of(Usage("no such option".into()).into()), 2);
        assert_eq!(of(BadData::of(anyhow!("truncated").context("data.bin"))), 3);
        assert_eq!(of(PeerFailure(3).into()), 3);
        assert_eq!(of(BadData::of(Error::new(Interrupted).context("--data hub"))), 130);
        let clap = |argument: &str| Command::new("x").try_get_matches_from(["x", argument]);
        let error = |argument: &str| clap(argument).map(drop).context("").err();
        let plain = |argument: &str| clap(argument).err().map(|error| of(error.into()));
        assert_eq!((plain("--bad"), plain("--help")), (Some(2), Some(0)));
        assert_eq!(error("--bad").map(of), Some(2), "in a context, too");
        // A failure outlives Ctrl-C.
        assert_eq!(code(&Err(anyhow!("no space left")), true), 1);
    }

    #[test]
    fn what_clap_finds_wrong_is_one_line() {
        let says = |argument: &str| {
            let dtype = Arg::new("dtype").long("dtype").value_parser(["f32", "bf16"]);
            let error = Command::new("x").arg(dtype).try_get_matches_from(["x", argument]);
            one_line(&error.expect_err("a wrong option"))
        };
        let values = "invalid value 'x' for '--dtype <dtype>' [possible values: f32, bf16]";
        assert_eq!(says("--dtype=x"), values);
        let tip = "unexpected argument '--dtypo' found; a similar argument exists: '--dtype'";
        assert_eq!(says("--dtypo"), tip);
    }

    #[test]
    fn bad_data_are_reported_in_one_line() {
        let error = BadData::of(anyhow!("no such file").context("cannot read test_batch.bin"));
        assert_eq!(error.to_string(), "cannot read test_batch.bin: no such file");
    }
}
