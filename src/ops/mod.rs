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
mod check;
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
mod wants;

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
pub use norm::{BatchStatistics, batch_norm, batch_norm_eval, batch_norm_relu, batch_norm_relu6};
pub(crate) use norm::{OfBatch, batch_norm_of, batch_norm_relu_of, batch_norm_relu6_of};
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
