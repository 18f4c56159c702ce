//! A vision transformer: the image is cut into patches, each of which becomes a token, and attention lets every
//! token look at every other from the first layer on. Nothing tells it that neighbours belong together, so that
//! it needs more data or more epochs than a convolutional network. Dosovitskiy et al. 2020,
//! <https://arxiv.org/abs/2010.11929>, in the smallest size of Touvron et al. 2020,
//! <https://arxiv.org/abs/2012.12877>, on patches of 4x4.

use candle_amp::nn::{
    Activation, Conv2d, Conv2dConfig, Init, Module, ModuleT, SequentialT, TransformerConfig,
    TransformerEncoder, conv2d, seq_t, transformer_encoder,
};
use candle_amp::ops;
use candle_core::{Result, Tensor};

use super::net::Net;
use super::{CLASSES, SIDE};

pub(super) const PAPER: &str = "https://arxiv.org/abs/2010.11929";

const PATCH: usize = 4;
const TOKENS: usize = (SIDE / PATCH) * (SIDE / PATCH);
const WIDTH: usize = 192;
const HEADS: usize = 3;

/// Of so many layers.
pub(super) fn vit(net: &Net, layers: usize) -> Result<SequentialT> {
    let init = Init::Randn { mean: 0., stdev: 0.02 };
    let config = Conv2dConfig { stride: PATCH, ..Default::default() };
    let patches = conv2d(3, WIDTH, PATCH, config, net.vb.pp("patches"))?;
    let tokens = Tokens {
        patches: if net.channels_last { patches.channels_last() } else { patches },
        channels_last: net.channels_last,
        class: net.vb.get_with_hints((1, 1, WIDTH), "class", init)?,
        positions: net.vb.get_with_hints((1, 1 + TOKENS, WIDTH), "positions", init)?,
    };
    let config = TransformerConfig {
        dim_feedforward: 4 * WIDTH,
        dropout: 0.,
        activation: Activation::Gelu,
        norm_first: true,
        ..Default::default()
    };
    let encoder = transformer_encoder(layers, WIDTH, HEADS, config, net.vb.pp("encoder"))?;
    Ok(seq_t().add(tokens).add(OfClass(encoder)).add(net.pp("head").linear(WIDTH, CLASSES)?))
}

/// A token for the class, one for each patch, and the position of each, which is learned.
#[derive(Debug)]
struct Tokens {
    patches: Conv2d,
    channels_last: bool,
    class: Tensor,
    positions: Tensor,
}

impl Module for Tokens {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.patches.forward(x)?;
        let tokens = match self.channels_last {
            true => x.flatten(1, 2)?,
            false => x.flatten_from(2)?.transpose(1, 2)?,
        };
        let zeros = Tensor::zeros((x.dims()[0], 1, WIDTH), self.class.dtype(), x.device())?;
        let class = ops::add(&zeros, &self.class)?; // one for each image
        ops::add(&ops::cat(&[&class, &tokens], 1)?, &self.positions)
    }
}

/// What an encoder makes of the token of the class.
#[derive(Debug)]
struct OfClass(TransformerEncoder);

impl ModuleT for OfClass {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        self.0.forward_t(x, train)?.narrow(1, 0, 1)?.squeeze(1)
    }
}
