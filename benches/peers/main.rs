//! Measures the crate beside PyTorch: the same work on both sides, in turns, in one run.
//!
//! ```text
//! cargo run --release --manifest-path benches/Cargo.toml --bin peers -- --python python3
//! cargo run --release --manifest-path benches/Cargo.toml --bin peers -- --filter resnet20
//! cargo run --release --manifest-path benches/Cargo.toml --bin peers -- --python python3 --memory
//! cargo run --release --manifest-path benches/Cargo.toml --bin peers -- --python python3 --check
//! ```

mod backward;
mod check;
mod layers;
mod list;
mod memory;
mod networks;
mod operators;
mod products;
mod scopes;
mod targets;
mod updates;
mod workload;
mod zoo;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::{env, fs};

use anyhow::{Context, Result};
use candle_amp_benches::measure::{self, Settings};
use candle_amp_benches::table::{Line, Table};
use candle_amp_benches::torch::{self, Torch};
use candle_core::Device;
use clap::Parser;

/// What candle and rayon take the number of threads from, when they first ask for it.
const THREADS: &str = "RAYON_NUM_THREADS";

/// What the allocator asks before it gives memory back: -1 is never.
const KEEP: (&str, &str) = ("MIMALLOC_PURGE_DELAY", "-1");

/// Measures candle-amp beside PyTorch.
#[derive(Debug, Parser)]
pub(crate) struct Options {
    /// A Python with PyTorch; without one the crate is measured alone
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// Only rows whose name has this in it
    #[arg(long, value_name = "SUBSTRING", default_value = "")]
    filter: String,
    /// How often the two sides take turns
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Seconds a side and turn, after a warm-up of a fifth of that
    #[arg(long, default_value_t = 0.5)]
    seconds: f64,
    /// The fastest runs instead of the median ones: of use where other programs disturb most
    #[arg(long)]
    fastest: bool,
    /// Also writes the rows as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Threads of either side
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Also measures PyTorch without the settings that make glibc keep memory
    #[arg(long)]
    default_allocator: bool,
    /// This side without `on_workers`: as a program that does not call it
    #[arg(long)]
    without_workers: bool,
    /// Peak memory of training steps, instead of times
    #[arg(long)]
    memory: bool,
    /// Whether both sides of the zoo's rows do the same work, instead of times
    #[arg(long, requires = "python")]
    check: bool,
    /// Runs everything once, tiny, without PyTorch: to see that it works
    #[arg(long)]
    smoke: bool,
    /// One workload, as JSON, whose peak memory to print
    #[arg(long, hide = true)]
    peak_of: Option<String>,
}

/// What PyTorch takes memory from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Allocator {
    /// glibc's, as it is: large buffers go back to the kernel when they are freed.
    Default,
    /// glibc's, told to keep them, as the allocator on this side does.
    Recycling,
}

impl Options {
    fn settings(&self) -> Settings {
        let Self { rounds, seconds, fastest, .. } = *self;
        let (rounds, seconds) = if self.smoke { (1, 0.0) } else { (rounds, seconds) };
        Settings { rounds, seconds, fastest }
    }

    /// What starts PyTorch.
    pub(crate) fn torch(&self, python: &Path, allocator: Allocator) -> Command {
        let threads = self.threads.to_string();
        let mut command = torch::command(python, "peers/peers.py");
        command.arg(&threads).env("OMP_NUM_THREADS", &threads).env("MKL_NUM_THREADS", &threads);
        if allocator == Allocator::Recycling {
            command.env("MALLOC_MMAP_THRESHOLD_", "4294967296");
            command.env("MALLOC_TRIM_THRESHOLD_", "8589934592");
        }
        command
    }
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<ExitCode> {
    let threads = options.threads.to_string();
    let has = |name, value: &str| env::var(name).as_deref() == Ok(value);
    if !has(THREADS, &threads) || !has(KEEP.0, KEEP.1) {
        // The pools are as large as the environment said when the process began.
        let program = env::current_exe().context("finding the program")?;
        let mut again = Command::new(program);
        let status = again
            .args(env::args_os().skip(1))
            .env(THREADS, threads)
            .env(KEEP.0, KEEP.1)
            .status()?;
        return Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    if let Some(spec) = &options.peak_of {
        println!("{}", memory::of_this_process(&serde_json::from_str(spec)?)?);
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(python) = options.python.as_ref().filter(|_| options.check) {
        check::compare(options, python)?;
        return Ok(ExitCode::SUCCESS);
    }
    if options.smoke {
        check::parameters(options)?;
    }
    let mut table = Table::new(options.json.as_deref())?;
    if !options.memory {
        compare(options, &mut table)?;
    }
    if options.memory || options.smoke && cfg!(target_os = "linux") {
        memory::compare(options, &mut table)?;
    }
    table.finish();
    Ok(ExitCode::SUCCESS)
}

/// Other programs slow both sides down, but not alike: PyTorch's threads wait for one another.
fn warn_of_load() {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split(' ').next().and_then(|minute| minute.parse::<f64>().ok());
    if let Some(load) = load.filter(|load| *load > 0.5) {
        eprintln!("warning: the load is {load} before anything is measured; ratios may be far off");
    }
}

/// Times every group of rows, and prints it as soon as it is done.
fn compare(options: &Options, table: &mut Table) -> Result<()> {
    let mut peers = Vec::new();
    if let Some(python) = options.python.as_ref().filter(|_| !options.smoke) {
        peers.push(Torch::start(options.torch(python, Allocator::Recycling))?);
        if options.default_allocator {
            peers.push(Torch::start(options.torch(python, Allocator::Default))?);
        }
        println!("PyTorch {}", peers[0].version());
        warn_of_load();
    }
    for mut group in list::groups() {
        group.retain(&options.filter);
        if options.smoke {
            // One family stands for all, which are too large for tiny runs: the example's own tests run them.
            let runs = |name: &str| !name.starts_with("family") || name.contains("shufflenet-g2");
            group.rows.retain(|row| runs(&row.name));
            group.shrink();
        }
        let mut measure = || measure::group(&group, &Device::Cpu, options.settings(), &mut peers);
        let times = match options.without_workers {
            true => measure()?,
            false => candle_amp::backend::on_workers(measure)?,
        };
        for row in &group.rows {
            for line in Line::of(row, &times, &["", ", its default allocator"])? {
                table.print(line)?;
            }
        }
    }
    Ok(())
}
