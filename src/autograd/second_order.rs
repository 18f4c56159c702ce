//! Gradients of gradients.

use std::sync::LazyLock;

/// Whether candle keeps the graph of gradients, so that a loss can have them in it.
///
/// Read once, as candle reads it: it is of the process's environment.
pub(crate) fn is_wanted() -> bool {
    static WANTED: LazyLock<bool> = LazyLock::new(|| {
        std::env::var("CANDLE_GRAD_DO_NOT_DETACH")
            .is_ok_and(|value| !value.is_empty() && value != "0")
    });
    *WANTED
}
