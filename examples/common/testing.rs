//! What the tests of the examples share.

use clap::Parser;

/// What `PROGRAM ARGUMENTS` parses to.
pub(crate) fn parse<O: Parser>(arguments: &str) -> Result<O, clap::Error> {
    O::try_parse_from(std::iter::once("program").chain(arguments.split_whitespace()))
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
