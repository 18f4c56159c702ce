//! The networks of `make_golden.py`, line by line, of the crate's layers and operators.

use candle_amp::{nn, ops};
use candle_core::{Result, Tensor};
use candle_nn::{Module, ModuleT, VarBuilder};

/// A network from a batch to logits.
pub(crate) type Model = Box<dyn Fn(&Tensor) -> Result<Tensor>>;

/// Makes one, of the variables in a builder.
pub(crate) type Build = fn(VarBuilder) -> Result<Model>;

pub(crate) fn mlp(vb: VarBuilder) -> Result<Model> {
    let fc1 = nn::linear(13, 37, vb.pp("fc1"))?;
    let fc2 = nn::linear(37, 21, vb.pp("fc2"))?;
    let fc3 = nn::linear(21, 7, vb.pp("fc3"))?;
    Ok(Box::new(move |x| fc3.forward(&ops::relu(&fc2.forward(&ops::relu(&fc1.forward(x)?)?)?)?)))
}

pub(crate) fn cnn(vb: VarBuilder) -> Result<Model> {
    let config = nn::Conv2dConfig { padding: 1, ..Default::default() };
    let conv1 = nn::conv2d_no_bias(3, 6, 3, config, vb.pp("conv1"))?;
    let norm1 = nn::batch_norm(6, 1e-5, vb.pp("norm1"))?;
    let config = nn::Conv2dConfig { stride: 2, ..config };
    let conv2 = nn::conv2d_no_bias(6, 10, 3, config, vb.pp("conv2"))?;
    let norm2 = nn::batch_norm(10, 1e-5, vb.pp("norm2"))?;
    let head = nn::linear(40, 5, vb.pp("head"))?;
    Ok(Box::new(move |x| {
        let x = ops::relu(&norm1.forward_t(&conv1.forward(x)?, true)?)?;
        let x = ops::max_pool2d(&x, 3, 2, 1)?;
        let x = ops::relu(&norm2.forward_t(&conv2.forward(&x)?, true)?)?;
        head.forward(&ops::flatten(&ops::avg_pool2d(&x, 2, 1, 0)?)?)
    }))
}

pub(crate) fn gpt(vb: VarBuilder) -> Result<Model> {
    let tokens = nn::embedding(17, 15, vb.pp("tokens"))?;
    let places = vb.get((13, 15), "places")?;
    let blocks = [block(vb.pp("blocks.0"))?, block(vb.pp("blocks.1"))?];
    let norm = nn::layer_norm(15, 1e-5, vb.pp("norm"))?;
    let head = nn::linear(15, 17, vb.pp("head"))?;
    Ok(Box::new(move |x| {
        let mut x = ops::add(&tokens.forward(x)?, &places)?;
        for block in &blocks {
            x = block(&x)?;
        }
        head.forward(&norm.forward(&x)?)
    }))
}

fn block(vb: VarBuilder) -> Result<Model> {
    const HEADS: usize = 3;
    let norm1 = nn::layer_norm(15, 1e-5, vb.pp("norm1"))?;
    let norm2 = nn::layer_norm(15, 1e-5, vb.pp("norm2"))?;
    let qkv = nn::linear_no_bias(15, 45, vb.pp("qkv"))?;
    let out = nn::linear(15, 15, vb.pp("out"))?;
    let (up, down) = (nn::linear(15, 37, vb.pp("up"))?, nn::linear(37, 15, vb.pp("down"))?);
    Ok(Box::new(move |x| {
        let (n, t, width) = x.dims3()?;
        let qkv = qkv.forward(&norm1.forward(x)?)?.reshape((n, t, 3, HEADS, width / HEADS))?;
        let part = |i| qkv.get_on_dim(2, i)?.transpose(1, 2);
        let scale = ((width / HEADS) as f64).powf(-0.5);
        let y = ops::sdpa(&part(0)?, &part(1)?, &part(2)?, None, true, scale)?;
        let x = ops::add(x, &out.forward(&y.transpose(1, 2)?.flatten_from(2)?)?)?;
        let inner = ops::gelu_erf(&up.forward(&norm2.forward(&x)?)?)?;
        ops::add(&x, &down.forward(&inner)?)
    }))
}
