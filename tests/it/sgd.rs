//! SGD against the formula, step by step.

use candle_amp::optim::{Sgd, SgdConfig};
use candle_core::backprop::GradStore;
use candle_core::{DType, Result, Var};

use crate::util::{assert_close, random, to_vec};

/// PyTorch's documented algorithm, on doubles.
fn oracle(w: &mut f64, buffer: &mut Option<f64>, gradient: f64, config: &SgdConfig) {
    let mut g = gradient + config.weight_decay * *w;
    if config.momentum != 0.0 {
        let b = match *buffer {
            None => g,
            Some(b) => config.momentum * b + (1.0 - config.dampening) * g,
        };
        *buffer = Some(b);
        g = if config.nesterov { g + config.momentum * b } else { b };
    }
    *w -= config.lr * g;
}

#[test]
fn every_setting_follows_pytorchs_formula() -> Result<()> {
    let plain = SgdConfig { lr: 0.3, ..Default::default() };
    let momentum = SgdConfig { momentum: 0.9, ..plain };
    let configs = [
        plain,
        SgdConfig { weight_decay: 0.05, ..plain },
        momentum,
        SgdConfig { dampening: 0.4, weight_decay: 0.05, ..momentum },
        SgdConfig { nesterov: true, weight_decay: 0.05, ..momentum },
    ];
    for config in configs {
        for dtype in [DType::F32, DType::F64] {
            // Past the end of a vector and of a block.
            let var = Var::from_tensor(&random(1, 70_003, dtype))?;
            let (mut w, mut buffers) = (to_vec(&var), vec![None; 70_003]);
            let mut sgd = Sgd::new(vec![var.clone()], config)?;
            for step in 0..4 {
                let gradient = random(10 + step, 70_003, dtype);
                for ((w, b), g) in w.iter_mut().zip(&mut buffers).zip(to_vec(&gradient)) {
                    oracle(w, b, g, &config);
                }
                let mut store = GradStore::default();
                store.insert(&var, gradient);
                sgd.step(&store)?;
            }
            let expected = candle_core::Tensor::new(w, var.device())?;
            assert_close(&format!("{config:?}"), &var, &expected, dtype, 8.0);
        }
    }
    Ok(())
}

#[test]
fn half_variables_follow_their_masters() -> Result<()> {
    for dtype in [DType::F16, DType::BF16] {
        let half = Var::from_tensor(&random(1, 33, dtype))?;
        let full = Var::from_tensor(&half.detach().to_dtype(DType::F32)?)?;
        let config = SgdConfig { lr: 1e-4, momentum: 0.9, ..Default::default() };
        let mut sgd = Sgd::new(vec![half.clone(), full.clone(), half.clone()], config)?;
        for step in 0..50 {
            // Powers of two, the same for both: exact in every dtype.
            let gradient = half.ones_like()?.affine(2f64.powi(step % 3), 0.0)?;
            let mut store = GradStore::default();
            store.insert(&full, gradient.to_dtype(DType::F32)?);
            store.insert(&half, gradient);
            sgd.step(&store)?;
        }
        let rounded = full.to_dtype(dtype)?;
        crate::util::assert_same("half", &half, &rounded);
    }
    Ok(())
}

#[test]
fn a_gradient_of_the_wrong_shape_updates_nothing() -> Result<()> {
    let (a, b) = (
        Var::from_tensor(&random(1, 3, DType::F32))?,
        Var::from_tensor(&random(2, 4, DType::F32))?,
    );
    let before = to_vec(&a);
    let mut store = GradStore::default();
    store.insert(&a, random(3, 3, DType::F32));
    store.insert(&b, random(4, 5, DType::F32));
    let mut sgd = Sgd::new(vec![a.clone(), b], SgdConfig { lr: 1.0, ..Default::default() })?;
    let message = sgd.step(&store).unwrap_err().to_string();
    assert!(message.contains("has shape [5]") && message.contains("[4]"), "{message}");
    assert_eq!(to_vec(&a), before);
    Ok(())
}
