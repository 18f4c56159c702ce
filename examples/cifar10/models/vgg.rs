//! VGG: nothing but convolutions of 3x3, with a pool of 2x2 between stages that halves the image as the
//! width doubles. Two small kernels see as much as one large one, with fewer weights and a relu in between.
//! Simonyan and Zisserman 2014, <https://arxiv.org/abs/1409.1556>: A, B, D and E of table 1, with batch
//! norm and one linear layer instead of three.

use candle_amp::nn::{SequentialT, seq_t};
use candle_core::Result;

use super::net::{Net, kernel};

pub(super) const PAPER: &str = "https://arxiv.org/abs/1409.1556";

/// Of so many convolutions a stage.
pub(super) fn vgg(net: &Net, convs: &[usize; 5]) -> Result<SequentialT> {
    let (mut layers, mut from) = (seq_t(), 3);
    for (stage, (&width, &count)) in [64, 128, 256, 512, 512].iter().zip(convs).enumerate() {
        for i in 0..count {
            let net = net.pp(format!("stage{}.{i}", stage + 1));
            layers = layers.add(net.conv_norm_relu(from, width, kernel(3).bias())?);
            from = width;
        }
        layers = layers.add(net.max_pool(2, 2));
    }
    Ok(layers.add(net.head(from)?))
}
