//! Networks of convolutions that make images.

use candle_amp::nn::{
    BatchNorm, Conv2d, Conv2dConfig, ConvTranspose2d, ConvTranspose2dConfig, conv_transpose2d,
    conv_transpose2d_no_bias, conv2d, conv2d_no_bias,
};
use candle_amp::ops;
use candle_core::{Result, Tensor};
use candle_nn::{Module, ModuleT, VarBuilder};

use super::classifiers::{ConvNorm, norm};

/// Two convolutions of a U-Net.
struct Double([ConvNorm; 2]);

impl Double {
    fn new([from, to]: [usize; 2], vb: VarBuilder) -> Result<Self> {
        let first = ConvNorm::new([from, to], 3, 1, 1, vb.pp("first"))?;
        Ok(Self([first, ConvNorm::new([to, to], 3, 1, 1, vb.pp("second"))?]))
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0[1].relu(&self.0[0].relu(x)?)
    }
}

/// A U-Net of three levels.
pub(super) struct UNet {
    down: Vec<Double>,
    bottom: Double,
    up: Vec<(ConvTranspose2d, Double)>,
    head: Conv2d,
}

impl UNet {
    pub(super) fn new(channels: usize, vb: VarBuilder) -> Result<Self> {
        let c = channels;
        let down = [[3, c], [c, 2 * c]];
        let down = (0..).zip(down).map(|(i, sides)| Double::new(sides, vb.pp("down").pp(i)));
        let up = |(i, [from, to]): (usize, [usize; 2])| {
            let (vb, config) =
                (vb.pp("up").pp(i), ConvTranspose2dConfig { stride: 2, ..Default::default() });
            let larger = conv_transpose2d(from, to, 2, config, vb.pp("larger"))?;
            Ok((larger, Double::new([from, to], vb.pp("convs"))?))
        };
        let up = (0..).zip([[4 * c, 2 * c], [2 * c, c]]).map(up);
        Ok(Self {
            down: down.collect::<Result<_>>()?,
            bottom: Double::new([2 * c, 4 * c], vb.pp("bottom"))?,
            up: up.collect::<Result<_>>()?,
            head: conv2d(c, 1, 1, Conv2dConfig::default(), vb.pp("head"))?,
        })
    }
}

impl Module for UNet {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (mut x, mut kept) = (x.clone(), Vec::new());
        for double in &self.down {
            let y = double.forward(&x)?;
            x = ops::max_pool2d(&y, 2, 2, 0)?;
            kept.push(y);
        }
        x = self.bottom.forward(&x)?;
        for ((larger, double), kept) in self.up.iter().zip(kept.iter().rev()) {
            x = double.forward(&ops::cat(&[kept, &larger.forward(&x)?], 1)?)?;
        }
        self.head.forward(&x)
    }
}

/// The generator of a DCGAN.
pub(super) struct Generator {
    layers: Vec<(ConvTranspose2d, BatchNorm)>,
    last: ConvTranspose2d,
}

impl Generator {
    /// Of the noise that it makes an image of.
    pub(super) const LATENT: usize = 100;

    pub(super) fn new(width: usize, vb: VarBuilder) -> Result<Self> {
        let layer = |from, to, stride, vb| {
            let config =
                ConvTranspose2dConfig { padding: stride - 1, stride, ..Default::default() };
            conv_transpose2d_no_bias(from, to, 4, config, vb)
        };
        let sides = [[Self::LATENT, 4 * width], [4 * width, 2 * width], [2 * width, width]];
        let sides = sides.into_iter().enumerate();
        let layers = sides.map(|(i, [from, to])| {
            let (vb, stride) = (vb.pp("layers").pp(i), if i == 0 { 1 } else { 2 });
            Ok((layer(from, to, stride, vb.pp("conv"))?, norm(to, vb.pp("norm"))?))
        });
        Ok(Self {
            layers: layers.collect::<Result<_>>()?,
            last: layer(width, 3, 2, vb.pp("last"))?,
        })
    }
}

impl Module for Generator {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let layer = |x: Tensor, (conv, norm): &(ConvTranspose2d, BatchNorm)| {
            norm.forward_relu_t(&conv.forward(&x)?, None, true)
        };
        let x = self.layers.iter().try_fold(x.clone(), layer)?;
        ops::tanh(&self.last.forward(&x)?)
    }
}

/// The discriminator of a DCGAN.
pub(super) struct Discriminator {
    first: Conv2d,
    layers: Vec<(Conv2d, BatchNorm)>,
    last: Conv2d,
}

impl Discriminator {
    pub(super) fn new(width: usize, vb: VarBuilder) -> Result<Self> {
        let layer = |from, to, vb| {
            let config = Conv2dConfig { padding: 1, stride: 2, ..Default::default() };
            conv2d_no_bias(from, to, 4, config, vb)
        };
        let sides = [[width, 2 * width], [2 * width, 4 * width]].into_iter().enumerate();
        let layers = sides.map(|(i, [from, to])| {
            let vb = vb.pp("layers").pp(i);
            Ok((layer(from, to, vb.pp("conv"))?, norm(to, vb.pp("norm"))?))
        });
        Ok(Self {
            first: layer(3, width, vb.pp("first"))?,
            layers: layers.collect::<Result<_>>()?,
            last: conv2d_no_bias(4 * width, 1, 4, Conv2dConfig::default(), vb.pp("last"))?,
        })
    }
}

impl Module for Discriminator {
    /// `(n, 3, 32, 32)` → `(n, 1, 1, 1)`.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = ops::leaky_relu(&self.first.forward(x)?, 0.2)?;
        let layer = |x: Tensor, (conv, norm): &(Conv2d, BatchNorm)| {
            ops::leaky_relu(&norm.forward_t(&conv.forward(&x)?, true)?, 0.2)
        };
        self.last.forward(&self.layers.iter().try_fold(x, layer)?)
    }
}
