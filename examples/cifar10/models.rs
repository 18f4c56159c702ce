//! The networks, one file a family, built of the crate's layers and operators.

mod airbench;
mod cost;
mod densenet;
mod dla;
mod dpn;
mod efficientnet;
mod googlenet;
mod mlp;
mod mobilenet;
mod net;
mod preact_resnet;
mod regnet;
mod resnet;
mod resnext;
mod senet;
mod shufflenet;
#[cfg(test)]
mod tests;
mod vgg;
mod vit;
mod whitening;

use std::{fmt, str::FromStr};

use candle_amp::Parameters;
use candle_amp::nn::{ModuleT, SequentialT, VarBuilder};
use candle_core::{Result, Tensor};
use serde::{Serialize, Serializer};

use crate::{
    data::{CLASSES, SIDE},
    ranks::sync_batch_norm,
};
pub(crate) use cost::{list, products};
use net::Net;
use resnet::{BOTTLENECK, PLAIN};

/// A network's row: its name, its layers, and the paper that it comes from.
type Row = (&'static str, fn(&Net) -> Result<SequentialT>, &'static str);

/// Every network, by family.
#[rustfmt::skip]
const ZOO: &[Row] = &[
    ("mlp", mlp::mlp, mlp::PAPER),
    ("resnet8", |net| resnet::narrow(net, 1), resnet::PAPER),
    ("resnet20", |net| resnet::narrow(net, 3), resnet::PAPER),
    ("resnet32", |net| resnet::narrow(net, 5), resnet::PAPER),
    ("resnet44", |net| resnet::narrow(net, 7), resnet::PAPER),
    ("resnet56", |net| resnet::narrow(net, 9), resnet::PAPER),
    ("resnet110", |net| resnet::narrow(net, 18), resnet::PAPER),
    ("resnet18", |net| resnet::wide(net, &[2; 4], PLAIN), resnet::PAPER),
    ("resnet34", |net| resnet::wide(net, &[3, 4, 6, 3], PLAIN), resnet::PAPER),
    ("resnet50", |net| resnet::wide(net, &[3, 4, 6, 3], BOTTLENECK), resnet::PAPER),
    ("resnet101", |net| resnet::wide(net, &[3, 4, 23, 3], BOTTLENECK), resnet::PAPER),
    ("resnet152", |net| resnet::wide(net, &[3, 8, 36, 3], BOTTLENECK), resnet::PAPER),
    ("preact-resnet18", |net| preact_resnet::plain(net, &[2; 4]), preact_resnet::PAPER),
    ("preact-resnet34", |net| preact_resnet::plain(net, &[3, 4, 6, 3]), preact_resnet::PAPER),
    ("preact-resnet50", |net| preact_resnet::bottleneck(net, &[3, 4, 6, 3]), preact_resnet::PAPER),
    ("preact-resnet101", |net| preact_resnet::bottleneck(net, &[3, 4, 23, 3]), preact_resnet::PAPER),
    ("preact-resnet152", |net| preact_resnet::bottleneck(net, &[3, 8, 36, 3]), preact_resnet::PAPER),
    ("vgg11", |net| vgg::vgg(net, &[1, 1, 2, 2, 2]), vgg::PAPER),
    ("vgg13", |net| vgg::vgg(net, &[2; 5]), vgg::PAPER),
    ("vgg16", |net| vgg::vgg(net, &[2, 2, 3, 3, 3]), vgg::PAPER),
    ("vgg19", |net| vgg::vgg(net, &[2, 2, 4, 4, 4]), vgg::PAPER),
    ("senet18", |net| senet::senet(net, &[2; 4]), senet::PAPER),
    ("googlenet", googlenet::googlenet, googlenet::PAPER),
    ("densenet-cifar", |net| densenet::densenet(net, &[6, 12, 24, 16], 12), densenet::PAPER),
    ("densenet121", |net| densenet::densenet(net, &[6, 12, 24, 16], 32), densenet::PAPER),
    ("densenet169", |net| densenet::densenet(net, &[6, 12, 32, 32], 32), densenet::PAPER),
    ("densenet201", |net| densenet::densenet(net, &[6, 12, 48, 32], 32), densenet::PAPER),
    ("densenet161", |net| densenet::densenet(net, &[6, 12, 36, 24], 48), densenet::PAPER),
    ("resnext29-32x4d", |net| resnext::resnext29(net, 32, 4), resnext::PAPER),
    ("resnext29-2x64d", |net| resnext::resnext29(net, 2, 64), resnext::PAPER),
    ("resnext29-4x64d", |net| resnext::resnext29(net, 4, 64), resnext::PAPER),
    ("resnext29-8x64d", |net| resnext::resnext29(net, 8, 64), resnext::PAPER),
    ("dpn26", |net| dpn::dpn(net, &[2; 4]), dpn::PAPER),
    ("dpn92", |net| dpn::dpn(net, &[3, 4, 20, 3]), dpn::PAPER),
    ("mobilenet", mobilenet::mobilenet, mobilenet::PAPER),
    ("mobilenet-v2", mobilenet::mobilenet_v2, mobilenet::PAPER_V2),
    ("shufflenet-g2", |net| shufflenet::shufflenet(net, &[200, 400, 800], 2), shufflenet::PAPER),
    ("shufflenet-g3", |net| shufflenet::shufflenet(net, &[240, 480, 960], 3), shufflenet::PAPER),
    ("shufflenet-v2-x0.5", |net| shufflenet::shufflenet_v2(net, &[48, 96, 192, 1024]), shufflenet::PAPER_V2),
    ("shufflenet-v2-x1", |net| shufflenet::shufflenet_v2(net, &[116, 232, 464, 1024]), shufflenet::PAPER_V2),
    ("shufflenet-v2-x1.5", |net| shufflenet::shufflenet_v2(net, &[176, 352, 704, 1024]), shufflenet::PAPER_V2),
    ("shufflenet-v2-x2", |net| shufflenet::shufflenet_v2(net, &[224, 488, 976, 2048]), shufflenet::PAPER_V2),
    ("efficientnet-b0", efficientnet::efficientnet_b0, efficientnet::PAPER),
    ("regnetx-200mf", |net| regnet::regnet(net, regnet::X_200MF), regnet::PAPER),
    ("regnetx-400mf", |net| regnet::regnet(net, regnet::X_400MF), regnet::PAPER),
    ("regnety-400mf", |net| regnet::regnet(net, regnet::Y_400MF), regnet::PAPER),
    ("dla-simple", |net| dla::dla(net, true), dla::PAPER),
    ("dla", |net| dla::dla(net, false), dla::PAPER),
    ("vit-tiny", |net| vit::vit(net, 12), vit::PAPER),
    ("airbench", |net| airbench::airbench(net, &[64, 256, 256]), airbench::PAPER),
];

/// Which network, by its place in the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Architecture(usize);

impl Architecture {
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        (0..ZOO.len()).map(Self)
    }

    fn name(self) -> &'static str {
        ZOO[self.0].0
    }

    fn paper(self) -> &'static str {
        ZOO[self.0].2
    }

    /// Sets what a new network begins with besides random numbers, from some training images, and freezes what
    /// it is not to learn.
    pub(crate) fn prepare(
        self,
        parameters: &Parameters,
        images: impl FnOnce() -> Result<Tensor>,
    ) -> Result<()> {
        match self.name() {
            "airbench" => airbench::prepare(parameters, &images()?),
            _ => Ok(()),
        }
    }

    /// Whether the layout of images makes a difference.
    pub(crate) fn has_channels(self) -> bool {
        self.name() != "mlp"
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Serialize for Architecture {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl FromStr for Architecture {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let found = Self::all().find(|architecture| architecture.name() == text);
        found.ok_or_else(|| {
            let mut all: Vec<_> = Self::all().map(Self::name).collect();
            all.sort_by_key(|name| strsim::damerau_levenshtein(name, &text.to_lowercase()));
            format!("the nearest are {}; --list-models has all", all[..3].join(", "))
        })
    }
}

fn names() -> String {
    Architecture::all().map(Architecture::name).collect::<Vec<_>>().join(", ")
}

/// What `--help` says of the choice.
pub(crate) fn help() -> String {
    format!("What to train: {}", names())
}

/// A network from normalised images, `(n, 3, 32, 32)`, to logits, `(n, 10)`.
#[derive(Debug)]
pub(crate) struct Model {
    layers: SequentialT,
    channels_last: bool,
}

impl Model {
    /// With `channels_last`, images are turned to `(n, 32, 32, 3)` where they enter.
    pub(crate) fn new(
        Architecture(number): Architecture,
        vb: VarBuilder<'static>,
        channels_last: bool,
    ) -> Result<Self> {
        let (_, layers, _) = ZOO[number];
        Ok(Self { layers: layers(&Net { vb, channels_last })?, channels_last })
    }

    /// `train` is true in training, where batch norm uses the batch's own statistics.
    pub(crate) fn forward(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        match self.channels_last {
            true => self.layers.forward_t(&x.permute((0, 2, 3, 1))?, train),
            false => self.layers.forward_t(x, train),
        }
    }
}
