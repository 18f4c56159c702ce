//! Instance norm, weight norm, and transposed convolutions in groups.

use candle_amp::nn::{self, InstanceNormConfig, Module, VarMap};
use candle_amp::optim::{Sgd, SgdConfig};
use candle_amp::{Autocast, GradScaler, Parameters, ops};
use candle_core::{DType, Device, Result, Tensor};

use super::Case;
use crate::util::{assert_close, random, seeded};

#[test]
fn instance_norm_is_pytorchs() -> candle_amp::Result<()> {
    // A norm subtracts sums from sums.
    for (name, eps, affine) in [("plain", 1e-5, false), ("affine", 1e-3, true), ("1d", 1e-5, true)]
    {
        Case::load(&format!("instance_norm.{name}")).check(32.0, |vb, input| {
            let config = InstanceNormConfig { eps, affine };
            nn::instance_norm(3, config, vb)?.forward(&input("x"))
        })?;
    }
    let x = random(1, (2, 4, 5, 5), DType::F32);
    let norm = nn::InstanceNorm::new(3, 1e-5);
    for x in [x.clone(), x.narrow(1, 0, 3)?.narrow(2, 0, 1)?.narrow(3, 0, 1)?, x.get(0)?.get(0)?] {
        let message = norm.forward(&x).expect_err("it does not fit").to_string();
        assert!(message.contains("instance_norm: x has shape"), "{message}");
    }
    Ok(())
}

#[test]
fn grouped_transposed_convolution_is_pytorchs() -> candle_amp::Result<()> {
    let _fork = seeded(2);
    let config =
        nn::ConvTranspose2dConfig { padding: 1, output_padding: 1, stride: 2, dilation: 1 };
    let config = nn::GroupedConvTranspose2dConfig { config, groups: 3 };
    Case::load("conv_transpose2d").check(32.0, |vb, input| {
        nn::grouped_conv_transpose2d(6, 9, 3, config, vb)?.forward(&input("x"))
    })?;
    let vb = nn::var_builder(&VarMap::new(), DType::F32, &Device::Cpu);
    let layer = nn::grouped_conv_transpose2d_no_bias(6, 9, 3, config, vb)?;
    let x = random(1, (2, 6, 4, 5), DType::F32);
    let turned = layer.clone().channels_last().forward(&x.permute((0, 2, 3, 1))?)?;
    let turned = turned.permute((0, 3, 1, 2))?;
    assert_close("channels last", &turned.contiguous()?, &layer.forward(&x)?, DType::F32, 16.0);
    let odd = ops::conv_transpose2d_grouped(&x, layer.weight(), None, config.config, 4);
    let message = odd.expect_err("4 does not divide 6").to_string();
    assert!(message.contains("conv_transpose2d: weight has shape"), "{message}");
    Ok(())
}

#[test]
fn weight_norm_is_pytorchs() -> candle_amp::Result<()> {
    let run =
        |name: &str, roundings, module: &dyn Fn(nn::VarBuilder, &Tensor) -> Result<Tensor>| {
            Case::load(&format!("weight_norm.{name}"))
                .check(roundings, |vb, input| module(vb, &input("x")))
        };
    run("linear", 32.0, &|vb, x| nn::weight_norm(vb, |vb| nn::linear(5, 7, vb))?.forward(x))?;
    run("conv2d", 64.0, &|vb, x| {
        let config = nn::Conv2dConfig { padding: 1, groups: 2, ..Default::default() };
        nn::weight_norm(vb, |vb| nn::conv2d(4, 6, 3, config, vb))?.forward(x)
    })?;
    run("conv1d", 64.0, &|vb, x| {
        let config = nn::Conv1dConfig::default();
        nn::weight_norm(vb, |vb| nn::conv1d_no_bias(4, 6, 3, config, vb))?.forward(x)
    })?;
    run("transposed", 64.0, &|vb, x| {
        let config = nn::ConvTranspose1dConfig { stride: 2, ..Default::default() };
        nn::weight_norm(vb, |vb| nn::conv_transpose1d(4, 6, 3, config, vb))?.forward(x)
    })
}

/// Made in every dtype: the names, the first weight, and a training that turns it.
#[test]
fn weight_norm_starts_from_the_layer_and_trains() -> candle_amp::Result<()> {
    let _fork = seeded(1);
    for (dtype, amp) in [
        (DType::F32, Autocast::disabled()),
        (DType::F32, Autocast::new(DType::BF16)),
        (DType::BF16, Autocast::disabled()),
        (DType::F16, Autocast::new(DType::F16)),
        (DType::F64, Autocast::disabled()),
    ] {
        let varmap = VarMap::new();
        let vb = nn::var_builder(&varmap, dtype, &Device::Cpu).pp("a").pp("b");
        let layer = nn::weight_norm(vb.clone(), |vb| nn::linear(6, 5, vb))?;
        let parameters = Parameters::from_varmap(&varmap);
        let names: Vec<_> = parameters.names().collect();
        assert_eq!(names, ["a.b.bias", "a.b.weight_g", "a.b.weight_v"]);
        // The length is rounded to the dtype, and the weight.
        assert_close("weight", &layer.weight()?, layer.weight_v(), dtype, 2.0);
        let again = nn::weight_norm(vb, |vb| nn::linear(6, 5, vb))?;
        assert_eq!(again.weight_g().id(), layer.weight_g().id());
        let (x, target) = (random(1, (8, 6), dtype), random(2, (8, 5), dtype));
        let mut sgd = Sgd::new(&parameters, SgdConfig { lr: 0.3, ..Default::default() })?;
        let mut scaler = GradScaler::default();
        let mut losses = Vec::new();
        for _ in 0..30 {
            let y = amp.scope(|| layer.forward(&x))?;
            let loss = amp.scope(|| ops::mse(&y, &target.to_dtype(y.dtype())?))?;
            scaler.scale(&loss)?.backward()?;
            assert_eq!(scaler.missing(&parameters), [""; 0], "{dtype:?}");
            let _ = scaler.step(&mut sgd)?;
            scaler.update()?;
            losses.push(loss.to_dtype(DType::F32)?.to_scalar::<f32>()?);
        }
        assert!(losses[29] < 0.5 * losses[0], "{dtype:?}: {losses:?}");
    }
    let weight = random(1, (5, 6), DType::F32);
    let wrong = nn::WeightNorm::new(nn::Linear::new(weight.clone(), None), weight);
    let message = wrong.expect_err("lengths are (5, 1)").to_string();
    assert!(message.contains("weight_g has shape [5, 6], expected [5, 1]"), "{message}");
    Ok(())
}

/// Squares of F16 would overflow from 256 on, and vanish below 2⁻¹².
#[test]
fn weight_norm_squares_in_f32() -> Result<()> {
    for size in [300f32, 1e-4] {
        let v = Tensor::full(size, (2, 4), &Device::Cpu)?.to_dtype(DType::F16)?;
        let g = Tensor::ones((2, 1), DType::F16, &Device::Cpu)?;
        let layer = nn::WeightNorm::new(nn::Linear::new(v, None), g)?;
        let half = Tensor::full(0.5f64, (2, 4), &Device::Cpu)?;
        assert_close("weight", &layer.weight()?, &half, DType::F16, 1.0);
    }
    Ok(())
}
