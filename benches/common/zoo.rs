//! Networks of the usual zoo, written as a port of a PyTorch model would be: none of them was looked at
//! when the crate was made fast. `zoo.py` has the same, with the same names of parameters.

mod classifiers;
mod generators;
mod sequences;
mod values;

use std::fmt;

use candle_amp::nn::var_builder;
use candle_amp::optim::{self, AdamW, AdamWConfig, Sgd};
use candle_amp::{Parameters, ops};
use candle_core::{Device, Result, Tensor};
use candle_nn::{Module, VarBuilder, VarMap};
use serde::{Deserialize, Serialize};

use crate::cifar;
use crate::networks::{GptSize, SGD};
use crate::precision::Precision;
use classifiers::{DenseNet, MobileNet};
use generators::{Discriminator, Generator, UNet};
use sequences::{LstmLm, NanoGpt, ViT};

pub use values::{noise, tokens};

/// A network, and the size of its batch.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(tag = "name", rename_all = "snake_case")]
pub enum Network {
    /// MobileNetV2, for images of CIFAR-10's size.
    MobilenetV2 {
        /// Channels of the stem; the original has 32, and all others are as many times more or fewer.
        width: usize,
        /// Images.
        batch: usize,
    },
    /// The tiny vision transformer, of 4x4 patches of such images.
    VitTiny {
        /// Blocks; the original has 12.
        layers: usize,
        /// Images.
        batch: usize,
    },
    /// nanoGPT, its table of tokens the head's weight too.
    Nanogpt {
        /// Of what size.
        size: GptSize,
        /// Sequences.
        batch: usize,
    },
    /// A step of a DCGAN's discriminator and one of its generator, for images of CIFAR-10's size.
    Dcgan {
        /// Channels next to an image.
        width: usize,
        /// Images.
        batch: usize,
    },
    /// A language model of stacked LSTMs.
    LstmLm {
        /// Tokens there are.
        vocabulary: usize,
        /// Features of a token, and units of a layer.
        width: usize,
        /// LSTMs.
        layers: usize,
        /// Tokens of a sequence.
        context: usize,
        /// Sequences.
        batch: usize,
    },
    /// DenseNet-BC, for images of CIFAR-10's size.
    Densenet {
        /// Layers with weights: four more than a multiple of six.
        depth: usize,
        /// Channels that a layer adds.
        growth: usize,
        /// Images.
        batch: usize,
    },
    /// One of the cifar10 example.
    Cifar {
        /// Which one.
        model: cifar::Model,
        /// Images.
        batch: usize,
    },
    /// A U-Net of three levels.
    Unet {
        /// Of the first level; each has twice those of the one before.
        channels: usize,
        /// Of an image's side.
        size: usize,
        /// Images.
        batch: usize,
    },
}

impl Network {
    /// Whether either side draws for itself in training, so that losses differ.
    pub fn is_random(self) -> bool {
        matches!(self, Self::Cifar { model, .. } if model.drops_out())
    }

    /// Makes it small, for a machine that has no time.
    pub fn shrink(&mut self) {
        match self {
            Self::MobilenetV2 { width, batch } | Self::Dcgan { width, batch } => {
                (*width, *batch) = (*width / 8, 2);
            }
            Self::VitTiny { layers, batch } => (*layers, *batch) = (1, 2),
            Self::Nanogpt { size, batch } => {
                (size.layers, size.width, size.context, *batch) = (1, 48, 16, 2);
            }
            Self::LstmLm { width, context, batch, .. } => (*width, *context, *batch) = (16, 5, 2),
            Self::Cifar { batch, .. } => *batch = 4,
            Self::Densenet { depth, batch, .. } => (*depth, *batch) = (10, 2),
            Self::Unet { channels, size, batch } => (*channels, *size, *batch) = (4, 16, 2),
        }
    }
}

type Loss = Box<dyn Fn() -> Result<Tensor>>;
type Step = Box<dyn FnMut() -> candle_amp::Result<Tensor>>;

/// A network that is trained, on one batch for ever.
pub struct Training {
    parameters: Parameters,
    step: Step,
}

impl fmt::Debug for Training {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Training").field("parameters", &self.parameters).finish_non_exhaustive()
    }
}

impl Training {
    /// With initial weights.
    ///
    /// # Errors
    ///
    /// What drawing them meets.
    pub fn new(
        network: Network,
        precision: Precision,
        device: &Device,
    ) -> candle_amp::Result<Self> {
        let varmap = VarMap::new();
        let vb = var_builder(&varmap, precision.storage(), device);
        let parameters = || Parameters::from_varmap(&varmap);
        let sgd = |loss| Ok(step(precision, Sgd::new(parameters(), SGD)?, loss));
        let adamw =
            |loss| Ok(step(precision, AdamW::new(parameters(), AdamWConfig::default())?, loss));
        let step: candle_amp::Result<Step> = match network {
            Network::MobilenetV2 { width, batch } => {
                sgd(classification(MobileNet::new(width, vb)?, batch, device)?)
            }
            Network::VitTiny { layers, batch } => {
                adamw(classification(ViT::new(layers, vb)?, batch, device)?)
            }
            Network::Nanogpt { size, batch } => {
                let shape = (batch, size.context);
                adamw(prediction(NanoGpt::new(size, vb)?, size.vocabulary, shape, device)?)
            }
            Network::Dcgan { width, batch } => adversarial(width, batch, precision, &varmap, vb),
            Network::LstmLm { vocabulary, width, layers, context, batch } => {
                let model = LstmLm::new(vocabulary, width, layers, vb)?;
                adamw(prediction(model, vocabulary, (batch, context), device)?)
            }
            Network::Densenet { depth, growth, batch } => {
                sgd(classification(DenseNet::new(depth, growth, vb)?, batch, device)?)
            }
            Network::Cifar { model, batch } => {
                let network = cifar::Trained::new(model, vb)?;
                model.prepare(&parameters(), &noise((batch, 3, 32, 32), 0, device)?)?;
                sgd(classification(network, batch, device)?)
            }
            Network::Unet { channels, size, batch } => {
                adamw(segmentation(UNet::new(channels, vb)?, batch, size, device)?)
            }
        };
        Ok(Self { step: step?, parameters: parameters() })
    }

    /// A step; its loss.
    ///
    /// # Errors
    ///
    /// What it meets.
    pub fn step(&mut self) -> candle_amp::Result<Tensor> {
        (self.step)()
    }

    /// How many numbers are trained.
    pub fn parameter_count(&self) -> usize {
        self.parameters.iter().map(|(_, var)| var.elem_count()).sum()
    }

    /// Gives every parameter the values that `zoo.py` gives the one of the same name, so that both
    /// sides must go on alike.
    ///
    /// # Errors
    ///
    /// What setting them meets.
    pub fn set_known_values(&self) -> Result<()> {
        for (i, (_, var)) in self.parameters.iter().enumerate() {
            var.set(&values::known_values(var.dims(), i, var.device())?.to_dtype(var.dtype())?)?;
        }
        Ok(())
    }
}

/// The cross entropy of the classes of images of CIFAR-10's size.
fn classification(model: impl Module + 'static, batch: usize, device: &Device) -> Result<Loss> {
    let x = noise((batch, 3, 32, 32), 0, device)?;
    let y = Tensor::from_iter((0..batch as u32).map(|i| i % 10), device)?;
    Ok(Box::new(move || ops::cross_entropy(&model.forward(&x)?, &y)))
}

/// The cross entropy of the tokens that come next, over all places.
fn prediction(
    model: impl Module + 'static,
    vocabulary: usize,
    shape: (usize, usize),
    device: &Device,
) -> Result<Loss> {
    let x = tokens(vocabulary, shape, 0, device)?;
    let next = tokens(vocabulary, shape, 1, device)?.flatten_all()?;
    Ok(Box::new(move || ops::cross_entropy(&model.forward(&x)?.flatten(0, 1)?, &next)))
}

/// The cross entropy of a mask of square images.
fn segmentation(
    model: impl Module + 'static,
    batch: usize,
    size: usize,
    device: &Device,
) -> Result<Loss> {
    let x = noise((batch, 3, size, size), 0, device)?;
    let mask = noise((batch, 1, size, size), 1, device)?.ge(0f32)?.to_dtype(x.dtype())?;
    Ok(Box::new(move || ops::binary_cross_entropy_with_logit(&model.forward(&x)?, &mask)))
}

fn step(precision: Precision, mut optimizer: impl optim::Step + 'static, loss: Loss) -> Step {
    let (amp, mut scaler) = (precision.autocast(), precision.scaler());
    Box::new(move || {
        let loss = amp.scope(&loss)?;
        scaler.scale(&loss)?.backward()?;
        let _ = scaler.step(&mut optimizer)?;
        scaler.update()?;
        Ok(loss)
    })
}

/// A step of a DCGAN: each of its networks has an optimizer, and is stepped once. The loss is the sum of
/// both.
fn adversarial(
    width: usize,
    batch: usize,
    precision: Precision,
    varmap: &VarMap,
    vb: VarBuilder,
) -> candle_amp::Result<Step> {
    let real = noise((batch, 3, 32, 32), 0, vb.device())?;
    let latent = noise((batch, Generator::LATENT, 1, 1), 1, vb.device())?;
    let verdict = |value: f32| Tensor::full(value, (batch, 1, 1, 1), vb.device());
    let (yes, no) = (verdict(1.0)?, verdict(0.0)?);
    let generator = Generator::new(width, vb.pp("generator"))?;
    let discriminator = Discriminator::new(width, vb.pp("discriminator"))?;
    let parameters = Parameters::from_varmap(varmap);
    let config = AdamWConfig { lr: 2e-4, beta1: 0.5, weight_decay: 0.0, ..AdamWConfig::default() };
    let optimizer = |name| AdamW::new(parameters.filter(|full| full.starts_with(name)), config);
    let (mut of_generator, mut of_discriminator) =
        (optimizer("generator")?, optimizer("discriminator")?);
    let amp = precision.autocast();
    let mut scalers = [precision.scaler(), precision.scaler()];
    let judged = move |x: &Tensor, verdict: &Tensor| {
        ops::binary_cross_entropy_with_logit(&discriminator.forward(x)?, verdict)
    };
    Ok(Box::new(move || {
        let [first, second] = &mut scalers;
        let fake = amp.scope(|| generator.forward(&latent))?;
        let apart = || ops::add(&judged(&real, &yes)?, &judged(&fake.detach(), &no)?);
        let apart = amp.scope(apart)?;
        first.scale(&apart)?.backward()?;
        let _ = first.step(&mut of_discriminator)?;
        first.update()?;
        let alike = amp.scope(|| judged(&fake, &yes))?;
        second.scale(&alike)?.backward()?;
        let _ = second.step(&mut of_generator)?;
        second.update()?;
        Ok((apart + alike)?)
    }))
}
