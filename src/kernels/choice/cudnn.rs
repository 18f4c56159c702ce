//! Settings of cuDNN: whether it times its algorithms, and whether it rounds weight gradients.

use std::sync::atomic::{AtomicBool, Ordering};

static MEASURED: AtomicBool = AtomicBool::new(false);
static F32_WEIGHT_GRADIENTS: AtomicBool = AtomicBool::new(false);

/// Chooses the algorithm of every new convolution by running those that cuDNN has, for all threads from now on. `false`
/// at the start: cuDNN's heuristics choose.
///
/// Of the engines of cuDNN's graph API, ten at most are timed; of its older functions, all. Only deterministic ones that
/// transform nothing are chosen. A choice is made once for a shape, a dtype and a pass, and remembered. Measuring
/// takes tenths of a second or more and synchronises. The next run may choose another algorithm. Measure if images have
/// one size, not if every batch has its own. A [`GraphedStep`](crate::optim::GraphedStep) measures in the steps before
/// its capture. Without the feature `cudnn` nothing is chosen.
///
/// ```
/// candle_amp::backend::set_cudnn_benchmark(true);
/// assert!(candle_amp::backend::cudnn_benchmark());
/// ```
///
/// # References
///
/// `torch.backends.cudnn.benchmark`.
pub fn set_cudnn_benchmark(measure: bool) {
    MEASURED.store(measure, Ordering::Relaxed);
}

/// What was last given to [`set_cudnn_benchmark`].
pub fn cudnn_benchmark() -> bool {
    MEASURED.load(Ordering::Relaxed)
}

/// Has cuDNN write the weight gradients of 16-bit convolutions in `F32`, where that is wanted, for all threads from
/// now on. `false` at the start: they are rounded to 16 bits once, as PyTorch's always are.
///
/// cuDNN sums in `F32` either way, but rounds the result to its operands' dtype. With this set, it is asked for an engine
/// that writes `F32` from 16-bit operands. Where it has none, it gets copies of both operands in `F32`,
/// and multiplies in TF32, which holds 16-bit numbers exactly. The pass then reads and writes five times as many bytes.
///
/// A gradient's relative error goes from 2⁻⁹ (`BF16`) or 2⁻¹² (`F16`) to that of an `F32` sum, and `F16` gradients
/// neither overflow nor underflow. Convolutions without cuDNN write `F32` in any case.
///
/// ```
/// candle_amp::backend::set_cudnn_f32_weight_gradients(true);
/// assert!(candle_amp::backend::cudnn_f32_weight_gradients());
/// ```
pub fn set_cudnn_f32_weight_gradients(f32: bool) {
    F32_WEIGHT_GRADIENTS.store(f32, Ordering::Relaxed);
}

/// What was last given to [`set_cudnn_f32_weight_gradients`].
pub fn cudnn_f32_weight_gradients() -> bool {
    F32_WEIGHT_GRADIENTS.load(Ordering::Relaxed)
}
