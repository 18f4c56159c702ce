//! The steps of a rank.

use anyhow::Result;
use candle_amp::dist::{self, DataParallel};
use candle_amp::nn::{self, Linear};
use candle_amp::optim::Sgd;
use candle_amp::{GradScaler, Parameters, ops};
use candle_amp_benches::measure::{median, seconds};
use candle_amp_benches::networks::{ResNet, ResNetSize, SGD, images};
use candle_core::{DType, Device, Tensor};
use candle_nn::{Module, VarBuilder};
use clap::ValueEnum;

/// Samples of a step, of all ranks together.
const BATCH: usize = 128;

/// What is trained.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Network {
    /// ResNet-20: 0.27 M parameters, much arithmetic.
    Resnet20,
    /// A perceptron of 10.5 M parameters, little arithmetic.
    Mlp,
}

/// The perceptron's layers; `ddp.py` has the same.
const WIDTHS: [usize; 5] = [1024, 2048, 2048, 2048, 10];

impl Network {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Resnet20 => "resnet20",
            Self::Mlp => "mlp",
        }
    }

    fn build(self, vb: VarBuilder) -> candle_core::Result<Forward> {
        Ok(match self {
            Self::Resnet20 => {
                let network = ResNet::new(ResNetSize::cifar(16, 3), vb)?;
                Box::new(move |x| network.forward(x))
            }
            Self::Mlp => {
                let layer = |at: usize| nn::linear(WIDTHS[at], WIDTHS[at + 1], vb.pp(at));
                let layers = (0..WIDTHS.len() - 1).map(layer);
                let layers = layers.collect::<candle_core::Result<Vec<_>>>()?;
                Box::new(move |x| perceptron(&layers, x))
            }
        })
    }

    fn samples(self, batch: usize) -> candle_core::Result<(Tensor, Tensor)> {
        let (x, labels) = images(batch, &Device::Cpu)?;
        Ok(match self {
            Self::Resnet20 => (x, labels),
            Self::Mlp => (Tensor::randn(0f32, 1.0, (batch, WIDTHS[0]), &Device::Cpu)?, labels),
        })
    }
}

/// A network from a batch to logits.
type Forward = Box<dyn Fn(&Tensor) -> candle_core::Result<Tensor>>;

fn perceptron(layers: &[Linear], x: &Tensor) -> candle_core::Result<Tensor> {
    let mut y = x.clone();
    for (at, layer) in layers.iter().enumerate() {
        y = layer.forward(&y)?;
        if at + 1 < layers.len() {
            y = ops::relu(&y)?;
        }
    }
    Ok(y)
}

/// Trains with the ranks that were started, and prints the time of a step.
pub(crate) fn measure(network: Network, steps: usize) -> Result<()> {
    let communicator = dist::from_environment()?;
    let varmap = nn::VarMap::new();
    let model = network.build(nn::var_builder(&varmap, DType::F32, &Device::Cpu))?;
    let parameters = Parameters::from_varmap(&varmap);
    let mut sgd = Sgd::new(&parameters, SGD)?;
    let mut scaler = GradScaler::disabled();
    if communicator.size() > 1 {
        DataParallel::new(communicator.clone(), &parameters)?.attach(&mut scaler)?;
    }
    let (x, labels) = network.samples(BATCH / communicator.size())?;
    let mut step = || {
        seconds(|| {
            let loss = ops::cross_entropy(&model(&x)?, &labels)?;
            scaler.scale(&loss)?.backward()?;
            let _ = scaler.step(&mut sgd)?;
            Ok(scaler.update()?)
        })
    };
    for _ in 0..steps.div_ceil(5) {
        step()?;
    }
    let times = (0..steps).map(|_| step()).collect::<Result<_>>()?;
    if communicator.rank() == 0 {
        println!("milliseconds {}", 1e3 * median(times));
    }
    Ok(())
}
