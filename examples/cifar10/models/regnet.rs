//! RegNet: not one network that a search found, but a design space of which the good ones are chosen: widths
//! grow by a line over the blocks, rounded to stages. Blocks are those of ResNeXt without a bottleneck, all with
//! groups of one width. Radosavovic et al. 2020, <https://arxiv.org/abs/2003.13678>: X of 200 and 400
//! million multiply-adds on ImageNet, and Y, which has squeeze and excitation.

use candle_amp::nn::{Activation, SequentialT, seq_t};
use candle_core::Result;

use super::net::{Net, Residual, kernel};
use super::senet::SqueezeExcite;

pub(super) const PAPER: &str = "https://arxiv.org/abs/2003.13678";

/// Blocks and width of each stage, the width of groups, and whether blocks have squeeze and excitation.
pub(super) struct Plan {
    depths: [usize; 4],
    widths: [usize; 4],
    group: usize,
    gate: bool,
}

pub(super) const X_200MF: Plan =
    Plan { depths: [1, 1, 4, 7], widths: [24, 56, 152, 368], group: 8, gate: false };
pub(super) const X_400MF: Plan =
    Plan { depths: [1, 2, 7, 12], widths: [32, 64, 160, 384], group: 16, gate: false };
pub(super) const Y_400MF: Plan = Plan { gate: true, ..X_400MF };

pub(super) fn regnet(net: &Net, plan: Plan) -> Result<SequentialT> {
    let mut from = 64;
    let mut layers = seq_t().add(net.pp("stem").conv_norm_relu(3, from, kernel(3))?);
    for (stage, (&width, &count)) in plan.widths.iter().zip(&plan.depths).enumerate() {
        for i in 0..count {
            let net = net.pp(format!("stage{}.{i}", stage + 1));
            let stride = if stage > 1 && i == 0 { 2 } else { 1 };
            let grouped = kernel(3).stride(stride).groups(width / plan.group);
            let mut path = seq_t()
                .add(net.pp(1).conv_norm_relu(from, width, kernel(1))?)
                .add(net.pp(2).conv_norm_relu(width, width, grouped)?);
            if plan.gate {
                let inner = (from + 2) / 4; // a quarter, rounded
                let gate = net.pp("gate");
                path = path.add(SqueezeExcite::new(&gate, width, inner, Activation::Relu)?);
            }
            let last = net.pp(3).conv_norm(width, width, kernel(1))?;
            layers = layers.add(Residual::around(&net, path, last, (from, width), stride)?);
            from = width;
        }
    }
    Ok(layers.add(net.head(from)?))
}
