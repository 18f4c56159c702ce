//! The names of the algorithms that kernels choose, for [`Autocast::trace`](crate::Autocast::trace) and for a log.

use std::cell::Cell;
use std::fmt::Debug;

thread_local! {
    /// The last choice of this thread since [`take`].
    static CHOSEN: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// Says that `pass` of these `sizes` runs by `algorithm`. Of several choices for one operator, the last one counts.
pub(super) fn chosen(pass: &'static str, algorithm: &'static str, sizes: &dyn Debug) {
    CHOSEN.set(Some(algorithm));
    tracing::trace!(target: "candle_amp::algorithm", pass, algorithm, ?sizes);
}

/// The last choice since the last call.
pub(crate) fn take() -> Option<&'static str> {
    CHOSEN.take()
}
