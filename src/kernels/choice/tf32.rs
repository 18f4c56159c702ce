//! Whether F32 products on a GPU may round what they multiply to TF32.

use std::sync::atomic::{AtomicBool, Ordering};

static ALLOWED: AtomicBool = AtomicBool::new(false);

/// Lets matrix products and convolutions of `F32` tensors on CUDA devices round what they multiply to
/// TF32, for all threads from now on. `false` at the start.
///
/// # Precision
///
/// TF32 has the range of `F32` and 10 bits after the leading one, as many as `F16`. Products have a
/// relative error of up to 2⁻¹⁰. From compute capability 8.0 on, the hardware's peak is up to eight times as high; no product
/// was timed. Sums stay `F32`, and so does what is stored. 16-bit products, those of `F64`, and the CPU's do not change;
/// but the products of `lstm` and `gru` from step to step are `F32` in `F16` too. candle's own products follow candle's own
/// setting.
///
/// ```
/// assert!(!candle_amp::backend::allow_tf32());
/// candle_amp::backend::set_allow_tf32(true);
/// assert!(candle_amp::backend::allow_tf32());
/// ```
///
/// # References
///
/// `torch.backends.cuda.matmul.allow_tf32`; candle's
/// `candle_core::cuda::set_gemm_reduced_precision_f32`.
pub fn set_allow_tf32(allow: bool) {
    ALLOWED.store(allow, Ordering::Relaxed);
}

/// What was last given to [`set_allow_tf32`].
pub fn allow_tf32() -> bool {
    ALLOWED.load(Ordering::Relaxed)
}
