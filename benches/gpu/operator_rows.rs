//! The rows of operators one by one, beside PyTorch and beside what the card can do.

use candle_amp_benches::list;
use candle_amp_benches::precision::Precision;

use crate::operators::{Operator, Pass};
use crate::workload::{Spec, Work};

use Operator::{
    Attention, BatchNorm, Cast, Conv, CrossEntropy, Dropout, Embedding, Gelu, GroupNorm, Head,
    LayerNorm, Linear, Lstm, MaxPool, Softmax,
};

type Peer = list::Peer<Spec>;
type Group = list::Group<Spec>;

const EACH: &[Pass] = &[Pass::Forward, Pass::Both];
const CONV: &[Pass] = &[Pass::Forward, Pass::Dgrad, Pass::Wgrad, Pass::Both];
const ATTENTION: &[Pass] = &[Pass::Forward, Pass::Backward, Pass::Both];

const fn conv(sizes: [usize; 5], stride: usize) -> Operator {
    let [batch, channels, outs, size, kernel] = sizes;
    Conv { batch, channels, outs, size, kernel, stride }
}

const fn embedding(hot: bool) -> Operator {
    Embedding { numbers: 8192, rows: 50257, width: 768, hot }
}

const ALL: &[(&str, Operator, &[Pass])] = &[
    ("conv 3x3, 64", conv([128, 64, 64, 32, 3], 1), CONV),
    ("conv 3x3, 512", conv([128, 512, 512, 4, 3], 1), CONV),
    ("conv 3x3, stride 2", conv([128, 128, 256, 16, 3], 2), CONV),
    ("conv 1x1", conv([128, 256, 64, 32, 1], 1), CONV),
    ("attention, 1024", Attention { batch: 8, heads: 12, length: 1024, width: 64 }, ATTENTION),
    ("attention, wide", Attention { batch: 4, heads: 8, length: 2048, width: 128 }, ATTENTION),
    ("layer norm", LayerNorm { rows: 8192, width: 768 }, EACH),
    ("batch norm", BatchNorm { batch: 128, channels: 64, size: 32 }, EACH),
    ("group norm", GroupNorm { batch: 32, channels: 128, size: 32, groups: 32 }, EACH),
    ("cross entropy", CrossEntropy { rows: 8192, classes: 50257 }, EACH),
    ("fused head", Head { rows: 8192, width: 768, classes: 50257 }, EACH),
    ("linear", Linear { rows: 8192, ins: 768, outs: 3072 }, EACH),
    ("embedding", embedding(false), EACH),
    ("embedding, hot", embedding(true), EACH),
    ("gelu", Gelu { elements: 8192 * 3072 }, EACH),
    ("softmax", Softmax { rows: 8192, width: 1024 }, EACH),
    ("max pool", MaxPool { batch: 128, channels: 64, size: 32 }, EACH),
    ("dropout", Dropout { elements: 8192 * 768 }, EACH),
    ("lstm", Lstm { batch: 64, length: 64, width: 512 }, EACH),
    ("cast from F32", Cast { elements: 1 << 26 }, &[Pass::Forward]),
];

const PRECISIONS: [Precision; 3] = [Precision::Bf16, Precision::F16, Precision::F32];

/// What products are judged by: one so large that nothing but the arithmetic counts.
pub(crate) fn products() -> Group {
    let mut group = Group::default();
    for precision in PRECISIONS {
        let operator = Linear { rows: 8192, ins: 8192, outs: 8192 };
        let spec = Work::Operator { operator, pass: Pass::Forward }.at(precision);
        group.row(format!("product 8192 {precision}"), spec, Peer::Torch, None);
    }
    group
}

/// A group for each operator and precision: what one holds is none of the next one's. All operators in BF16 come first,
/// as a call that is lent may end before the last group. `rate` is what the card gets through in a second, of a unit in a
/// precision.
pub(crate) fn groups(rate: impl Fn(&str, Precision) -> f64) -> Vec<Group> {
    let mut groups = Vec::new();
    for precision in PRECISIONS {
        let is_cast = |operator: Operator| matches!(operator, Cast { .. });
        let all = ALL.iter().filter(|all| precision != Precision::F32 || !is_cast(all.1));
        for &(name, operator, passes) in all {
            let mut group = Group::default();
            for &pass in passes {
                let spec = Work::Operator { operator, pass }.at(precision);
                let name = format!("{name}, {} {precision}", pass.name());
                group.row(&name, spec, Peer::Torch, Some(1.0));
                if let Some((_, unit)) = operator.amount(pass, precision) {
                    let what = if unit == "GB/s" { "copy" } else { "product" };
                    let peer = Peer::Rate(rate(unit, precision), what);
                    group.row(format!("{name} / {what}"), spec, peer, None);
                }
            }
            groups.push(group);
        }
    }
    groups
}
