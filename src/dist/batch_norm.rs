//! Batch norm by the statistics of all ranks.

use std::sync::{Arc, OnceLock};

use candle_core::{DType, Result, Tensor};

use super::communicator::{Communicator, ReduceOp};
use super::exchange::on_host;
use crate::Op;
use crate::autograd::{Backward, Gradient, Operator, apply};
use crate::error::ArgumentError;
use crate::kernels::accumulator;
use crate::kernels::batch_norm::{self as kernel, Affine, Running, Statistics};
use crate::kernels::tensors::format::Format;
use crate::nn::{self, OverRanks};
use crate::ops::OfBatch;

/// The layer `norm`, which normalises in training by the mean and variance of the batches of all ranks.
///
/// Parameters, running statistics and evaluation are the same. With batches of `B / N` samples, `N` ranks compute what one
/// rank does of `B`; the ranks' batches may differ in size.
///
/// # Precision
///
/// As [`ops::batch_norm`](crate::ops::batch_norm). Each rank takes mean and variance of its batch in `F32`, and all join
/// them in the order of the ranks, in `F64` on the host. The gradient of `x` takes the sums of all ranks; those of weight
/// and bias are of this rank's batch, to be averaged with the others by [`DataParallel`](super::DataParallel).
///
/// # Communication
///
/// One all-gather of `2 c + 2` numbers in forward, one all-reduce of `2 c` in backward. All ranks must run the same graph,
/// so that these calls come in the same order.
///
/// # Synchronisation
///
/// On a GPU, the host reads the statistics in forward.
///
/// # Errors
///
/// Of the layer's forward: as [`ops::batch_norm`](crate::ops::batch_norm), and those of the communicator.
///
/// # Examples
///
/// ```
/// use candle_amp::{dist, nn};
/// use candle_core::{DType, Device, ModuleT, Tensor};
///
/// let outputs = dist::Threads::run(2, |communicator| {
///     let vb = nn::var_builder(&nn::VarMap::new(), DType::F32, &Device::Cpu);
///     let norm = dist::sync_batch_norm(nn::batch_norm(1, 0.0, vb)?, communicator.clone());
///     let x = Tensor::full(communicator.rank() as f32, (4, 1), &Device::Cpu)?;
///     Ok(norm.forward_t(&x, true)?.flatten_all()?.to_vec1::<f32>()?)
/// })?;
/// assert_eq!(outputs, [[-1.0; 4], [1.0; 4]]); // mean 0.5, standard deviation 0.5
/// # Ok::<(), candle_amp::Error>(())
/// ```
///
/// # References
///
/// `torch.nn.SyncBatchNorm`.
pub fn sync_batch_norm(norm: nn::BatchNorm, communicator: Arc<dyn Communicator>) -> nn::BatchNorm {
    match communicator.size() {
        1 => norm,
        _ => norm.over_ranks(Arc::new(SyncBatchNorm(communicator))),
    }
}

#[derive(Debug)]
struct SyncBatchNorm(Arc<dyn Communicator>);

impl OverRanks for SyncBatchNorm {
    fn batch_norm(
        &self,
        x: &Tensor,
        Affine { weight, bias }: Affine<'_>,
        eps: f64,
        format: Format,
    ) -> Result<(Tensor, OfBatch)> {
        let statistics = Arc::new(OnceLock::new());
        let inputs: Vec<&Tensor> = [Some(x), weight, bias].into_iter().flatten().collect();
        let (communicator, out) = (self.0.clone(), statistics.clone());
        let (weight, bias) = (weight.is_some(), bias.is_some());
        let y = apply(Normalise { communicator, eps, format, weight, bias, out }, &inputs)?;
        Ok((y, OfBatch::taken(&statistics)?))
    }
}

/// Its inputs are `x`, and the weight and the bias that there are.
struct Normalise {
    communicator: Arc<dyn Communicator>,
    eps: f64,
    format: Format,
    weight: bool,
    bias: bool,
    /// Where forward leaves what the running averages are updated from.
    out: Arc<OnceLock<OfBatch>>,
}

struct Saved {
    x: Tensor,
    weight: Option<Tensor>,
    statistics: Statistics,
    /// Values of a channel, over all ranks.
    count: usize,
}

/// Mean, variance and count of a rank.
type OfRank<'a> = (&'a [f64], &'a [f64], f64);

impl Normalise {
    /// `x` with its channels in the second dimension.
    fn seen(&self, x: &Tensor) -> Result<Tensor> {
        match self.format {
            Format::ChannelsFirst => Ok(x.clone()),
            Format::ChannelsLast => x.detach().flatten_to(x.rank() - 2),
        }
    }

    /// Mean and variance of all ranks' `x`, and of how many values.
    ///
    /// By the formula of Chan et al., which adds no squares of large means.
    fn statistics(&self, x: &Tensor) -> Result<(Statistics, usize)> {
        let channels = x.dim(1)?;
        let own = x.elem_count() / channels.max(1);
        let dtype = accumulator(x.dtype());
        let (mean, var) = match own {
            0 => (
                Tensor::zeros(channels, dtype, x.device())?,
                Tensor::zeros(channels, dtype, x.device())?,
            ),
            _ => kernel::statistics(x)?,
        };
        // Two numbers, each exact in F32.
        let count = Tensor::new(&[(own >> 16) as f32, (own & 0xffff) as f32], x.device())?;
        let all = Tensor::cat(&[&mean, &var, &count.to_dtype(dtype)?], 0)?;
        let all = self.communicator.all_gather(&all)?.to_dtype(DType::F64)?;
        let all: Vec<f64> = on_host(&*self.communicator, &all)?;
        let ranks: Vec<OfRank<'_>> = all
            .chunks(2 * channels + 2)
            .map(|rank| {
                let (mean, rest) = rank.split_at(channels);
                let (var, count) = rest.split_at(channels);
                (mean, var, count[0] * 65536.0 + count[1])
            })
            .collect();
        let count: f64 = ranks.iter().map(|(_, _, count)| count).sum();
        if count < 2.0 {
            let (op, name, got) = ("batch_norm", "x", x.shape().clone());
            let expected = "more than one value a channel, over all ranks, to take a variance of";
            return Err(ArgumentError::Shape { op, name, got, expected: expected.into() }.into());
        }
        let (mut mean, mut var, mut inv_std) = (Vec::new(), Vec::new(), Vec::new());
        for c in 0..channels {
            let of_all = |f: &dyn Fn(&OfRank<'_>) -> f64| {
                ranks
                    .iter()
                    .filter(|rank| rank.2 > 0.0)
                    .map(|rank| f(rank) * rank.2 / count)
                    .sum::<f64>()
            };
            let middle = of_all(&|(mean, _, _)| mean[c]);
            let spread = of_all(&|(mean, var, _)| var[c] + (mean[c] - middle).powi(2));
            mean.push(middle);
            var.push(spread);
            inv_std.push(1.0 / (spread + self.eps).sqrt());
        }
        let here = |values: Vec<f64>| {
            Tensor::new(values, &candle_core::Device::Cpu)?.to_dtype(dtype)?.to_device(x.device())
        };
        let statistics = Statistics::new(&here(mean)?, &here(var)?, &here(inv_std)?)?;
        Ok((statistics, count as usize))
    }

    fn check(&self, x: &Tensor, parameters: &[Tensor]) -> Result<()> {
        let c = match (x.dims(), self.format) {
            (&[_, c, ..], Format::ChannelsFirst) | (&[_, .., c], Format::ChannelsLast) => c,
            _ => 0,
        };
        let fits = x.dtype().is_float() && x.rank() >= 2;
        let wrong = parameters.iter().find(|parameter| parameter.dims() != [c]);
        let (name, tensor, expected) = match wrong {
            _ if !fits => ("x", x, "floating point, of two dimensions or more".to_owned()),
            Some(parameter) => ("weight or bias", parameter, format!("[{c}]")),
            None => return Ok(()),
        };
        let got = tensor.shape().clone();
        Err(ArgumentError::Shape { op: "batch_norm", name, got, expected }.into())
    }
}

impl Operator for Normalise {
    type Saved = Saved;

    fn op(&self) -> Op {
        Op::BatchNorm
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Saved)> {
        let (given, parameters) = (&inputs[0], &inputs[1..]);
        self.check(given, parameters)?;
        let x = self.seen(given)?;
        let (statistics, count) = self.statistics(&x)?;
        let weight = if self.weight { parameters.first() } else { None };
        let bias = if self.bias { parameters.last() } else { None };
        let (mean, var) = (&statistics.mean()?, &statistics.var()?);
        let running = Running { mean, var, eps: self.eps };
        let y = kernel::forward_eval(Format::ChannelsFirst, &x, running, Affine { weight, bias })?;
        self.out.get_or_init(|| OfBatch { statistics: statistics.clone(), count });
        let saved = Saved { x: given.clone(), weight: weight.cloned(), statistics, count };
        Ok((y.reshape(given.dims())?, saved))
    }

    fn backward(&self, ctx: &Backward<'_, Saved>) -> Result<Vec<Option<Gradient>>> {
        let Saved { x: given, weight, statistics, count } = ctx.saved;
        let (x, gradient) = (self.seen(given)?, self.seen(ctx.gradient)?);
        let c = x.dim(1)?;
        let (dweight, dbias) = kernel::parameter_gradients(&x, &gradient, statistics)?;
        let mut gradients = vec![None];
        if ctx.wants[0].is_some() {
            let sums = Tensor::cat(&[&dweight, &dbias], 0)?;
            let sums = self.communicator.all_reduce(&sums, ReduceOp::Sum)?;
            let sums = [&sums.narrow(0, 0, c)?, &sums.narrow(0, c, c)?];
            let dx = kernel::backward_part(
                &x,
                &gradient,
                weight.as_ref(),
                statistics,
                sums,
                *count as f64,
            )?;
            gradients[0] = Some(Gradient::owned(dx.reshape(given.dims())?));
        }
        gradients.extend(self.weight.then_some(Some(Gradient::owned(dweight))));
        gradients.extend(self.bias.then_some(Some(Gradient::owned(dbias))));
        Ok(gradients)
    }
}
