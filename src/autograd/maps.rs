//! Maps and sets by the numbers of tensors and of their storages.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

use candle_core::TensorId;

/// Values by [`place`](super::storage::place).
pub(super) type ByPlace<V> = HashMap<usize, V, BuildHasherDefault<NumberHasher>>;

/// Values by tensor.
pub(crate) type ById<V> = HashMap<TensorId, V, BuildHasherDefault<NumberHasher>>;

/// A set of tensors.
pub(crate) type Ids = HashSet<TensorId, BuildHasherDefault<NumberHasher>>;

/// Hashes by multiplication: every operator looks for its inputs and every step for its gradients, and the default hash takes
/// many times as long. Nobody chooses these numbers to make them collide.
#[derive(Default)]
pub(crate) struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_usize(byte.into()));
    }

    fn write_usize(&mut self, number: usize) {
        self.0 = (self.0 ^ number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn finish(&self) -> u64 {
        // The map looks at the lowest bits, which have only those below in them, and at the highest.
        self.0 ^ self.0 >> 32
    }
}
