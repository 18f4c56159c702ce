//! EfficientNet: the blocks of MobileNetV2 with squeeze and excitation and with SiLU, in numbers that a search
//! found; larger versions scale depth, width and image together. Whole blocks are dropped at random in
//! training, later ones more often. Tan and Le 2019, <https://arxiv.org/abs/1905.11946>: B0 with strides
//! for small images, and without the last convolution of 1x1.
//!
//! The first block has no convolution that expands. An implementation that makes one, unused, has 1,088
//! parameters more.

use candle_amp::nn::{Activation, Dropout, ModuleT, SequentialT, seq_t};
use candle_amp::ops;
use candle_core::{Result, Tensor};

use super::CLASSES;
use super::net::{Net, kernel};
use super::senet::SqueezeExcite;

pub(super) const PAPER: &str = "https://arxiv.org/abs/1905.11946";

/// How many times wider inside, the width, the number of blocks, the kernel, the stride of the first.
const STAGES: [(usize, usize, usize, usize, usize); 7] = [
    (1, 16, 1, 3, 1),
    (6, 24, 2, 3, 2),
    (6, 40, 2, 5, 2),
    (6, 80, 3, 3, 2),
    (6, 112, 3, 5, 1),
    (6, 192, 4, 5, 2),
    (6, 320, 1, 3, 1),
];
const BLOCKS: usize = 16;

/// How often the classifier's inputs are dropped, and a block behind the last.
const DROP: f32 = 0.2;

pub(super) fn efficientnet_b0(net: &Net) -> Result<SequentialT> {
    let (mut from, mut number) = (32, 0);
    let stem = net.pp("stem").conv_norm(3, from, kernel(3))?;
    let mut layers = seq_t().add(stem).add(Activation::Silu);
    for (stage, &(times, width, count, size, stride)) in STAGES.iter().enumerate() {
        for i in 0..count {
            let net = net.pp(format!("stage{}.{i}", stage + 1));
            let (inner, stride) = (times * from, if i == 0 { stride } else { 1 });
            let depthwise = kernel(size).stride(stride).groups(inner);
            let mut path = seq_t();
            if times > 1 {
                let expand = net.pp("expand").conv_norm(from, inner, kernel(1))?;
                path = path.add(expand).add(Activation::Silu);
            }
            let gate = SqueezeExcite::new(&net.pp("gate"), inner, from / 4, Activation::Silu)?;
            path = path
                .add(net.pp("depthwise").conv_norm(inner, inner, depthwise)?)
                .add(Activation::Silu)
                .add(gate)
                .add(net.pp("project").conv_norm(inner, width, kernel(1))?);
            layers = match (stride, from) == (1, width) {
                true => layers.add(Dropped { path, p: DROP * number as f32 / BLOCKS as f32 }),
                false => layers.add(path),
            };
            (from, number) = (width, number + 1);
        }
    }
    let head = net.pp("head").linear(from, CLASSES)?;
    Ok(layers.add(net.global_pool()).add(Dropout::new(DROP)).add(head))
}

/// A path that is added to its input, for each image of a batch with probability `1 - p`.
#[derive(Debug)]
struct Dropped {
    path: SequentialT,
    p: f32,
}

impl ModuleT for Dropped {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let mut y = self.path.forward_t(x, train)?;
        if train {
            let ones = Tensor::ones((x.dims()[0], 1, 1, 1), y.dtype(), y.device())?;
            y = ops::mul(&y, &ops::dropout(&ones, self.p)?)?;
        }
        ops::add(&y, x)
    }
}
