//! Maps of keys that the crate makes itself, so that nobody can have them collide. The default hash takes ten times as
//! long: a launch looks its kernel up, and a convolution its plan.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

pub(super) type Quick<K, V> = HashMap<K, V, BuildHasherDefault<Words>>;

/// FNV-1a, a word at a time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Words(u64);

impl Default for Words {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Hasher for Words {
    fn write(&mut self, bytes: &[u8]) {
        for some in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..some.len()].copy_from_slice(some);
            self.write_u64(u64::from_ne_bytes(word));
        }
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = (self.0 ^ word).wrapping_mul(0x100_0000_01b3);
    }

    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }

    fn finish(&self) -> u64 {
        // The map looks at the highest bits, too.
        self.0 ^ self.0.rotate_left(32)
    }
}

#[cfg(test)]
mod tests {
    use std::hash::BuildHasher;

    use super::*;

    #[test]
    fn places_of_kernels_spread_over_a_map() {
        // Addresses that differ by a few bytes, as those of names do.
        let of = |i: usize| (0x5555_0000_0000usize, [(0x5570_1234_5600 + 8 * i, 4), (0, i % 7)]);
        let hashes = (0..4096).map(|i| BuildHasherDefault::<Words>::default().hash_one(of(i)));
        let (mut low, mut high) = (HashMap::new(), HashMap::new());
        for hash in hashes {
            *low.entry(hash & 0xfff).or_insert(0) += 1;
            *high.entry(hash >> 57).or_insert(0) += 1;
        }
        // By chance 63 % of the places are taken, and 32 of 4,096 have each of the highest bits.
        assert!(low.len() > 2000 && low.values().all(|&count| count < 16), "{}", low.len());
        assert!(high.len() > 100 && high.values().all(|&count| count < 128), "{}", high.len());
    }
}
