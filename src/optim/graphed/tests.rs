//! A captured step against the same step as always: the same bits; and what cannot be captured.

mod language;
mod other_threads;

use std::cell::Cell;

use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::{Optimizer, SGD};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::GraphedStep;
use crate::kernels::cuda::Gpu;
use crate::kernels::testing::devices::{devices, gpus};
use crate::kernels::testing::own_process::in_own_process;
use crate::optim::{
    AdamW, AdamWConfig, Config, Ema, EmaConfig, Lamb, LambConfig, Lion, LionConfig, Masters, Optim,
    Schedule, Scheduler, Sgd, SgdConfig,
};
use crate::random::{self, RandomState};
use crate::{Autocast, Error, GradScaler, LossScale, Parameters, Result, ScaleConfig, nn, ops};

const HERE: &str = "optim::graphed::tests::";
const STEPS: u64 = 14;
/// Steps whose batch holds an infinity: before the capture, at it, and after.
const BAD: [u64; 4] = [1, 4, 6, 7];

/// What is trained, and how.
#[derive(Clone, Copy, Debug)]
struct Setup {
    /// Of the variables.
    dtype: DType,
    masters: Masters,
    /// The loss scale's, if there is one.
    scale: Option<ScaleConfig>,
    amp: DType,
    channels_last: bool,
}

fn setup(dtype: DType, masters: Masters, enabled: bool) -> Setup {
    let scale = enabled.then(config);
    Setup { dtype, masters, scale, amp: DType::BF16, channels_last: false }
}

/// Two convolutions, batch norm, dropout, two linear layers.
struct Net {
    channels_last: bool,
    varmap: nn::VarMap,
    conv: nn::Conv2d,
    deep: nn::Conv2d,
    norm: nn::BatchNorm,
    hidden: nn::Linear,
    out: nn::Linear,
}

impl Net {
    fn new(Setup { dtype, channels_last, .. }: Setup, device: &Device) -> Result<Self> {
        let varmap = nn::VarMap::new();
        let vb = nn::var_builder(&varmap, dtype, device);
        let config = candle_nn::Conv2dConfig { padding: 1, ..Default::default() };
        let conv = nn::conv2d(3, 8, 3, config, vb.pp("conv"))?;
        let deep = nn::conv2d(8, 8, 3, config, vb.pp("deep"))?;
        let norm = nn::batch_norm(8, candle_nn::BatchNormConfig::default(), vb.pp("norm"))?;
        Ok(Self {
            channels_last,
            conv: if channels_last { conv.channels_last() } else { conv },
            deep: if channels_last { deep.channels_last() } else { deep },
            norm: if channels_last { norm.channels_last() } else { norm },
            hidden: nn::linear(8 * 36, 32, vb.pp("hidden"))?,
            out: nn::linear(32, 5, vb.pp("out"))?,
            varmap,
        })
    }

    fn loss(&self, x: &Tensor, y: &Tensor) -> candle_core::Result<Tensor> {
        let x = if self.channels_last { x.permute((0, 2, 3, 1))? } else { x.clone() };
        let x = self.deep.forward(&self.conv.forward(&x)?)?;
        let x = ops::relu(&candle_core::ModuleT::forward_t(&self.norm, &x, true)?)?;
        let x = ops::dropout(&x.flatten_from(1)?, 0.25)?;
        let x = ops::dropout(&ops::relu(&self.hidden.forward(&x)?)?, 0.5)?;
        ops::cross_entropy(&self.out.forward(&x)?, y)
    }
}

fn batch(step: u64, bad: bool, device: &Device) -> candle_core::Result<[Tensor; 2]> {
    let mut rng = ChaCha8Rng::seed_from_u64(step);
    let mut x: Vec<f32> = (0..4 * 3 * 36).map(|_| rng.random_range(-1f32..1.0)).collect();
    if bad {
        x[7] = f32::INFINITY;
    }
    let y: Vec<u32> = (0..4).map(|_| rng.random_range(0..5)).collect();
    Ok([Tensor::from_vec(x, (4, 3, 6, 6), device)?, Tensor::new(y, device)?])
}

fn bits(tensor: &Tensor) -> Result<Vec<u64>> {
    // candle has no cast of a remainder, I16, on a GPU.
    let tensor = tensor.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
    let all = tensor.flatten_all()?.to_vec1::<f64>()?;
    Ok(all.into_iter().map(f64::to_bits).collect())
}

fn config() -> ScaleConfig {
    ScaleConfig { init_scale: 1024.0, growth_interval: 3, ..ScaleConfig::default() }
}

/// All that a run leaves behind.
#[derive(Debug, PartialEq)]
struct Trained {
    losses: Vec<Vec<u64>>,
    reports: Vec<String>,
    weights: Vec<(String, Vec<u64>)>,
    states: Vec<(String, Vec<u64>)>,
    steps: Vec<(String, u64)>,
    scale: Option<LossScale>,
    history: String,
    random: RandomState,
    rate: f64,
}

/// Trains; as always, or by a graph.
fn train<C: Config>(device: &Device, setup: Setup, config_of: C, graphed: bool) -> Result<Trained> {
    let _fork = random::fork_rng_guard();
    random::manual_seed(3);
    let Setup { masters, scale, amp, .. } = setup;
    let net = Net::new(setup, device)?;
    let parameters = Parameters::from_varmap(&net.varmap);
    let trained = parameters.filter(|name| !name.contains("running"));
    let mut optimizer = Optim::new(&trained, config_of)?.with_masters(masters)?;
    let mut scheduler = Scheduler::new(Schedule::cosine(20).with_warm_up(4), &mut optimizer)?;
    let mut scaler = scale.map_or_else(|| Ok(GradScaler::disabled()), GradScaler::new)?;
    let amp = Autocast::new(amp);
    let calls = Cell::new(0);
    let forward = |inputs: &[Tensor]| {
        calls.set(calls.get() + 1);
        amp.scope(|| net.loss(&inputs[0], &inputs[1]))
    };
    let mut step = GraphedStep::new(forward).with_clip_grad_norm(1.0);
    let (mut losses, mut reports) = (Vec::new(), Vec::new());
    let mut late = Vec::new();
    for number in 0..STEPS {
        let inputs = batch(number, scale.is_some() && BAD.contains(&number), device)?;
        let (loss, outcome) = match graphed {
            true => step.run(&mut scaler, &mut optimizer, &inputs)?,
            false => step.eager(&mut scaler, &mut optimizer, &inputs)?,
        };
        scheduler.step(&outcome, &mut optimizer)?;
        late.push((loss, outcome));
    }
    assert_eq!(step.is_captured(), graphed && !device.is_cpu());
    // Three steps of warm-up, and the capture.
    assert_eq!(calls.get(), if step.is_captured() { 4 } else { STEPS });
    // Each step's own, though read at the end.
    for (loss, outcome) in late {
        losses.push(bits(&loss)?);
        reports.push(format!("{} {}", outcome.skipped()?, outcome.report(&parameters)?));
    }
    let named = parameters.iter().map(|(name, var)| Ok((name.to_owned(), bits(var)?)));
    let state = optimizer.state()?;
    let tensors = state.tensors.iter().map(|(name, tensor)| Ok((name.clone(), bits(tensor)?)));
    Ok(Trained {
        losses,
        reports,
        weights: named.collect::<Result<_>>()?,
        states: tensors.collect::<Result<_>>()?,
        steps: state.steps.into_iter().collect(),
        scale: scaler.state(),
        history: scaler.history().to_string(),
        random: random::state(),
        rate: optimizer.learning_rate(),
    })
}

/// The same bits by a graph as without; the steps that were skipped are those of `skipped`.
fn same<C: Config>(setup: Setup, config: C, skipped: &[u64]) -> Result<()> {
    for device in devices() {
        let (eager, graphed) =
            (train(&device, setup, config, false)?, train(&device, setup, config, true)?);
        assert_eq!(eager, graphed, "{setup:?} {config:?}");
        let skips = (0..).zip(&eager.reports).filter(|(_, report)| report.starts_with("true"));
        assert_eq!(skips.map(|(step, _)| step).collect::<Vec<_>>(), skipped, "{setup:?}");
    }
    Ok(())
}

#[test]
fn a_graph_does_what_the_step_does_to_the_bit() -> Result<()> {
    let test = format!("{HERE}a_graph_does_what_the_step_does_to_the_bit");
    if !in_own_process(&test, &[]) {
        return Ok(());
    }
    let momentum = SgdConfig { lr: 0.05, momentum: 0.9, nesterov: true, ..Default::default() };
    let adamw = AdamWConfig { lr: 0.01, ..Default::default() };
    let lion = LionConfig { lr: 0.001, ..Default::default() };
    same(setup(DType::F32, Masters::F32, true), adamw, &BAD)?;
    same(setup(DType::F32, Masters::F32, false), AdamWConfig { amsgrad: true, ..adamw }, &[])?;
    same(setup(DType::BF16, Masters::Remainder, true), momentum, &BAD)?;
    same(setup(DType::BF16, Masters::Stochastic, true), adamw, &BAD)?;
    same(setup(DType::BF16, Masters::F32, true), lion, &BAD)?;
    same(setup(DType::F32, Masters::F32, true), LambConfig { lr: 0.01, ..Default::default() }, &BAD)
}

/// Convolutions of 16 bits with channels last. In F16 a scale that is too large overflows in the arithmetic itself: before
/// the capture, at it, and after.
#[test]
fn a_graph_of_channels_last_does_what_the_step_does_to_the_bit() -> Result<()> {
    let test = format!("{HERE}a_graph_of_channels_last_does_what_the_step_does_to_the_bit");
    if !in_own_process(&test, &[]) {
        return Ok(());
    }
    let adamw = AdamWConfig { lr: 0.01, ..Default::default() };
    let bf16 = Setup { channels_last: true, ..setup(DType::BF16, Masters::Stochastic, true) };
    let f16 = Setup {
        amp: DType::F16,
        scale: Some(ScaleConfig { init_scale: 16_777_216.0, growth_interval: 100, ..config() }),
        channels_last: true,
        ..setup(DType::F32, Masters::F32, true)
    };
    for setup in [bf16, f16] {
        for device in gpus() {
            let (net, [x, y]) = (Net::new(setup, &device)?, batch(0, false, &device)?);
            let (loss, trace) = Autocast::new(setup.amp).trace(|| net.loss(&x, &y));
            loss?;
            let convolutions = trace.rows().iter().filter(|row| row.op.name() == "conv2d");
            let by: Vec<_> = convolutions.filter_map(|row| row.algorithm).collect();
            let engine = |by: &&str| by.starts_with("cudnn graph, engine ");
            assert_eq!(by.len(), 2);
            let by_cudnn = Gpu::of(&device).is_some_and(|gpu| gpu.has_convolutions());
            assert!(!by_cudnn || by.iter().all(engine), "{by:?}");
        }
    }
    same(bf16, adamw, &BAD)?;
    same(f16, adamw, &[0, 1, 2, 3, 4, 5, 6, 7])?;
    // By the engines that the first steps have measured.
    crate::backend::set_cudnn_benchmark(true);
    same(bf16, adamw, &BAD)
}

/// With streams that are behind: inputs and words are not those of a later step.
#[test]
fn a_graph_that_is_behind_has_its_own_inputs() -> Result<()> {
    let test = format!("{HERE}a_graph_that_is_behind_has_its_own_inputs");
    if gpus().is_empty() || !in_own_process(&test, &[("EMULATED_GPU_DELAY", "5")]) {
        return Ok(());
    }
    let adamw = AdamWConfig { lr: 0.01, ..Default::default() };
    same(setup(DType::F32, Masters::F32, true), adamw, &BAD)
}

fn linear(device: &Device) -> Result<(nn::VarMap, nn::Linear)> {
    let varmap = nn::VarMap::new();
    let layer = nn::linear(4, 3, nn::var_builder(&varmap, DType::F32, device))?;
    Ok((varmap, layer))
}

fn rows(step: u64, rows: usize, device: &Device) -> candle_core::Result<Tensor> {
    let mut rng = ChaCha8Rng::seed_from_u64(step);
    let values: Vec<f32> = (0..4 * rows).map(|_| rng.random_range(-1f32..1.0)).collect();
    Tensor::from_vec(values, (rows, 4), device)
}

/// What the host cannot capture is an error that changes nothing, and the step goes on as always.
#[test]
fn what_cannot_be_captured_is_refused_and_changes_nothing() -> Result<()> {
    let test = format!("{HERE}what_cannot_be_captured_is_refused_and_changes_nothing");
    if gpus().is_empty() || !in_own_process(&test, &[]) {
        return Ok(());
    }
    type Fault = fn(&Tensor, &mut State) -> candle_core::Result<()>;
    struct State {
        count: u32,
        ema: Ema,
        sgd: SGD,
        own: Sgd,
        scaler: GradScaler,
    }
    let faults: [(&str, Fault); 7] = [
        ("not permitted while capturing", |x, _| x.sum_all()?.to_scalar::<f32>().map(drop)),
        ("uncached host data", |x, _| {
            Tensor::from_vec(vec![1f32; 5000], 5000, x.device()).map(drop)
        }),
        ("missing cached host data", |x, state| {
            state.count += 1;
            Tensor::new(&[state.count], x.device()).map(drop)
        }),
        ("call `Ema::update` after", |_, state| Ok(state.ema.update()?)),
        ("optimizer", |x, state| {
            let w = Var::from_tensor(x)?;
            state.scaler.scale(&w.sum_all()?)?.backward()?;
            state.scaler.step(&mut state.sgd)?;
            Ok(state.scaler.update()?)
        }),
        ("second step", |_, state| {
            let variables = state.own.slots[0].variable.clone();
            state.own.backward_step(&variables.sum_all()?)
        }),
        ("seeds the random generator", |x, _| {
            random::manual_seed(1);
            ops::dropout(x, 0.5).map(drop)
        }),
    ];
    for device in gpus() {
        for (expected, fault) in faults {
            let _fork = random::fork_rng_guard();
            random::manual_seed(5);
            let (varmap, layer) = linear(&device)?;
            let parameters = Parameters::from_varmap(&varmap);
            let other = Var::ones(3, DType::F32, &device)?;
            let mut state = State {
                count: 0,
                ema: Ema::new(&parameters, EmaConfig::default())?,
                sgd: SGD::new(vec![other.clone()], 0.1)?,
                own: Sgd::new(vec![other], SgdConfig::default())?,
                scaler: GradScaler::default(),
            };
            let mut adamw = AdamW::new(&parameters, AdamWConfig::default())?;
            let mut scaler = GradScaler::new(config())?;
            let mut step = GraphedStep::new(|inputs: &[Tensor]| {
                fault(&inputs[0], &mut state)?;
                let y = ops::dropout(&layer.forward(&inputs[0])?, 0.5)?;
                ops::mean(&ops::mul(&y, &y)?)
            });
            for number in 0..3 {
                step.run(&mut scaler, &mut adamw, &[rows(number, 2, &device)?])?;
            }
            let all = |adamw: &AdamW, scaler: &GradScaler| -> Result<_> {
                let vars = parameters.vars();
                let weights = vars.iter().map(|var| bits(var)).collect::<Result<Vec<_>>>()?;
                let steps = adamw.state()?.steps;
                Ok((weights, steps, scaler.state(), random::state()))
            };
            let before = all(&adamw, &scaler)?;
            for _ in 0..2 {
                let refused = step.run(&mut scaler, &mut adamw, &[rows(3, 2, &device)?]);
                let message = refused.unwrap_err().to_string();
                assert!(message.contains(expected), "{expected}: {message}");
                assert!(!step.is_captured() && !scaler.has_gradients());
                assert_eq!(all(&adamw, &scaler)?, before, "{expected}");
            }
            let (loss, outcome) = step.eager(&mut scaler, &mut adamw, &[rows(3, 2, &device)?])?;
            assert!(loss.to_scalar::<f32>()?.is_finite() && !outcome.skipped()?);
            assert_ne!(all(&adamw, &scaler)?, before);
        }
    }
    Ok(())
}

#[test]
fn inputs_of_another_shape_are_refused_on_every_device() -> Result<()> {
    let test = format!("{HERE}inputs_of_another_shape_are_refused_on_every_device");
    if !in_own_process(&test, &[]) {
        return Ok(());
    }
    for device in devices() {
        let (varmap, layer) = linear(&device)?;
        let mut sgd = Sgd::new(Parameters::from_varmap(&varmap), SgdConfig::default())?;
        let mut scaler = GradScaler::default();
        let mut step = GraphedStep::new(|inputs: &[Tensor]| ops::mean(&layer.forward(&inputs[0])?));
        for number in 0..6 {
            step.run(&mut scaler, &mut sgd, &[rows(number, 2, &device)?])?;
            let odd = [rows(number, 3, &device)?];
            let refused = step.run(&mut scaler, &mut sgd, &odd).unwrap_err();
            assert!(matches!(refused, Error::Capture(_)), "{refused}");
            let message = refused.to_string();
            assert!(message.contains("F32 [2, 4]") && message.contains("F32 [3, 4]"), "{message}");
            step.eager(&mut scaler, &mut sgd, &odd)?;
            // A batch of the host's is copied.
            step.run(&mut scaler, &mut sgd, &[rows(number, 2, &Device::Cpu)?])?;
        }
        scaler.scale(&layer.forward(&rows(0, 2, &device)?)?.sum_all()?)?.backward()?;
        let pending = step.run(&mut scaler, &mut sgd, &[rows(0, 2, &device)?]).unwrap_err();
        assert!(pending.to_string().contains("between `backward` and `update`"), "{pending}");
    }
    Ok(())
}

/// What a graph is bound to may change: it is made anew.
#[test]
fn a_graph_is_made_anew_for_another_state() -> Result<()> {
    let test = format!("{HERE}a_graph_is_made_anew_for_another_state");
    if gpus().is_empty() || !in_own_process(&test, &[]) {
        return Ok(());
    }
    for device in gpus() {
        let run = |graphed: bool| -> Result<_> {
            let _fork = random::fork_rng_guard();
            random::manual_seed(5);
            let (varmap, layer) = linear(&device)?;
            let parameters = Parameters::from_varmap(&varmap);
            let bias = parameters.filter(|name| name == "bias");
            let mut adamw = AdamW::new(&parameters, AdamWConfig::default())?;
            let mut scaler = GradScaler::new(config())?;
            let calls = Cell::new(0);
            let mut step = GraphedStep::new(|inputs: &[Tensor]| {
                calls.set(calls.get() + 1);
                let y = ops::dropout(&layer.forward(&inputs[0])?, 0.5)?;
                ops::mean(&ops::mul(&y, &y)?)
            })
            .with_warm_up(1);
            let (mut made, mut saved) = (Vec::new(), None);
            let mut amp = Autocast::disabled();
            for number in 0..30 {
                match number {
                    4 => saved = Some((adamw.state()?, scaler.state())),
                    8 => adamw.load_state(&saved.as_ref().expect("it is").0)?,
                    12 => scaler.load_state(saved.as_ref().expect("it is").1)?,
                    16 => bias.freeze(),
                    20 => bias.unfreeze(),
                    24 => amp = Autocast::new(DType::BF16),
                    // No other graph: settings and seeds are read anew.
                    27 => random::manual_seed(9),
                    28 => adamw.set_config(0, AdamWConfig { beta1: 0.5, ..Default::default() })?,
                    _ => {}
                }
                let inputs = [rows(number, 2, &device)?];
                let before = calls.get();
                amp.scope(|| match graphed {
                    true => step.run(&mut scaler, &mut adamw, &inputs),
                    false => step.eager(&mut scaler, &mut adamw, &inputs),
                })?;
                made.extend((calls.get() > before).then_some(number));
            }
            let vars = parameters.vars();
            let weights = vars.iter().map(|var| bits(var)).collect::<Result<Vec<_>>>()?;
            Ok((made, (weights, adamw.state()?.steps, scaler.state(), random::state())))
        };
        let ((_, eager), (made, graphed)) = (run(false)?, run(true)?);
        assert_eq!(eager, graphed);
        // A step as always, then the capture.
        assert_eq!(made, [0, 1, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25]);
    }
    Ok(())
}

/// Backward through a graph from before a replay reads weights that are gone.
#[test]
fn a_replay_makes_older_graphs_stale() -> Result<()> {
    let test = format!("{HERE}a_replay_makes_older_graphs_stale");
    if gpus().is_empty() || !in_own_process(&test, &[]) {
        return Ok(());
    }
    for device in gpus() {
        let (varmap, layer) = linear(&device)?;
        let mut lion = Lion::new(Parameters::from_varmap(&varmap), LionConfig::default())?;
        let mut scaler = GradScaler::default();
        let mut step = GraphedStep::new(|inputs: &[Tensor]| ops::mean(&layer.forward(&inputs[0])?));
        for number in 0..5 {
            step.run(&mut scaler, &mut lion, &[rows(number, 2, &device)?])?;
        }
        let x = Var::from_tensor(&rows(9, 2, &device)?)?;
        let loss = ops::mean(&layer.forward(&x)?)?;
        step.run(&mut scaler, &mut lion, &[rows(6, 2, &device)?])?;
        let stale = scaler.scale(&loss)?.backward().unwrap_err().to_string();
        assert!(stale.contains("written in place"), "{stale}");
    }
    Ok(())
}

/// Weights that were loaded are not lost to the masters of before.
#[test]
fn a_replay_sees_that_weights_were_written() -> Result<()> {
    let test = format!("{HERE}a_replay_sees_that_weights_were_written");
    if gpus().is_empty() || !in_own_process(&test, &[]) {
        return Ok(());
    }
    for device in gpus() {
        let varmap = nn::VarMap::new();
        let layer = nn::linear(4, 3, nn::var_builder(&varmap, DType::BF16, &device))?;
        let parameters = Parameters::from_varmap(&varmap);
        let config = AdamWConfig { lr: 0.1, ..AdamWConfig::default() };
        let mut adamw = AdamW::new(parameters.clone(), config)?;
        let ema = Ema::new(&parameters, EmaConfig::default())?;
        let mut scaler = GradScaler::disabled();
        let mut step = GraphedStep::new(|inputs: &[Tensor]| ops::mean(&layer.forward(&inputs[0])?));
        let mut run = |number: u64, adamw: &mut AdamW| {
            let _amp = Autocast::new(DType::BF16).enter();
            step.run(&mut scaler, adamw, &[rows(number, 2, &device)?]).map(drop)?;
            Ok::<_, Error>(step.is_captured())
        };
        let weights = || parameters.iter().map(|(_, var)| bits(var)).collect::<Result<Vec<_>>>();
        for number in 0..6 {
            assert_eq!(run(number, &mut adamw)?, number > 2, "step {number}");
        }
        // As they were before the first step.
        ema.copy_to()?;
        let loaded = weights()?;
        let error = run(6, &mut adamw).unwrap_err().to_string();
        assert!(error.contains("reload_masters"), "{error}");
        assert_eq!(weights()?, loaded);
        adamw.reload_masters()?;
        // The masters are other tensors, so that the graph is made anew.
        assert!(!run(7, &mut adamw)?);
        assert_ne!(weights()?, loaded);
    }
    Ok(())
}

/// Memory that eager steps reuse may be replaced by a larger piece, and the cast cache may hold copies of its own.
#[test]
fn other_work_between_replays_does_not_disturb_them() -> Result<()> {
    let test = format!("{HERE}other_work_between_replays_does_not_disturb_them");
    if gpus().is_empty() || !in_own_process(&test, &[]) {
        return Ok(());
    }
    for device in gpus() {
        let run = |graphed: bool| -> Result<_> {
            let _fork = random::fork_rng_guard();
            random::manual_seed(5);
            let net = Net::new(setup(DType::F32, Masters::F32, true), &device)?;
            let parameters = Parameters::from_varmap(&net.varmap);
            let trained = parameters.filter(|name| !name.contains("running"));
            let mut lamb = Lamb::new(&trained, LambConfig::default())?;
            let mut scaler = GradScaler::new(config())?;
            let mut step = GraphedStep::new(|inputs: &[Tensor]| net.loss(&inputs[0], &inputs[1]));
            let amp = Autocast::new(DType::BF16);
            let _scope = amp.enter();
            for number in 0..9 {
                let inputs = batch(number, false, &device)?;
                match graphed {
                    true => step.run(&mut scaler, &mut lamb, &inputs)?,
                    false => step.eager(&mut scaler, &mut lamb, &inputs)?,
                };
                let large = Tensor::ones((8 + number as usize, 3, 6, 6), DType::F32, &device)?;
                random::fork_rng(|| crate::no_grad(|| net.conv.forward(&large)))?;
                let eager = batch(50 + number, false, &device)?;
                step.eager(&mut scaler, &mut lamb, &eager)?;
            }
            let vars = parameters.vars();
            let weights = vars.iter().map(|var| bits(var)).collect::<Result<Vec<_>>>()?;
            Ok((weights, lamb.state()?.steps, scaler.state(), random::state()))
        };
        assert_eq!(run(false)?, run(true)?);
    }
    Ok(())
}

/// A limit that is set after the capture counts from the next step on.
#[test]
fn clipping_may_begin_after_the_capture() -> Result<()> {
    let run = |device: &Device, graphed: bool| -> Result<Vec<Vec<u64>>> {
        let _fork = random::fork_rng_guard();
        random::manual_seed(5);
        let (varmap, layer) = linear(device)?;
        let parameters = Parameters::from_varmap(&varmap);
        let mut sgd = Sgd::new(&parameters, SgdConfig::default())?;
        let mut scaler = GradScaler::default();
        let forward = |inputs: &[Tensor]| ops::mean(&ops::square(&layer.forward(&inputs[0])?)?);
        let mut step = GraphedStep::new(forward);
        for number in 0..12 {
            if number == 6 {
                step = step.with_clip_grad_norm(1e-3);
            }
            let inputs = [rows(number, 2, device)?];
            match graphed {
                true => step.run(&mut scaler, &mut sgd, &inputs)?,
                false => step.eager(&mut scaler, &mut sgd, &inputs)?,
            };
        }
        parameters.vars().iter().map(|var| bits(var)).collect()
    };
    for device in gpus() {
        assert_eq!(run(&device, true)?, run(&device, false)?);
    }
    Ok(())
}
