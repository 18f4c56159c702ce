//! Variables that are not trained.

use candle_amp::autograd::checkpoint;
use candle_amp::optim::{Sgd, SgdConfig};
use candle_amp::{GradScaler, MasterVars, Parameters, nn, ops};
use candle_core::{DType, Device, Module, Result, Tensor, Var};

use crate::util::{assert_same, random, seeded};

/// `body`, then `head`, then `tail`.
struct Model {
    layers: [nn::Linear; 3],
    all: Parameters,
}

impl Model {
    fn new(dtype: DType) -> Result<Self> {
        let varmap = nn::VarMap::new();
        let vb = nn::var_builder(&varmap, dtype, &Device::Cpu);
        let layers = [
            nn::linear(5, 7, vb.pp("body"))?,
            nn::linear(7, 7, vb.pp("head"))?,
            nn::linear(7, 3, vb.pp("tail"))?,
        ];
        Ok(Self { layers, all: Parameters::from_varmap(&varmap) })
    }

    fn loss(&self, x: &Tensor) -> Result<Tensor> {
        let [body, head, tail] = &self.layers;
        let inner = ops::relu(&head.forward(&ops::relu(&body.forward(x)?)?)?)?;
        ops::mean(&ops::square(&tail.forward(&inner)?)?)
    }

    /// Those of some layers.
    fn of(&self, names: &[&str]) -> Parameters {
        self.all.filter(|name| names.iter().any(|start| name.starts_with(start)))
    }
}

fn backward(model: &Model, x: &Tensor) -> candle_amp::Result<GradScaler> {
    let mut scaler = GradScaler::default();
    scaler.scale(&model.loss(x)?.to_dtype(DType::F32)?)?.backward()?;
    Ok(scaler)
}

#[test]
fn frozen_variables_get_no_gradient_and_the_others_the_same() -> candle_amp::Result<()> {
    let _fork = seeded(1);
    for dtype in [DType::F32, DType::BF16] {
        let (model, x) = (Model::new(dtype)?, random(1, (4, 5), dtype));
        let all = backward(&model, &x)?;
        // Below all that is trained, above, and both.
        for names in [&["body"][..], &["tail"], &["body", "tail"]] {
            let frozen = model.of(names);
            frozen.freeze();
            let mut scaler = backward(&model, &x)?;
            let mut squares = 0.0;
            for (name, var) in model.all.iter() {
                if frozen.iter().any(|(other, _)| other == name) {
                    assert!(scaler.grad(var)?.is_none(), "{name}");
                    continue;
                }
                let gradient = scaler.grad(var)?.expect("a gradient");
                assert_same(name, &gradient, &all.grad(var)?.expect("a gradient"));
                squares += gradient.to_dtype(DType::F64)?.sqr()?.sum_all()?.to_scalar::<f64>()?;
            }
            assert!(scaler.missing(&model.all).is_empty());
            // The norm is of the others alone.
            let norm = scaler.clip_grad_norm(1e9)?.to_dtype(DType::F64)?.to_scalar::<f64>()?;
            let error = (norm - squares.sqrt()).abs() / norm;
            assert!(error < 4.0 * f64::from(f32::EPSILON), "{names:?}: {norm}, {squares}");
            frozen.unfreeze();
        }
        let again = backward(&model, &x)?;
        for (name, var) in model.all.iter() {
            let gradient = again.grad(var)?.expect("a gradient again");
            assert_same(name, &gradient, &all.grad(var)?.expect("a gradient"));
        }
    }
    Ok(())
}

#[test]
fn below_what_is_trained_there_is_no_graph() -> candle_amp::Result<()> {
    let (model, x) = (Model::new(DType::F32)?, random(2, (4, 5), DType::F32));
    model.of(&["body"]).freeze();
    assert!(!model.layers[0].forward(&x)?.track_op());
    assert!(model.layers[1].forward(&random(3, (4, 7), DType::F32))?.track_op());
    // candle's own backward finds none either.
    let gradients = model.loss(&x)?.backward()?;
    assert!(gradients.get(model.layers[0].weight()).is_none());
    assert!(gradients.get(model.layers[1].weight()).is_some());
    model.all.freeze();
    let error = GradScaler::default().scale(&model.loss(&x)?)?.backward().unwrap_err();
    assert!(error.to_string().contains("frozen"), "{error}");
    Ok(())
}

#[test]
fn an_overflow_of_a_frozen_variable_skips_no_step() -> candle_amp::Result<()> {
    let trained = Var::new(&[1f32, -2.0], &Device::Cpu)?;
    let frozen = Var::new(&[3f32, 0.5], &Device::Cpu)?;
    // The gradient of `frozen` is infinite, by an operator of the crate and by one of candle's.
    let huge = Tensor::new(&[f32::MAX, f32::MAX], &Device::Cpu)?;
    for by_candle in [false, true] {
        let named = [("trained", trained.clone()), ("frozen", frozen.clone())];
        let all = Parameters::named(named)?;
        all.filter(|name| name == "frozen").freeze();
        let before = frozen.to_vec1::<f32>()?;
        let product = match by_candle {
            true => (&huge * frozen.as_tensor())?,
            false => ops::mul(&huge, &frozen)?,
        };
        let loss = ops::add(&ops::sum(&product)?, &ops::sum(&trained)?)?;
        let mut scaler = GradScaler::default();
        let mut sgd = Sgd::new(&all, SgdConfig { lr: 0.1, ..Default::default() })?;
        scaler.scale(&loss)?.backward()?;
        assert!(scaler.grad(&frozen)?.is_none(), "by candle: {by_candle}");
        assert!(!scaler.step(&mut sgd)?.skipped()?, "by candle: {by_candle}");
        scaler.update()?;
        assert_eq!(frozen.to_vec1::<f32>()?, before);
    }
    Ok(())
}

#[test]
fn copies_of_frozen_masters_are_frozen() -> candle_amp::Result<()> {
    let masters = MasterVars::new(DType::BF16, &Device::Cpu);
    let vb = masters.var_builder();
    let (body, head) = (nn::linear(5, 7, vb.pp("body"))?, nn::linear(7, 3, vb.pp("head"))?);
    let all = masters.parameters();
    all.filter(|name| name.starts_with("head")).freeze();
    let x = random(5, (4, 5), DType::BF16);
    let loss = ops::mean(&head.forward(&ops::relu(&body.forward(&x)?)?)?)?;
    let mut scaler = GradScaler::default();
    scaler.scale(&loss.to_dtype(DType::F32)?)?.backward()?;
    for (name, var) in all.iter() {
        assert_eq!(scaler.grad(var)?.is_none(), name.starts_with("head"), "{name}");
    }
    Ok(())
}

/// A checkpoint recomputes operators of the crate and of candle on frozen variables, and on nothing else.
#[test]
fn checkpoints_of_frozen_variables_give_them_no_gradient() -> candle_amp::Result<()> {
    let [trained, frozen] = [20, 21].map(|seed| random(seed, (3, 3), DType::F32));
    let [trained, frozen] = [Var::from_tensor(&trained)?, Var::from_tensor(&frozen)?];
    Parameters::named([("frozen", frozen.clone())])?.freeze();
    let block = {
        let frozen = frozen.clone();
        move |x: &Tensor| ops::relu(&(ops::matmul(x, &frozen)? + frozen.as_tensor())?)
    };
    let of = |y: Tensor| -> candle_amp::Result<GradScaler> {
        let mut scaler = GradScaler::default();
        scaler.scale(&ops::sum(&ops::square(&y)?)?)?.backward()?;
        Ok(scaler)
    };
    let (plain, scaler) = (of(block(&trained)?)?, of(checkpoint(block.clone(), &trained)?)?);
    assert!(scaler.grad(&frozen)?.is_none() && plain.grad(&frozen)?.is_none());
    let [actual, expected] = [&scaler, &plain].map(|scaler| scaler.grad(&trained));
    assert_same("trained", &actual?.expect("a gradient"), &expected?.expect("a gradient"));
    // With nothing to train in it, a checkpoint is a constant.
    let constant = checkpoint(block, &random(22, (3, 3), DType::F32))?;
    let scaler = of(ops::add(&constant, &trained)?)?;
    assert!(scaler.grad(&frozen)?.is_none() && scaler.grad(&trained)?.is_some());
    Ok(())
}
