//! Trains a small network in mixed precision: one loop, whatever the precision.
//!
//! ```text
//! cargo run --release --example cifar10                     # drawn shapes, no download
//! cargo run --release --example cifar10 -- --help
//! cargo run --release --example cifar10 -- --data DIR       # the real CIFAR-10, binary version
//! cargo run --release --example cifar10 --features cuda -- --gpu --precision f16
//! ```

use std::{
    process::{ExitCode, exit},
    sync::atomic::{AtomicBool, Ordering},
    time::Instant,
};

use anyhow::{Context, Result};
use candle_amp::{
    Autocast, GradScaler, Parameters, ScaleConfig, nn, ops,
    optim::{Scheduler, Sgd, SgdConfig},
    random,
};
use candle_core::{D, Device};
use candle_nn::VarMap;
use clap::Parser;

use augment::Augment;
use choices::{LossScale, Precision};
use data::Dataset;
use history::{History, Score};
use models::Model;
use options::{Options, Usage};
use progress::Progress;
use report::Report;
use schedule::Schedule;

mod augment;
mod choices;
mod data;
mod history;
mod models;
mod options;
mod progress;
mod report;
mod rng;
mod schedule;
mod synthetic;

/// Keeps the memory of a step for the next one: the system's own allocator hands large buffers
/// back, and having them zeroed again costs more than much of the arithmetic in them. What lies
/// free for a second this one hands back too, unless the environment has MIMALLOC_PURGE_DELAY=-1.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// True once Ctrl-C was pressed.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

fn main() -> ExitCode {
    match finish_on_ctrl_c().and_then(|()| run(&Options::parse())) {
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
    if let Some(path) = &options.report {
        report::check_writable(path)?;
    }
    let data = load(options)?;
    let schedule = Schedule::new(options, data.train.len())?;

    random::manual_seed(options.seed);
    let varmap = VarMap::new();
    let vb = nn::var_builder(&varmap, options.storage(), &device);
    let model = Model::new(options.model, vb)?;
    let vars = Parameters::from_varmap(&varmap).vars();
    let parameters = vars.iter().map(|var| var.elem_count()).sum();
    let weight_bytes = vars.iter().map(|var| var.elem_count() * var.dtype().size_in_bytes()).sum();

    let amp = match options.precision {
        Precision::F32 => Autocast::disabled(),
        half => Autocast::new(half.dtype()),
    };
    let scaler = match options.loss_scale() {
        LossScale::Dynamic => {
            let init_scale = options.init_scale as f32;
            GradScaler::new(ScaleConfig { init_scale, ..Default::default() })
        }
        LossScale::None => Ok(GradScaler::disabled()),
        LossScale::Constant(scale) => GradScaler::new(ScaleConfig::constant(scale)),
    };
    let mut scaler = scaler.map_err(|error| Usage(error.to_string()))?;
    let Options { lr, momentum, weight_decay, seed, .. } = *options;
    let mut opt = Sgd::new(vars, SgdConfig { lr, momentum, weight_decay, ..Default::default() })?;
    let mut scheduler = Scheduler::new(schedule.rates(), &mut opt)?;

    progress::print(&progress::opening(options, &data, &schedule, parameters));
    let mut progress = Progress::new(schedule, options.batch_size());
    let mut history = History::default();
    let mut score = Score::default();
    for epoch in 0..schedule.epochs {
        let augment = Some(Augment { seed, epoch });
        let begun = history.steps();
        for indices in data.train.shuffled(seed, epoch).chunks_exact(options.batch_size()) {
            let started = Instant::now();
            let (x, y) = data.train.batch(indices, &data.norm, augment, &device)?;

            let loss = amp.scope(|| {
                let logits = model.forward(&x, true)?;
                ops::cross_entropy(&logits, &y)
            })?;
            scaler.scale(&loss)?.backward()?;
            let outcome = scaler.step(&mut opt)?;
            scheduler.step(&outcome, &mut opt)?;
            scaler.update()?;

            let (loss, skipped) = (loss.to_scalar()?, outcome.skipped()?);
            history.step(loss, started.elapsed(), skipped, scaler.current_scale());
            progress.step(&history);
            if history.steps() == schedule.steps || INTERRUPTED.load(Ordering::Relaxed) {
                break;
            }
        }
        score = evaluate(&amp, &model, &data, &device)?;
        history.epoch(history.steps() - begun, score.accuracy());
        progress.epoch(&history);
        if history.steps() == schedule.steps || INTERRUPTED.load(Ordering::Relaxed) {
            break;
        }
    }
    drop(progress);

    let interrupted = history.steps() < schedule.steps;
    let report = Report::new(options, &data, &history, &score, weight_bytes, interrupted);
    progress::print(&progress::closing(&report, &data.classes));
    progress::print(&progress::hint(options));
    if let Some(path) = &options.report {
        report.write(path)?;
    }
    Ok(())
}

/// Recognises all test images, as they are.
fn evaluate(amp: &Autocast, model: &Model, data: &Dataset, device: &Device) -> Result<Score> {
    let mut score = Score::default();
    let all: Vec<usize> = (0..data.test.len()).collect();
    for indices in all.chunks(500) {
        let (x, y) = data.test.batch(indices, &data.norm, None, device)?;
        let logits = amp.scope(|| model.forward(&x, false))?;
        score.count(&y.to_vec1()?, &logits.argmax(D::Minus1)?.to_vec1()?);
    }
    Ok(score)
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
