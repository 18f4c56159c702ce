//! A network that learns fast, in the manner of airbench94. The first layer whitens patches of the image,
//! and never learns. Norms have no weight to learn, and convolutions begin as the identity.
//! Jordan 2024, <https://arxiv.org/abs/2404.00498>, without the bias of the first layer.

use candle_amp::nn::{
    BatchNorm, Conv2d, MaxPool2d, Module, ModuleT, SequentialT, linear_no_bias, seq_t,
};
use candle_amp::{Parameters, ops};
use candle_core::{DType, Result, Tensor, Var};

use super::CLASSES;
use super::net::{Net, kernel};
use super::whitening::{self, PATCH, SIDE};

pub(super) const PAPER: &str = "https://arxiv.org/abs/2404.00498";

/// What logits are multiplied by, so that the network begins unsure.
const LOGITS: f64 = 1. / 9.;

/// The variable of the first layer.
const WHITENING: &str = "whitening.weight";

/// Of three blocks of these widths.
pub(super) fn airbench(net: &Net, widths: &[usize; 3]) -> Result<SequentialT> {
    let mut width = 2 * PATCH;
    let whitening = net.pp("whitening").conv(3, width, kernel(SIDE).unpadded())?;
    let mut layers = seq_t().add(whitening).add_fn(ops::gelu_tanh);
    for (i, &to) in widths.iter().enumerate() {
        layers = layers.add(Block::new(&net.pp(format!("block{}", i + 1)), width, to)?);
        width = to;
    }
    let layers = layers.add(net.max_pool(3, 3).with_padding(0)).add(net.flatten());
    let head = linear_no_bias(width, CLASSES, net.pp("head").vb)?;
    Ok(layers.add(head).add_fn(|x| ops::affine(x, LOGITS, 0.)))
}

/// Two convolutions of 3x3. A pool after the first one halves the image.
#[derive(Debug)]
struct Block {
    convs: [Conv2d; 2],
    norms: [BatchNorm; 2],
    pool: MaxPool2d,
}

impl Block {
    fn new(net: &Net, from: usize, to: usize) -> Result<Self> {
        let (first, second) = (net.pp("1"), net.pp("2"));
        Ok(Self {
            convs: [first.conv(from, to, kernel(3))?, second.conv(to, to, kernel(3))?],
            norms: [first.pp("norm").norm(to)?, second.pp("norm").norm(to)?],
            pool: net.max_pool(2, 2),
        })
    }
}

impl ModuleT for Block {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let x = self.pool.forward(&self.convs[0].forward(x)?)?;
        let x = ops::gelu_tanh(&self.norms[0].forward_t(&x, train)?)?;
        let x = self.convs[1].forward(&x)?;
        ops::gelu_tanh(&self.norms[1].forward_t(&x, train)?)
    }
}

/// Gives a new network its first layer, from training images `(n, 3, h, w)`, and convolutions that begin as
/// the identity. Freezes the first layer, and the weights of norms.
pub(super) fn prepare(parameters: &Parameters, images: &Tensor) -> Result<()> {
    for (name, var) in parameters.iter() {
        let start = match name {
            WHITENING => whitening::filters(images)?,
            name if name.starts_with("block") && var.rank() == 4 => identity(var)?,
            _ => continue,
        };
        var.set(&start.to_device(var.device())?.to_dtype(var.dtype())?)?;
    }
    parameters.filter(|name| name == WHITENING || name.ends_with("norm.weight")).freeze();
    Ok(())
}

/// Kernels of which the first pass on one channel each, as far as there are channels.
fn identity(weight: &Var) -> Result<Tensor> {
    let (outputs, inputs, height, width) = weight.dims4()?;
    let mut values = weight.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    let area = height * width;
    for (channel, kernel) in values.chunks_exact_mut(inputs * area).take(inputs).enumerate() {
        kernel.fill(0.);
        kernel[channel * area + area / 2] = 1.;
    }
    Tensor::from_vec(values, (outputs, inputs, height, width), weight.device())
}
