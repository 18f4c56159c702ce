//! Attention and transformer layers.

use candle_amp::nn::{self, Activation, Module, ModuleT, TransformerConfig, VarMap};
use candle_amp::optim::{AdamW, AdamWConfig};
use candle_amp::{Autocast, GradScaler, Parameters, ops, random as generator};
use candle_core::{DType, Device, Result, Tensor};

use super::Case;
use crate::util::{assert_close, assert_same, random, seeded, to_vec};

/// Sums of some hundred terms, through a softmax and up to ten products one after another.
const ROUNDINGS: f64 = 64.0;

#[test]
fn attention_computes_what_pytorch_does_from_its_state_dict() -> candle_amp::Result<()> {
    for name in ["self", "causal", "no_bias"] {
        Case::load(&format!("attention.{name}")).check(ROUNDINGS, |vb, input| {
            let layer = match name {
                "no_bias" => nn::multihead_attention_no_bias(6, 3, vb)?,
                _ => nn::multihead_attention(6, 3, vb)?,
            };
            let x = input("x");
            layer.forward(&x, &x, &x, None, name == "causal")
        })?;
    }
    let case = Case::load("attention.masked");
    case.check(ROUNDINGS, |vb, input| {
        let (layer, x) = (nn::multihead_attention(6, 3, vb)?, input("x"));
        layer.forward(&x, &x, &x, Some(&case.get("mask.added", x.dtype())?), false)
    })?;
    let case = Case::load("attention.cross");
    case.check(ROUNDINGS, |vb, input| {
        let mask = case.get("mask.attends", DType::U8)?.reshape((2, 1, 1, 6))?;
        let (x, memory) = (input("x"), input("memory"));
        let layer = nn::multihead_attention(6, 3, vb)?;
        layer.forward(&x, &memory, &memory, Some(&mask), false)
    })
}

/// The settings of the cases of this name.
fn settings(name: &str) -> TransformerConfig {
    let post = TransformerConfig { dim_feedforward: 16, dropout: 0.0, ..Default::default() };
    let pre = TransformerConfig { norm_first: true, ..post };
    match name {
        "post" => post,
        "no_bias" => TransformerConfig { bias: false, ..pre },
        _ => TransformerConfig { activation: Activation::Gelu, layer_norm_eps: 1e-3, ..pre },
    }
}

#[test]
fn transformer_layers_compute_what_pytorchs_do() -> candle_amp::Result<()> {
    for name in ["post", "pre", "no_bias"] {
        Case::load(&format!("encoder.{name}")).check(ROUNDINGS, |vb, input| {
            let layer = nn::transformer_encoder_layer(8, 2, settings(name), vb)?;
            layer.forward(&input("x"), None, true, true)
        })?;
        let case = Case::load(&format!("decoder.{name}"));
        case.check(ROUNDINGS, |vb, input| {
            let layer = nn::transformer_decoder_layer(8, 2, settings(name), vb)?;
            let mask = case.get("mask.attends", DType::U8)?.reshape((2, 1, 1, 3))?;
            layer.forward(&input("x"), &input("memory"), None, Some(&mask), true, true)
        })?;
    }
    Case::load("encoder.stack").check(4.0 * ROUNDINGS, |vb, input| {
        nn::transformer_encoder(2, 8, 2, settings("stack"), vb)?.forward_t(&input("x"), true)
    })?;
    Case::load("decoder.stack").check(4.0 * ROUNDINGS, |vb, input| {
        let stack = nn::transformer_decoder(2, 8, 2, settings("stack"), vb)?;
        stack.forward(&input("x"), &input("memory"), None, None, true, true)
    })
}

/// Copying the memory in reverse needs both attentions; variables and scope in every precision.
#[test]
fn an_encoder_and_a_decoder_train_in_every_precision() -> candle_amp::Result<()> {
    let _fork = generator::fork_rng_guard();
    let cpu = Device::Cpu;
    for (dtype, variables) in [
        (DType::F32, DType::F32),
        (DType::BF16, DType::F32),
        (DType::F16, DType::F32),
        (DType::BF16, DType::BF16),
        (DType::F16, DType::F16),
    ] {
        generator::manual_seed(5);
        let varmap = VarMap::new();
        let vb = nn::var_builder(&varmap, variables, &cpu);
        let config = TransformerConfig { dim_feedforward: 32, dropout: 0.01, ..Default::default() };
        let encoder = nn::transformer_encoder(1, 16, 4, config, vb.pp("encoder"))?;
        let decoder = nn::transformer_decoder(1, 16, 4, config, vb.pp("decoder"))?;
        let head = nn::linear(16, 5, vb.pp("head"))?;
        let ids = Tensor::new(&[[1u32, 4, 0, 2], [3, 3, 1, 0]], &cpu)?;
        let targets = Tensor::new(&[2u32, 0, 4, 1, 0, 1, 3, 3], &cpu)?;
        let (table, places) = (random(7, (5, 16), variables), random(8, (4, 16), variables));
        let parameters = Parameters::from_varmap(&varmap);
        let mut adamw = AdamW::new(&parameters, AdamWConfig { lr: 0.01, ..Default::default() })?;
        let (mut scaler, amp) = (GradScaler::default(), Autocast::new(dtype));
        let mut losses = Vec::new();
        for _ in 0..40 {
            let loss = amp.scope(|| {
                let x = ops::embedding(&ids, &table)?.broadcast_add(&places)?;
                let memory = encoder.forward_t(&x, true)?;
                let queries = places.unsqueeze(0)?.repeat((2, 1, 1))?;
                let y = decoder.forward(&queries, &memory, None, None, true, true)?;
                ops::cross_entropy(&head.forward(&y.flatten_to(1)?)?, &targets)
            })?;
            scaler.scale(&loss)?.backward()?;
            assert_eq!(scaler.missing(&parameters), [""; 0], "{dtype:?}");
            let _ = scaler.step(&mut adamw)?;
            scaler.update()?;
            losses.push(loss.to_scalar::<f32>()?);
        }
        assert!(losses[0] > 1.0 && losses[39] < 0.2, "{dtype:?} {variables:?}: {losses:?}");
    }
    Ok(())
}

#[test]
fn dropout_is_drawn_in_training_alone() -> Result<()> {
    let _fork = generator::fork_rng_guard();
    let vb = nn::var_builder(&VarMap::new(), DType::F32, &Device::Cpu);
    let config = TransformerConfig { dim_feedforward: 16, dropout: 0.5, ..Default::default() };
    let layer = nn::transformer_encoder_layer(8, 2, config, vb)?;
    let x = random(1, (2, 5, 8), DType::F32);
    assert_same("evaluation", &layer.forward_t(&x, false)?, &layer.forward_t(&x, false)?);
    assert_ne!(to_vec(&layer.forward_t(&x, true)?), to_vec(&layer.forward_t(&x, true)?));
    Ok(())
}

/// The paths of one tensor and of three give the same; a query that sees nothing gives the output's bias.
#[test]
fn self_attention_is_attention_to_copies() -> Result<()> {
    let _fork = seeded(2);
    let varmap = VarMap::new();
    let vb = nn::var_builder(&varmap, DType::F32, &Device::Cpu);
    let layer = nn::multihead_attention(12, 3, vb)?;
    for (seed, (_, var)) in (20..).zip(Parameters::from_varmap(&varmap).iter()) {
        var.set(&random(seed, var.shape(), DType::F32))?;
    }
    let x = random(1, (5, 2, 12), DType::F32).transpose(0, 1)?;
    let (key, value) = (x.copy()?, x.copy()?);
    let all = Tensor::ones((5, 5), DType::U8, &Device::Cpu)?;
    for causal in [false, true] {
        let expected = layer.forward(&x, &key, &value, None, causal)?;
        for mask in [None, Some(&all)] {
            let y = layer.forward(&x, &x, &x, mask, causal)?;
            assert_close("self attention", &y, &expected, DType::F32, 16.0);
        }
    }
    let blind = layer.forward(&x, &x, &x, Some(&all.zeros_like()?), false)?;
    let bias = layer.out_proj().bias().unwrap().broadcast_as((2, 5, 12))?;
    assert_same("blind", &blind, &bias);
    Ok(())
}

#[test]
fn what_does_not_fit_is_said() -> Result<()> {
    let vb = || nn::var_builder(&VarMap::new(), DType::F32, &Device::Cpu);
    let says = |result: Result<String>, part: &str| {
        let message = result.expect_err(part).to_string();
        assert!(message.contains(part), "{message}");
    };
    let new = |heads| nn::multihead_attention(12, heads, vb()).map(|_| String::new());
    says(new(5), "num_heads is 5, expected a divisor of the embedding's size");
    says(new(0), "num_heads is 0");
    let layer = nn::multihead_attention(12, 3, vb())?;
    let x = random(1, (2, 5, 12), DType::F32);
    let on = |x: &Tensor, y: &Tensor| layer.forward(x, y, y, None, false).map(|_| String::new());
    says(on(&x.get(0)?, &x), "query has shape [5, 12], expected (b, steps, 12)");
    says(on(&x, &x.narrow(2, 0, 6)?), "key has shape [2, 5, 6]");
    says(on(&x, &x.narrow(0, 0, 1)?), "sdpa: k has shape");
    let weights =
        (random(2, (36, 12), DType::F32), nn::Linear::new(random(3, (12, 12), DType::F32), None));
    let bias = random(4, 12, DType::F32);
    let (weight, out) = weights;
    let new = nn::MultiheadAttention::new(weight, Some(bias), out, 3).map(|_| String::new());
    says(new, "in_proj_bias has shape [12], expected (36)");
    Ok(())
}
