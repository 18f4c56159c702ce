//! Measures the crate on a CUDA device, beside PyTorch and beside what the device's memory can do.
//!
//! ```text
//! cargo run --release --manifest-path benches/Cargo.toml --features cuda --bin gpu -- --python python3
//! cargo run --release --manifest-path benches/Cargo.toml --features cuda --bin gpu -- --filter adamw
//! cargo run --manifest-path benches/Cargo.toml --bin gpu -- --smoke
//! ```

mod algorithms;
mod details;
mod device;
mod host;
mod list;
mod operator_rows;
mod operators;
mod parameters;
mod passes;
mod progress;
mod steps;
mod workload;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail, ensure};
use candle_amp_benches::list::{Group, Peer, Row};
use candle_amp_benches::measure::{self, Settings, Times, Workload};
use candle_amp_benches::table::{Line, Table};
use candle_amp_benches::torch::{self, Torch};
use candle_core::Device;
use clap::{Parser, ValueEnum};

use details::Repeats;
use list::{Card, Part};
use progress::{Progress, Watch};
use workload::{Spec, Work};

/// Measures candle-amp on a GPU.
#[derive(Debug, Parser)]
struct Options {
    /// A Python with PyTorch; without one the crate is measured alone
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// Only rows whose name has this in it
    #[arg(long, value_name = "SUBSTRING", default_value = "")]
    filter: String,
    /// Only these parts, with commas between them
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PART")]
    part: Vec<Part>,
    /// How often the two sides take turns
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Seconds a side and turn, after a warm-up of a fifth of that
    #[arg(long, default_value_t = 0.5)]
    seconds: f64,
    /// The fastest runs instead of the median ones
    #[arg(long)]
    fastest: bool,
    /// Also writes the rows as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Keeps in FILE where the run is. Where it has begun, it goes on after the last group of rows that it came to, which
    /// may have ended it, and adds to the file of --json
    #[arg(long, value_name = "FILE", requires = "json")]
    progress: Option<PathBuf>,
    /// Ends the program, with status 124, when one group of rows takes longer than so many seconds
    #[arg(long, value_name = "SECONDS")]
    group_seconds: Option<u64>,
    /// Lets the driver take back what was freed whenever the host waits, as candle leaves it
    #[arg(long)]
    release_memory: bool,
    /// Lets cuDNN try its algorithms, on both sides; that takes a while
    #[arg(long)]
    cudnn_benchmark: bool,
    /// Runs everything once, tiny, on the CPU where there is no GPU: to see that it works
    #[arg(long)]
    smoke: bool,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The first GPU, or the CPU where that is enough.
fn device(options: &Options) -> Result<Device> {
    if cfg!(feature = "cuda") {
        match Device::new_cuda(0) {
            Err(error) if options.smoke => eprintln!("on the CPU: {error}"),
            device => return Ok(device?),
        }
    } else if !options.smoke {
        bail!(
            "this measures a CUDA device: build it with --features cuda, or try --smoke, which runs \
             everything once and tiny, on the CPU too"
        );
    }
    Ok(Device::Cpu)
}

fn run(options: &Options) -> Result<()> {
    let device = device(options)?;
    println!("{}", device::name(&device)?);
    if !options.release_memory {
        candle_amp::backend::keep_memory(&device)?;
    }
    let mut torch = Vec::new();
    candle_amp::backend::set_cudnn_benchmark(options.cudnn_benchmark);
    if let Some(python) = &options.python {
        let mut command = torch::command(python, "gpu/torch_gpu.py");
        command.args(options.cudnn_benchmark.then_some("--cudnn-benchmark"));
        torch.push(Torch::start(command)?);
        println!("PyTorch {}", torch[0].version());
    }
    let Options { rounds, seconds, fastest, .. } = *options;
    let (rounds, seconds) = if options.smoke { (1, 0.0) } else { (rounds, seconds) };
    let settings = Settings { rounds, seconds, fastest };
    let repeats = if options.smoke { Repeats::ONCE } else { Repeats::FULL };
    let mut progress = Progress::of(options.progress.as_deref())?;
    let mut table = match &options.json {
        Some(file) if progress.has_begun() => Table::go_on(file)?,
        file => Table::new(file.as_deref())?,
    };
    let watch = Watch::new(options.group_seconds, torch.iter().map(Torch::id).collect());
    let parts = if options.part.is_empty() { Part::value_variants() } else { &options.part };
    let mut failed = 0;

    // Measured first, whatever the filter says, and by each process: others are judged by it.
    let mut card = Card { copied: f64::NAN, products: Vec::new() };
    let mut scales = vec![list::copy()];
    scales.extend(parts.contains(&Part::Operators).then(operator_rows::products));
    for mut group in scales {
        if options.smoke {
            group.shrink();
        }
        watch.group();
        let times = match measure::group(&group, &device, settings, &mut torch) {
            Ok(times) => times,
            Err(error) => {
                eprintln!("error: {}: {error:#}", names(&group));
                torch.iter_mut().try_for_each(Torch::forget)?;
                failed += 1;
                continue;
            }
        };
        let is_shown = |row: &&Row<Spec>| {
            let is_copy = matches!(row.ours.work, Work::Copy { .. });
            !progress.has_begun() && (!is_copy || row.name.contains(&options.filter))
        };
        for row in group.rows.iter().filter(is_shown) {
            Line::of(row, &times, &[])?.into_iter().try_for_each(|line| table.print(line))?;
        }
        for (spec, rate) in times.iter().filter_map(|times| Some((times.spec, rate(times)?))) {
            match spec.work {
                Work::Copy { .. } => card.copied = rate,
                _ => card.products.push((spec.precision, rate)),
            }
        }
    }
    // Shrunk, all batches are one.
    let batches = if options.smoke { &list::BATCHES[..1] } else { &list::BATCHES };
    let groups = list::groups(parts, &card, batches);
    for (number, mut group) in groups.into_iter().enumerate().skip(progress.next()) {
        group.retain(&options.filter);
        if options.smoke {
            group.shrink();
        }
        progress.begin(number)?;
        watch.group();
        // A machine with a GPU is rare: what else there is to measure is measured all the same.
        if let Err(error) = measured(&group, &device, settings, repeats, &mut torch, &mut table) {
            eprintln!("error: {}: {error:#}", names(&group));
            failed += 1;
            // After an illegal access nothing more works in this process.
            ensure!(device.synchronize().is_ok(), "the device is of no more use to this process");
            torch.iter_mut().try_for_each(Torch::forget)?;
        }
    }
    progress.end()?;
    table.finish();
    for fallback in candle_amp::backend::fallbacks() {
        println!("fell back: {fallback}");
    }
    ensure!(failed == 0, "{failed} groups of rows could not be measured");
    Ok(())
}

fn names(group: &Group<Spec>) -> String {
    let names: Vec<_> = group.rows.iter().map(|row| row.name.as_str()).collect();
    names.join("; ")
}

/// What the card gets through in a second: it can do what either side did.
fn rate(times: &Times<Spec>) -> Option<f64> {
    let fastest = times.torch.iter().fold(times.ours, |least, torch| least.min(torch.seconds));
    times.spec.amount().map(|(amount, _)| amount / fastest)
}

/// Prints the times of a group's rows, then their details.
fn measured(
    group: &Group<Spec>,
    device: &Device,
    settings: Settings,
    repeats: Repeats,
    torch: &mut [Torch],
    table: &mut Table,
) -> Result<()> {
    let times = measure::group(group, device, settings, torch)?;
    for row in &group.rows {
        Line::of(row, &times, &[])?.into_iter().try_for_each(|line| table.print(line))?;
    }
    for row in group.rows.iter().filter(|row| has_details(row)) {
        let name = row.name.strip_suffix(" / copy").unwrap_or(&row.name);
        for line in details::of(name, &row.ours, repeats, device, torch)? {
            table.print(line)?;
        }
    }
    Ok(())
}

/// Whether a row has details: once for each workload. A graph has them at its row beside the eager step, and a pass at its row
/// beside the copy.
fn has_details(row: &Row<Spec>) -> bool {
    let is_the_one = match row.peer {
        Peer::Torch => !row.ours.is_graphed() && !row.ours.work.is_pass(),
        Peer::Rate(..) => row.ours.work.is_pass(),
        _ => row.ours.is_graphed(),
    };
    is_the_one && row.ours.has_details()
}
