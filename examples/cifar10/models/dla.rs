//! Deep layer aggregation: blocks are the leaves of a tree, whose nodes put the outputs of their children side by
//! side and mix them by a convolution of 1x1. So the last layer is a few steps from all earlier ones, at every
//! depth. Yu et al. 2017, <https://arxiv.org/abs/1707.06484>, on the plain blocks of a ResNet.
//!
//! The simple version has a binary tree. The other one also hands a node what the subtree before it made, and
//! the output of a block of its own.

use candle_amp::nn::{ModuleT, SequentialT, seq_t};
use candle_amp::ops;
use candle_core::{Result, Tensor};

use super::net::{ConvNorm, Net, kernel};
use super::resnet::plain;

pub(super) const PAPER: &str = "https://arxiv.org/abs/1707.06484";

/// Width, level and stride of each tree.
const TREES: [(usize, usize, usize); 4] = [(64, 1, 1), (128, 2, 2), (256, 2, 2), (512, 1, 2)];

pub(super) fn dla(net: &Net, simple: bool) -> Result<SequentialT> {
    let (mut layers, mut from) = (seq_t(), 3);
    for (i, width) in [16, 16, 32].into_iter().enumerate() {
        layers = layers.add(net.pp(format!("stem.{i}")).conv_norm_relu(from, width, kernel(3))?);
        from = width;
    }
    for (i, (width, level, stride)) in TREES.into_iter().enumerate() {
        let net = net.pp(format!("tree{}", i + 1));
        layers = layers.add(tree(&net, (from, width), level, stride, simple)?);
        from = width;
    }
    Ok(layers.add(net.head(from)?))
}

fn tree(
    net: &Net,
    (from, to): (usize, usize),
    level: usize,
    stride: usize,
    simple: bool,
) -> Result<Tree> {
    let leaf = |name: &str, from, stride| {
        Ok::<_, candle_core::Error>(seq_t().add(plain(&net.pp(name), from, to, stride)?))
    };
    let subtree = |name: &str, from, stride| {
        Ok::<_, candle_core::Error>(seq_t().add(tree(
            &net.pp(name),
            (from, to),
            level - 1,
            stride,
            simple,
        )?))
    };
    let mut beside = None;
    let row = match (level, simple) {
        (1, _) => vec![leaf("left", from, stride)?, leaf("right", to, 1)?],
        (_, true) => vec![subtree("left", from, stride)?, subtree("right", to, 1)?],
        (_, false) => {
            beside = Some(leaf("beside", from, stride)?);
            vec![subtree("subtree", from, stride)?, leaf("left", to, 1)?, leaf("right", to, 1)?]
        }
    };
    let parts = row.len() + usize::from(beside.is_some());
    let root = net.pp("root").conv_norm_relu(parts * to, to, kernel(1))?;
    Ok(Tree { beside, row, root, channels: net.channels() })
}

/// Layers one after another, each of whose outputs goes into the root.
#[derive(Debug)]
struct Tree {
    /// Sees the input too, and goes into the root alone.
    beside: Option<SequentialT>,
    row: Vec<SequentialT>,
    root: ConvNorm,
    channels: usize,
}

impl ModuleT for Tree {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let beside = self.beside.as_ref().map(|layer| layer.forward_t(x, train)).transpose()?;
        let mut outputs = Vec::from_iter(beside);
        let mut x = x.clone();
        for layer in &self.row {
            x = layer.forward_t(&x, train)?;
            outputs.push(x.clone());
        }
        let joined = ops::cat(&outputs.iter().collect::<Vec<_>>(), self.channels)?;
        self.root.forward_t(&joined, train)
    }
}
