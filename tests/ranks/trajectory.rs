//! A network with batch norm, whose path on several ranks is that on one.

use std::path::Path;
use std::sync::Arc;

use candle_amp::checkpoints::{Checkpoint, Checkpointer, State, Stateful};
use candle_amp::dist::{self, Communicator, DataParallel, Sampler, Sharded, Single};
use candle_amp::optim::{AdamW, AdamWConfig, Masters, Step};
use candle_amp::{Autocast, GradScaler, Parameters, Result, ScaleConfig, nn, ops};
use candle_core::{DType, Tensor};
use candle_nn::{Conv2dConfig, Module, ModuleT};

use super::{assert_same_everywhere, cpu, small_buckets};
use crate::util::{assert_absolute, largest, random};

pub(crate) const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

const SAMPLES: usize = 48;
const BATCH: usize = 12;
const STEPS: usize = 16;
/// The steps whose loss is infinite for one sample.
const OVERFLOWS: [usize; 2] = [3, 9];
/// Where a training is saved that goes on later.
const HALF: usize = 8;

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

/// A training that goes on from step to step.
struct Training {
    communicator: Arc<dyn Communicator>,
    dtype: DType,
    network: Network,
    parameters: Parameters,
    parallel: DataParallel,
    scaler: GradScaler,
    sampler: Sampler,
    step: usize,
    skipped: Vec<usize>,
}

/// What a training ends with.
pub(crate) struct End {
    weights: Vec<Tensor>,
    scale: f32,
    skipped: Vec<usize>,
}

impl Training {
    fn new(communicator: Arc<dyn Communicator>, dtype: DType) -> Result<Self> {
        let varmap = nn::VarMap::new();
        let network = Network::new(&varmap, &communicator)?;
        let parameters = Parameters::from_varmap(&varmap);
        // Low enough for gradients of a batch of a fourth, four times as large, to fit F16.
        let config = ScaleConfig { init_scale: 1024.0, ..Default::default() };
        let mut scaler = GradScaler::new(config)?;
        let parallel =
            DataParallel::with_config(communicator.clone(), &parameters, small_buckets())?;
        parallel.attach(&mut scaler)?;
        let sampler = Sampler::new(&*communicator, SAMPLES, 5)?;
        let (step, skipped) = (0, Vec::new());
        Ok(Self {
            communicator,
            dtype,
            network,
            parameters,
            parallel,
            scaler,
            sampler,
            step,
            skipped,
        })
    }

    fn sharded(&self) -> Result<Sharded<AdamWConfig>> {
        Sharded::new(&self.parallel, &self.parameters, config(), Masters::F32)
    }

    /// Trains until so many steps are taken.
    fn run<S: Step>(&mut self, adamw: &mut S, until: usize) -> Result<()> {
        let images = random(77, (SAMPLES, 2, 6, 6), DType::F32);
        let amp = match self.dtype {
            DType::F32 => Autocast::disabled(),
            dtype => Autocast::new(dtype),
        };
        let (rank, size) = (self.communicator.rank(), self.communicator.size());
        while self.step < until {
            let Some(batch) = self.sampler.next_batch(BATCH / size) else { continue };
            let labels: Vec<u32> = batch.iter().map(|&sample| sample as u32 % 3).collect();
            let at: Vec<u32> = batch.iter().map(|&sample| sample as u32).collect();
            let x = images.index_select(&Tensor::new(at, &cpu())?, 0)?;
            // On the last rank alone, also where one rank is all there are.
            let overflows = rank + 1 == size && OVERFLOWS.contains(&self.step);
            let factor = Tensor::new(if overflows { f32::INFINITY } else { 1.0 }, &cpu())?;
            let loss = amp.scope(|| {
                let logits = self.network.forward(&x)?;
                ops::mul(&ops::cross_entropy(&logits, &Tensor::new(labels, &cpu())?)?, &factor)
            })?;
            self.scaler.scale(&loss)?.backward()?;
            if self.scaler.step(adamw)?.skipped()? {
                self.skipped.push(self.step);
            }
            self.scaler.update()?;
            self.step += 1;
        }
        Ok(())
    }

    fn end(&self) -> Result<End> {
        let all = self.parameters.iter().chain(self.parameters.buffers());
        let weights = all.map(|(_, var)| var.copy()).collect::<Result<_, _>>()?;
        let (scale, skipped) = (self.scaler.current_scale(), self.skipped.clone());
        Ok(End { weights, scale, skipped })
    }
}

fn config() -> AdamWConfig {
    AdamWConfig { lr: 3e-3, eps: 1e-3, ..Default::default() }
}

/// One rank with the whole batch.
pub(crate) fn alone(dtype: DType) -> Result<End> {
    let mut training = Training::new(Arc::new(Single), dtype)?;
    let mut adamw = AdamW::new(&training.parameters, config())?;
    training.run(&mut adamw, STEPS)?;
    let end = training.end()?;
    let (skipped, injected) = (&end.skipped, &OVERFLOWS);
    assert!(injected.iter().all(|step| skipped.contains(step)), "{dtype:?}: {skipped:?}");
    Ok(end)
}

/// Trains, and compares with one rank.
pub(crate) fn compare(
    communicator: &Arc<dyn Communicator>,
    dtype: DType,
    alone: &End,
) -> Result<()> {
    let mut training = Training::new(communicator.clone(), dtype)?;
    let mut adamw = AdamW::new(&training.parameters, config())?;
    training.run(&mut adamw, STEPS)?;
    assert_path(&training, alone)
}

/// Trains the first half in shards, and saves: each rank a file.
pub(crate) fn save_half(
    communicator: &Arc<dyn Communicator>,
    dtype: DType,
    folder: &Path,
) -> Result<()> {
    let mut training = Training::new(communicator.clone(), dtype)?;
    let mut adamw = training.sharded()?;
    training.run(&mut adamw, HALF)?;
    let skipped = State::default().with("skipped", training.skipped.len());
    Checkpoint::new(HALF as u64)
        .with("model", &training.parameters)?
        .with("optimizer", &adamw)?
        .with("scaler", &training.scaler)?
        .with("sampler", &training.sampler)?
        .with("skipped", &skipped)?
        .save(file(folder, dtype, communicator.rank()))?;
    Ok(())
}

/// Trains in shards, and saves after each step: each rank in a folder of its own.
pub(crate) fn train_and_save(
    communicator: &Arc<dyn Communicator>,
    folder: &Path,
    steps: usize,
) -> Result<()> {
    let mut training = Training::new(communicator.clone(), DType::F16)?;
    let mut adamw = training.sharded()?;
    let checkpointer = Checkpointer::new(folder.join(communicator.rank().to_string()))?;
    while training.step < steps {
        training.run(&mut adamw, training.step + 1)?;
        let checkpoint = Checkpoint::new(training.step as u64)
            .with("model", &training.parameters)?
            .with("optimizer", &adamw)?;
        checkpointer.save(&checkpoint)?;
    }
    Ok(())
}

/// Checks what `size` ranks have left that were ended at any moment: whole checkpoints, of the same step. Whether there are any.
pub(crate) fn check_saved(folder: &Path, size: usize) -> Result<bool> {
    let steps = |rank: usize| Checkpointer::new(folder.join(rank.to_string()))?.steps();
    let all = (0..size).map(steps).collect::<Result<Vec<_>>>()?;
    let Some(step) = all[0].iter().rev().find(|step| all.iter().all(|all| all.contains(step)))
    else {
        assert!(all.iter().any(|steps| steps.len() < 2), "no common step: {all:?}");
        return Ok(false);
    };
    let mut training = Training::new(Arc::new(Single), DType::F16)?;
    let mut adamw = training.sharded()?;
    let mut shards = vec![State::default(); size];
    for (rank, shard) in shards.iter_mut().enumerate() {
        let folder = folder.join(rank.to_string());
        for entry in std::fs::read_dir(&folder).expect("the folder") {
            let path = entry.expect("a file").path();
            if path.extension().is_some_and(|extension| extension == "safetensors") {
                Checkpoint::open(&path)?;
            }
        }
        let saved = Checkpoint::open(folder.join(format!("step-{step:08}.safetensors")))?;
        saved.load(&mut [("optimizer", shard), ("model", &mut training.parameters)])?;
    }
    adamw.load_shards(&shards)?;
    training.run(&mut adamw, 1)?;
    Ok(true)
}

/// Goes on with what `saved` ranks have saved, and compares with one rank that was not interrupted.
pub(crate) fn go_on(
    communicator: &Arc<dyn Communicator>,
    dtype: DType,
    folder: &Path,
    saved: usize,
) -> Result<()> {
    assert_ne!(communicator.size(), saved);
    let mut training = Training::new(communicator.clone(), dtype)?;
    let mut adamw = training.sharded()?;
    let mut shards = vec![State::default(); saved];
    for (rank, shard) in shards.iter_mut().enumerate() {
        Checkpoint::open(file(folder, dtype, rank))?.load(&mut [("optimizer", shard)])?;
    }
    adamw.load_shards(&shards)?;
    let mut rest: Vec<(&str, &mut dyn Stateful)> = vec![
        ("model", &mut training.parameters),
        ("scaler", &mut training.scaler),
        ("sampler", &mut training.sampler),
    ];
    let first = Checkpoint::open(file(folder, dtype, 0))?;
    first.load(&mut rest)?;
    training.step = first.step() as usize;
    let alone = alone(dtype)?;
    training.skipped = alone.skipped.iter().copied().filter(|&step| step < HALF).collect();
    let mut skipped = State::default();
    first.load(&mut [("skipped", &mut skipped)])?;
    assert_eq!(skipped.value::<usize>("skipped")?, training.skipped.len());
    training.run(&mut adamw, STEPS)?;
    assert_path(&training, &alone)
}

fn file(folder: &Path, dtype: DType, rank: usize) -> std::path::PathBuf {
    folder.join(format!("{}-{rank}.safetensors", dtype.as_str()))
}

fn assert_path(training: &Training, alone: &End) -> Result<()> {
    let (dtype, size) = (training.dtype, training.communicator.size());
    let end = training.end()?;
    assert_eq!((end.scale, &end.skipped), (alone.scale, &alone.skipped), "{dtype:?}, {size}");
    for (at, (weight, expected)) in end.weights.iter().zip(&alone.weights).enumerate() {
        let what = format!("{dtype:?}, {size} ranks, tensor {at}");
        assert_same_everywhere(&what, &*training.communicator, weight)?;
        // 16-bit activations are rounded alike but where statistics differ by the last bit of F32.
        let share = if dtype == DType::F32 { 2e-5 } else { 2e-2 };
        assert_absolute(&what, weight, expected, share * largest(expected).max(0.1));
    }
    Ok(())
}
