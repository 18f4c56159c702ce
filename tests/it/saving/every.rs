//! A run with a part of every kind, and small: what the files of the corpus are loaded into.

use std::path::Path;

use candle_amp::checkpoints::{Checkpoint, State, Stateful};
use candle_amp::optim::{
    AdamW, AdamWConfig, Ema, EmaConfig, Lamb, LambConfig, Lion, LionConfig, Masters, PlateauConfig,
    ReduceOnPlateau, Schedule, Scheduler, Sgd, SgdConfig, decay_groups,
};
use candle_amp::{GradScaler, MasterVars, Parameters, Result, ScaleConfig, random};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Shape, Tensor, Var};

pub(crate) struct Every {
    model: Parameters,
    masters: MasterVars,
    adamw: AdamW,
    sgd: Sgd,
    lion: Lion,
    lamb: Lamb,
    scaler: GradScaler,
    off: GradScaler,
    ema: Ema,
    schedule: Scheduler,
    plateau: ReduceOnPlateau,
    generator: random::Generator,
    own: State,
}

fn var(number: usize, shape: impl Into<Shape>, dtype: DType) -> Result<Var> {
    let shape = shape.into();
    let values: Vec<f32> =
        (0..shape.elem_count()).map(|i| ((number * 7 + i * 3) % 11) as f32 / 8.0 - 0.5).collect();
    Ok(Var::from_tensor(&Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)?)?)
}

impl Every {
    /// Draws from the generator.
    pub(crate) fn new() -> Result<Self> {
        let model = Parameters::named([
            ("a.weight", var(1, (2, 3), DType::F32)?),
            ("b", var(2, 3, DType::BF16)?),
            ("c", var(3, (), DType::F16)?),
            ("d \"q\"", var(4, (2, 1), DType::F64)?),
            ("e", var(5, (0, 4), DType::F32)?),
        ])?;
        let masters = MasterVars::new(DType::BF16, &Device::Cpu);
        masters.var_builder().get((2, 2), "w")?;
        let config = AdamWConfig { amsgrad: true, ..Default::default() };
        let adamw = AdamW::from_groups(decay_groups(&model, config))?;
        let config = SgdConfig { momentum: 0.9, ..Default::default() };
        let mut sgd =
            Sgd::new(model.filter(|name| name != "c"), config)?.with_masters(Masters::Remainder)?;
        let lion = Lion::new(&model, LionConfig::default())?.with_masters(Masters::Stochastic)?;
        let lamb = Lamb::new(&model, LambConfig::default())?.with_state_dtype(DType::BF16)?;
        let config = ScaleConfig { init_scale: 4.0, hysteresis: 3, ..Default::default() };
        let schedule = Scheduler::new(Schedule::cosine(100).with_warm_up(2), &mut sgd)?;
        let own = State::default().with("epoch", 3).with("quoted", "\"\\\n\u{1F980}");
        let mut every = Self {
            ema: Ema::new(&model, EmaConfig::default())?,
            plateau: ReduceOnPlateau::new(PlateauConfig::default())?,
            scaler: GradScaler::new(config)?,
            off: GradScaler::disabled(),
            generator: random::Generator,
            model,
            masters,
            adamw,
            sgd,
            lion,
            lamb,
            schedule,
            own,
        };
        every.step()?;
        Ok(every)
    }

    /// A step of everything: it goes on from what was loaded. No gradients are left behind.
    pub(crate) fn step(&mut self) -> Result<()> {
        let stepped = self.step_all();
        self.scaler.zero_grad();
        stepped
    }

    fn step_all(&mut self) -> Result<()> {
        let mut gradients = GradStore::default();
        for var in self.model.vars() {
            gradients.insert(&var, var.ones_like()?);
        }
        // Each writes what is the master of another.
        self.adamw.reload_masters()?;
        self.adamw.step(&gradients)?;
        self.sgd.step(&gradients)?;
        self.lion.step(&gradients)?;
        self.lamb.reload_masters()?;
        self.lamb.step(&gradients)?;
        let first = self.model.vars().into_iter().find(|var| var.dtype() == DType::F32);
        if let Some(var) = first {
            self.scaler.scale(&var.sum_all()?)?.backward()?;
            let _ = self.scaler.step(&mut self.sgd)?;
            self.scaler.update()?;
        }
        self.ema.update()?;
        self.schedule.after(true, &mut self.sgd);
        self.plateau.step(0.5, &mut self.sgd);
        Ok(())
    }

    pub(crate) fn parts(&mut self) -> [(&'static str, &mut dyn Stateful); 13] {
        [
            ("adamw", &mut self.adamw),
            ("ema", &mut self.ema),
            ("lamb", &mut self.lamb),
            ("lion", &mut self.lion),
            ("masters", &mut self.masters),
            ("model", &mut self.model),
            ("off", &mut self.off),
            ("own", &mut self.own),
            ("plateau", &mut self.plateau),
            ("random", &mut self.generator),
            ("scaler", &mut self.scaler),
            ("schedule", &mut self.schedule),
            ("sgd", &mut self.sgd),
        ]
    }

    /// Saves all parts to `path`; the bytes of the file.
    pub(crate) fn save(&mut self, path: &Path) -> Result<Vec<u8>> {
        let mut checkpoint = Checkpoint::new(9).metric(0.5);
        for (name, part) in self.parts() {
            checkpoint = checkpoint.with(name, &part.save()?)?;
        }
        checkpoint.save(path)?;
        Ok(std::fs::read(path).unwrap())
    }

    /// Loads every part that the file has.
    pub(crate) fn load(&mut self, path: &Path) -> Result<()> {
        let saved = Checkpoint::open(path)?;
        let there = |name: &str| saved.parts().any(|part| part == name);
        let mut parts: Vec<_> = self.parts().into_iter().filter(|(name, _)| there(name)).collect();
        saved.load(&mut parts)
    }

    /// Everything that could have changed. Numbers as bits: what was loaded may be NaN.
    pub(crate) fn bits(&mut self) -> Result<Vec<(String, Vec<u64>)>> {
        let mut all = Vec::new();
        for (part, state) in self.parts() {
            let State { tensors, values } = state.save()?;
            all.extend(values.into_iter().map(|(k, v)| (format!("{part}.{k} is {v}"), Vec::new())));
            for (name, tensor) in tensors {
                let name = format!("{part}.{name}: {:?} {:?}", tensor.dtype(), tensor.dims());
                let values = tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
                all.push((name, values.into_iter().map(f64::to_bits).collect()));
            }
        }
        Ok(all)
    }
}
