//! One training: a network, a precision, a seed.

use std::time::Instant;

use anyhow::Result;
use candle_amp::{
    GradScaler, Parameters, ScaleConfig, StepOutcome, nn,
    optim::{Ema, LearningRate, Scheduler},
    random,
};
use candle_core::{Device, Tensor};
use candle_nn::VarMap;

use crate::{
    augment::Augment,
    choices::LossScale,
    common::{self, options::Usage, progress::print},
    data::Dataset,
    feed::Feed,
    history::{Gradients, History},
    memory::is_of_run,
    models::Model,
    options::Options,
    out::{EpochRow, RunFolder, StepRow},
    profile::Profiler,
    progress::{self, Progress},
    ranks, recipe,
    report::Report,
    resume::Training,
    schedule::Schedule,
    tester::Tester,
};

/// What to train, and how to show it.
#[derive(Debug)]
pub(crate) struct Run<'a> {
    /// With the precision and the seed of this run.
    pub(crate) options: &'a Options,
    /// The options of all runs, for the table before the first one.
    pub(crate) heading: Option<&'a Options>,
    /// What the lines of progress begin with.
    pub(crate) prefix: String,
    /// Says, after so many steps, whether to end the training here.
    pub(crate) stop: fn(usize) -> bool,
    /// Where to write the history, checkpoints and the result, if anywhere. A run that began there
    /// goes on.
    pub(crate) folder: Option<RunFolder>,
    /// The memory held before it, where the peak is to be that of this run and not of the process.
    pub(crate) held: Option<Option<u64>>,
}

/// Trains on `data`, and tests after every epoch.
pub(crate) fn train(
    mut run: Run<'_>,
    data: &Dataset,
    schedule: Schedule,
    device: &Device,
) -> Result<Report> {
    let options = run.options;
    random::manual_seed(options.seed);
    let varmap = VarMap::new();
    let vb = nn::var_builder(&varmap, options.precision.storage(options.master_weights), device);
    let model = Model::new(options.model, vb, options.channels_last)?;
    let parameters = Parameters::from_varmap(&varmap);
    options.model.prepare(&parameters, || first_images(data))?;
    let vars = parameters.trainable().vars();
    let elements = vars.iter().map(|var| var.elem_count()).sum();
    let weight_bytes = vars.iter().map(|var| var.elem_count() * var.dtype().size_in_bytes()).sum();

    let amp = options.precision.autocast();
    let scaler = match options.loss_scale() {
        LossScale::Dynamic => {
            let init_scale = options.init_scale as f32;
            GradScaler::new(ScaleConfig { init_scale, ..Default::default() })
        }
        LossScale::None => Ok(GradScaler::disabled()),
        LossScale::Constant(scale) => GradScaler::new(ScaleConfig::constant(scale)),
    };
    let mut scaler = scaler.map_err(|error| Usage(error.to_string()))?;
    let parallel = ranks::data_parallel(&parameters, &mut scaler, options.sharded)?;
    let Options { seed, recipe, .. } = *options;
    let mut optimizer = recipe::optimizer(options, &parameters, parallel.as_ref())?;
    let scheduler = Scheduler::new(recipe.rates(schedule.steps), &mut optimizer)?;
    let (history, average) = (History::default(), recipe.average(&parameters)?);
    let mut on = Training { parameters, optimizer, average, scheduler, scaler, history };
    if let Some(folder) = &mut run.folder {
        ranks::agree(folder.resume(&mut on, options, data))?;
    }
    let begun = on.history.steps.count();
    ranks::same(&[("steps to go on after".to_owned(), begun.to_string())].into())?;
    ranks::draw_apart();
    let save = |folder: &Option<RunFolder>, on: &Training, accuracy| match folder {
        Some(folder) => folder.save(on, options, data, accuracy),
        None => Ok(()),
    };

    if let Some(all) = run.heading {
        print(&progress::opening(all, data, &schedule, elements));
    }
    let mut progress = Progress::new(schedule, options.batch_size(), run.prefix, begun);
    let mut profiler = Profiler::new(options, begun..schedule.steps, device);
    let mut score = None;
    let train = Feed::new(&data.train, data, device)?;
    let test = Feed::new(&data.test, data, device)?;
    let tester = Tester { amp: &amp, model: &model, test, count: data.test.len(), recipe };
    for epoch in on.history.epochs.len()..schedule.epochs {
        let (mut taken, done) = (on.history.steps.count(), on.history.unfinished());
        if taken == schedule.steps && done == 0 {
            break;
        }
        let (shift, alternate) = (recipe.shift, recipe.alternate_flips);
        let augment = Some(Augment { seed, epoch, shift, alternate });
        // A step that is still on its way on a GPU: its loss is read when the next one is, too.
        let (mut pending, mut clock, mut stopped) = (None, Instant::now(), false);
        let order = data.train.shuffled(seed, epoch);
        let batches = order.chunks_exact(options.batch_size()).skip(done);
        let batches = batches.take(schedule.steps - taken);
        let end = taken + batches.len();
        for indices in batches {
            let Training { parameters, optimizer, average, scheduler, scaler, history } = &mut on;
            let lr = optimizer.learning_rate();
            let (loss, outcome) = profiler.step(taken, |phases| {
                let (x, y) = phases.run("batch", || train.batch(&ranks::part(indices), augment))?;
                let own_loss = phases.forward(&amp, || {
                    let logits = model.forward(&x, true)?;
                    recipe.loss(&logits, &y)
                })?;
                phases.run("backward", || scaler.scale(&own_loss)?.backward())?;
                let outcome = phases.run("optimizer", || scaler.step(optimizer))?;
                let loss;
                (loss, stopped) = common::after_step(&own_loss, (run.stop)(taken + 1))?;
                // A rank that has a part of the gradients does not know them all.
                if run.folder.is_some() && !options.sharded && (stopped || taken + 1 == end) {
                    let exponents = scaler.histogram(parameters)?;
                    history.gradients = Some(Gradients::new(exponents.all(), outcome.scale()));
                }
                phases.run("optimizer", || -> candle_amp::Result<()> {
                    scheduler.step(&outcome, optimizer)?;
                    // After a skipped step, too: that it was is not known yet on a GPU.
                    average.as_mut().map_or(Ok(()), Ema::update)?;
                    scaler.update()?;
                    Ok(())
                })?;
                Ok((loss, outcome))
            })?;

            taken += 1;
            let scale = on.scaler.current_scale();
            let step = Some(Taken { loss: loss.detach(), outcome, scale, epoch, lr });
            let ready = if options.gpu { std::mem::replace(&mut pending, step) } else { step };
            if let Some(ready) = ready {
                ready.enter(&mut on.history, &mut clock, run.folder.as_mut())?;
                progress.step(&on.history);
            }
            if let Some(text) = profiler.news() {
                progress.note(&text);
            }
            if stopped {
                break;
            }
        }
        if let Some(last) = pending {
            last.enter(&mut on.history, &mut clock, run.folder.as_mut())?;
        }
        if stopped {
            save(&run.folder, &on, None)?; // before the test: its epoch goes on from here
        }
        let result = tester.test(&mut on.average)?;
        let accuracy = result.accuracy();
        on.history.epoch(on.history.unfinished(), accuracy);
        progress.epoch(&on.history);
        if let Some(folder) = &mut run.folder {
            folder.epoch(EpochRow::new(&on.history, &result))?;
        }
        score = Some(result);
        if stopped && taken < schedule.steps {
            break;
        }
        save(&run.folder, &on, Some(accuracy))?;
    }
    if let Some(text) = profiler.rest() {
        progress.note(&text);
    }
    drop(progress);
    profiler.write()?;

    let score = match score {
        Some(score) => score,
        None => tester.test(&mut on.average)?, // the run had ended before
    };
    let cut_short = on.history.steps.count() < schedule.steps;
    let mut report = Report::new(options, data, &on.history, &score, weight_bytes, cut_short);
    if let Some(held) = run.held {
        report.peak_rss_bytes = report.peak_rss_bytes.filter(|&peak| is_of_run(peak, held));
    }
    if let Some(folder) = &run.folder {
        folder.finish(&report, &score, data)?;
    }
    Ok(report)
}

/// A step, whose numbers may still be on the device.
struct Taken {
    loss: Tensor,
    outcome: StepOutcome,
    /// The loss scale after it.
    scale: f32,
    epoch: usize,
    lr: f64,
}

impl Taken {
    /// Waits for the numbers. What passed since the step before is the time it took.
    fn enter(
        &self,
        history: &mut History,
        clock: &mut Instant,
        folder: Option<&mut RunFolder>,
    ) -> Result<()> {
        let (loss, skipped) = (self.loss.to_scalar::<f32>()?, self.outcome.skipped()?);
        let started = std::mem::replace(clock, Instant::now());
        let time = clock.duration_since(started);
        history.steps.add(loss, time, skipped, self.scale);
        folder.map_or(Ok(()), |folder| {
            folder.step(StepRow {
                step: history.steps.count(),
                epoch: self.epoch + 1,
                loss: loss.is_finite().then_some(loss),
                lr: self.lr,
                scale: self.outcome.scale(),
                skipped,
                ms: 1000. * time.as_secs_f64(),
            })
        })
    }
}

/// The first training images, as they are: enough to know their patches by.
fn first_images(data: &Dataset) -> candle_core::Result<Tensor> {
    let indices: Vec<usize> = (0..data.train.len().min(5_000)).collect();
    Ok(data.train.batch(&indices, &data.norm, None, &Device::Cpu)?.0)
}
