//! Stack for candle, which walks a graph by recursion.

/// A walk takes 200 bytes for each tensor above another, 600 unoptimised: room for half a million. The system provides
/// the memory page by page, once it is used.
const SIZE: usize = 256 << 20;

/// Runs `f`, in which candle walks a graph, with room for a deep one.
pub(crate) fn with_deep_stack<R>(f: impl FnOnce() -> R) -> R {
    stacker::maybe_grow(SIZE / 2, SIZE, f)
}
