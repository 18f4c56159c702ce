//! Trains a small network in mixed precision. So far: its data, options and report.

#![allow(dead_code)]

use clap::Parser;

mod augment;
mod data;
mod options;
mod progress;
mod report;
mod schedule;
mod synthetic;

fn main() -> anyhow::Result<()> {
    let options = options::Options::parse();
    options.check()?;
    let (train, test) = options.drawn_images();
    let data = match &options.data {
        Some(dir) => data::read_cifar10(dir)?,
        None => synthetic::dataset(train, test, options.seed),
    };
    println!("{}: {} and {} images", data.name, data.train.len(), data.test.len());
    Ok(())
}
