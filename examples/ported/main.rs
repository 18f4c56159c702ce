//! Eight PyTorch programs, written with this crate, a page each. `pytorch` has the originals.
//!
//! Both sides start from the same values and see the same data. `losses.json` has the losses of ten steps of the
//! originals in F32 (`python3 pytorch/losses.py`); this program compares.

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

use candle_core::Result;
use candle_core::{DType, Device};
use clap::{Parser, ValueEnum};

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

/// Steps of the originals whose losses are kept.
const STEPS: usize = 10;

/// How far a loss may be from the original's, as a share of it. Both round in F32 (6e-8) in orders of their own, and each
/// step of training multiplies the distance.
const TOLERANCE: f32 = 2e-3;

/// Eight PyTorch programs, written with candle-amp.
#[derive(Debug, Parser)]
struct Options {
    /// Programs to run; all of them if none is named
    #[arg(value_parser = PROGRAMS.map(|(name, _)| name))]
    programs: Vec<String>,
    /// What autocast computes in
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    precision: Precision,
    /// Training steps; of ten in f32, the losses are compared with PyTorch's
    #[arg(long, default_value_t = STEPS)]
    steps: usize,
    /// Run all programs in every precision, as the tests of this repository do
    #[arg(long)]
    smoke: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Precision {
    F32,
    Bf16,
    F16,
}

impl Precision {
    fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
            Self::F16 => DType::F16,
        }
    }
}

/// The losses of the originals.
fn originals() -> anyhow::Result<BTreeMap<String, Vec<f32>>> {
    Ok(serde_json::from_str(include_str!("losses.json"))?)
}

fn run(name: &str, train: Train, precision: Precision, steps: usize) -> anyhow::Result<Vec<f32>> {
    let mut run = Run::new(precision.dtype(), steps, Device::Cpu);
    train(&mut run)?;
    let losses: Vec<_> = run.losses.iter().map(|loss| format!("{loss:.4}")).collect();
    println!("{name:<10} {:<5} {}", format!("{precision:?}").to_lowercase(), losses.join(" "));
    Ok(run.losses)
}

/// The losses are finite, and in F32 those of the original.
fn compare(name: &str, losses: &[f32], original: Option<&[f32]>) -> anyhow::Result<()> {
    anyhow::ensure!(losses.iter().all(|loss| loss.is_finite()), "{name}: a loss is not finite");
    let Some(original) = original else { return Ok(()) };
    anyhow::ensure!(losses.len() == original.len(), "{name}: {} losses", losses.len());
    let distance = |(a, b): (&f32, &f32)| (a - b).abs() / b.abs();
    let furthest = losses.iter().zip(original).map(distance).fold(0.0, f32::max);
    println!("{:>16} {furthest:.1e} from PyTorch's", "");
    anyhow::ensure!(furthest <= TOLERANCE, "{name}: further than {TOLERANCE:e} from PyTorch's");
    Ok(())
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let originals = originals()?;
    let precisions = match options.smoke {
        true => Precision::value_variants(),
        false => &[options.precision],
    };
    for (name, train) in PROGRAMS {
        let asked = options.programs.is_empty() || options.programs.iter().any(|of| of == name);
        for &precision in precisions.iter().filter(|_| asked) {
            let losses = run(name, train, precision, options.steps)?;
            let comparable = precision == Precision::F32 && options.steps == STEPS;
            let original = originals.get(name).filter(|_| comparable);
            compare(name, &losses, original.map(Vec::as_slice))?;
        }
    }
    Ok(())
}
