//! The rows of the table, and what is wanted of them.

use candle_amp_benches::list;
use candle_amp_benches::networks::{GptSize, ResNetSize};
use candle_amp_benches::precision::Precision;

use clap::ValueEnum;

use crate::operator_rows;
use crate::parameters::Parameters;
use crate::passes::Storage;
use crate::workload::{Spec, Work};

use Precision::{Bf16, F16, F32, Tf32};

type Peer = list::Peer<Spec>;
type Group = list::Group<Spec>;

/// What passes over memory should have of the copy's bandwidth.
const SHARE: f64 = 0.85;

/// What everything else is measured by.
pub(crate) fn copy() -> Group {
    let mut group = Group::default();
    group.row("copy 1 GiB", Work::Copy { bytes: 1 << 30 }.at(F32), Peer::Torch, None);
    group
}

/// What a run may be limited to.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub(crate) enum Part {
    /// Passes over all parameters.
    Passes,
    /// Operators, forward and backward.
    Operators,
    /// Training steps of GPT-2.
    Gpt2,
    /// Training steps of residual networks.
    Resnets,
    /// Steps of GPT-2 as one CUDA graph, beside `torch.compile`, which takes a minute each to compile.
    Gpt2Compiled,
    /// The same of residual networks.
    ResnetsCompiled,
}

/// What the card gets through in a second, as it was measured.
#[derive(Debug)]
pub(crate) struct Card {
    /// GB/s that a copy reads and writes.
    pub(crate) copied: f64,
    /// TFLOP/s of a large product.
    pub(crate) products: Vec<(Precision, f64)>,
}

impl Card {
    fn rate(&self, unit: &str, precision: Precision) -> f64 {
        let product = self.products.iter().find(|(of, _)| *of == precision);
        if unit == "GB/s" { self.copied } else { product.map_or(f64::NAN, |(_, rate)| *rate) }
    }
}

/// The batches of ResNets.
pub(crate) const BATCHES: [usize; 2] = [128, 512];

/// The rows of these parts, of ResNets in these batches. A run that is cut short has the first ones: what counts most comes
/// first.
pub(crate) fn groups(parts: &[Part], card: &Card, batches: &[usize]) -> Vec<Group> {
    let rows = |part: &Part| match part {
        Part::Passes => passes(card.copied),
        Part::Operators => operator_rows::groups(|unit, precision| card.rate(unit, precision)),
        Part::Gpt2 => gpt2(),
        Part::Resnets => resnets(batches),
        Part::Gpt2Compiled => beside_compiled(&[("gpt2", GRAPHED_GPT2)]),
        Part::ResnetsCompiled => {
            let graphed = |(name, size)| (name, Work::GraphedResnet { size, batch: 128 });
            beside_compiled(&RESNETS.map(graphed))
        }
    };
    parts.iter().flat_map(rows).collect()
}

fn passes(copied: f64) -> Vec<Group> {
    let mut groups = Vec::new();
    for (name, parameters) in [("resnet50", Parameters::Resnet50), ("gpt2", Parameters::Gpt2)] {
        let mut add = |what: &str, work: Work| groups.push(pass(what, name, work, copied));
        add("unscale", Work::Unscale { parameters });
        add("clip_grad_norm", Work::Clip { parameters });
        add("unscale, adamw", Work::Update { parameters, clip: false });
        add("unscale, clip, adamw", Work::Update { parameters, clip: true });
        add("sgd", Work::Sgd { parameters });
        add("lion", Work::Lion { parameters });
        add("lamb", Work::Lamb { parameters });
        add("ema", Work::Ema { parameters });
        add("MasterWeights refresh", Work::RefreshWeights { parameters });
        add("MasterVars refresh", Work::RefreshVars { parameters });
    }
    let million = |tensors| Parameters::Even { tensors, length: 1 << 20 };
    for (name, parameters) in [
        ("resnet50", Parameters::Resnet50),
        ("gpt2", Parameters::Gpt2),
        ("100 M", million(96)),
        ("1 B", million(960)),
    ] {
        for (what, storage) in [
            ("adamw", Storage::F32),
            ("adamw bf16 masters", Storage::Bf16Masters),
            ("adamw bf16 remainder", Storage::Bf16Remainder),
        ] {
            groups.push(pass(what, name, Work::Adamw { parameters, storage }, copied));
        }
    }
    groups
}

const GRAPHED_GPT2: Work = Work::GraphedGpt { size: GptSize::SMALL, batch: 8 };

const RESNETS: [(&str, ResNetSize); 2] =
    [("resnet50", ResNetSize::RESNET50), ("resnet18", ResNetSize::RESNET18)];

/// What counts most comes first: a call that is lent may end before the last of them.
fn resnets(batches: &[usize]) -> Vec<Group> {
    let mut groups = Vec::new();
    let batch = 128;
    for channels_last in [true, false] {
        for &batch in batches {
            groups.extend(RESNETS.map(|(name, size)| resnet(name, size, batch, channels_last)));
        }
        if channels_last {
            for (name, size) in RESNETS {
                let eager = Work::Resnet { size, batch, channels_last };
                groups.extend(by_a_graph(name, Work::GraphedResnet { size, batch }, eager));
            }
        }
    }
    groups.extend(RESNETS.map(|(name, size)| beside_candle(name, size, batch)));
    groups
}

/// A pass beside PyTorch's, where it has one, and beside the copy.
fn pass(what: &str, whose: &str, work: Work, copied: f64) -> Group {
    let spec = work.at(F32);
    let name = format!("{what}, {whose}");
    let mut group = Group::default();
    if work.has_torch() {
        group.row(&name, spec, Peer::Torch, Some(1.0));
    }
    let copy = Peer::Rate(copied, "copy");
    group.row(format!("{name} / copy"), spec, copy, Some(1.0 / SHARE));
    group
}

/// In groups of their own: each has gigabytes of activations.
fn gpt2() -> Vec<Group> {
    let work = Work::Gpt { size: GptSize::SMALL, batch: 8 };
    let beside = |precision| {
        let mut group = Group::default();
        group.row(format!("gpt2 {precision}"), work.at(precision), Peer::Torch, Some(1.0));
        group
    };
    let mut groups: Vec<_> = [Bf16, F16, Tf32, F32].map(beside).into();
    groups.extend(by_a_graph("gpt2", GRAPHED_GPT2, work));
    groups
}

/// A step as one CUDA graph, beside the same step as always.
fn by_a_graph(name: &str, graphed: Work, eager: Work) -> [Group; 2] {
    [Bf16, F16].map(|precision| {
        let mut group = Group::default();
        let peer = Peer::Own(eager.at(precision), "own eager");
        group.row(format!("{name} {precision}, by a graph"), graphed.at(precision), peer, None);
        group
    })
}

/// A step as one CUDA graph, beside `torch.compile`'s, which is two.
fn beside_compiled(steps: &[(&str, Work)]) -> Vec<Group> {
    let all =
        [Bf16, F16].into_iter().flat_map(|precision| steps.iter().map(move |s| (precision, s)));
    let group = |(precision, &(name, work)): (Precision, &(&str, Work))| {
        let mut group = Group::default();
        let name = format!("{name} {precision}, by a graph / torch.compile");
        group.row(name, work.at(precision), Peer::Torch, Some(1.0));
        group
    };
    all.map(group).collect()
}

fn resnet(name: &str, size: ResNetSize, batch: usize, channels_last: bool) -> Group {
    let (mut group, work) = (Group::default(), Work::Resnet { size, batch, channels_last });
    let name = if channels_last { format!("{name} channels-last") } else { name.to_owned() };
    for precision in [Bf16, F16, Tf32, F32] {
        let name = format!("{name} batch {batch} {precision}");
        group.row(name, work.at(precision), Peer::Torch, Some(1.0));
    }
    let f32 = Peer::Own(work.at(F32), "own f32");
    for precision in [F16, Bf16] {
        let name = format!("{name} batch {batch} {precision} / own f32");
        group.row(name, work.at(precision), f32, None);
    }
    group
}

/// The floor.
fn beside_candle(name: &str, size: ResNetSize, batch: usize) -> Group {
    let mut group = Group::default();
    let candle = Peer::Own(Work::CandleResnet { size, batch }.at(F32), "candle's own f32");
    let ours = Work::Resnet { size, batch, channels_last: false }.at(F32);
    group.row(format!("{name} batch {batch} f32 / candle"), ours, candle, None);
    group
}
