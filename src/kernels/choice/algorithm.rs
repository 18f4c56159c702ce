//! The names of the algorithms that kernels choose, for [`Autocast::trace`](crate::Autocast::trace) and for a log; and how
//! often one stood in for another.

use crate::error::lock::lock;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt::{self, Debug};
use std::sync::Mutex;

thread_local! {
    /// The last choice of this thread since [`take`].
    static CHOSEN: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// Of all threads: pass, the algorithm that was meant to run, the one that ran.
static FALLBACKS: Mutex<BTreeMap<[&'static str; 3], u64>> = Mutex::new(BTreeMap::new());

/// Says that `pass` of these `sizes` runs by `algorithm`. Of several choices for one operator, the last one counts.
pub(in crate::kernels) fn chosen(pass: &'static str, algorithm: &'static str, sizes: &dyn Debug) {
    CHOSEN.set(Some(algorithm));
    tracing::trace!(target: "candle_amp::algorithm", pass, algorithm, ?sizes);
}

/// [`chosen`], where `wanted` is the algorithm for it, and cannot do it.
pub(in crate::kernels) fn fell_back(
    pass: &'static str,
    wanted: &'static str,
    algorithm: &'static str,
    sizes: &dyn Debug,
) {
    chosen(pass, algorithm, sizes);
    let mut fallbacks = lock(&FALLBACKS);
    *fallbacks.entry([pass, wanted, algorithm]).or_default() += 1;
}

/// The last choice since the last call.
pub(crate) fn take() -> Option<&'static str> {
    CHOSEN.take()
}

/// A slower algorithm that stood in for another one on a GPU, from [`fallbacks`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fallback {
    /// What it computed: `conv forward`, `conv dgrad`, `conv wgrad`, `attention`, `attention backward` or `gemm`.
    pub pass: &'static str,
    /// The algorithm that was meant to run.
    pub wanted: &'static str,
    /// The algorithm that ran, by the name that [`Autocast::trace`](crate::Autocast::trace) has for it.
    pub ran: &'static str,
    /// How often, since the program began.
    pub count: u64,
}

impl fmt::Display for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pass, wanted, ran, count } = self;
        write!(f, "{pass}: {ran} instead of {wanted}, {count} times")
    }
}

/// The slower algorithms that stood in for others on GPUs since the program began, on all threads: empty is good.
///
/// Results are right in any case, so that nobody would notice. These are counted:
///
/// | pass | wanted | why it may not run |
/// |---|---|---|
/// | convolutions | `cudnn` | cuDNN has no deterministic algorithm for the shape; each shape is logged once, as a warning |
/// | convolutions | `cudnn graph` | cuDNN's graph API has no engine for the shape; logged as above |
/// | `attention` | `flash` | heads wider than 128 elements, or not of whole 16 bytes; compute capability below 8.0 |
/// | `attention backward` | `flash` | the same; or a mask wants a gradient |
/// | `gemm` | `cublaslt` | cuBLASLt has no product with a bias for the shape |
///
/// Tensors of `F64`, and convolutions without the feature `cudnn`, are never meant for those.
///
/// ```
/// for fallback in candle_amp::backend::fallbacks() {
///     println!("{fallback}"); // conv wgrad: im2col, cublas instead of cudnn, 12 times
/// }
/// ```
pub fn fallbacks() -> Vec<Fallback> {
    let fallbacks = lock(&FALLBACKS);
    let fallback = |(&[pass, wanted, ran], &count): (&[&'static str; 3], &u64)| Fallback {
        pass,
        wanted,
        ran,
        count,
    };
    fallbacks.iter().map(fallback).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fallbacks_are_counted_and_are_choices() {
        take();
        for _ in 0..3 {
            fell_back("a test", "fast", "slow", &0);
        }
        fell_back("a test", "fast", "slower", &0);
        chosen("a test", "fast", &0);
        fell_back("a test", "fast", "slow", &0);
        assert_eq!((take(), take()), (Some("slow"), None));
        let ours: Vec<_> = fallbacks().into_iter().filter(|f| f.pass == "a test").collect();
        let counted = |ran, count| Fallback { pass: "a test", wanted: "fast", ran, count };
        assert_eq!(ours, [counted("slow", 4), counted("slower", 1)]);
        assert_eq!(ours[0].to_string(), "a test: slow instead of fast, 4 times");
    }
}
