//! GoogLeNet: an inception block looks at its input at several scales, by convolutions of 1x1, 3x3 and 5x5
//! and a pool, and puts the results side by side. Convolutions of 1x1 make the large ones cheap. Szegedy et
//! al. 2014, <https://arxiv.org/abs/1409.4842>, table 1; as in later versions, two of 3x3 stand for one of
//! 5x5, and there is batch norm.

use candle_amp::nn::{SequentialT, seq_t};
use candle_core::Result;

use super::net::{Branches, Net, kernel};

pub(super) const PAPER: &str = "https://arxiv.org/abs/1409.4842";

/// The columns of the paper's table: 1x1, before 3x3, 3x3, before 5x5, 5x5, behind the pool.
type Widths = [usize; 6];

const STAGES: [&[Widths]; 3] = [
    &[[64, 96, 128, 16, 32, 32], [128, 128, 192, 32, 96, 64]],
    &[
        [192, 96, 208, 16, 48, 64],
        [160, 112, 224, 24, 64, 64],
        [128, 128, 256, 24, 64, 64],
        [112, 144, 288, 32, 64, 64],
        [256, 160, 320, 32, 128, 128],
    ],
    &[[256, 160, 320, 32, 128, 128], [384, 192, 384, 48, 128, 128]],
];

pub(super) fn googlenet(net: &Net) -> Result<SequentialT> {
    let mut width = 192;
    let mut layers = seq_t().add(net.pp("stem").conv_norm_relu(3, width, kernel(3).bias())?);
    for (stage, blocks) in STAGES.iter().enumerate() {
        if stage > 0 {
            layers = layers.add(net.max_pool(3, 2));
        }
        for (i, widths) in blocks.iter().enumerate() {
            layers = layers.add(inception(&net.pp(format!("{}.{i}", stage + 3)), width, widths)?);
            width = widths[0] + widths[2] + widths[4] + widths[5];
        }
    }
    Ok(layers.add(net.head(width)?))
}

fn inception(
    net: &Net,
    width: usize,
    &[one, to3, three, to5, five, pool]: &Widths,
) -> Result<Branches> {
    let conv =
        |name: &str, from, to, size| net.pp(name).conv_norm_relu(from, to, kernel(size).bias());
    Ok(net.branches(vec![
        seq_t().add(conv("1x1", width, one, 1)?),
        seq_t().add(conv("3x3.1", width, to3, 1)?).add(conv("3x3.2", to3, three, 3)?),
        seq_t()
            .add(conv("5x5.1", width, to5, 1)?)
            .add(conv("5x5.2", to5, five, 3)?)
            .add(conv("5x5.3", five, five, 3)?),
        seq_t().add(net.max_pool(3, 1)).add(conv("pool", width, pool, 1)?),
    ]))
}
