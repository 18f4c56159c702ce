//! Trains a small GPT in mixed precision: one loop, whatever the precision.
//!
//! ```text
//! cargo run --release --example gpt                  # on Shakespeare, no download
//! cargo run --release --example gpt -- --help
//! cargo run --release --example gpt -- --text FILE
//! cargo run --release --example gpt -- --report      # f32, bf16 and f16, compared
//! ```

use std::process::ExitCode;

use anyhow::Result;
use candle_core::Device;
use clap::Parser;

use common::{exit::BadData, interrupted, progress::print};
use data::Corpus;
use options::Options;
use report::Report;

#[path = "../common/mod.rs"]
mod common;
mod data;
mod model;
mod options;
mod progress;
mod report;
mod schedule;
mod train;

fn main() -> ExitCode {
    ExitCode::from(common::start(|| Ok(Options::try_parse()?), run))
}

fn run(options: &Options) -> Result<()> {
    options.check()?;
    let device = common::options::device(options.gpu)?;
    let corpus = load(options)?;
    if options.report { compare(options, &corpus, &device) } else { one(options, &corpus, &device) }
}

/// Trains in one precision, and writes a sample.
fn one(options: &Options, corpus: &Corpus, device: &Device) -> Result<()> {
    let trained = train::train(options, corpus, options.precision, device)?;
    print(&progress::closing(&trained.outcome));
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
        if interrupted() {
            break;
        }
    }
    print(&report.table());
    report.judge()
}

fn load(options: &Options) -> Result<Corpus> {
    let context = options.size().context;
    match &options.text {
        Some(path) => Ok(Corpus::read(path, context).map_err(BadData::from)?),
        None => Corpus::shakespeare(context),
    }
}

#[cfg(test)]
mod tests;
