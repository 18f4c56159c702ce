//! The rows of the table, and what is wanted of them.

use candle_amp_benches::list;
use candle_amp_benches::networks::ResNetSize;
use candle_amp_benches::precision::Precision;

use crate::workload::{Spec, Work};

use Precision::{Bf16, Bf16Masters, F16, F32};

type Peer = list::Peer<Spec>;
type Group = list::Group<Spec>;

/// A row beside PyTorch.
fn beside_torch(
    group: &mut Group,
    name: &str,
    work: Work,
    precision: Precision,
    target: Option<f64>,
) {
    group.row(format!("{name} {precision}"), work.at(precision), Peer::Torch, target);
}

pub(crate) fn groups() -> Vec<Group> {
    let mut groups = vec![resnet20(), wide(), blocks(), gemm()];
    groups.extend(convolutions());
    groups.extend([batch_norm(), updates(), backward(), autocast()]);
    groups
}

/// The network of the cifar10 example.
pub(crate) const RESNET20: Work = resnet(ResNetSize::cifar(16, 3), 128, false);

const fn resnet(size: ResNetSize, batch: usize, channels_last: bool) -> Work {
    Work::Resnet { size, batch, channels_last }
}

fn resnet20() -> Group {
    network("resnet20", ResNetSize::cifar(16, 3), 128)
}

fn wide() -> Group {
    network("wide", ResNetSize::cifar(64, 1), 64)
}

fn network(name: &str, size: ResNetSize, batch: usize) -> Group {
    let mut group = Group::default();
    let [work, turned] = [false, true].map(|last| resnet(size, batch, last));
    let f32 = Peer::Own(work.at(F32), "own f32");
    beside_torch(&mut group, name, work, F32, Some(0.85));
    beside_torch(&mut group, name, work, Bf16, Some(0.75));
    let last = format!("{name} channels-last");
    beside_torch(&mut group, &last, turned, F32, Some(0.85));
    beside_torch(&mut group, &last, turned, Bf16, Some(0.75));
    group.row(format!("{name} bf16 / own f32"), work.at(Bf16), f32, Some(1.0 / 1.6));
    let bf16 = Peer::Own(work.at(Bf16), "own bf16");
    group.row(format!("{name} bf16 masters / own bf16"), work.at(Bf16Masters), bf16, None);
    group.row(format!("{name} f16 / own f32"), work.at(F16), f32, Some(1.3));
    let candle = Peer::Own(Work::CandleResnet { size, batch }.at(F32), "candle's own f32");
    group.row(format!("{name} f32 / candle"), work.at(F32), candle, Some(1.0 / 10.0));
    group.row(format!("{name} bf16 / candle"), work.at(Bf16), candle, Some(1.0 / 25.0));
    group
}

fn blocks() -> Group {
    let mut group = Group::default();
    let block = Work::GptBlock { width: 256, heads: 4, context: 128, batch: 16 };
    for precision in [F32, Bf16] {
        beside_torch(
            &mut group,
            "mlp",
            Work::Mlp { layers: 8, width: 512, batch: 64 },
            precision,
            Some(1.0),
        );
    }
    for precision in [F32, Bf16] {
        beside_torch(&mut group, "gpt_block", block, precision, Some(1.0));
    }
    group
}

fn gemm() -> Group {
    let mut group = Group::default();
    let shapes =
        [[1024; 3], [2048, 256, 768], [2048, 256, 1024], [2048, 1024, 256], [64, 512, 512]];
    for [m, k, n] in shapes {
        for weight_gradient in [false, true] {
            let form = if weight_gradient { " weight gradient" } else { "" };
            let name = format!("gemm {m}x{k}x{n}{form}");
            for (precision, target) in [(F32, 1.0), (Bf16, 1.0 / 0.9)] {
                let work = Work::Gemm { m, k, n, weight_gradient };
                beside_torch(&mut group, &name, work, precision, Some(target));
            }
        }
    }
    group
}

fn convolutions() -> Vec<Group> {
    let conv = |batch, from, to, size, kernel, stride| {
        let work = Work::Conv { batch, from, to, size, kernel, stride };
        let stride = if stride == 1 { String::new() } else { format!(" stride {stride}") };
        let batch = if batch == 128 { String::new() } else { format!(" batch {batch}") };
        let name = format!("conv {from}->{to} {size}x{size} {kernel}x{kernel}{stride}{batch}");
        let mut group = Group::default();
        beside_torch(&mut group, &name, work, F32, None);
        beside_torch(&mut group, &name, work, Bf16, None);
        group
    };
    vec![
        conv(128, 3, 16, 32, 3, 1),
        conv(128, 16, 16, 32, 3, 1),
        conv(128, 16, 32, 32, 3, 2),
        conv(128, 16, 32, 32, 1, 2),
        conv(128, 32, 32, 16, 3, 1),
        conv(128, 64, 64, 8, 3, 1),
        conv(64, 64, 64, 32, 3, 1),
    ]
}

fn batch_norm() -> Group {
    let mut group = Group::default();
    for (channels, size) in [(16, 32), (32, 16), (64, 8)] {
        let name = format!("batch_norm_relu {channels}x{size}x{size}");
        for precision in [F32, Bf16] {
            let work = Work::BatchNormRelu { batch: 128, channels, size };
            beside_torch(&mut group, &name, work, precision, None);
        }
    }
    group
}

/// Over 64 tensors of 1 MiB, 16.8 million numbers.
fn updates() -> Group {
    let (tensors, length) = (64, 1 << 18);
    let mut group = Group::default();
    let pass = Work::Pass { tensors, length };
    let unscale = Work::Unscale { tensors, length };
    beside_torch(&mut group, "read and write", pass, F32, None);
    beside_torch(&mut group, "unscale", unscale, F32, None);
    let own = Peer::Own(pass.at(F32), "own read and write");
    group.row("unscale / read and write", unscale.at(F32), own, Some(1.25));
    beside_torch(&mut group, "clip_grad_norm", Work::Clip { tensors, length }, F32, None);
    let update = |clip| Work::Update { tensors, length, clip };
    beside_torch(&mut group, "unscale, adamw", update(false), F32, None);
    beside_torch(&mut group, "unscale, clip, adamw", update(true), F32, None);
    let (sgd, adamw) = (Work::Sgd { tensors, length }, Work::Adamw { tensors, length });
    beside_torch(&mut group, "sgd", sgd, F32, None);
    beside_torch(&mut group, "adamw", adamw, F32, None);
    for (name, work, states) in [("sgd", sgd, 1), ("adamw", adamw, 2)] {
        let same = Work::SameBytes { tensors, length, states }.at(F32);
        let same = Peer::Own(same, "a plain loop");
        group.row(format!("{name} / its bytes"), work.at(F32), same, Some(1.25));
    }
    group
}

fn backward() -> Group {
    let (links, length) = (8, 1 << 21);
    let (layers, width, batch) = (8, 512, 64);
    let mut group = Group::default();
    let kernels = |work: Work| Peer::Own(work.at(F32), "its kernels");
    let chain = kernels(Work::ChainKernels { links, length });
    let mlp = kernels(Work::MlpKernels { layers, width, batch });
    let ours = Work::ChainBackward { links, length }.at(F32);
    group.row("backward of a chain", ours, chain, Some(1.5));
    let ours = Work::MlpBackward { layers, width, batch }.at(F32);
    group.row("backward of an MLP", ours, mlp, Some(1.5));
    group
}

fn autocast() -> Group {
    let mut group = Group::default();
    let in_scope = |enabled| Work::InScope { enabled }.at(F32);
    group.row("autocast: operator in no scope", Work::TinyOperator.at(F32), Peer::Nothing, None);
    let bound = |nanoseconds: f64| Peer::Bound(nanoseconds * 1e-9);
    group.row("autocast: adds, enabled", in_scope(true), bound(100.0), Some(1.0));
    group.row("autocast: adds, disabled", in_scope(false), bound(20.0), Some(1.0));
    group.row("autocast: enter and leave", Work::EnterScope.at(F32), Peer::Nothing, None);
    group
}
