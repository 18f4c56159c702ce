//! Several ranks take the path of one.

use std::sync::Arc;

use candle_amp::dist::{self, Communicator, DataParallel, Sampler, Single};
use candle_amp::optim::{AdamW, AdamWConfig};
use candle_amp::{Autocast, GradScaler, Parameters, Result, ScaleConfig, nn, ops};
use candle_core::{DType, Tensor};
use candle_nn::{Conv2dConfig, Module, ModuleT};

use super::{cpu, on_ranks, small_buckets};
use crate::util::{assert_absolute, assert_same, largest, random};

const SAMPLES: usize = 48;
const BATCH: usize = 12;
const STEPS: usize = 16;
/// The steps whose loss is infinite for one sample.
const OVERFLOWS: [usize; 2] = [3, 9];

/// Two convolutions with batch norm, and a linear layer.
struct Network {
    convs: [nn::Conv2d; 2],
    norms: [nn::BatchNorm; 2],
    head: nn::Linear,
}

impl Network {
    fn new(varmap: &nn::VarMap, communicator: &Arc<dyn Communicator>) -> Result<Self> {
        let vb = nn::var_builder(varmap, DType::F32, &cpu());
        let config = Conv2dConfig { padding: 1, ..Default::default() };
        let conv = |from, to, name: &str| nn::conv2d_no_bias(from, to, 3, config, vb.pp(name));
        let norm = |name: &str| -> Result<_> {
            let norm = nn::batch_norm(6, 1e-3, vb.pp(name))?;
            Ok(dist::sync_batch_norm(norm, communicator.clone()))
        };
        let network = Self {
            convs: [conv(2, 6, "conv0")?, conv(6, 6, "conv1")?],
            norms: [norm("norm0")?, norm("norm1")?],
            head: nn::linear(6, 3, vb.pp("head"))?,
        };
        // Seeded here: the process's generator gives every rank, and every run, another head.
        for (at, (name, var)) in Parameters::from_varmap(varmap).iter().enumerate() {
            if var.rank() > 1 || name == "head.bias" {
                let scale = (var.elem_count() as f64 / var.dim(0)? as f64).sqrt().recip();
                let weights = (random(at as u64, var.shape().clone(), DType::F32) * scale)?;
                var.set(&weights)?;
            }
        }
        Ok(network)
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let mut y = x.clone();
        for (conv, norm) in self.convs.iter().zip(&self.norms) {
            // No ReLU: where a number rounds to the other side of zero, its gradient jumps.
            y = ops::tanh(&norm.forward_t(&conv.forward(&y)?, true)?)?;
        }
        self.head.forward(&ops::global_avg_pool2d(&y)?)
    }
}

/// The weights, running statistics and scale after some steps, and which were skipped.
type Path = (Vec<Tensor>, f32, Vec<bool>);

fn train(communicator: Arc<dyn Communicator>, dtype: DType) -> Result<Path> {
    let varmap = nn::VarMap::new();
    let network = Network::new(&varmap, &communicator)?;
    let parameters = Parameters::from_varmap(&varmap);
    let config = AdamWConfig { lr: 3e-3, eps: 1e-3, ..Default::default() };
    let mut adamw = AdamW::new(&parameters, config)?;
    // Low enough for gradients of a batch of a fourth, four times as large, to fit F16.
    let mut scaler = GradScaler::new(ScaleConfig { init_scale: 1024.0, ..Default::default() })?;
    DataParallel::with_config(communicator.clone(), &parameters, small_buckets())?
        .attach(&mut scaler)?;
    let images = random(77, (SAMPLES, 2, 6, 6), DType::F32);
    let labels: Vec<u32> = (0..SAMPLES as u32).map(|sample| sample % 3).collect();
    let mut sampler = Sampler::new(&*communicator, SAMPLES, 5)?;
    let amp = if dtype == DType::F32 { Autocast::disabled() } else { Autocast::new(dtype) };
    let mut skipped = Vec::new();
    while skipped.len() < STEPS {
        let Some(batch) = sampler.next_batch(BATCH / communicator.size()) else { continue };
        let labels: Vec<u32> = batch.iter().map(|&sample| labels[sample]).collect();
        let at: Vec<u32> = batch.iter().map(|&sample| sample as u32).collect();
        let x = images.index_select(&Tensor::new(at, &cpu())?, 0)?;
        // On the last rank alone, also where one rank is all there are.
        let last = communicator.rank() + 1 == communicator.size();
        let factor = if last && OVERFLOWS.contains(&skipped.len()) { f32::INFINITY } else { 1.0 };
        let loss = amp.scope(|| {
            let loss = ops::cross_entropy(&network.forward(&x)?, &Tensor::new(labels, &cpu())?)?;
            ops::mul(&loss, &Tensor::new(factor, &cpu())?)
        })?;
        scaler.scale(&loss)?.backward()?;
        skipped.push(scaler.step(&mut adamw)?.skipped()?);
        scaler.update()?;
    }
    let all = parameters.iter().chain(parameters.buffers());
    let weights = all.map(|(_, var)| var.copy()).collect::<Result<_, _>>()?;
    Ok((weights, scaler.current_scale(), skipped))
}

#[test]
fn ranks_take_the_path_of_one() -> Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let (alone, scale, skipped) = train(Arc::new(Single), dtype)?;
        let overflows: Vec<usize> = (0..STEPS).filter(|&step| skipped[step]).collect();
        assert!(OVERFLOWS.iter().all(|step| overflows.contains(step)), "{dtype:?}: {overflows:?}");
        for size in [2, 3, 4] {
            let all = on_ranks(size, |communicator| train(communicator, dtype))?;
            for (weights, other_scale, other_skipped) in &all {
                assert_eq!((other_scale, other_skipped), (&scale, &skipped), "{dtype:?}, {size}");
                for (at, (weight, expected)) in weights.iter().zip(&alone).enumerate() {
                    let what = format!("{dtype:?}, {size} ranks, tensor {at}");
                    assert_same(&what, weight, &all[0].0[at]);
                    // 16-bit activations are rounded alike but where statistics differ by the last bit of F32.
                    let share = if dtype == DType::F32 { 2e-5 } else { 2e-2 };
                    assert_absolute(&what, weight, expected, share * largest(expected).max(0.1));
                }
            }
        }
    }
    Ok(())
}
