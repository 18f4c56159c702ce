//! Trains a small GPT in mixed precision: one loop, whatever the precision.
//!
//! ```text
//! cargo run --release --example gpt                  # on Shakespeare, no download
//! cargo run --release --example gpt -- --help
//! cargo run --release --example gpt -- --text FILE
//! cargo run --release --example gpt -- --report      # f32, bf16 and f16, compared
//! mpirun -n 2 cargo run --release --features mpi --example gpt   # two ranks, one model
//! ```

use std::{ffi::OsString, process::ExitCode};

use anyhow::{Error, Result};
use candle_core::Device;
use clap::Parser;

use common::{exit::BadData, interrupted, progress::print, ranks};
use data::Corpus;
use options::Options;
use report::Report;

#[path = "../common/mod.rs"]
mod common;
mod data;
mod model;
#[cfg(all(test, feature = "mpi"))]
mod mpirun;
mod options;
mod progress;
mod report;
mod schedule;
mod train;

fn main() -> ExitCode {
    ExitCode::from(common::start(|| options(std::env::args_os().collect()), run))
}

/// What a command line asks for, the program's name first.
fn options(line: Vec<OsString>) -> Result<Options> {
    let options = ranks::agree(Options::try_parse_from(line).map_err(Error::from))?;
    ranks::same(&options.facts()?)?;
    Ok(options)
}

fn run(options: &Options) -> Result<()> {
    let (device, corpus) = ranks::agree(prepare(options))?;
    ranks::same(&[("text".to_owned(), corpus.fingerprint())].into())?;
    if options.report { compare(options, &corpus, &device) } else { one(options, &corpus, &device) }
}

/// Where to train, and on what.
fn prepare(options: &Options) -> Result<(Device, Corpus)> {
    options.check()?;
    common::options::check_ranks(
        ranks::count(),
        options.batch_size(),
        options.gpu,
        options.sharded,
    )?;
    Ok((common::options::device(options.gpu)?, load(options)?))
}

/// Trains in one precision, and writes a sample.
fn one(options: &Options, corpus: &Corpus, device: &Device) -> Result<()> {
    let trained = train::train(options, corpus, options.precision, device)?;
    print(&progress::closing(&trained.outcome));
    if !ranks::is_first() {
        return Ok(());
    }
    let sample = train::sample(options, corpus, &trained, device)?;
    if !sample.is_empty() {
        print(&format!("\nIt writes:\n\n{}\n", corpus.show(&sample)));
    }
    print(&progress::hint(options));
    Ok(())
}

/// Trains in every precision, from the same weights on the same windows.
fn compare(options: &Options, corpus: &Corpus, device: &Device) -> Result<()> {
    let mut report = Report::default();
    for precision in options.precisions() {
        let trained = train::train(options, corpus, precision, device)?;
        print("\n");
        report.add(trained.outcome);
        if ranks::any(interrupted())? {
            break;
        }
    }
    print(&report.table());
    ranks::agree(report.judge())
}

fn load(options: &Options) -> Result<Corpus> {
    let context = options.size().context;
    match &options.text {
        Some(path) => Ok(Corpus::read(path, context).map_err(BadData::of)?),
        None => Corpus::shakespeare(context),
    }
}

#[cfg(test)]
mod tests;
