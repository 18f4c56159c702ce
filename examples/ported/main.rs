//! Eight PyTorch programs, written again with this crate, a page each. The folder `pytorch` has the originals.
//!
//! ```text
//! cargo run --release --example ported                                 # all of them, in f32
//! cargo run --release --example ported -- unet lstm --precision bf16
//! ```
//!
//! Both sides start from the same values and see the same data. `losses.json` has the losses of ten steps of the
//! originals in F32, written by `python3 pytorch/losses.py`. This program compares its own with them.

mod dcgan;
mod densenet;
mod fine_tune;
mod lstm;
mod mobilenet;
mod nanogpt;
mod run;
mod unet;
mod vit;

use std::collections::BTreeMap;

use candle_core::{DType, Result};
use clap::{Parser, value_parser};

use run::Run;

type Train = fn(&mut Run) -> Result<()>;

const PROGRAMS: [(&str, Train); 8] = [
    ("mobilenet", mobilenet::train),
    ("densenet", densenet::train),
    ("unet", unet::train),
    ("vit", vit::train),
    ("nanogpt", nanogpt::train),
    ("dcgan", dcgan::train),
    ("lstm", lstm::train),
    ("fine_tune", fine_tune::train),
];

/// How far a loss may be from the original's in F32, as a share of it. Both sides round to F32 (6e-8), in orders of their
/// own, and every step multiplies the distance. PyTorch's losses in F32 are as far from its own in F64.
const TOLERANCE: f32 = 2e-3;

/// As [`TOLERANCE`], in 16 bits.
const TOLERANCE_16_BIT: f32 = 5e-2;

/// Eight PyTorch programs, written with candle-amp
#[derive(Debug, Parser)]
struct Options {
    /// Programs to run [default: all of them]
    #[arg(value_parser = PROGRAMS.map(|(name, _)| name))]
    programs: Vec<String>,
    /// What autocast computes in: f32, f16 or bf16
    #[arg(long, value_name = "DTYPE", value_parser = precision, default_value = "f32")]
    precision: DType,
    /// Training steps; of the first ten, the losses are compared with PyTorch's
    #[arg(long, value_name = "N", value_parser = value_parser!(u16).range(1..), default_value = "10")]
    steps: u16,
    /// Three steps of all programs, in f32 and in bf16
    #[arg(long)]
    smoke: bool,
}

fn precision(text: &str) -> std::result::Result<DType, String> {
    match text {
        "f32" => Ok(DType::F32),
        "f16" => Ok(DType::F16),
        "bf16" => Ok(DType::BF16),
        _ => Err("expected f32, f16 or bf16".to_owned()),
    }
}

/// The losses of a program, beside those of its original.
struct Comparison {
    losses: Vec<f32>,
    /// As many steps as are known.
    original: Vec<f32>,
}

impl Comparison {
    fn run(name: &str, train: Train, dtype: DType, steps: usize) -> anyhow::Result<Self> {
        let mut originals: BTreeMap<String, Vec<f32>> =
            serde_json::from_str(include_str!("losses.json"))?;
        let mut run = Run::new(dtype, steps);
        train(&mut run)?;
        Ok(Self { losses: run.losses, original: originals.remove(name).unwrap_or_default() })
    }

    /// The largest difference, as a share of the original's loss; NaN counts as infinite.
    fn difference(&self) -> f32 {
        let of_step = |(loss, original): (&f32, &f32)| (loss - original).abs() / original.abs();
        let steps = self.losses.iter().zip(&self.original).map(of_step);
        steps.fold(0.0, |a, b| if b.is_nan() { f32::INFINITY } else { a.max(b) })
    }

    fn row(&self, name: &str, dtype: DType) -> String {
        let show = |loss: Option<&f32>| loss.map_or("-".to_owned(), |loss| format!("{loss:.4}"));
        let of = |losses: &[f32]| [losses.first(), losses.get(self.losses.len() - 1)].map(show);
        let ([first, last], [theirs, theirs_last]) = (of(&self.losses), of(&self.original));
        row([
            name,
            dtype.as_str(),
            &first,
            &last,
            &theirs,
            &theirs_last,
            &format!("{:.1e}", self.difference()),
        ])
    }
}

fn row([name, dtype, first, last, theirs, theirs_last, difference]: [&str; 7]) -> String {
    format!("{name:<10} {dtype:<5}{first:>9}{last:>9}{theirs:>11}{theirs_last:>9}{difference:>12}")
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let (dtypes, steps) = match options.smoke {
        true => (vec![DType::F32, DType::BF16], 3),
        false => (vec![options.precision], options.steps.into()),
    };
    println!("{}{:>18}{:>20}", " ".repeat(16), format!("loss, {steps} steps"), "of PyTorch in f32");
    println!("{}", row(["program", "dtype", "first", "last", "first", "last", "difference"]));
    let asked =
        |name: &str| options.programs.is_empty() || options.programs.iter().any(|p| p == name);
    for (name, train) in PROGRAMS.into_iter().filter(|(name, _)| asked(name)) {
        for &dtype in &dtypes {
            let comparison = Comparison::run(name, train, dtype, steps)?;
            println!("{}", comparison.row(name, dtype));
            let tolerance = if dtype == DType::F32 { TOLERANCE } else { TOLERANCE_16_BIT };
            anyhow::ensure!(
                comparison.difference() <= tolerance,
                "{name} is further than {tolerance:e} from PyTorch's losses {:?}",
                comparison.original
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
