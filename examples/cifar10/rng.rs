//! A random number generator for every item, whatever thread makes it.

use rand::SeedableRng;
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
///
/// A generator for every item, not one for all: items can be made in any order, on any thread.
pub(crate) fn rng(stream: Stream, seed: u64, epoch: usize, index: usize) -> ChaCha8Rng {
    let mut key = [0; 32];
    let words = [stream as u64, seed, epoch as u64, index as u64];
    for (bytes, word) in key.chunks_exact_mut(8).zip(words) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    ChaCha8Rng::from_seed(key)
}
