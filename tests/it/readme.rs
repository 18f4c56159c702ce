//! What the README shows is what runs.

use std::fs;

use crate::util::package;

fn read(path: &str) -> String {
    let path = package().join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The lines of a program without the comment on what it is.
fn program<'t>(lines: impl Iterator<Item = &'t str>) -> Vec<&'t str> {
    lines.skip_while(|line| line.starts_with("//!") || line.is_empty()).map(str::trim_end).collect()
}

#[test]
fn the_readme_s_first_program_is_the_quickstart() {
    let (readme, quickstart) = (read("README.md"), read("examples/quickstart.rs"));
    let block = readme.lines().skip_while(|line| !line.starts_with("```rust")).skip(1);
    let shown = program(block.take_while(|line| !line.starts_with("```")));
    let run = program(quickstart.lines());
    assert!(!shown.is_empty(), "README.md has no block that starts with ```rust");
    for (line, (shown, run)) in (1..).zip(shown.iter().zip(&run)) {
        assert_eq!(shown, run, "line {line} of README.md's first program and the quickstart's");
    }
    assert_eq!(shown.len(), run.len(), "lines of README.md's first program and of the quickstart");
}

#[test]
fn the_readme_is_read_in_one_go() {
    assert!(read("README.md").lines().count() <= 200, "README.md has more than 200 lines");
}
