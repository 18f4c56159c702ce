//! Trains a small GPT in mixed precision: one loop, whatever the precision.
//!
//! ```text
//! cargo run --release --example gpt                  # on Shakespeare, no download
//! cargo run --release --example gpt -- --help
//! cargo run --release --example gpt -- --text FILE
//! cargo run --release --example gpt -- --report      # f32, bf16 and f16, compared
//! ```

use std::{
    process::{ExitCode, exit},
    sync::atomic::{AtomicBool, Ordering},
};

use anyhow::{Context, Result};
use candle_amp::backend::on_workers;
use candle_core::Device;
use clap::Parser;

use data::Corpus;
use options::{Options, Usage};
use report::Report;

mod data;
mod history;
mod model;
mod options;
mod progress;
mod report;
mod train;

/// Keeps the memory of a step for the next one: the system's own allocator hands large buffers
/// back, and having them zeroed again costs more than much of the arithmetic in them.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// True once Ctrl-C was pressed.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

fn main() -> ExitCode {
    match finish_on_ctrl_c().and_then(|()| on_workers(|| run(&Options::parse()))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(if error.is::<Usage>() { 2 } else { 1 })
        }
    }
}

fn run(options: &Options) -> Result<()> {
    options.check()?;
    let device = options.device()?;
    let corpus = load(options)?;
    if options.report { compare(options, &corpus, &device) } else { one(options, &corpus, &device) }
}

/// Trains in one precision, and writes a sample.
fn one(options: &Options, corpus: &Corpus, device: &Device) -> Result<()> {
    let trained = train::train(options, corpus, options.precision, device)?;
    progress::print(&progress::closing(&trained.outcome));
    let sample = train::sample(options, corpus, &trained, device)?;
    if !sample.is_empty() {
        progress::print(&format!("\nIt writes:\n\n{}\n", corpus.show(&sample)));
    }
    progress::print(&progress::hint(options));
    Ok(())
}

/// Trains in every precision, from the same weights on the same windows.
fn compare(options: &Options, corpus: &Corpus, device: &Device) -> Result<()> {
    let mut report = Report::default();
    for precision in options.precisions() {
        let trained = train::train(options, corpus, precision, device)?;
        progress::print("\n");
        report.add(trained.outcome);
        if interrupted() {
            break;
        }
    }
    progress::print(&report.table());
    report.judge()
}

fn load(options: &Options) -> Result<Corpus> {
    let context = options.size().context;
    match &options.text {
        Some(path) => Corpus::read(path, context),
        None => Corpus::shakespeare(context),
    }
}

fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Makes the first Ctrl-C end the training after its step, and the second one the program.
fn finish_on_ctrl_c() -> Result<()> {
    ctrlc::set_handler(|| {
        if INTERRUPTED.swap(true, Ordering::Relaxed) {
            exit(130);
        }
        progress::print("\nEnding after this step and a test; Ctrl-C again ends at once.\n");
    })
    .context("cannot handle Ctrl-C")
}

#[cfg(test)]
mod tests;
