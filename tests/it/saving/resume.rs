//! 100 steps are 50 steps, a file, another process, and 50 steps.

use std::path::Path;

use candle_amp::checkpoints::{Checkpoint, Stateful};
use candle_amp::optim::{
    AdamWConfig, Config, LambConfig, LionConfig, Masters, Optim, Schedule, Scheduler, SgdConfig,
};
use candle_amp::{Autocast, GradScaler, Parameters, Result, ScaleConfig, nn, ops, random};
use candle_core::{DType, Device, Module, ModuleT, Tensor};

use super::{Folder, elsewhere, workplace};
use crate::util;

/// How a run computes and what its weights are.
#[derive(Clone, Copy)]
struct Precision {
    name: &'static str,
    stored: DType,
    compute: Option<DType>,
    masters: Masters,
    state: DType,
}

const fn precision(
    name: &'static str,
    stored: DType,
    compute: Option<DType>,
    masters: Masters,
    state: DType,
) -> Precision {
    Precision { name, stored, compute, masters, state }
}

const PRECISIONS: [Precision; 8] = {
    use DType::{BF16, F16, F32};
    [
        precision("f32", F32, None, Masters::F32, F32),
        precision("amp-f16", F32, Some(F16), Masters::F32, F32),
        precision("amp-bf16", F32, Some(BF16), Masters::F32, F32),
        precision("f16", F16, None, Masters::F32, F32),
        precision("bf16", BF16, None, Masters::F32, F32),
        precision("bf16-remainder", BF16, None, Masters::Remainder, F32),
        precision("bf16-stochastic", BF16, None, Masters::Stochastic, F32),
        precision("bf16-state", BF16, None, Masters::F32, BF16),
    ]
};

struct Run<C> {
    precision: Precision,
    parameters: Parameters,
    layers: (nn::Linear, nn::BatchNorm, nn::Linear),
    optimizer: Optim<C>,
    scaler: GradScaler,
    scheduler: Scheduler,
}

impl<C: Config> Run<C> {
    fn new(seed: u64, precision: Precision, config: C) -> Result<Self> {
        random::manual_seed(seed);
        let varmap = nn::VarMap::new();
        let vb = nn::var_builder(&varmap, precision.stored, &Device::Cpu);
        let layers = (
            nn::linear(6, 8, vb.pp("first"))?,
            nn::batch_norm(8, 1e-5, vb.pp("norm"))?,
            nn::linear(8, 3, vb.pp("second"))?,
        );
        let parameters = Parameters::from_varmap(&varmap);
        let mut optimizer = Optim::new(&parameters, config)?.with_state_dtype(precision.state)?;
        if precision.masters != Masters::F32 {
            optimizer = optimizer.with_masters(precision.masters)?;
        }
        let scheduler = Scheduler::new(Schedule::cosine(80).with_warm_up(9), &mut optimizer)?;
        let scaler = GradScaler::new(ScaleConfig {
            init_scale: 2f32.powi(20),
            growth_interval: 7,
            hysteresis: 2,
            ..Default::default()
        })?;
        Ok(Self { precision, parameters, layers, optimizer, scaler, scheduler })
    }

    fn train(&mut self, steps: std::ops::Range<u64>) -> Result<()> {
        let amp = self.precision.compute.map_or_else(Autocast::disabled, Autocast::new);
        let (first, norm, second) = &self.layers;
        for step in steps {
            let x = util::random(step, (8, 6), self.precision.stored);
            let y = Tensor::new(&[0u32, 1, 2, 0, 1, 2, 0, 1], &Device::Cpu)?;
            let loss = amp.scope(|| {
                let h = ops::relu(&norm.forward_t(&first.forward(&x)?, true)?)?;
                ops::cross_entropy(&second.forward(&ops::dropout(&h, 0.2)?)?, &y)
            })?;
            self.scaler.scale(&loss)?.backward()?;
            self.scaler.clip_grad_norm(0.5)?;
            let outcome = self.scaler.step(&mut self.optimizer)?;
            self.scheduler.step(&outcome, &mut self.optimizer)?;
            self.scaler.update()?;
        }
        Ok(())
    }

    fn save(&self, step: u64, path: &Path) -> Result<()> {
        Checkpoint::new(step)
            .with("model", &self.parameters)?
            .with("optimizer", &self.optimizer)?
            .with("scaler", &self.scaler)?
            .with("schedule", &self.scheduler)?
            .with("random", &random::Generator)?
            .save(path)
    }

    fn load(&mut self, path: &Path) -> Result<u64> {
        let saved = Checkpoint::open(path)?;
        let mut generator = random::Generator;
        let mut parts: [(&str, &mut dyn Stateful); 5] = [
            ("model", &mut self.parameters),
            ("optimizer", &mut self.optimizer),
            ("scaler", &mut self.scaler),
            ("schedule", &mut self.scheduler),
            ("random", &mut generator),
        ];
        saved.load(&mut parts)?;
        Ok(saved.step())
    }
}

/// What to do with one case.
trait Work {
    fn on<C: Config>(&self, name: &str, precision: Precision, config: C) -> Result<()>;
}

fn for_each_case(work: &impl Work) -> Result<()> {
    for precision in PRECISIONS {
        let case = |optimizer: &str| format!("{optimizer}-{}", precision.name);
        let sgd = SgdConfig { lr: 0.05, momentum: 0.9, nesterov: true, ..Default::default() };
        work.on(&case("sgd"), precision, sgd)?;
        let adamw = AdamWConfig { lr: 0.01, amsgrad: true, ..Default::default() };
        work.on(&case("adamw"), precision, adamw)?;
        work.on(&case("lion"), precision, LionConfig { lr: 0.003, ..Default::default() })?;
        work.on(&case("lamb"), precision, LambConfig { lr: 0.02, ..Default::default() })?;
    }
    Ok(())
}

/// Trains 100 steps, and saves in the middle and at the end.
struct Whole<'a>(&'a Path);

impl Work for Whole<'_> {
    fn on<C: Config>(&self, name: &str, precision: Precision, config: C) -> Result<()> {
        let mut run = Run::new(11, precision, config)?;
        run.train(0..50)?;
        run.save(50, &self.0.join(format!("{name}-50")))?;
        run.train(50..100)?;
        run.save(100, &self.0.join(format!("{name}-whole")))
    }
}

/// Goes on from the middle, and saves at the end.
struct Half<'a>(&'a Path);

impl Work for Half<'_> {
    fn on<C: Config>(&self, name: &str, precision: Precision, config: C) -> Result<()> {
        let mut run = Run::new(12, precision, config)?;
        run.train(200..203)?; // what it will forget
        let step = run.load(&self.0.join(format!("{name}-50")))?;
        run.train(step..100)?;
        run.save(100, &self.0.join(format!("{name}-resumed")))
    }
}

struct Compare<'a>(&'a Path);

impl Work for Compare<'_> {
    fn on<C: Config>(&self, name: &str, _: Precision, _: C) -> Result<()> {
        let read = |which: &str| std::fs::read(self.0.join(format!("{name}-{which}"))).unwrap();
        let (middle, whole, resumed) = (read("50"), read("whole"), read("resumed"));
        assert!(whole != middle, "{name}: nothing was learnt");
        assert!(whole == resumed, "{name}: the resumed run is another one");
        Ok(())
    }
}

#[test]
fn a_resumed_run_is_the_run_bit_for_bit() -> Result<()> {
    let _fork = random::fork_rng_guard();
    let folder = Folder::new();
    for_each_case(&Whole(&folder.0))?;
    let output = elsewhere("saving::resume::the_second_half", &folder.0).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    for_each_case(&Compare(&folder.0))
}

#[test]
#[ignore = "the other half of the test above, which runs it"]
fn the_second_half() -> Result<()> {
    let _fork = random::fork_rng_guard();
    for_each_case(&Half(&workplace()))
}
