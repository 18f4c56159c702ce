//! The loop, the losses after it, and the sample.

use std::time::Instant;

use anyhow::Result;
use candle_amp::{
    Autocast, GradScaler, Parameters, ScaleConfig,
    dist::ReduceOp,
    nn, no_grad, ops,
    optim::{AdamWConfig, Group, Scheduler},
    random,
};
use candle_core::{DType, Device, Tensor};
use candle_nn::VarMap;
use rand::Rng;

use crate::{
    common::{
        self, interrupted,
        optimizer::Optimizer,
        options::{Precision, Usage},
        progress::print,
        ranks,
        steps::Steps,
    },
    data::{self, Corpus, Stream},
    model::Gpt,
    options::Options,
    progress::{self, Progress},
    report::Outcome,
    schedule::Schedule,
};

/// A model, and how its training went.
#[derive(Debug)]
pub(crate) struct Trained {
    model: Gpt,
    amp: Autocast,
    pub(crate) outcome: Outcome,
}

pub(crate) fn train(
    options: &Options,
    corpus: &Corpus,
    precision: Precision,
    device: &Device,
) -> Result<Trained> {
    random::manual_seed(options.seed);
    let varmap = VarMap::new();
    let vb = nn::var_builder(&varmap, precision.storage(options.master_weights), device);
    let model = Gpt::new(corpus.characters(), options.size(), options.checkpoint, vb)?;
    let parameters = Parameters::from_varmap(&varmap);
    let elements = parameters.vars().iter().map(|var| var.elem_count()).sum();

    let amp = precision.autocast();
    let init_scale = options.init_scale as f32;
    let scaler = match precision {
        Precision::F16 => GradScaler::new(ScaleConfig { init_scale, ..Default::default() }),
        Precision::F32 | Precision::Bf16 => Ok(GradScaler::disabled()),
    };
    let mut scaler = scaler.map_err(|error| Usage(error.to_string()))?;
    let Options { lr, weight_decay, seed, .. } = *options;
    let config = AdamWConfig { lr, weight_decay, beta2: 0.99, ..Default::default() };
    let parallel = ranks::data_parallel(&parameters, &mut scaler, options.sharded)?;
    let sharded = parallel.as_ref().filter(|_| options.sharded);
    let mut adamw = Optimizer::new(vec![Group::new(&parameters, config)], sharded)?;

    print(&progress::opening(options, corpus, precision, elements));
    let schedule = Schedule { steps: options.steps() };
    let mut scheduler = Scheduler::new(common::rates(schedule.steps), &mut adamw)?;
    let mut progress = Progress::new(schedule.steps, options.tokens());
    let mut history = Steps::default();
    let context = options.size().context;
    let mut stop = ranks::any(interrupted())?;
    while history.count() < schedule.steps && !stop {
        let started = Instant::now();
        let windows = corpus.train.random(seed, history.count(), options.batch_size(), context);
        let (x, y) = data::batch(&ranks::part(&windows), device)?;

        let own_loss = amp.scope(|| ops::cross_entropy(&model.forward(&x)?, &y))?;
        scaler.scale(&own_loss)?.backward()?;
        scaler.clip_grad_norm(options.clip)?;
        let outcome = scaler.step(&mut adamw)?;
        scheduler.step(&outcome, &mut adamw)?;
        scaler.update()?;

        let loss;
        (loss, stop) = common::after_step(&own_loss, interrupted())?;
        let (loss, skipped) = (loss.to_scalar()?, outcome.skipped()?);
        history.add(loss, started.elapsed(), skipped, scaler.current_scale());
        progress.step(&history);
        if schedule.pauses_after(history.count()) {
            let held_out = judge(&amp, &model, &corpus.held_out.spread(32, context), device)?;
            progress.pause(&history, held_out);
        }
    }
    drop(progress);

    let judged = options.judged();
    let [train_loss, held_out_loss] = [&corpus.train, &corpus.held_out]
        .map(|part| judge(&amp, &model, &part.spread(judged, context), device));
    let outcome = Outcome {
        precision,
        train_loss: train_loss?,
        held_out_loss: held_out_loss?,
        seconds: history.seconds(usize::MAX),
        tokens_per_second: history.rate(usize::MAX) * options.tokens() as f64,
        steps: history.count(),
        skipped: history.skipped,
        scale: history.scale,
        interrupted: history.count() < schedule.steps,
    };
    Ok(Trained { model, amp, outcome })
}

/// The mean loss over `windows`, of which each rank takes a part.
fn judge(amp: &Autocast, model: &Gpt, windows: &[&[u32]], device: &Device) -> Result<f64> {
    let (ranks, mut sum) = (ranks::communicator(), 0f64);
    for part in windows.chunks(16).skip(ranks.rank()).step_by(ranks.size()) {
        let (x, y) = data::batch(part, device)?;
        let loss = no_grad(|| amp.scope(|| ops::cross_entropy(&model.forward(&x)?, &y)))?;
        sum += f64::from(loss.to_scalar::<f32>()?) * part.len() as f64;
    }
    let sum = ranks.all_reduce(&Tensor::new(&[sum], &Device::Cpu)?, ReduceOp::Sum)?;
    Ok(sum.to_vec1::<f64>()?[0] / windows.len() as f64)
}

/// Characters as the model would go on from a line break, drawn one by one.
pub(crate) fn sample(
    options: &Options,
    corpus: &Corpus,
    trained: &Trained,
    device: &Device,
) -> Result<Vec<u32>> {
    let Trained { model, amp, .. } = trained;
    let mut rng = data::rng(Stream::Sample, options.seed, 0);
    let mut tokens = vec![corpus.start()];
    while tokens.len() <= options.sample() {
        let seen = &tokens[tokens.len().saturating_sub(options.size().context)..];
        let x = Tensor::new(seen, device)?.unsqueeze(0)?;
        let logits = no_grad(|| amp.scope(|| model.forward(&x)))?;
        let logits = logits.get(seen.len() - 1)?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
        tokens.push(draw(&logits, options.temperature, rng.random()) as u32);
    }
    Ok(tokens.split_off(1))
}

/// The index that `uniform`, a random number from 0 to 1, falls on where index `i` takes
/// `exp(logits[i] / temperature)`.
fn draw(logits: &[f64], temperature: f64, uniform: f64) -> usize {
    let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = logits.iter().map(|x| ((x - most) / temperature).exp()).collect();
    let mut left = uniform * weights.iter().sum::<f64>();
    let index = weights.iter().position(|weight| {
        left -= weight;
        left < 0.
    });
    index.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draw_follows_the_logits() {
        let logits = [0., 3f64.ln(), f64::NEG_INFINITY, 12f64.ln()]; // 1 : 3 : 0 : 12
        let share = |temperature, index| {
            let drawn = (0..1600).map(|i| draw(&logits, temperature, (f64::from(i) + 0.5) / 1600.));
            drawn.filter(|&drawn| drawn == index).count()
        };
        assert_eq!([0, 1, 2, 3].map(|index| share(1., index)), [100, 300, 0, 1200]);
        assert_eq!(share(0.01, 3), 1600);
    }
}
