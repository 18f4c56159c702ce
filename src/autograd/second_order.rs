//! Gradients of gradients.

/// Whether candle keeps the graph of gradients on this thread, so that a loss can have them in it.
///
/// It reads the variable once a thread, and so does this.
pub(crate) fn is_wanted() -> bool {
    thread_local! {
        static WANTED: bool = std::env::var("CANDLE_GRAD_DO_NOT_DETACH")
            .is_ok_and(|value| !value.is_empty() && value != "0");
    }
    WANTED.with(|wanted| *wanted)
}
