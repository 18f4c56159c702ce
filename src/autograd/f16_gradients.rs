//! Whether backward passes meet F16 gradients, which need a loss scale.

use std::cell::Cell;

thread_local! {
    static SAW_F16: Cell<bool> = const { Cell::new(false) };
    static TOLD: Cell<bool> = const { Cell::new(false) };
}

/// An operator's backward was given an `F16` gradient, in a scaler's pass or in candle's own.
pub(crate) fn f16_gradient(in_scaler: bool) {
    SAW_F16.set(true);
    if !in_scaler && !TOLD.replace(true) {
        tracing::warn!(
            "F16 gradients without a GradScaler: those below 2^-25 become zero; back-propagate \
             with `scaler.scale(&loss)?.backward()?`, or compute in BF16"
        );
    }
}

/// Whether there was one on this thread since the last call.
pub(crate) fn saw_f16() -> bool {
    SAW_F16.replace(false)
}
