//! Operators that follow the autocast scope, with right gradients in every dtype.
//!
//! Each states which dtype it takes, computes in, accumulates in and returns. "16-bit" is `F16` or `BF16`; for `F64`
//! inputs, read `F64` where it says `F32`. All are [`Operator`](crate::autograd::Operator)s: they work among candle's own
//! operators and under plain `loss.backward()`.
//!
//! They return candle's `Result`, so that they fit in `candle_core::Module`s; errors of this crate are inside.

mod activation;
mod adaptive_pool;
mod arithmetic;
mod attention;
pub mod channels_last;
mod conv;
mod conv_transpose;
mod cumsum;
#[cfg(test)]
mod device_tests;
mod elementwise;
mod embedding;
mod group_norm;
mod indexing;
mod interpolate;
mod join;
mod layer_norm;
mod linear_cross_entropy;
mod loss;
mod norm;
mod packed_attention;
mod pairwise;
mod pool;
mod positive_weight;
mod product;
mod reduce;
mod rnn;
mod rope;
mod softmax;
mod statistics;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor};

use crate::Op;
use crate::error::ArgumentError;

pub use activation::*;
pub use adaptive_pool::{adaptive_avg_pool2d, adaptive_max_pool2d};
pub use arithmetic::{add, div, maximum, minimum, mul, sub, where_cond};
pub use attention::{sdpa, sdpa_softcapped};
pub use conv::{conv1d, conv2d};
pub use conv_transpose::{conv_transpose1d, conv_transpose2d, conv_transpose2d_grouped};
pub use cumsum::cumsum;
pub use elementwise::{add_relu, dropout, flatten, relu};
pub use embedding::embedding;
pub use group_norm::group_norm;
pub use indexing::{gather, index_select, scatter_add};
pub use interpolate::{
    upsample_bilinear2d, upsample_bilinear2d_with_scale, upsample_nearest1d, upsample_nearest2d,
};
pub use join::{broadcast_as, cat, stack};
pub(crate) use layer_norm::row_norm;
pub use layer_norm::{layer_norm, rms_norm};
pub(crate) use linear_cross_entropy::linear_cross_entropy_with;
pub use linear_cross_entropy::{linear_cross_entropy, linear_cross_entropy_smoothed};
pub(crate) use loss::{ClassSettings, cross_entropy_with, nll_with};
pub use loss::{cross_entropy, cross_entropy_smoothed, nll};
pub use norm::{BatchStatistics, batch_norm, batch_norm_eval, batch_norm_relu};
pub(crate) use norm::{OfBatch, batch_norm_of, batch_norm_relu_of};
pub use packed_attention::sdpa_packed;
pub use pairwise::{binary_cross_entropy, binary_cross_entropy_with_logit, huber, kl_div, l1, mse};
pub(crate) use pairwise::{huber_with, pair_loss, probabilities};
pub use pool::{avg_pool2d, global_avg_pool2d, max_pool2d};
pub(crate) use positive_weight::positive_weighted;
pub use product::{linear, matmul};
pub use reduce::{mean, mean_dims, mean_keepdim, sum, sum_dims, sum_keepdim};
pub use rnn::{RecurrentWeights, gru, lstm};
pub use rope::{rope, rope_i, rope_thd};
pub use softmax::{log_softmax, softmax};
pub use statistics::{log_sum_exp, norm, norm_dims, norm_keepdim, var, var_dims, var_keepdim};

pub use crate::kernels::loss::Reduction;

/// candle's own, which only move: their gradients are right in every dtype, and they ask no scope.
pub use candle_nn::ops::{pixel_shuffle, pixel_unshuffle, replication_pad2d};

fn shape_error<T>(op: Op, name: &'static str, got: &Tensor, expected: String) -> Result<T> {
    let got = got.shape().clone();
    Err(ArgumentError::Shape { op: op.name(), name, got, expected }.into())
}

/// What backward of a product reads: an operand, where the gradient of the other one is wanted, and no bias.
fn reads_other_operand(input: usize, wanted: &[bool]) -> bool {
    input < 2 && wanted.get(1 - input).is_some_and(|&wanted| wanted)
}

/// Puts a tensor of its shape, without elements of its own, in the place of operand `input` if backward does not read it.
fn trim_operand(operand: &mut Tensor, input: usize, wanted: &[bool]) -> Result<()> {
    if !reads_other_operand(input, wanted) {
        let zero = Tensor::zeros((), operand.dtype(), operand.device())?;
        *operand = zero.broadcast_as(operand.shape())?;
    }
    Ok(())
}

/// `got` is floating point, on the device of `first` and, where `same_dtype`, of its dtype.
fn check_operand(
    op: Op,
    first: &Tensor,
    name: &'static str,
    got: &Tensor,
    same_dtype: bool,
) -> Result<()> {
    let op = op.name();
    if !matches!(got.dtype(), DType::F16 | DType::BF16 | DType::F32 | DType::F64) {
        let expected = "F16, BF16, F32 or F64".to_string();
        return Err(ArgumentError::DType { op, name, got: got.dtype(), expected }.into());
    }
    if same_dtype && got.dtype() != first.dtype() {
        let cure = match (got.dtype(), first.dtype()) {
            (DType::F64, _) | (_, DType::F64) => "cast one, for no scope casts F64",
            _ => "run it in an `Autocast` scope, which casts, or cast one",
        };
        let expected = format!("{:?} as the first argument: {cure}", first.dtype());
        return Err(ArgumentError::DType { op, name, got: got.dtype(), expected }.into());
    }
    let (got, expected) = (got.device().location(), first.device().location());
    if got != expected {
        return Err(ArgumentError::Device { op, name, got, expected }.into());
    }
    Ok(())
}

/// What is wanted of `x`, weight and bias, and which of them there are, where a norm's inputs are
/// `x` and those of the others that there are.
fn affine_wants(wants: &[Option<DType>], weight: bool) -> ([Option<DType>; 3], [bool; 3]) {
    let bias = 1 + usize::from(weight);
    let given = [true, weight, wants.len() > bias];
    let dbias = wants.get(bias).copied().flatten();
    ([wants[0], wants[1..bias].first().copied().flatten(), dbias], given)
}

/// `eps`, which is added to a variance, is finite and not below zero.
fn check_eps(eps: f64) -> Result<()> {
    if eps >= 0.0 && eps.is_finite() {
        return Ok(());
    }
    let expected = "a finite number, not below zero";
    Err(ArgumentError::Setting { name: "eps", got: eps, expected }.into())
}

/// `got` has exactly the dimensions `expected`.
fn check_dims(op: Op, name: &'static str, got: &Tensor, expected: &[usize]) -> Result<()> {
    if got.dims() == expected {
        return Ok(());
    }
    shape_error(op, name, got, format!("{expected:?}"))
}
