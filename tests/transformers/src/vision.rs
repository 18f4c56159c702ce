//! Models of images.

use candle_amp::ops;
use candle_core::{DType, Module, Result, Tensor, Var};
use candle_nn::VarBuilder;
use candle_transformers::models::stable_diffusion::attention::{
    AttentionBlock, AttentionBlockConfig,
};
use candle_transformers::models::stable_diffusion::vae::{AutoEncoderKL, AutoEncoderKLConfig};
use candle_transformers::models::{convnext, resnet, vit};

use crate::harness::{CPU, Loss, Outcome, Truth, check, check_with};

/// Something to look at.
fn image(vb: &VarBuilder, channels: usize, size: usize) -> Result<Tensor> {
    let count = 2 * channels * size * size;
    let values = (Tensor::arange(0f32, count as f32, &CPU)? * 0.7)?.sin()?;
    values.reshape((2, channels, size, size))?.to_dtype(vb.dtype())
}

fn classes() -> Result<Tensor> {
    Tensor::new(&[2u32, 0], &CPU)
}

fn vit(vb: VarBuilder<'static>) -> Result<Loss> {
    let config = vit::Config {
        hidden_size: 8,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        intermediate_size: 16,
        hidden_act: candle_nn::Activation::Gelu,
        layer_norm_eps: 1e-12,
        image_size: 8,
        patch_size: 4,
        num_channels: 3,
        qkv_bias: true,
    };
    let x = image(&vb, 3, 8)?;
    let model = vit::Model::new(&config, 3, vb)?;
    Ok(Box::new(move || ops::cross_entropy(&model.forward(&x)?, &classes()?)))
}

fn convnext(vb: VarBuilder<'static>) -> Result<Loss> {
    let x = image(&vb, 3, 32)?;
    let model = convnext::convnext(&convnext::Config::atto(), 3, vb)?;
    Ok(Box::new(move || ops::cross_entropy(&model.forward(&x)?, &classes()?)))
}

fn resnet18(vb: VarBuilder<'static>) -> Result<Loss> {
    let x = image(&vb, 3, 8)?;
    let model = resnet::resnet18(3, vb)?;
    Ok(Box::new(move || ops::cross_entropy(&model.forward(&x)?, &classes()?)))
}

/// The variational autoencoder of Stable Diffusion. candle cannot seed its noise, so its logarithm
/// starts so low that there is none.
fn autoencoder(vb: VarBuilder<'static>) -> Result<Loss> {
    let config = AutoEncoderKLConfig {
        block_out_channels: vec![4, 8],
        norm_num_groups: 2,
        ..Default::default()
    };
    let x = image(&vb, 3, 8)?;
    let bias = vb.to_dtype(DType::F32).get(8, "quant_conv.bias")?; // the master itself
    Var::from_tensor(&bias)?
        .set(&Tensor::new(&[0f32, 0., 0., 0., -40., -40., -40., -40.], &CPU)?)?;
    let model = AutoEncoderKL::new(vb, 3, 3, config)?;
    Ok(Box::new(move || {
        let code = model.encode(&x)?.sample()?;
        ops::mse(&model.decode(&code)?, &x)
    }))
}

/// The attention in the middle of it: group norm, softmax and linear layers.
fn attention(vb: VarBuilder<'static>) -> Result<Loss> {
    let config = AttentionBlockConfig { num_groups: 2, ..Default::default() };
    let x = image(&vb, 8, 3)?;
    let target = x.affine(-0.5, 0.25)?;
    let model = AttentionBlock::new(vb, 8, config)?;
    Ok(Box::new(move || ops::mse(&model.forward(&x)?, &target)))
}

const NO_BF16: Outcome = Outcome::Fails("unsupported dtype BF16 for op matmul");

/// Queries and keys are behind `softmax_last_dim`, and the norms of the layers are fused. The last
/// norm's input is a slice, not contiguous, so it is not. candle has no BF16 convolution on a CPU.
#[test]
fn vit_trains_beside_its_norms() {
    let truth = Truth {
        variables: 40,
        reached: 24,
        is_reached: |name| {
            !["attention.query.", "attention.key.", "layernorm_before.", "layernorm_after."]
                .iter()
                .any(|cut| name.contains(cut))
        },
        whole: false,
        outcomes: [Outcome::Trains, Outcome::Trains, NO_BF16],
    };
    check(&truth, &vit);
}

/// A layer norm in front of the head.
#[test]
fn convnext_trains_its_head() {
    let truth = Truth {
        variables: 152,
        reached: 2,
        is_reached: |name| name.starts_with("head.fc."),
        whole: true,
        outcomes: [Outcome::Trains, Outcome::Trains, NO_BF16],
    };
    check(&truth, &convnext);
}

/// candle's max pool has no gradient where windows overlap, and its batch norm in evaluation, which
/// is how this model has it, takes no statistics of another dtype than its input.
#[test]
fn resnet18_does_not_train() {
    let pool = Outcome::Fails("backward not supported for maxpool2d");
    let statistics = Outcome::Fails("dtype mismatch in sub, lhs: F16, rhs: F32");
    let truth = |outcomes| Truth {
        variables: 62,
        reached: 0,
        is_reached: |_| false,
        whole: false,
        outcomes,
    };
    check(&truth([pool, statistics, NO_BF16]), &resnet18);
    check_with(&truth([pool, pool, NO_BF16]), true, &resnet18);
}

/// Group norm, `softmax` proper, convolutions: nothing cuts.
#[test]
fn the_autoencoder_trains_wholly() {
    let truth = Truth {
        variables: 124,
        reached: 124,
        is_reached: |_| true,
        whole: true,
        outcomes: [Outcome::Trains, Outcome::Trains, NO_BF16],
    };
    check(&truth, &autoencoder);
}

/// The part of it without convolutions, in every dtype.
#[test]
fn its_attention_trains_wholly() {
    let truth = Truth {
        variables: 10,
        reached: 10,
        is_reached: |_| true,
        whole: true,
        outcomes: [Outcome::Trains; 3],
    };
    check(&truth, &attention);
}
