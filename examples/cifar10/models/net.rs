//! What the networks are built of: layers that know their variables' names and the layout of images.

use candle_amp::nn::{
    AvgPool2d, BatchNorm, Conv2d, Conv2dConfig, Flatten, GlobalAvgPool2d, Linear, MaxPool2d,
    Module, ModuleT, SequentialT, VarBuilder, batch_norm, conv2d, conv2d_no_bias, linear, seq_t,
};
use candle_amp::ops;
use candle_core::{Result, Tensor};

use super::{CLASSES, sync_batch_norm};

/// Makes layers. A clone by [`pp`](Self::pp) makes those of a part of the network.
#[derive(Clone)]
pub(crate) struct Net {
    pub(super) vb: VarBuilder<'static>,
    pub(super) channels_last: bool,
}

/// The kernel of a convolution, which keeps the size of images but for its stride.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernel {
    size: usize,
    pub(super) stride: usize,
    groups: usize,
    bias: bool,
    padded: bool,
}

/// A square kernel of this size, without stride, groups and bias.
pub(super) const fn kernel(size: usize) -> Kernel {
    Kernel { size, stride: 1, groups: 1, bias: false, padded: true }
}

impl Kernel {
    pub(super) const fn stride(self, stride: usize) -> Self {
        Self { stride, ..self }
    }

    pub(super) const fn groups(self, groups: usize) -> Self {
        Self { groups, ..self }
    }

    pub(super) const fn bias(self) -> Self {
        Self { bias: true, ..self }
    }

    pub(super) const fn unpadded(self) -> Self {
        Self { padded: false, ..self }
    }
}

impl Net {
    pub(super) fn pp(&self, name: impl ToString) -> Self {
        Self { vb: self.vb.pp(name), ..*self }
    }

    /// Calls `last` of a layer where channels come last.
    fn turn<L>(&self, layer: L, last: fn(L) -> L) -> L {
        if self.channels_last { last(layer) } else { layer }
    }

    pub(super) fn conv(&self, from: usize, to: usize, kernel: Kernel) -> Result<Conv2d> {
        let Kernel { size, stride, groups, bias, padded } = kernel;
        let padding = if padded { size / 2 } else { 0 };
        let config = Conv2dConfig { padding, stride, groups, ..Default::default() };
        let make = if bias { conv2d } else { conv2d_no_bias };
        Ok(self.turn(make(from, to, size, config, self.vb.clone())?, Conv2d::channels_last))
    }

    pub(super) fn norm(&self, width: usize) -> Result<BatchNorm> {
        let norm = sync_batch_norm(batch_norm(width, 1e-5, self.vb.clone())?);
        Ok(self.turn(norm, BatchNorm::channels_last))
    }

    pub(super) fn conv_norm(&self, from: usize, to: usize, kernel: Kernel) -> Result<ConvNorm> {
        let conv = self.pp("conv").conv(from, to, kernel)?;
        Ok(ConvNorm { conv, norm: self.pp("norm").norm(to)?, relu: false })
    }

    pub(super) fn conv_norm_relu(
        &self,
        from: usize,
        to: usize,
        kernel: Kernel,
    ) -> Result<ConvNorm> {
        Ok(ConvNorm { relu: true, ..self.conv_norm(from, to, kernel)? })
    }

    /// A batch norm and a relu, in one pass.
    pub(super) fn norm_relu(&self, width: usize) -> Result<NormRelu> {
        Ok(NormRelu(self.norm(width)?))
    }

    pub(super) fn linear(&self, from: usize, to: usize) -> Result<Linear> {
        linear(from, to, self.vb.clone())
    }

    /// An odd window keeps the size of images, but for its stride. An even one has no padding.
    pub(super) fn max_pool(&self, size: usize, stride: usize) -> MaxPool2d {
        let pool = MaxPool2d::new(size).with_stride(stride).with_padding(size / 2 * (size % 2));
        self.turn(pool, MaxPool2d::channels_last)
    }

    /// As [`max_pool`](Self::max_pool).
    pub(super) fn avg_pool(&self, size: usize, stride: usize) -> AvgPool2d {
        let pool = AvgPool2d::new(size).with_stride(stride).with_padding(size / 2 * (size % 2));
        self.turn(pool, AvgPool2d::channels_last)
    }

    pub(super) fn global_pool(&self) -> GlobalAvgPool2d {
        self.turn(GlobalAvgPool2d::new(), GlobalAvgPool2d::channels_last)
    }

    pub(super) fn flatten(&self) -> Flatten {
        self.turn(Flatten::new(), Flatten::channels_last)
    }

    /// How most networks end: the mean of each channel, and a linear layer.
    pub(super) fn head(&self, width: usize) -> Result<SequentialT> {
        Ok(seq_t().add(self.global_pool()).add(self.pp("head").linear(width, CLASSES)?))
    }

    /// The dimension that channels are in.
    pub(super) fn channels(&self) -> usize {
        if self.channels_last { 3 } else { 1 }
    }

    /// Layers on one input, whose outputs are one after another in the output's channels.
    pub(super) fn branches(&self, branches: Vec<SequentialT>) -> Branches {
        Branches { branches, channels: self.channels() }
    }

    /// Channel `i` of group `g` becomes channel `g` of group `i`.
    pub(super) fn shuffle(&self, groups: usize) -> impl Fn(&Tensor) -> Result<Tensor> + use<> {
        let channels = self.channels();
        move |x| {
            let mut dims = x.dims().to_vec();
            dims[channels] /= groups;
            dims.insert(channels, groups);
            let shuffled = x.reshape(dims)?.transpose(channels, channels + 1)?;
            ops::flatten(&shuffled)?.reshape(x.shape())
        }
    }
}

/// A convolution, its batch norm, and perhaps a relu.
#[derive(Debug)]
pub(super) struct ConvNorm {
    conv: Conv2d,
    norm: BatchNorm,
    relu: bool,
}

impl ConvNorm {
    /// With `residual` added before a relu, in the norm's pass.
    pub(super) fn add_relu(&self, x: &Tensor, residual: &Tensor, train: bool) -> Result<Tensor> {
        self.norm.forward_relu_t(&self.conv.forward(x)?, Some(residual), train)
    }
}

impl ModuleT for ConvNorm {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let y = self.conv.forward(x)?;
        match self.relu {
            true => self.norm.forward_relu_t(&y, None, train),
            false => self.norm.forward_t(&y, train),
        }
    }
}

#[derive(Debug)]
pub(super) struct NormRelu(BatchNorm);

impl ModuleT for NormRelu {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        self.0.forward_relu_t(x, None, train)
    }
}

/// A path, and a way around it that is the input or a projection of it: `relu(path(x) + x)`.
#[derive(Debug)]
pub(super) struct Residual {
    path: SequentialT,
    /// The path's last layer, which adds.
    last: ConvNorm,
    /// Where the width or the size changes.
    projection: Option<ConvNorm>,
}

impl Residual {
    /// Convolutions of these widths one after another, each with its norm.
    pub(super) fn new(net: &Net, from: usize, convs: &[(usize, Kernel)]) -> Result<Self> {
        let (mut path, mut width, mut stride) = (seq_t(), from, 1);
        for (i, &(to, kernel)) in convs.iter().enumerate() {
            stride *= kernel.stride;
            if i + 1 < convs.len() {
                path = path.add(net.pp(i + 1).conv_norm_relu(width, to, kernel)?);
                width = to;
            }
        }
        let Some(&(to, kernel)) = convs.last() else { candle_core::bail!("no convolutions") };
        let last = net.pp(convs.len()).conv_norm(width, to, kernel)?;
        Self::around(net, path, last, (from, to), stride)
    }

    /// A projection around layers that change the width and have a stride.
    pub(super) fn around(
        net: &Net,
        path: SequentialT,
        last: ConvNorm,
        (from, to): (usize, usize),
        stride: usize,
    ) -> Result<Self> {
        let projection = match (from, stride) == (to, 1) {
            true => None,
            false => Some(net.pp("projection").conv_norm(from, to, kernel(1).stride(stride))?),
        };
        Ok(Self { path, last, projection })
    }
}

impl ModuleT for Residual {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let around = match &self.projection {
            Some(projection) => projection.forward_t(x, train)?,
            None => x.clone(),
        };
        self.last.add_relu(&self.path.forward_t(x, train)?, &around, train)
    }
}

#[derive(Debug)]
pub(super) struct Branches {
    branches: Vec<SequentialT>,
    channels: usize,
}

impl ModuleT for Branches {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let parts = self.branches.iter().map(|branch| branch.forward_t(x, train));
        let parts = parts.collect::<Result<Vec<_>>>()?;
        ops::cat(&parts.iter().collect::<Vec<_>>(), self.channels)
    }
}
