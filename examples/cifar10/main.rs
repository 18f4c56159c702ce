//! Trains a network in mixed precision: one loop, whatever the network and the precision.
//!
//! ```text
//! cargo run --release --example cifar10                     # synthetic images, in F32 and BF16
//! cargo run --release --example cifar10 -- --help
//! cargo run --release --example cifar10 -- --list-models
//! cargo run --release --example cifar10 -- --data DIR       # the real CIFAR-10, binary version
//! cargo run --release --example cifar10 -- --compare f32,bf16,f16 --seeds 3 --out runs/three
//! cargo run --release --example cifar10 -- --resume runs/three   # after Ctrl-C
//! cargo run --release --example cifar10 -- --data DIR --config examples/cifar10/recipes/airbench.toml
//! cargo run --release --example cifar10 -- --smoke --profile
//! cargo run --release --example cifar10 --features cuda -- --gpu --precision f16
//! mpirun -n 2 cargo run --release --features mpi --example cifar10 -- --epochs 4   # two ranks, one model
//! ```

use std::{ffi::OsString, process::ExitCode};

use anyhow::{Result, ensure};
use candle_core::Device;

use common::{
    exit::BadData,
    interrupted,
    options::Usage,
    progress::{counted, print},
};
use data::Dataset;
use options::Options;
use out::Folder;
use runs::All;
use schedule::Schedule;

mod augment;
mod choices;
#[path = "../common/mod.rs"]
mod common;
mod compare;
mod config;
mod data;
mod demo;
#[cfg(test)]
mod ends;
mod evaluation;
mod feed;
mod history;
#[cfg(feature = "hub")]
mod hub;
mod memory;
mod models;
#[cfg(all(test, feature = "mpi"))]
mod mpirun;
mod options;
mod out;
mod profile;
mod progress;
mod ranks;
mod recipe;
mod report;
mod resident;
mod resume;
mod rng;
mod runs;
mod schedule;
mod synthetic;
mod tester;
#[cfg(test)]
mod testing;
mod train;

fn main() -> ExitCode {
    ExitCode::from(common::start(|| options(std::env::args_os().collect()), run))
}

/// What a command line asks for, the program's name first.
fn options(line: Vec<OsString>) -> Result<Options> {
    let chooses_nothing = demo::chooses_nothing(line.get(1..).unwrap_or_default());
    let options = ranks::agree(config::parse(line))?;
    ranks::same(&config::facts(&options)?)?;
    if chooses_nothing { demo::options(&options) } else { Ok(options) }
}

fn run(options: &Options) -> Result<()> {
    run_until(options, |_| interrupted())
}

/// Trains until `stop` says, after so many steps of a run, to end there.
fn run_until(options: &Options, stop: fn(usize) -> bool) -> Result<()> {
    if options.list_models {
        print(&models::list()?);
        return Ok(());
    }
    let (device, data, schedule) = ranks::agree(prepare(options))?;
    if ranks::count() > 1 {
        let origin = resume::origin(options, &data);
        ranks::same(&origin.map(|(name, value)| (name.to_owned(), value)).into())?;
    }
    let folder = Folder::of(options)?;
    let file = options.save_config.as_ref();
    ranks::on_first(|| file.map_or(Ok(()), |path| config::save(options, path)))?;
    let (data, device, folder) = (&data, &device, folder.as_ref());
    let all = All { options, data, schedule, device, folder, stop };
    let is_complete = if options.compares() { all.compare()? } else { all.alone()? };
    if is_complete {
        print(&progress::hint(options));
    }
    if let Some(folder) = folder {
        print(&progress::page(&folder.page()));
    }
    if !is_complete {
        print(&resume::advice(options));
    }
    Ok(())
}

/// Where to train, on what, and for how long: all that can fail before hours of training.
fn prepare(options: &Options) -> Result<(Device, Dataset, Schedule)> {
    options.check()?;
    // One rank may go on with what several began.
    let shares = options.sharded && options.resume.is_none();
    common::options::check_ranks(ranks::count(), options.batch_size(), options.gpu, shares)?;
    let device = common::options::device(options.gpu)?;
    let profile = options.profile.clone().flatten();
    for (option, path) in [
        ("--report", &options.report),
        ("--profile", &profile),
        ("--save-config", &options.save_config),
    ] {
        let path = path.as_ref().filter(|_| ranks::is_first());
        // The folder of --out will be there.
        let path = path.filter(|path| options.out.as_deref() != path.parent());
        path.map_or(Ok(()), |path| report::check_writable(option, path))?;
    }
    let data = load(options).map_err(BadData::of)?;
    let schedule = Schedule::new(options, data.train.len())?;
    Ok((device, data, schedule))
}

/// The images to train on and to test with.
fn load(options: &Options) -> Result<Dataset> {
    let Some(dir) = &options.data else {
        let (train, test) = options.synthetic_images();
        return Ok(synthetic::dataset(train, test, options.seed));
    };
    #[cfg(feature = "hub")]
    let dir = &if options.downloads() { ranks::first_on_first(hub::folder)? } else { dir.clone() };
    let (train, test) = options.images();
    let mut data = data::read_cifar10(dir, train.is_some())?;
    if let Some(asked) = options.train_images {
        let (dir, found) = (dir.display(), counted(data.train.len(), "training image"));
        ensure!(
            asked <= data.train.len(),
            Usage(format!("--train-images is {asked}, but {dir} has {found}"))
        );
    }
    data.train.truncate(train.unwrap_or(usize::MAX));
    data.test.truncate(test.unwrap_or(usize::MAX));
    Ok(data)
}

#[cfg(test)]
mod tests;
