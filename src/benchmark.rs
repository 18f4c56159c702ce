//! Whether cuDNN may try its algorithms.

use std::sync::atomic::{AtomicBool, Ordering};

static MEASURED: AtomicBool = AtomicBool::new(false);

/// Lets cuDNN choose the algorithm of every new convolution by running all it has, for all threads
/// from now on. `false` at the start: it chooses by rules of its own.
///
/// A choice is made once for a shape, a dtype and a pass, and remembered. Measured, it takes some
/// tenths of a second, waits for the device, and may be another one in the next run. That is worth it
/// where images have one size, and not where every batch has its own. Without the feature `cudnn`
/// nothing is chosen.
///
/// ```
/// candle_amp::set_cudnn_benchmark(true);
/// assert!(candle_amp::cudnn_benchmark());
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
