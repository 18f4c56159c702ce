//! ResNets with norm and relu before each convolution. Nothing then stands between one addition and the
//! next, so that a block's input reaches every later block, and its gradient comes back, unchanged. He et
//! al. 2016, <https://arxiv.org/abs/1603.05027>.
//!
//! A projection starts from the input behind the block's first norm and relu.

use candle_amp::nn::{Conv2d, Module, ModuleT, SequentialT, seq_t};
use candle_amp::ops;
use candle_core::{Result, Tensor};

use super::net::{Kernel, Net, NormRelu, kernel};

pub(super) const PAPER: &str = "https://arxiv.org/abs/1603.05027";

const WIDTHS: [usize; 4] = [64, 128, 256, 512];

/// Of so many plain blocks a stage.
pub(super) fn plain(net: &Net, blocks: &[usize; 4]) -> Result<SequentialT> {
    let stem = seq_t().add(net.pp("stem").conv(3, 64, kernel(3))?);
    stages(net, stem, blocks, |net, from, width, stride| {
        let convs = [(width, kernel(3).stride(stride)), (width, kernel(3))];
        PreAct::new(net, from, &convs, seq_t())
    })
}

/// Of so many bottlenecks a stage.
pub(super) fn bottleneck(net: &Net, blocks: &[usize; 4]) -> Result<SequentialT> {
    let stem = seq_t().add(net.pp("stem").conv(3, 64, kernel(3))?);
    stages(net, stem, blocks, |net, from, width, stride| {
        let inner = kernel(3).stride(stride);
        let convs = [(width, kernel(1)), (width, inner), (4 * width, kernel(1))];
        PreAct::new(net, from, &convs, seq_t())
    })
}

/// Four stages behind a stem of 64 channels, of which all but the first halve the image.
pub(super) fn stages(
    net: &Net,
    mut layers: SequentialT,
    blocks: &[usize; 4],
    block: impl Fn(&Net, usize, usize, usize) -> Result<PreAct>,
) -> Result<SequentialT> {
    let mut from = 64;
    for (stage, (&width, &count)) in WIDTHS.iter().zip(blocks).enumerate() {
        for i in 0..count {
            let stride = if stage > 0 && i == 0 { 2 } else { 1 };
            let block = block(&net.pp(format!("stage{}.{i}", stage + 1)), from, width, stride)?;
            from = block.width;
            layers = layers.add(block);
        }
    }
    Ok(layers.add(net.head(from)?))
}

/// Convolutions, each behind a norm and a relu, and a way around them.
#[derive(Debug)]
pub(super) struct PreAct {
    first: NormRelu,
    path: SequentialT,
    projection: Option<Conv2d>,
    width: usize,
}

impl PreAct {
    /// Convolutions of these widths, and `gate` behind the last.
    pub(super) fn new(
        net: &Net,
        from: usize,
        convs: &[(usize, Kernel)],
        gate: SequentialT,
    ) -> Result<Self> {
        let (mut path, mut width, mut stride) = (seq_t(), from, 1);
        for (i, &(to, kernel)) in convs.iter().enumerate() {
            let net = net.pp(i + 1);
            if i > 0 {
                path = path.add(net.pp("norm").norm_relu(width)?);
            }
            path = path.add(net.pp("conv").conv(width, to, kernel)?);
            (width, stride) = (to, stride * kernel.stride);
        }
        let project = || net.pp("projection").conv(from, width, kernel(1).stride(stride));
        let projection = ((from, 1) != (width, stride)).then(project).transpose()?;
        let first = net.pp("1.norm").norm_relu(from)?;
        Ok(Self { first, path: path.add(gate), projection, width })
    }
}

impl ModuleT for PreAct {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let activated = self.first.forward_t(x, train)?;
        let y = self.path.forward_t(&activated, train)?;
        match &self.projection {
            Some(projection) => ops::add(&y, &projection.forward(&activated)?),
            None => ops::add(&y, x),
        }
    }
}
