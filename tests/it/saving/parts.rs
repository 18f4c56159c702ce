//! What each part saves, and that nothing changes when anything does not fit.

use std::fs;

use candle_amp::checkpoints::{Checkpoint, State, Stateful};
use candle_amp::error::CheckpointError;
use candle_amp::optim::{
    AdamW, AdamWConfig, Ema, EmaConfig, PlateauConfig, ReduceOnPlateau, Schedule, Scheduler, Sgd,
    SgdConfig,
};
use candle_amp::{
    Error, GradScaler, LossScale, MasterVars, Parameters, Result, ScaleConfig, ops, random,
};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Module, VarBuilder};

use super::{Folder, signed};
use crate::bad_input::assert_says;
use crate::util::{self, assert_same, to_vec};

/// One of each dtype, and awkward shapes.
fn parameters(seed: u64) -> Result<Parameters> {
    let var = |seed, shape: &[usize], dtype| Var::from_tensor(&util::random(seed, shape, dtype));
    Parameters::named([
        ("half.weight", var(seed, &[3, 5], DType::F16)?),
        ("bfloat.weight", var(seed + 1, &[70_001], DType::BF16)?),
        ("a \"quoted\" name", var(seed + 2, &[], DType::F32)?),
        ("double", var(seed + 3, &[2, 1, 2], DType::F64)?),
        ("nothing", var(seed + 4, &[0, 4], DType::F32)?),
    ])
}

fn values(parameters: &Parameters) -> Vec<Vec<f64>> {
    parameters.iter().map(|(_, var)| to_vec(var)).collect()
}

#[test]
fn everything_comes_back_as_it_was() -> Result<()> {
    let _fork = random::fork_rng_guard();
    let folder = Folder::new();
    let path = folder.file("run.safetensors");
    let config = ScaleConfig {
        init_scale: 3.25,
        growth_factor: 1.7,
        backoff_factor: 0.1,
        growth_interval: 5,
        hysteresis: 4,
        min_scale: 0.3,
        max_scale: 1e5,
    };
    let scale = LossScale::restore(config, 12.3, 3)?.with_hysteresis_tracker(2);
    let mut scaler = GradScaler::default();
    scaler.load_state(Some(scale))?;
    let (model, statistics) = (parameters(1)?, candle_nn::VarMap::new());
    let vb = candle_amp::nn::var_builder(&statistics, DType::F32, &Device::Cpu);
    candle_amp::nn::batch_norm(3, 1e-5, vb)?;
    let mut norm = Parameters::from_varmap(&statistics);
    for (_, var) in norm.buffers() {
        var.set(&util::random(5, var.shape(), DType::F32))?;
    }
    let generator = random::RandomState { seed: u64::MAX, draws: 1 << 60 };
    random::set_state(generator);
    let mut ema = Ema::new(&model, EmaConfig::default())?;
    ema.update()?;
    let mut sgd = Sgd::new(&model, SgdConfig::default())?;
    let mut scheduler = Scheduler::new(Schedule::cosine(10), &mut sgd)?;
    (0..3).for_each(|_| scheduler.after(true, &mut sgd));
    let mut plateau = ReduceOnPlateau::new(PlateauConfig::default())?;
    [0.5, 0.1, 0.7].into_iter().for_each(|measure| plateau.step(measure, &mut sgd));
    let own = State::default().with("epoch", 3).with("quoted", "\"\\\n\u{1F980}");
    Checkpoint::new(77)
        .metric(0.1 + 0.2)
        .with("model", &model)?
        .with("norm", &norm)?
        .with("scaler", &scaler)?
        .with("off", &GradScaler::disabled())?
        .with("random", &random::Generator)?
        .with("ema", &ema)?
        .with("schedule", &scheduler)?
        .with("plateau", &plateau)?
        .with("own", &own)?
        .save(&path)?;
    let first = fs::read(&path).unwrap();

    let saved = Checkpoint::open(&path)?;
    assert_eq!((saved.step(), saved.metric(), saved.path()), (77, Some(0.1 + 0.2), &*path));
    let names = ["ema", "model", "norm", "off", "own", "plateau", "random", "scaler", "schedule"];
    assert_eq!(saved.parts().collect::<Vec<_>>(), names);
    let statistics: Vec<_> = norm.buffers().map(|(_, var)| to_vec(var)).collect();
    for (_, var) in norm.buffers().chain(norm.iter()) {
        var.set(&var.zeros_like()?)?;
    }
    let (mut other, mut other_scaler, mut off) =
        (parameters(50)?, GradScaler::default(), GradScaler::disabled());
    let mut other_ema = Ema::new(&other, EmaConfig::default())?;
    let mut other_scheduler = Scheduler::new(Schedule::cosine(10), &mut sgd)?;
    let mut other_plateau = ReduceOnPlateau::new(PlateauConfig::default())?;
    let mut other_own = State::default();
    random::manual_seed(1);
    // Neither would go on as the run did, without a word.
    for part in [("off", &mut GradScaler::default()), ("scaler", &mut GradScaler::disabled())] {
        let (name, scaler) = part;
        let enabled = scaler.is_enabled();
        let error =
            saved.load(&mut [("model", &mut other), (name, scaler)]).unwrap_err().to_string();
        let expected = format!("enabled is {}, expected {enabled}", !enabled);
        assert!(error.contains(&expected), "{error}");
        assert_eq!(scaler.is_enabled(), enabled);
    }
    saved.load(&mut [
        ("model", &mut other),
        ("norm", &mut norm),
        ("scaler", &mut other_scaler),
        ("off", &mut off),
        ("random", &mut random::Generator),
        ("ema", &mut other_ema),
        ("schedule", &mut other_scheduler),
        ("plateau", &mut other_plateau),
        ("own", &mut other_own),
    ])?;
    for ((name, a), (_, b)) in other.iter().zip(model.iter()) {
        assert_same(name, a, b);
    }
    assert_eq!(norm.buffers().map(|(_, var)| to_vec(var)).collect::<Vec<_>>(), statistics);
    assert_eq!(other_scaler.state(), Some(scale));
    assert!(!off.is_enabled());
    assert_eq!(random::state(), generator);
    assert_eq!((other_ema.updates(), &other_scheduler, other_plateau), (1, &scheduler, plateau));
    assert_eq!(other_own.values, own.values);
    // The same run is the same file, byte for byte.
    Checkpoint::new(77)
        .metric(0.1 + 0.2)
        .with("model", &other)?
        .with("norm", &norm)?
        .with("scaler", &other_scaler)?
        .with("off", &off)?
        .with("random", &random::Generator)?
        .with("ema", &other_ema)?
        .with("schedule", &other_scheduler)?
        .with("plateau", &other_plateau)?
        .with("own", &other_own)?
        .save(&path)?;
    assert!(fs::read(&path).unwrap() == first);
    Ok(())
}

/// Weights, optimizer and scaler of a run that has begun.
struct Run {
    parameters: Parameters,
    adamw: AdamW,
    scaler: GradScaler,
}

impl Run {
    fn new(names: [&str; 2], shape: usize, dtype: DType) -> Result<Self> {
        let var = |seed| Var::from_tensor(&util::random(seed, shape, dtype));
        let parameters = Parameters::named([(names[0], var(1)?), (names[1], var(2)?)])?;
        let mut adamw = AdamW::new(&parameters, AdamWConfig::default())?;
        let mut scaler = GradScaler::new(ScaleConfig::constant(2.0))?;
        for var in parameters.vars() {
            scaler.scale(&var.to_dtype(DType::F32)?.sum_all()?)?.backward()?;
        }
        scaler.step(&mut adamw)?;
        scaler.update()?;
        Ok(Self { parameters, adamw, scaler })
    }

    fn checkpoint(&self) -> Result<Checkpoint> {
        let checkpoint = Checkpoint::new(1).with("model", &self.parameters)?;
        checkpoint.with("optimizer", &self.adamw)?.with("scaler", &self.scaler)
    }

    /// Loads from `path`, in either order of the parts, which must fail and change nothing.
    #[track_caller]
    fn assert_refuses(&mut self, path: &std::path::Path, parts: &[&str]) -> Result<()> {
        for turned in [false, true] {
            let before = (values(&self.parameters), self.adamw.save()?, self.scaler.state());
            let saved = Checkpoint::open(path)?;
            let mut all: [(&str, &mut dyn Stateful); 3] = [
                ("model", &mut self.parameters),
                ("optimizer", &mut self.adamw),
                ("scaler", &mut self.scaler),
            ];
            if turned {
                all.reverse();
            }
            let refused = saved.load(&mut all);
            // Where several parts do not fit, the first is told of.
            assert_says(refused, if turned { &[] } else { parts });
            let adamw = self.adamw.save()?;
            assert_eq!(values(&self.parameters), before.0);
            assert_eq!((adamw.values, self.scaler.state()), (before.1.values, before.2));
            for (name, tensor) in adamw.tensors {
                assert_same(&name, &tensor, &before.1.tensors[&name]);
            }
        }
        Ok(())
    }
}

#[test]
fn what_does_not_fit_changes_nothing_and_is_listed() -> Result<()> {
    let folder = Folder::new();
    let path = folder.file("run.safetensors");
    let base = || Run::new(["a.w", "b.w"], 6, DType::F32);
    base()?.checkpoint()?.save(&path)?;
    let mut cases: Vec<(Run, &[&str])> = vec![
        (Run::new(["a.w", "c.w"], 6, DType::F32)?, &["missing: c.w", "unexpected: b.w"]),
        (Run::new(["a.w", "b.w"], 7, DType::F32)?, &["a.w: F32 [6], not F32 [7]"]),
        (Run::new(["a.w", "b.w"], 6, DType::BF16)?, &["a.w: F32 [6], not BF16 [6]", "b.w: F32"]),
    ];
    for (run, parts) in &mut cases {
        run.assert_refuses(&path, parts)?;
    }
    // The optimizer alone does not fit.
    let mut other = base()?;
    let config = AdamWConfig { amsgrad: true, ..Default::default() };
    other.adamw = AdamW::new(&other.parameters, config)?;
    let mut run = base()?;
    other.checkpoint()?.save(&path)?;
    run.adamw = AdamW::new(&run.parameters, AdamWConfig::default())?;
    let names = Parameters::named([("b.w", run.parameters.vars()[0].clone())])?;
    run.adamw = AdamW::new(&names, AdamWConfig::default())?;
    run.assert_refuses(&path, &["group 0 of variables"])?;
    // The scaler alone does not fit, or is in the middle of something.
    base()?.checkpoint()?.save(&path)?;
    let mut text = fs::read(&path).unwrap();
    let at = text.windows(16).position(|w| w == b"backoff_factor\":").unwrap() + 17;
    assert_eq!(&text[at..at + 3], b"0.5");
    text[at] = b'7';
    fs::write(&path, signed(text)).unwrap();
    base()?.assert_refuses(&path, &["backoff_factor is 7.5"])?;
    base()?.checkpoint()?.save(&path)?;
    let mut run = base()?;
    let w = run.parameters.vars()[0].clone();
    run.scaler.scale(&w.sum_all()?)?.backward()?;
    run.assert_refuses(&path, &["would mix two scales"])?;
    assert_says(run.checkpoint(), &["would mix two scales"]);
    Ok(())
}

#[test]
fn parts_are_named_and_all_that_are_asked_for_are_there() -> Result<()> {
    let folder = Folder::new();
    let path = folder.file("run.safetensors");
    let own = State::default().with("epoch", "three");
    for name in ["", "a.b", "own"] {
        let checkpoint = Checkpoint::new(1).with("own", &own)?;
        assert_says(checkpoint.with(name, &own), &["cannot be called", "without dots"]);
    }
    Checkpoint::new(1).with("own", &own)?.save(&path)?;
    let saved = Checkpoint::open(&path)?;
    let (mut a, mut b) = (State::default(), State::default());
    let refused = saved.load(&mut [("own", &mut a), ("other", &mut b)]);
    assert_says(refused, &["no part `other`", "\"own\""]);
    assert!(a.values.is_empty(), "nothing is half done");
    saved.load(&mut [("own", &mut a)])?;
    assert_says(a.value::<u32>("epoch"), &["epoch: \"three\", not u32"]);
    assert_says(a.value::<u32>("batch"), &["missing: batch"]);
    Ok(())
}

#[test]
fn an_optimizer_without_names_says_how_to_get_them() -> Result<()> {
    let w = Var::ones(2, DType::F32, &Device::Cpu)?;
    let sgd = Sgd::new(vec![w], SgdConfig::default())?;
    assert_says(Checkpoint::new(1).with("optimizer", &sgd), &["Parameters"]);
    Ok(())
}

#[test]
fn a_checkpoint_of_another_version_says_which() -> Result<()> {
    let folder = Folder::new();
    let path = folder.file("run.safetensors");
    Checkpoint::new(1).save(&path)?;
    let mut bytes = fs::read(&path).unwrap();
    let at = bytes.windows(11).position(|w| w == b"\"version\":\"").unwrap() + 11;
    bytes[at] = b'2';
    fs::write(&path, signed(bytes)).unwrap();
    let refused = Checkpoint::open(&path);
    assert!(matches!(
        refused,
        Err(Error::Checkpoint(CheckpointError::Version { got: 2, supported: 1, .. }))
    ));
    assert_says(refused, &["version 2", env!("CARGO_PKG_VERSION"), "reads version 1"]);
    Ok(())
}

#[test]
fn candle_reads_the_weights_of_a_checkpoint_and_of_an_export() -> Result<()> {
    let folder = Folder::new();
    let varmap = candle_amp::nn::VarMap::new();
    let vb = candle_amp::nn::var_builder(&varmap, DType::F32, &Device::Cpu);
    let layer = candle_amp::nn::linear(40, 50, vb.pp("layer"))?;
    candle_amp::nn::batch_norm(4, 1e-5, vb.pp("norm"))?;
    let parameters = Parameters::from_varmap(&varmap);
    let path = folder.file("run.safetensors");
    Checkpoint::new(1).with("model", &parameters)?.save(&path)?;
    let read = |path: &std::path::Path, dtype| {
        VarBuilder::from_buffered_safetensors(fs::read(path).unwrap(), dtype, &Device::Cpu)
    };
    let weight = read(&path, DType::F32)?.pp("model").get((50, 40), "layer.weight")?;
    let expected = &parameters.filter(|name| name == "layer.weight").vars()[0];
    assert_same("the weight", &weight, expected);

    let full = folder.file("f32.safetensors");
    parameters.export(&full, DType::F32)?;
    for dtype in [DType::F16, DType::BF16] {
        let half = folder.file("half.safetensors");
        parameters.export(&half, dtype)?;
        let size = |path| fs::metadata(path).unwrap().len() as f64;
        assert!((size(&half) / size(&full) - 0.5).abs() < 0.05, "{}, {}", size(&half), size(&full));
        let vb = read(&half, dtype)?;
        let exported = candle_nn::linear(40, 50, vb.pp("layer"))?;
        assert_same("the half weight", exported.weight(), &expected.to_dtype(dtype)?);
        let x = util::random(1, (3, 40), dtype);
        let same = candle_amp::nn::Linear::new(exported.weight().clone(), exported.bias().cloned());
        assert_eq!(same.forward(&x)?.dims(), [3, 50]);
        let tensors = candle_core::safetensors::load(&half, &Device::Cpu)?;
        assert_eq!(tensors["norm.running_var"].dtype(), DType::F32, "buffers stay as they are");
        assert_eq!(tensors["norm.weight"].dtype(), dtype);
    }
    drop(layer);
    let large = Var::new(&[1f32, 65519.0, -65520.0, f32::MAX], &Device::Cpu)?;
    let large = Parameters::named([("w", large)])?;
    let refused = large.export(folder.file("x"), DType::F16);
    assert_says(refused, &["`w` has 2 elements", "65504", "use BF16"]);
    assert!(!folder.names().contains(&"x".to_owned()));
    large.export(folder.file("x"), DType::BF16)?;
    assert_says(large.export(folder.file("x"), DType::U8), &["export", "U8"]);
    Ok(())
}

#[test]
fn loading_masters_rewrites_the_half_weights() -> Result<()> {
    let folder = Folder::new();
    let path = folder.file("run.safetensors");
    let build = || -> Result<_> {
        let masters = MasterVars::new(DType::BF16, &Device::Cpu);
        let layer = candle_nn::linear(3, 2, masters.var_builder())?;
        Ok((masters, layer))
    };
    let _fork = random::fork_rng_guard();
    let (masters, layer) = build()?;
    let (mut other, other_layer) = build()?;
    Checkpoint::new(1).with("masters", &masters)?.save(&path)?;
    assert!(to_vec(layer.weight()) != to_vec(other_layer.weight()));
    Checkpoint::open(&path)?.load(&mut [("masters", &mut other)])?;
    assert_same("the half weight", other_layer.weight(), layer.weight());
    Ok(())
}

/// A cached half copy of a weight would be of before.
#[test]
fn loading_inside_of_a_scope_is_seen() -> Result<()> {
    let folder = Folder::new();
    let path = folder.file("run.safetensors");
    let w = Var::ones((1, 1), DType::F32, &Device::Cpu)?;
    let mut parameters = Parameters::named([("w", w.clone())])?;
    Checkpoint::new(1).with("model", &parameters)?.save(&path)?;
    w.set(&(w.as_tensor() * 3.0)?)?;
    candle_amp::Autocast::new(DType::BF16).scope(|| {
        let x = Tensor::ones((1, 1), DType::F32, &Device::Cpu)?;
        assert_eq!(to_vec(&ops::matmul(&x, &w)?), [3.0]);
        Checkpoint::open(&path)?.load(&mut [("model", &mut parameters)])?;
        assert_eq!(to_vec(&ops::matmul(&x, &w)?), [1.0]);
        Ok(())
    })
}

/// Threads that load from one open file read at places of their own.
#[test]
fn threads_may_share_an_open_checkpoint() -> Result<()> {
    let folder = Folder::new();
    let path = folder.file("run");
    let part = |value: f32| -> Result<State> {
        let tensors = (0..16).map(|i| (format!("{i}"), Tensor::full(value, 1 << 14, &Device::Cpu)));
        let tensors = tensors.map(|(name, tensor)| Ok((name, tensor?)));
        Ok(State { tensors: tensors.collect::<Result<_>>()?, ..Default::default() })
    };
    Checkpoint::new(1).with("a", &part(1.25)?)?.with("b", &part(2.5)?)?.save(&path)?;
    let saved = &Checkpoint::open(&path)?;
    let load = |name: &str, value: f32| -> Result<()> {
        for _ in 0..50 {
            let mut state = State::default();
            saved.load(&mut [(name, &mut state)])?;
            for tensor in state.tensors.values() {
                assert!(tensor.to_vec1::<f32>()?.iter().all(|x| *x == value), "{name}");
            }
        }
        Ok(())
    };
    let [a, b] = std::thread::scope(|scope| {
        [("a", 1.25), ("b", 2.5)]
            .map(|(name, value)| scope.spawn(move || load(name, value)))
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    a.and(b)
}
