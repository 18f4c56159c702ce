//! One training: a network, a precision, a seed.

use std::time::Instant;

use anyhow::Result;
use candle_amp::{
    Autocast, GradScaler, Parameters, ScaleConfig, StepOutcome, nn, no_grad, ops,
    optim::{Scheduler, Sgd, SgdConfig},
    random,
};
use candle_core::{DType, Device, Tensor};
use candle_nn::VarMap;

use crate::{
    augment::Augment,
    choices::LossScale,
    common::{self, interrupted, options::Usage, progress::print},
    data::{Dataset, Images, Norm},
    evaluation::Score,
    history::History,
    models::Model,
    options::Options,
    out::{EpochRow, Gradients, RunFolder, StepRow, Training},
    progress::{self, Progress},
    report::Report,
    resident::Resident,
    schedule::Schedule,
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
    /// Where to write the history, checkpoints and the result, if anywhere.
    pub(crate) folder: Option<RunFolder>,
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
    let vars = parameters.vars();
    let weights = vars.iter().map(|var| var.elem_count()).sum();
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
    let Options { lr, momentum, weight_decay, seed, .. } = *options;
    let config = SgdConfig { lr, momentum, weight_decay, ..Default::default() };
    let mut opt = Sgd::new(&parameters, config)?;
    let mut scheduler = Scheduler::new(common::rates(schedule.steps), &mut opt)?;

    if let Some(all) = run.heading {
        print(&progress::opening(all, data, &schedule, weights));
    }
    let mut progress = Progress::new(schedule, options.batch_size(), run.prefix);
    let mut history = History::default();
    let mut score = Score::default();
    let train = Feed::new(&data.train, data, device)?;
    let test = Feed::new(&data.test, data, device)?;
    for epoch in 0..schedule.epochs {
        let augment = Some(Augment { seed, epoch });
        let begun = history.steps.count();
        // A step that is still on its way on a GPU: its loss is read when the next one is, too.
        let (mut taken, mut pending, mut clock) = (begun, None, Instant::now());
        let mut gradients = None;
        for indices in data.train.shuffled(seed, epoch).chunks_exact(options.batch_size()) {
            let (x, y) = train.batch(indices, augment)?;

            let loss = amp.scope(|| {
                let logits = model.forward(&x, true)?;
                ops::cross_entropy(&logits, &y)
            })?;
            scaler.scale(&loss)?.backward()?;
            let lr = opt.learning_rate();
            let outcome = scaler.step(&mut opt)?;
            taken += 1;
            let is_last = taken == schedule.steps
                || taken == begun + schedule.steps_per_epoch
                || interrupted();
            if is_last && run.folder.is_some() {
                let exponents = scaler.histogram(&parameters)?;
                gradients = Some(Gradients::new(exponents.all(), outcome.scale()));
            }
            scheduler.step(&outcome, &mut opt)?;
            scaler.update()?;

            let (loss, scale) = (loss.detach(), scaler.current_scale());
            let step = Some(Taken { loss, outcome, scale, epoch, lr });
            let done = if options.gpu { std::mem::replace(&mut pending, step) } else { step };
            if let Some(done) = done {
                done.enter(&mut history, &mut clock, run.folder.as_mut())?;
                progress.step(&history);
            }
            if is_last {
                break;
            }
        }
        if let Some(last) = pending {
            last.enter(&mut history, &mut clock, run.folder.as_mut())?;
        }
        score = evaluate(&amp, &model, &test, data.test.len())?;
        history.epoch(history.steps.count() - begun, score.accuracy());
        progress.epoch(&history);
        if let Some(folder) = &mut run.folder {
            let step = history.steps.count();
            folder.epoch(EpochRow::new(epoch + 1, step, &history, &score, gradients))?;
            let (optimizer, epochs) = (&opt, history.epochs.len());
            let (parameters, scaler, scheduler) = (&parameters, &scaler, &scheduler);
            let training =
                Training { parameters, optimizer, scaler, scheduler, epochs, steps: step };
            folder.save(&training, score.accuracy())?;
        }
        if history.steps.count() == schedule.steps || interrupted() {
            break;
        }
    }
    drop(progress);

    let cut_short = history.steps.count() < schedule.steps;
    let report = Report::new(options, data, &history, &score, weight_bytes, cut_short);
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

/// Where batches come from.
enum Feed<'a> {
    Host(&'a Images, &'a Norm),
    Device(Resident),
}

impl<'a> Feed<'a> {
    fn new(images: &'a Images, data: &'a Dataset, device: &Device) -> Result<Self> {
        Ok(match device {
            Device::Cpu => Self::Host(images, &data.norm),
            device => Self::Device(Resident::new(images, &data.norm, device)?),
        })
    }

    fn batch(
        &self,
        indices: &[usize],
        augment: Option<Augment>,
    ) -> candle_core::Result<(Tensor, Tensor)> {
        match self {
            Self::Host(images, norm) => images.batch(indices, norm, augment, &Device::Cpu),
            Self::Device(resident) => resident.batch(indices, augment),
        }
    }
}

/// Recognises all `count` test images, as they are.
fn evaluate(amp: &Autocast, model: &Model, test: &Feed<'_>, count: usize) -> Result<Score> {
    let mut score = Score::default();
    let all: Vec<usize> = (0..count).collect();
    for indices in all.chunks(500) {
        let (x, y) = test.batch(indices, None)?;
        let logits = no_grad(|| amp.scope(|| model.forward(&x, false)))?;
        score.add(indices[0], &y.to_vec1()?, &logits.to_dtype(DType::F32)?.to_vec2()?);
    }
    Ok(score)
}
