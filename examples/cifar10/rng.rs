//! A random number generator for every item, whatever thread makes it.

use rand_chacha::ChaCha8Rng;

/// What a stream of random numbers is for; no two share numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Stream {
    Shuffle,
    Augment,
    DrawTrain,
    DrawTest,
}

/// The generator of item `index` in epoch `epoch`.
pub(crate) fn rng(stream: Stream, seed: u64, epoch: usize, index: usize) -> ChaCha8Rng {
    crate::common::rng([stream as u64, seed, epoch as u64, index as u64])
}
