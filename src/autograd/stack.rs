//! Stack for candle, which walks a graph by recursion.

/// A walk takes 200 bytes for each tensor above another, 600 unoptimised: room for more than a million. The system
/// provides the memory page by page, once it is used. 32 bits of address space have less to give.
const SIZE: usize = if cfg!(target_pointer_width = "64") { 1 << 30 } else { 64 << 20 };

/// Runs `f`, in which candle walks a graph, with room for a deep one.
pub(crate) fn with_deep_stack<R>(f: impl FnOnce() -> R) -> R {
    stacker::maybe_grow(SIZE / 2, SIZE, f)
}
