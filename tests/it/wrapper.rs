//! Optimizers around optimizers.

use candle_amp::optim::{Sgd, SgdConfig, Step, UnscaledGradients};
use candle_amp::{GradScaler, ScaleConfig, ops};
use candle_core::{DType, Result, Tensor, Var};

use crate::util::{assert_same, random};

/// Hands its gradients on, and says to whom or does not.
struct Wrapper(Sgd, bool);

impl Step for Wrapper {
    fn variables(&self) -> Option<Vec<candle_core::TensorId>> {
        self.0.variables()
    }
    fn inner(&self) -> Option<&dyn Step> {
        self.1.then_some(&self.0)
    }
    fn apply(&mut self, gradients: &UnscaledGradients<'_>) -> Result<()> {
        self.0.apply(gradients)
    }
}

/// The gradients are unscaled once, whether the scaler or the optimizer within does it.
#[test]
fn a_wrapper_steps_as_the_optimizer_within() -> candle_amp::Result<()> {
    let stepped = |inner: Option<bool>| -> candle_amp::Result<Tensor> {
        let w = Var::from_tensor(&random(1, (3, 4), DType::F32))?;
        let sgd = || Sgd::new(vec![w.clone()], SgdConfig { lr: 0.5, ..Default::default() });
        let mut scaler = GradScaler::new(ScaleConfig::constant(1024.0))?;
        for seed in 2..4 {
            scaler
                .scale(&ops::sum(&ops::matmul(&random(seed, (5, 3), DType::F32), &w)?)?)?
                .backward()?;
            scaler.clip_grad_norm(3.0)?;
            let skipped = match inner {
                Some(says) => scaler.step(&mut Wrapper(sgd()?, says))?.skipped()?,
                None => scaler.step(&mut sgd()?)?.skipped()?,
            };
            assert!(!skipped);
            scaler.update()?;
        }
        Ok(w.as_tensor().copy()?)
    };
    let expected = stepped(None)?;
    assert_same("named", &stepped(Some(true))?, &expected);
    assert_same("not named", &stepped(Some(false))?, &expected);
    Ok(())
}

/// Sees the gradients on their way to the optimizer within.
struct Watches(Sgd, Var, Option<Tensor>);

impl Step for Watches {
    fn variables(&self) -> Option<Vec<candle_core::TensorId>> {
        self.0.variables()
    }
    fn inner(&self) -> Option<&dyn Step> {
        Some(&self.0)
    }
    fn apply(&mut self, gradients: &UnscaledGradients<'_>) -> Result<()> {
        self.2 = gradients.get(&self.1)?;
        self.0.apply(gradients)
    }
}

/// What it is shown is unscaled and clipped, and what the optimizer within gets is so once.
#[test]
fn a_wrapper_sees_unscaled_gradients() -> candle_amp::Result<()> {
    let (w, start) = (Var::new(&[1f32, 2.0], &candle_core::Device::Cpu)?, [1.0, 2.0]);
    let sgd = Sgd::new(vec![w.clone()], SgdConfig { lr: 0.5, ..Default::default() })?;
    let mut watches = Watches(sgd, w.clone(), None);
    let mut scaler = GradScaler::new(ScaleConfig::constant(1024.0))?;
    let x = Tensor::new(&[6f32, 8.0], &candle_core::Device::Cpu)?;
    scaler.scale(&ops::sum(&ops::mul(&w, &x)?)?)?.backward()?;
    scaler.clip_grad_norm(5.0)?;
    assert!(!scaler.step(&mut watches)?.skipped()?);
    let seen = watches.2.expect("a gradient").to_vec1::<f32>()?;
    for ((seen, expected), (w, start)) in
        seen.iter().zip([3.0, 4.0]).zip(w.to_vec1::<f32>()?.iter().zip(start))
    {
        assert!((seen - expected).abs() < 1e-5, "{seen} {expected}");
        assert!((w - (start - 0.5 * expected)).abs() < 1e-5, "{w}");
    }
    Ok(())
}
