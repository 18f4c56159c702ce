//! Measures the crate on a CUDA device, beside PyTorch and beside what the device's memory can do.
//!
//! ```text
//! cargo run --release --manifest-path benches/Cargo.toml --features cuda --bin gpu -- --python python3
//! cargo run --release --manifest-path benches/Cargo.toml --features cuda --bin gpu -- --filter adamw
//! cargo run --manifest-path benches/Cargo.toml --bin gpu -- --smoke
//! ```

mod algorithms;
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
use candle_amp_benches::table::{Line, Table, Unit};
use candle_amp_benches::torch::{self, Request, Torch};
use candle_core::Device;
use clap::{Parser, ValueEnum};

use algorithms::Chosen;
use host::HostPart;
use list::{Card, Part};
use operators::Pass;
use progress::{Progress, Watch};
use steps::TrainingStep;
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
        if let Err(error) = measured(&group, &device, settings, &mut torch, &mut table) {
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

/// Prints the times of a group's rows, then the details of its training steps.
fn measured(
    group: &Group<Spec>,
    device: &Device,
    settings: Settings,
    torch: &mut [Torch],
    table: &mut Table,
) -> Result<()> {
    let times = measure::group(group, device, settings, torch)?;
    for row in &group.rows {
        Line::of(row, &times, &[])?.into_iter().try_for_each(|line| table.print(line))?;
    }
    // A graph's are those of its row beside the step as always.
    let has_details = |row: &&Row<Spec>| match row.peer {
        Peer::Torch => !row.ours.is_graphed(),
        _ => row.ours.is_graphed(),
    };
    for row in group.rows.iter().filter(has_details).filter(|row| row.ours.has_details()) {
        for line in details(&row.name, &row.ours, device, torch)? {
            table.print(line)?;
        }
    }
    Ok(())
}

/// After that many steps nothing new is taken.
const STEPS: usize = 3;

/// Of so many steps the host's part is the median.
const HOST_STEPS: usize = 20;

/// The algorithms that a step runs by, and the share of its convolutions, forward and backward, that ran by a slower one
/// than was meant for them; `None` without any.
fn chosen(step: &mut TrainingStep, device: &Device) -> Result<(Chosen, Option<f64>)> {
    let is_convolution = |pass: &str| pass.starts_with("conv");
    let fallen = || -> u64 {
        let all = candle_amp::backend::fallbacks();
        all.iter().filter(|f| is_convolution(f.pass)).map(|f| f.count).sum()
    };
    let before = fallen();
    // In a profile, a step that is a graph runs operator by operator.
    let (done, chosen) = algorithms::chosen(|| candle_amp::diagnostics::profile(device, step));
    done?.0?;
    let convolutions = chosen.iter().filter(|([pass, _], _)| is_convolution(pass));
    let all: u64 = convolutions.map(|(_, count)| count).sum();
    let share = (all > 0).then(|| (fallen() - before) as f64 / all as f64);
    Ok((chosen, share))
}

/// Of a training step on a GPU: its peak memory and the host's part beside PyTorch's, how often the crate waits for the
/// device in it, which algorithms it runs by, and the share of its convolutions that fell back. Of an operator the host's
/// part, those of its own passes, and the last two.
fn details(name: &str, spec: &Spec, device: &Device, torch: &mut [Torch]) -> Result<Vec<Line>> {
    let counted = device::peak_from_here(device)?;
    let Some(mut step) = spec.step(device)?.filter(|_| device.is_cuda()) else {
        return Ok(Vec::new());
    };
    let mut reads = 0;
    for _ in 0..STEPS {
        let before = candle_amp::backend::device_reads();
        step()?;
        reads = candle_amp::backend::device_reads() - before;
    }
    let mut host = Vec::new();
    for _ in 0..HOST_STEPS {
        device.synchronize()?;
        host.push(measure::seconds(&mut step)?);
    }
    device.synchronize()?;
    let (chosen, fallen) = chosen(&mut step, device)?;
    drop(step);
    let name = |what: &str| format!("{what}, {name}");
    let mut lines = Vec::new();
    for ([pass, algorithm], count) in chosen {
        let what = name(&format!("{pass} by {algorithm}"));
        lines.push(Line::new(what, Unit::Count, count as f64, None, None));
    }
    if let Some(share) = fallen {
        let what = name("share of convolutions that fell back");
        lines.push(Line::new(what, Unit::Count, share, None, None));
    }
    let is_step = !matches!(spec.work, Work::Operator { .. });
    if is_step {
        lines.push(Line::new(name("reads a step"), Unit::Count, reads as f64, None, None));
    }
    if let Some(ours) = device::peak(device)?.filter(|_| counted && is_step) {
        let mut peer = None;
        if let Some(torch) = torch.first_mut().filter(|_| !spec.is_graphed()) {
            let bytes = torch.ask(&Request::peak(spec, STEPS, spec.layout()))?;
            peer = bytes.get(spec.layout()).map(|bytes| (String::new(), *bytes));
            torch.forget()?;
        }
        lines.push(Line::new(name("peak memory"), Unit::Bytes, ours, peer, None));
    }
    let mut peer = None;
    if let Some(torch) = torch.first_mut().filter(|_| !spec.is_graphed()) {
        let seconds = torch.ask(&Request::host(spec, HOST_STEPS, spec.layout()))?;
        peer = seconds.get(spec.layout()).map(|seconds| (String::new(), *seconds));
        torch.forget()?;
    }
    let host = measure::median(host);
    lines.push(Line::new(name("host's part"), Unit::Seconds, host, peer, None));
    if let Work::Operator { operator, pass } = spec.work
        && pass != Pass::Forward
    {
        let own = HostPart::of(operator, pass, spec.precision, device)?;
        let own = [("forward", own.forward), ("backward", own.backward)];
        lines.extend(own.map(|(of, seconds)| {
            let what = name(&format!("host's part of its own {of}"));
            Line::new(what, Unit::Seconds, seconds, None, None)
        }));
    }
    Ok(lines)
}
