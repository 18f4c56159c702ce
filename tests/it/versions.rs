//! What is written in place between forward and backward.

use candle_amp::autograd::checkpoint;
use candle_amp::checkpoints::Checkpoint;
use candle_amp::optim::{Ema, EmaConfig, Sgd, SgdConfig};
use candle_amp::{GradScaler, MasterWeights, Parameters, ops};
use candle_core::{DType, Result, Tensor, Var};
use candle_nn::{Optimizer, SGD};

use crate::bad_input::assert_says;
use crate::util::{assert_same, random};

fn var(seed: u64) -> Result<Var> {
    Var::from_tensor(&random(seed, (3, 3), DType::F32))
}

fn parameters(w: &Var) -> candle_amp::Result<Parameters> {
    Parameters::named([("w", w.clone())])
}

fn step(w: &Var) -> candle_amp::Result<()> {
    let mut sgd = Sgd::new(&parameters(w)?, SgdConfig { lr: 0.5, ..Default::default() })?;
    let mut scaler = GradScaler::disabled();
    scaler.scale(&ops::sum(w)?)?.backward()?;
    scaler.step(&mut sgd)?;
    Ok(())
}

fn step_candles(w: &Var, is_bound: bool) -> candle_amp::Result<()> {
    let mut sgd = SGD::new(vec![w.clone()], 0.5)?;
    let mut scaler = GradScaler::disabled();
    scaler.scale(&ops::sum(w)?)?.backward()?;
    match is_bound {
        true => scaler.step(&mut parameters(w)?.bind(&mut sgd))?,
        false => scaler.step(&mut sgd)?,
    };
    Ok(())
}

/// Runs backward by a scaler and by candle, each of which has to refuse.
fn assert_refused(what: &str, losses: [Tensor; 2]) {
    let [by_scaler, by_candle] = losses;
    let mut scaler = GradScaler::disabled();
    let by_scaler = scaler.scale(&by_scaler).and_then(|loss| loss.backward());
    for error in
        [by_scaler.err().map(|e| e.to_string()), by_candle.backward().err().map(|e| e.to_string())]
    {
        let error = error.unwrap_or_else(|| panic!("{what}: no error"));
        assert!(error.contains("its old values are gone"), "{what}: {error}");
    }
}

#[test]
fn whatever_the_crate_writes_is_noticed() -> candle_amp::Result<()> {
    let file = std::env::temp_dir().join(format!("candle-amp-versions-{}", std::process::id()));
    let file = file.with_extension("safetensors");
    type Write = Box<dyn Fn(&Var) -> candle_amp::Result<()>>;
    let ema = |w: &Var| Ema::new(&parameters(w)?, EmaConfig { decay: 0.5, ..Default::default() });
    let path = file.clone();
    let writes: [(&str, Write); 8] = [
        ("a step", Box::new(step)),
        ("a step of candle's optimizer", Box::new(|w| step_candles(w, false))),
        ("a step of candle's optimizer, bound", Box::new(|w| step_candles(w, true))),
        ("averages put in place", Box::new(move |w| ema(w)?.swap_in())),
        (
            "averages put in place and back",
            Box::new(move |w| {
                let mut ema = ema(w)?;
                ema.swap_in()?;
                ema.swap_out()
            }),
        ),
        ("averages for good", Box::new(move |w| ema(w)?.copy_to())),
        (
            "a master's refresh",
            Box::new(|w| {
                let half = Var::from_tensor(&w.to_dtype(DType::BF16)?)?;
                let loss = ops::sum(&ops::mul(&half, &half)?)?.to_dtype(DType::F32)?;
                let second = ops::sum(&ops::mul(&half, &half)?)?.to_dtype(DType::F32)?;
                let masters = MasterWeights::<SGD>::new(vec![half.clone()], 0.5)?;
                masters.refresh()?;
                assert_refused("a master's refresh", [loss, second]);
                step(w)
            }),
        ),
        (
            "a checkpoint that is loaded",
            Box::new(move |w| {
                let mut parameters = parameters(w)?;
                Checkpoint::new(1).with("model", &parameters)?.save(&path)?;
                Checkpoint::open(&path)?.load(&mut [("model", &mut parameters)])
            }),
        ),
    ];
    for (what, write) in writes {
        type Model = fn(&Tensor) -> Result<Tensor>;
        let models: [(&str, Model); 6] = [
            ("the crate's", |w| ops::sum(&ops::mul(w, w)?)),
            ("the crate's, of a view", |w| ops::sum(&ops::gelu_tanh(&w.t()?)?)),
            ("candle's", |w| (w * w)?.sum_all()),
            ("candle's, of a view", |w| w.relu()?.matmul(&w.t()?)?.sum_all()),
            ("candle's, the first operand", |w| {
                let other = Var::from_tensor(&w.ones_like()?)?;
                (w * ops::relu(&other)?.affine(2.0, 1.0)?)?.sum_all()
            }),
            ("candle's below the crate's", |w| ops::sum(&ops::relu(&w.sqr()?)?)),
        ];
        for (kind, model) in models {
            let w = var(3)?;
            // candle's backward passes no operator of the crate where the loss is candle's alone.
            let loss = |w: &Tensor| ops::sum(&model(w)?);
            let losses = [loss(&w)?, loss(&w)?];
            write(&w)?;
            assert_refused(&format!("{what}, {kind}"), losses);
            let mut scaler = GradScaler::disabled();
            scaler.scale(&loss(&w)?)?.backward()?;
        }
    }
    std::fs::remove_file(file).map_err(candle_core::Error::from)?;
    Ok(())
}

/// The first iteration of a GAN: the critic, detached, is read by the generator's loss and then stepped.
#[test]
fn a_detached_weight_s_first_step_is_noticed() -> candle_amp::Result<()> {
    let (generator, critic) = (var(1)?, var(2)?);
    let loss = || ops::sum(&ops::linear(&generator, &critic.detach(), None)?);
    let losses = [loss()?, loss()?];
    step(&critic)?;
    assert_refused("a detached weight", losses);
    Ok(())
}

#[test]
fn what_candle_made_of_other_variables_may_be_stepped_around() -> candle_amp::Result<()> {
    let (w, other) = (var(1)?, var(2)?);
    let loss = || -> Result<Tensor> { ops::sum(&ops::relu(&(w.as_tensor() * w.as_tensor())?)?) };
    let (before, kept) = (loss()?, loss()?);
    let expected = before.backward()?.get(&w).expect("a gradient").clone();
    step(&other)?;
    let mut scaler = GradScaler::disabled();
    scaler.scale(&kept)?.backward()?;
    assert_same("another's step", &scaler.grad(&w)?.expect("a gradient"), &expected);
    Ok(())
}

#[test]
fn a_checkpoint_that_would_read_what_was_written_is_refused() -> candle_amp::Result<()> {
    let (w, v, x) = (var(1)?, var(2)?, var(3)?);
    let frozen = w.as_detached_tensor();
    let loss = ops::sum(&checkpoint(move |x| ops::matmul(&ops::mul(x, &v)?, &frozen), &x)?)?;
    step(&w)?;
    let refused = GradScaler::disabled().scale(&loss)?.backward();
    assert_says(refused, &["`checkpoint`, whose function read a tensor that was written in place"]);
    Ok(())
}

/// Operators on the input alone read frozen weights too, whether a variable comes after them or none at all.
#[test]
fn a_checkpoint_of_frozen_weights_that_were_written_is_refused() -> candle_amp::Result<()> {
    for thawed in [false, true] {
        let (w, v, x) = (var(1)?, var(2)?, var(3)?);
        let frozen = w.as_detached_tensor();
        let f = move |x: &Tensor| {
            let y = ops::tanh(&ops::matmul(x, &frozen)?)?;
            if thawed { ops::mul(&y, &v) } else { Ok(y) }
        };
        let plain = GradScaler::disabled().scale(&ops::sum(&f(&x)?)?)?.backward();
        assert!(plain.is_ok(), "nothing has been written");
        let loss = ops::sum(&checkpoint(f, &x)?)?;
        step(&w)?;
        let refused = GradScaler::disabled().scale(&loss)?.backward();
        assert_says(
            refused,
            &["`checkpoint`, whose function read a tensor that was written in place"],
        );
    }
    Ok(())
}

/// Class weights are no inputs. Without a checkpoint a loss keeps a copy of them.
#[test]
fn a_checkpoint_of_class_weights_that_were_written_is_refused() -> candle_amp::Result<()> {
    let targets = Tensor::new(&[2u32, 0, 1], &candle_core::Device::Cpu)?;
    let classes = random(8, (3, 3), DType::F32);
    for form in 0..3 {
        let (w, x) = (Var::new(&[1f32, 2.0, 3.0], &candle_core::Device::Cpu)?, var(3)?);
        let weight = Some(w.as_detached_tensor());
        let (targets, classes) = (targets.clone(), classes.clone());
        let f = move |x: &Tensor| match form {
            0 => candle_amp::nn::CrossEntropyLoss { weight: weight.clone(), ..Default::default() }
                .forward(x, &targets),
            1 => candle_amp::nn::NllLoss { weight: weight.clone(), ..Default::default() }
                .forward(x, &targets),
            _ => {
                let loss = candle_amp::nn::CrossEntropyLoss {
                    weight: weight.clone(),
                    ..Default::default()
                };
                loss.forward_linear(x, &classes, None, &targets)
            }
        };
        let kept = f(&x)?;
        let loss = checkpoint(f, &x)?;
        step(&w)?;
        assert!(GradScaler::disabled().scale(&kept)?.backward().is_ok());
        let refused = GradScaler::disabled().scale(&loss)?.backward();
        assert_says(
            refused,
            &["`checkpoint`, whose function read a tensor that was written in place"],
        );
    }
    Ok(())
}

/// Only what was written after candle's operator has read it is gone.
#[test]
fn a_step_before_the_forward_pass_does_not_spoil_candles_operators() -> candle_amp::Result<()> {
    let (a, b) = (var(1)?, var(2)?);
    step(&a)?;
    let loss = (a.sqr()?.sum_all()? + ops::sum(&b)?)?;
    step(&b)?;
    let mut scaler = GradScaler::disabled();
    scaler.scale(&loss)?.backward()?;
    let gradient = scaler.grad(&a)?.expect("it has one");
    assert_same("gradient", &gradient, &(a.as_tensor() * 2.0)?);
    Ok(())
}
