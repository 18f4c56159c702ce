//! Vectors of sixteen F32, whatever the processor's registers hold.
//!
//! An algorithm is written once over [`Vector`]. Each instruction set implements the trait in a file of its own, with
//! little more than its instructions: one register of AVX-512, two of AVX2, four of NEON. The folder of a target lists
//! its sets, as `Vectors`, and has the macros that compile an algorithm for them:
//!
//! - `with_vectors!(vectors, V => body)` runs `body` with `V` bound to the [`Vector`] of `vectors`, compiled for that set.
//! - `with_bf16_vectors!(V => body)` does so for the set of `Vectors::for_bf16`.
//! - `with_ftz_vectors!(V => body)` does so for the set whose [`Vector::store_bf16_ftz`] may be called.
//!
//! `body` becomes a closure that is called once, but may not move out of what it captures. What it calls must be
//! `#[inline(always)]`, closures too, or else calls a function for every instruction. `map` of an array is not. All three
//! panic when the processor has no such instruction set.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(not(any(target_arch = "aarch64", target_arch = "x86_64")))]
mod absent;
mod lanes;
mod names;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86_64;

use std::sync::LazyLock;

#[cfg(target_arch = "aarch64")]
pub(in crate::kernels) use aarch64::{
    Neon, Vectors, with_bf16_vectors, with_ftz_vectors, with_vectors,
};
#[cfg(not(any(target_arch = "aarch64", target_arch = "x86_64")))]
pub(in crate::kernels) use absent::{Vectors, with_bf16_vectors, with_ftz_vectors, with_vectors};
pub(in crate::kernels) use lanes::{Vector, first_lanes};
#[cfg(target_arch = "x86_64")]
pub(in crate::kernels) use x86_64::{
    Avx2, Avx512, Vectors, add_products, with_bf16_vectors, with_ftz_vectors, with_vectors,
};

impl Vectors {
    // Not inlined: it is asked before every loop, and was a part of each.
    /// The widest of this processor.
    #[inline(never)]
    pub(crate) fn widest() -> Option<Self> {
        static WIDEST: LazyLock<Option<Vectors>> =
            LazyLock::new(|| Vectors::ALL.into_iter().rev().find(|set| set.is_available()));
        *WIDEST
    }

    /// The widest, for what runs only on processors that have some.
    ///
    /// # Panics
    /// On others.
    pub(in crate::kernels) fn known() -> Self {
        let Some(widest) = Self::widest() else { panic!("the processor has no vectors") };
        widest
    }
}
