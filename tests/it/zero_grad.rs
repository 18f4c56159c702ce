//! Gradients of some parameters that are dropped before the others are stepped.

use candle_amp::optim::{Sgd, SgdConfig};
use candle_amp::{GradScaler, Parameters, nn, ops};
use candle_core::{DType, Device, Module, Result, Tensor, Var};

use crate::util::{assert_same, random};

/// A critic's loss of samples that were not detached leaves nothing on the generator.
#[test]
fn gradients_of_some_parameters_can_be_dropped() -> candle_amp::Result<()> {
    let varmap = nn::VarMap::new();
    let vb = nn::var_builder(&varmap, DType::F32, &Device::Cpu);
    let (generator, critic) = (nn::linear(5, 7, vb.pp("g"))?, nn::linear(7, 3, vb.pp("c"))?);
    let of_generator = Parameters::from_varmap(&varmap).filter(|name| name.starts_with("g."));
    let judge = |x: &Tensor| ops::mean(&ops::square(&critic.forward(x)?)?);
    let (sample, weight) =
        (|x: &Tensor| -> Result<Tensor> { generator.forward(x) }, generator.weight());
    let x = random(6, (4, 5), DType::F32);

    let mut alone = GradScaler::default();
    alone.scale(&judge(&sample(&x)?)?)?.backward()?;
    let expected = alone.grad(weight)?.expect("a gradient");

    let mut scaler = GradScaler::default();
    let of_critic = ops::affine(&judge(&sample(&x)?)?, -3.0, 1.0)?;
    scaler.scale(&of_critic)?.backward()?;
    scaler.unscale()?;
    scaler.zero_grad_of(&of_generator);
    assert!(scaler.grad(weight)?.is_none());
    assert!(scaler.grad(critic.weight())?.is_some());
    scaler.scale(&judge(&sample(&x)?)?)?.backward()?;
    assert_same("the generator's", &scaler.grad(weight)?.expect("a gradient"), &expected);
    Ok(())
}

#[test]
fn dropped_overflows_are_forgotten_and_kept_ones_are_not() -> candle_amp::Result<()> {
    let [a, b] = [1f32, 2.0].map(|x| Var::new(&[x], &Device::Cpu).expect("a variable"));
    let huge = Tensor::new(&[f32::MAX], &Device::Cpu)?;
    for of_dropped in [true, false] {
        let (infinite, finite) = if of_dropped { (&a, &b) } else { (&b, &a) };
        let loss = ops::add(&ops::mul(&huge, infinite)?, &ops::square(finite)?)?;
        let mut scaler = GradScaler::default();
        scaler.scale(&ops::sum(&loss)?)?.backward()?;
        let [dropped, kept] =
            [("a", &a), ("b", &b)].map(|(name, var)| Parameters::named([(name, var.clone())]));
        scaler.unscale()?;
        scaler.zero_grad_of(&dropped?);
        let mut sgd = Sgd::new(&kept?, SgdConfig { lr: 0.0, ..Default::default() })?;
        let before = scaler.current_scale();
        assert_eq!(scaler.step(&mut sgd)?.skipped()?, !of_dropped);
        scaler.update()?;
        assert_eq!(scaler.current_scale() < before, !of_dropped);
    }
    Ok(())
}

/// A step that was skipped stays skipped, whatever is dropped after it.
#[test]
fn a_step_that_skipped_backs_the_scale_off_whatever_is_dropped_then() -> candle_amp::Result<()> {
    let w = Var::new(&[2f32], &Device::Cpu)?;
    let all = Parameters::named([("w", w.clone())])?;
    let mut scaler = GradScaler::default();
    let huge = Tensor::new(&[f32::MAX], &Device::Cpu)?;
    scaler.scale(&ops::sum(&ops::mul(&huge, &w)?)?)?.backward()?;
    let before = scaler.current_scale();
    let mut sgd = Sgd::new(&all, SgdConfig { lr: 0.1, ..Default::default() })?;
    assert!(scaler.step(&mut sgd)?.skipped()?);
    scaler.zero_grad_of(&all);
    scaler.update()?;
    assert!(scaler.current_scale() < before);
    Ok(())
}
