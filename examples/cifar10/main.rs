//! Trains a network in mixed precision: one loop, whatever the network and the precision.
//!
//! ```text
//! cargo run --release --example cifar10                     # drawn shapes, no download
//! cargo run --release --example cifar10 -- --help
//! cargo run --release --example cifar10 -- --list-models
//! cargo run --release --example cifar10 -- --data DIR       # the real CIFAR-10, binary version
//! cargo run --release --example cifar10 -- --compare f32,bf16,f16 --seeds 3
//! cargo run --release --example cifar10 -- --out DIR        # and after Ctrl-C: --resume DIR
//! cargo run --release --example cifar10 -- --smoke --profile
//! cargo run --release --example cifar10 --features cuda -- --gpu --precision f16
//! ```

use std::process::ExitCode;

use anyhow::Result;
use candle_core::Device;

use common::{exit::BadData, interrupted, progress::print};
use compare::Comparison;
use data::Dataset;
use options::Options;
use schedule::Schedule;
use train::{Run, train};

mod augment;
mod choices;
#[path = "../common/mod.rs"]
mod common;
mod compare;
mod config;
mod data;
#[cfg(test)]
mod ends;
mod history;
mod memory;
mod models;
mod options;
mod profile;
mod progress;
mod report;
mod resident;
mod resume;
mod rng;
mod schedule;
mod synthetic;
#[cfg(test)]
mod testing;
mod train;

fn main() -> ExitCode {
    ExitCode::from(common::start(|| config::parse(std::env::args_os()), run))
}

fn run(options: &Options) -> Result<()> {
    if options.list_models {
        print(&models::list()?);
        return Ok(());
    }
    options.check()?;
    let device = common::options::device(options.gpu)?;
    // Before hours of training.
    let profile = options.profile_file().filter(|_| options.out.is_none());
    for (option, path) in [("--report", &options.report), ("--profile", &profile)] {
        path.as_ref().map_or(Ok(()), |path| report::check_writable(option, path))?;
    }
    let data = load(options).map_err(BadData::from)?;
    let schedule = Schedule::new(options, data.train.len())?;
    if let Some(path) = &options.save_config {
        config::save(options, path)?;
    }
    if let Some(dir) = options.out.as_ref().filter(|_| options.resume.is_none()) {
        resume::create(dir, options)?;
    }
    if options.compares() {
        compare(options, &data, schedule, &device)?;
    } else {
        let stop = |_| interrupted();
        let run = Run { options, heading: Some(options), prefix: String::new(), stop };
        let report = train(run, &data, schedule, &device)?;
        print(&progress::closing(&report, &data.classes));
        match &options.report {
            Some(path) if compare::is_markdown(path) => {
                Comparison::of(report.clone()).write(path)?;
            }
            Some(path) => report.write(path)?,
            None => {}
        }
        if report.interrupted {
            print(&resume::advice(options));
            return Ok(());
        }
    }
    print(&progress::hint(options));
    Ok(())
}

/// Trains with each seed in each precision, and prints them side by side: after Ctrl-C or an error,
/// too, those that there are.
fn compare(options: &Options, data: &Dataset, schedule: Schedule, device: &Device) -> Result<()> {
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
        let stop = |_| interrupted();
        let run = Run { options: &one, heading, prefix, stop };
        let mut report = train(run, data, schedule, device)?;
        report.peak_rss_bytes = report.peak_rss_bytes.filter(|&peak| memory::is_of_run(peak, held));
        comparison.add(report);
        // After every run, so that nothing that ends the program loses those before.
        options.report.as_ref().map_or(Ok(()), |path| comparison.write(path))
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
