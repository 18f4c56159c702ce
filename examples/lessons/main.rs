//! Nine lessons, in order: each a file that can be copied into a `main.rs`.
//!
//! ```text
//! cargo run --example lessons          # what there is
//! cargo run --example lessons -- 3     # the third
//! ```

use candle_amp::random;
use clap::{Parser, value_parser};

#[path = "04_accumulation.rs"]
mod accumulation;
#[path = "01_autocast.rs"]
mod autocast;
#[path = "06_candle_model.rs"]
mod candle_model;
#[path = "08_checkpoint.rs"]
mod checkpoint;
#[path = "05_gan.rs"]
mod gan;
#[path = "03_masters.rs"]
mod masters;
#[path = "07_operator.rs"]
mod operator;
#[path = "09_overflow.rs"]
mod overflow;
#[path = "02_scaler.rs"]
mod scaler;

type Main = fn() -> candle_amp::Result<()>;

/// Each lesson, and its text.
const LESSONS: [(Main, &str); 9] = [
    (autocast::main, include_str!("01_autocast.rs")),
    (scaler::main, include_str!("02_scaler.rs")),
    (masters::main, include_str!("03_masters.rs")),
    (accumulation::main, include_str!("04_accumulation.rs")),
    (gan::main, include_str!("05_gan.rs")),
    (candle_model::main, include_str!("06_candle_model.rs")),
    (operator::main, include_str!("07_operator.rs")),
    (checkpoint::main, include_str!("08_checkpoint.rs")),
    (overflow::main, include_str!("09_overflow.rs")),
];

/// Nine lessons in mixed precision
#[derive(Debug, Parser)]
struct Options {
    /// The lesson to run, 1 to 9; without it, they are listed
    #[arg(value_parser = value_parser!(u8).range(1..=9))]
    lesson: Option<u8>,
    /// Run all lessons
    #[arg(long)]
    smoke: bool,
}

/// The first line of a lesson says what it teaches.
fn title(text: &str) -> &str {
    text.lines().next().unwrap_or_default().trim_start_matches("//! ")
}

fn main() -> candle_amp::Result<()> {
    let options = Options::parse();
    for (number, (lesson, text)) in (1..).zip(LESSONS) {
        let run = options.smoke || options.lesson == Some(number);
        if run || options.lesson.is_none() {
            println!("{}", title(text));
        }
        if run {
            println!();
            random::manual_seed(0); // alone or after others, a lesson draws the same numbers
            lesson()?;
            println!();
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lessons_run() -> candle_amp::Result<()> {
        LESSONS.iter().try_for_each(|(lesson, _)| {
            random::manual_seed(0);
            lesson()
        })
    }

    #[test]
    fn lessons_are_numbered_and_have_fewer_than_40_lines() {
        for (number, (_, text)) in (1..).zip(LESSONS) {
            assert!(title(text).starts_with(&format!("Lesson {number}, ")), "{}", title(text));
            assert!(text.lines().count() < 40, "lesson {number}: {} lines", text.lines().count());
        }
    }
}
