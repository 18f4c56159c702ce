//! Trains a network in mixed precision: one loop, whatever the network and the precision.
//!
//! ```text
//! cargo run --release --example cifar10                     # drawn shapes, in F32 and BF16
//! cargo run --release --example cifar10 -- --help
//! cargo run --release --example cifar10 -- --list-models
//! cargo run --release --example cifar10 -- --data DIR       # the real CIFAR-10, binary version
//! cargo run --release --example cifar10 -- --compare f32,bf16,f16 --seeds 3 --out runs/three
//! cargo run --release --example cifar10 --features cuda -- --gpu --precision f16
//! ```

use std::process::ExitCode;

use anyhow::Result;
use candle_core::Device;

use common::{interrupted, progress::print};
use compare::Comparison;
use data::Dataset;
use options::Options;
use out::Folder;
use schedule::Schedule;
use train::{Run, train};

mod augment;
mod choices;
#[path = "../common/mod.rs"]
mod common;
mod compare;
mod data;
mod demo;
mod evaluation;
mod history;
mod memory;
mod models;
mod options;
mod out;
mod progress;
mod report;
mod resident;
mod rng;
mod schedule;
mod synthetic;
mod train;

fn main() -> ExitCode {
    common::start(|options| {
        if demo::chooses_nothing(std::env::args_os().skip(1)) {
            run(&demo::options(options)?)
        } else {
            run(options)
        }
    })
}

fn run(options: &Options) -> Result<()> {
    if options.list_models {
        print(&models::list()?);
        return Ok(());
    }
    options.check()?;
    let device = common::options::device(options.gpu)?;
    if let Some(path) = &options.report {
        report::check_writable(path)?;
    }
    let data = load(options)?;
    let schedule = Schedule::new(options, data.train.len())?;
    let folder = options.out.as_deref().map(|path| Folder::create(path, options)).transpose()?;
    if options.compares() {
        compare(options, &data, schedule, &device, folder.as_ref())?;
    } else {
        let heading = Some(options);
        let own = folder.as_ref().map(|folder| folder.run(options)).transpose()?;
        let run = Run { options, heading, prefix: String::new(), folder: own };
        let report = train(run, &data, schedule, &device)?;
        print(&progress::closing(&report, &data.classes));
        match &options.report {
            Some(path) if compare::is_markdown(path) => {
                Comparison::of(report.clone()).write(path)?
            }
            Some(path) => report.write(path)?,
            None => {}
        }
        folder.as_ref().map_or(Ok(()), |folder| folder.finish(&Comparison::of(report)))?;
    }
    print(&progress::hint(options));
    if let Some(folder) = &folder {
        print(&progress::page(&folder.page()));
    }
    Ok(())
}

/// Trains with each seed in each precision, and prints them side by side: after Ctrl-C or an error,
/// too, those that there are.
fn compare(
    options: &Options,
    data: &Dataset,
    schedule: Schedule,
    device: &Device,
    folder: Option<&Folder>,
) -> Result<()> {
    let count = options.run_count();
    let mut comparison = Comparison::new(count);
    let outcome = options.runs().enumerate().try_for_each(|(index, one)| {
        if interrupted() {
            return Ok(());
        }
        let heading = (index == 0).then_some(options);
        let (precision, seed, number) = (one.precision, one.seed, index + 1);
        let prefix = format!("{precision}, seed {seed} ({number} of {count})  ");
        if index > 0 {
            memory::return_free_memory();
        }
        let held = memory::reset_peak_rss();
        let own = folder.map(|folder| folder.run(&one)).transpose()?;
        let run = Run { options: &one, heading, prefix, folder: own };
        let mut report = train(run, data, schedule, device)?;
        report.peak_rss_bytes = report.peak_rss_bytes.filter(|&peak| memory::is_of_run(peak, held));
        comparison.add(report);
        // After every run, so that nothing that ends the program loses those before.
        options.report.as_ref().map_or(Ok(()), |path| comparison.write(path))?;
        folder.map_or(Ok(()), |folder| folder.finish(&comparison))
    });
    print(&format!("\n{}", comparison.text()));
    outcome
}

/// The images to train on and to test with.
fn load(options: &Options) -> Result<Dataset> {
    let Some(dir) = &options.data else {
        let (train, test) = options.drawn_images();
        return Ok(synthetic::dataset(train, test, options.seed));
    };
    let mut data = data::read_cifar10(dir)?;
    let (train, test) = options.images();
    data.train.truncate(train.unwrap_or(usize::MAX));
    data.test.truncate(test.unwrap_or(usize::MAX));
    Ok(data)
}

#[cfg(test)]
mod tests;
