//! The rows of the table, and what is wanted of them.

use candle_amp_benches::cifar::Model;
use candle_amp_benches::list;
use candle_amp_benches::networks::{GptSize, ResNetSize};
use candle_amp_benches::precision::Precision;
use candle_amp_benches::zoo::Network;

use crate::operators::Operator;
use crate::targets::Targets;
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
    let targets = Targets::of_this_processor();
    let mut groups = vec![resnet20(targets), wide(targets), blocks(targets), gemm(targets)];
    groups.extend(convolutions());
    groups.extend([batch_norm(), updates(), backward(), autocast()]);
    groups.extend(zoo());
    groups
}

/// The network of the cifar10 example.
pub(crate) const RESNET20: Work = resnet(ResNetSize::cifar(16, 3), 128, false);

const fn resnet(size: ResNetSize, batch: usize, channels_last: bool) -> Work {
    Work::Resnet { size, batch, channels_last }
}

fn resnet20(targets: Targets) -> Group {
    network("resnet20", ResNetSize::cifar(16, 3), 128, targets)
}

fn wide(targets: Targets) -> Group {
    network("wide", ResNetSize::cifar(64, 1), 64, targets)
}

fn network(name: &str, size: ResNetSize, batch: usize, targets: Targets) -> Group {
    let [in_f32, in_bf16] = targets.resnets.map(Some);
    let mut group = Group::default();
    let [work, turned] = [false, true].map(|last| resnet(size, batch, last));
    let f32 = Peer::Own(work.at(F32), "own f32");
    beside_torch(&mut group, name, work, F32, in_f32);
    beside_torch(&mut group, name, work, Bf16, in_bf16);
    let last = format!("{name} channels-last");
    beside_torch(&mut group, &last, turned, F32, in_f32);
    beside_torch(&mut group, &last, turned, Bf16, in_bf16);
    let over = Some(targets.bf16_over_f32);
    group.row(format!("{name} bf16 / own f32"), work.at(Bf16), f32, over);
    let bf16 = Peer::Own(work.at(Bf16), "own bf16");
    group.row(format!("{name} bf16 masters / own bf16"), work.at(Bf16Masters), bf16, None);
    group.row(format!("{name} f16 / own f32"), work.at(F16), f32, Some(1.3));
    let candle = Peer::Own(Work::CandleResnet { size, batch }.at(F32), "candle's own f32");
    group.row(format!("{name} f32 / candle"), work.at(F32), candle, Some(1.0 / 10.0));
    group.row(format!("{name} bf16 / candle"), work.at(Bf16), candle, Some(1.0 / 25.0));
    group
}

fn blocks(targets: Targets) -> Group {
    let mut group = Group::default();
    let mlp = Work::Mlp { layers: 8, width: 512, batch: 64 };
    let block = Work::GptBlock { width: 256, heads: 4, context: 128, batch: 16 };
    for (name, work, in_f32) in [("mlp", mlp, targets.mlp), ("gpt_block", block, targets.gpt_block)]
    {
        beside_torch(&mut group, name, work, F32, Some(in_f32));
        beside_torch(&mut group, name, work, Bf16, Some(1.0));
    }
    group
}

fn gemm(targets: Targets) -> Group {
    let mut group = Group::default();
    let shapes =
        [[1024; 3], [2048, 256, 768], [2048, 256, 1024], [2048, 1024, 256], [64, 512, 512]];
    for [m, k, n] in shapes {
        for weight_gradient in [false, true] {
            let form = if weight_gradient { " weight gradient" } else { "" };
            let name = format!("gemm {m}x{k}x{n}{form}");
            for (precision, target) in [(F32, targets.products), (Bf16, 1.0 / 0.9)] {
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
        beside_torch(&mut group, &name, work, F32, Some(1.0));
        beside_torch(&mut group, &name, work, Bf16, Some(1.0));
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

/// Networks that nobody tuned the crate for, and the operators in them. Each is a group of its own, so
/// that none stays in memory while another is measured.
pub(crate) fn zoo() -> Vec<Group> {
    let group = |name: &str, work, target| {
        let mut group = Group::default();
        for precision in [F32, Bf16] {
            beside_torch(&mut group, name, work, precision, Some(target));
        }
        group
    };
    let networks = zoo_networks().map(|(name, network, _)| {
        let work = Work::ZooNetwork { network };
        group(name, work, 1.0)
    });
    let families = families().map(|(name, network, _)| {
        let work = Work::ZooNetwork { network };
        group(&format!("family: {name}"), work, 1.2)
    });
    let operators = zoo_operators().map(|(name, (operator, batch))| {
        let work = Work::ZooOperator { operator, batch };
        group(&format!("zoo: {name}"), work, 1.3)
    });
    networks.into_iter().chain(families).chain(operators).collect()
}

/// Each with how many parameters PyTorch counts in it.
pub(crate) fn zoo_networks() -> [(&'static str, Network, usize); 7] {
    let size = GptSize { layers: 3, width: 192, heads: 6, vocabulary: 65, context: 128 };
    let (vocabulary, width, layers, context) = (1000, 256, 2, 64);
    [
        ("mobilenet_v2", Network::MobilenetV2 { width: 32, batch: 32 }, 2_236_682),
        ("vit_tiny, 4 layers", Network::VitTiny { layers: 4, batch: 32 }, 1_803_850),
        ("nanogpt, 3 layers", Network::Nanogpt { size, batch: 12 }, 1_372_032),
        ("dcgan", Network::Dcgan { width: 64, batch: 32 }, 1_732_224),
        ("lstm_lm", Network::LstmLm { vocabulary, width, layers, context, batch: 16 }, 1_565_672),
        ("densenet_bc_40", Network::Densenet { depth: 40, growth: 12, batch: 32 }, 176_122),
        ("unet", Network::Unet { channels: 16, size: 64, batch: 8 }, 117_361),
    ]
}

/// One network of each family of the cifar10 example, with how many parameters PyTorch counts in it.
pub(crate) fn families() -> [(&'static str, Network, usize); 18] {
    use Model::*;
    let cifar = |model, batch| Network::Cifar { model, batch };
    [
        ("vgg11", cifar(Vgg11, 32), 9_231_114),
        ("resnet18", cifar(Resnet18, 16), 11_173_962),
        ("preact-resnet18", cifar(PreactResnet18, 16), 11_171_146),
        ("senet18", cifar(Senet18, 16), 11_260_354),
        ("googlenet", cifar(Googlenet, 8), 6_166_250),
        ("densenet-cifar", cifar(DensenetCifar, 32), 1_000_618),
        ("resnext29-32x4d", cifar(Resnext29, 8), 4_774_218),
        ("dpn26", cifar(Dpn26, 8), 11_574_842),
        ("mobilenet", cifar(Mobilenet, 64), 3_217_226),
        ("mobilenet-v2", cifar(MobilenetV2, 32), 2_296_922),
        ("shufflenet-g2", cifar(ShufflenetG2, 64), 887_582),
        ("shufflenet-v2-x1", cifar(ShufflenetV2X1, 64), 1_263_854),
        ("efficientnet-b0", cifar(EfficientnetB0, 64), 3_598_598),
        ("regnetx-200mf", cifar(Regnetx200mf, 32), 2_321_946),
        ("regnety-400mf", cifar(Regnety400mf, 16), 5_714_362),
        ("dla-simple", cifar(DlaSimple, 8), 15_142_970),
        ("vit-tiny", cifar(VitTiny, 16), 5_362_762),
        ("airbench", cifar(Airbench, 64), 1_972_768),
    ]
}

/// Each with its batch.
fn zoo_operators() -> [(&'static str, (Operator, usize)); 18] {
    let conv = |from, to, kernel, stride, groups| {
        (Operator::Conv { from, to, size: 32, kernel, stride, groups }, 32)
    };
    let (rows, width) = (128, 256);
    [
        ("depthwise 3x3", conv(64, 64, 3, 1, 64)),
        ("grouped 3x3, 8 groups", conv(64, 64, 3, 1, 8)),
        ("transposed 4x4 stride 2", (Operator::ConvTranspose { from: 64, to: 32, size: 16 }, 32)),
        ("1x1 64 to 128", conv(64, 128, 1, 1, 1)),
        ("3x3 stride 2", conv(64, 128, 3, 2, 1)),
        ("first layer 3x3", conv(3, 64, 3, 1, 1)),
        ("concatenation", (Operator::Cat { channels: 64, size: 32 }, 32)),
        ("dropout 0.1", (Operator::Dropout { rows, width: 768 }, 16)),
        ("layer norm of 250", (Operator::LayerNorm { rows, width: 250 }, 64)),
        ("gelu_erf", (Operator::GeluErf { rows, width: 768 }, 16)),
        ("softmax, last dimension", (Operator::Softmax { rows, width, dim: 2 }, 64)),
        ("softmax, first dimension", (Operator::Softmax { rows, width, dim: 0 }, 64)),
        ("attention 77x40", (Operator::Attention { heads: 8, context: 77, width: 40 }, 16)),
        ("lstm", (Operator::Lstm { context: 64, width }, 16)),
        ("gru", (Operator::Gru { context: 64, width }, 16)),
        ("embedding", (Operator::Embedding { vocabulary: 10_000, context: rows, width }, 16)),
        ("mean, middle dimension", (Operator::MeanMiddle { rows, width }, 64)),
        ("relu, transposed", (Operator::ReluTransposed { rows, width }, 64)),
    ]
}
