//! Networks of the cifar10 example, one a family, from its own files. `cifar_networks.py` has the same, with the
//! same names of parameters.

#![expect(dead_code, reason = "the example has more networks of a family")]

#[path = "../../examples/cifar10/models/airbench.rs"]
mod airbench;
#[path = "../../examples/cifar10/models/densenet.rs"]
mod densenet;
#[path = "../../examples/cifar10/models/dla.rs"]
mod dla;
#[path = "../../examples/cifar10/models/dpn.rs"]
mod dpn;
#[path = "../../examples/cifar10/models/efficientnet.rs"]
mod efficientnet;
#[path = "../../examples/cifar10/models/googlenet.rs"]
mod googlenet;
#[path = "../../examples/cifar10/models/mobilenet.rs"]
mod mobilenet;
#[path = "../../examples/cifar10/models/net.rs"]
mod net;
#[path = "../../examples/cifar10/models/preact_resnet.rs"]
mod preact_resnet;
#[path = "../../examples/cifar10/models/regnet.rs"]
mod regnet;
#[path = "../../examples/cifar10/models/resnet.rs"]
mod resnet;
#[path = "../../examples/cifar10/models/resnext.rs"]
mod resnext;
#[path = "../../examples/cifar10/models/senet.rs"]
mod senet;
#[path = "../../examples/cifar10/models/shufflenet.rs"]
mod shufflenet;
#[path = "../../examples/cifar10/models/vgg.rs"]
mod vgg;
#[path = "../../examples/cifar10/models/vit.rs"]
mod vit;
#[path = "../../examples/cifar10/models/whitening.rs"]
mod whitening;

use candle_amp::Parameters;
use candle_amp::nn::{BatchNorm, ModuleT, SequentialT};
use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder};
use serde::{Deserialize, Serialize};

use net::Net;

/// What the files above take from the example's.
const CLASSES: usize = 10;
const SIDE: usize = 32;

/// One process trains here.
fn sync_batch_norm(norm: BatchNorm) -> BatchNorm {
    norm
}

/// Which network.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[expect(missing_docs, reason = "names of networks")]
pub enum Model {
    Vgg11,
    Resnet18,
    PreactResnet18,
    Senet18,
    Googlenet,
    DensenetCifar,
    #[serde(rename = "resnext29-32x4d")]
    Resnext29,
    Dpn26,
    Mobilenet,
    MobilenetV2,
    ShufflenetG2,
    ShufflenetV2X1,
    EfficientnetB0,
    #[serde(rename = "regnetx-200mf")]
    Regnetx200mf,
    #[serde(rename = "regnety-400mf")]
    Regnety400mf,
    DlaSimple,
    VitTiny,
    Airbench,
}

impl Model {
    /// Whether it drops out at random in training: both sides then draw for themselves.
    pub fn drops_out(self) -> bool {
        self == Self::EfficientnetB0
    }

    /// Sets what a new network begins with besides random numbers, and freezes what it is not to learn.
    pub(crate) fn prepare(self, parameters: &Parameters, images: &Tensor) -> Result<()> {
        match self {
            Self::Airbench => airbench::prepare(parameters, images),
            _ => Ok(()),
        }
    }
}

/// A network in training.
#[derive(Debug)]
pub(crate) struct Trained(SequentialT);

impl Trained {
    pub(crate) fn new(model: Model, vb: VarBuilder<'static>) -> Result<Self> {
        let net = &Net { vb, channels_last: false };
        let layers = match model {
            Model::Vgg11 => vgg::vgg(net, &[1, 1, 2, 2, 2]),
            Model::Resnet18 => resnet::wide(net, &[2; 4], resnet::PLAIN),
            Model::PreactResnet18 => preact_resnet::plain(net, &[2; 4]),
            Model::Senet18 => senet::senet(net, &[2; 4]),
            Model::Googlenet => googlenet::googlenet(net),
            Model::DensenetCifar => densenet::densenet(net, &[6, 12, 24, 16], 12),
            Model::Resnext29 => resnext::resnext29(net, 32, 4),
            Model::Dpn26 => dpn::dpn(net, &[2; 4]),
            Model::Mobilenet => mobilenet::mobilenet(net),
            Model::MobilenetV2 => mobilenet::mobilenet_v2(net),
            Model::ShufflenetG2 => shufflenet::shufflenet(net, &[200, 400, 800], 2),
            Model::ShufflenetV2X1 => shufflenet::shufflenet_v2(net, &[116, 232, 464, 1024]),
            Model::EfficientnetB0 => efficientnet::efficientnet_b0(net),
            Model::Regnetx200mf => regnet::regnet(net, regnet::X_200MF),
            Model::Regnety400mf => regnet::regnet(net, regnet::Y_400MF),
            Model::DlaSimple => dla::dla(net, true),
            Model::VitTiny => vit::vit(net, 12),
            Model::Airbench => airbench::airbench(net, &[64, 256, 256]),
        };
        layers.map(Self)
    }
}

impl Module for Trained {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0.forward_t(x, true)
    }
}
