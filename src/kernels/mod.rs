//! The arithmetic, away from policy and autograd.
//!
//! One folder (or file, where it is short) a kernel. Each has `mod.rs`, the contract, which picks
//! an implementation by device; `cpu.rs`; and `portable.rs`, the same result out of candle's own
//! tensor operators, which serves every other device and is the oracle of the CPU version's tests.
//!
//! The caller has checked shapes, dtypes and devices. A kernel takes and returns detached tensors,
//! accepts any strides, returns contiguous tensors, and does its arithmetic in `f32` (`f64` for
//! `f64` tensors) whatever the storage dtype.

// Without vectors, what is built on them is compiled for nobody.
#![cfg_attr(
    not(any(target_arch = "aarch64", target_arch = "x86_64")),
    allow(dead_code, unused_imports, unused_macros, unused_variables)
)]

pub(crate) mod activation;
pub(crate) mod algorithm;
pub(crate) mod attention;
pub(crate) mod batch_norm;
pub(crate) mod capture;
mod cast;
mod contiguous;
pub(crate) mod conv;
mod cpu;
#[cfg_attr(not(feature = "cuda"), path = "cuda/absent.rs", allow(dead_code))]
pub(crate) mod cuda;
pub(crate) mod cudnn;
pub(crate) mod cumsum;
#[cfg(test)]
pub(crate) mod devices;
pub(crate) mod elementwise;
pub(crate) mod embedding;
mod fingerprint;
pub(crate) mod format;
pub(crate) mod gemm;
pub(crate) mod group_norm;
mod handle;
mod heads;
pub(crate) mod instructions;
pub(crate) mod interpolate;
pub(crate) mod layer_norm;
pub(crate) mod loss;
pub(crate) mod multi_tensor;
#[cfg(test)]
pub(crate) mod own_process;
pub(crate) mod pool;
pub(crate) mod reduce;
pub(crate) mod rnn;
pub(crate) mod rope;
pub(crate) mod softmax;
pub(crate) mod tf32;

pub(crate) use cast::{accumulator, cast, cast_all, in_dtype};
pub(crate) use contiguous::{cat, contiguous};
pub(crate) use elementwise::{add, add_assign};
pub(crate) use fingerprint::{fingerprint, is_rounded};
pub(crate) use handle::WeakTensor;
