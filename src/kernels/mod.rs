//! The arithmetic, away from policy and autograd.
//!
//! Most folders hold one kernel. There `mod.rs` picks an implementation by device: `cpu.rs`, `cuda.rs` (or a folder
//! `cuda`) or `portable.rs`, the same result out of candle's own tensor operators. Kernels share the folders `choice`,
//! `cpu`, `cuda`, `tensors` and `testing`, and the files `capture.rs` and `instructions.rs`.
//!
//! `portable.rs` serves devices without kernels. On a CPU or GPU it serves passes that have no kernel there, such as
//! the gradients of batch norm over several ranks on CUDA, and in some folders empty tensors. Tests compare the CPU
//! kernel with it, or both with the same expected values.
//!
//! The caller has checked shapes, dtypes and devices. A kernel takes and returns detached tensors and accepts any
//! strides. It returns contiguous tensors; for pointwise operators, `ops` keeps the strides of a permuted input. Its
//! arithmetic is in `f32` (`f64` for `f64` tensors) whatever the storage dtype.

// Without vectors, what is built on them is compiled for nobody.
#![cfg_attr(
    not(any(target_arch = "aarch64", target_arch = "x86_64")),
    allow(dead_code, unused_imports, unused_macros, unused_variables)
)]

pub(crate) mod activation;
pub(crate) mod attention;
pub(crate) mod batch_norm;
pub(crate) mod capture;
mod cast;
pub(crate) mod choice;
pub(crate) mod conv;
mod cpu;
#[cfg_attr(not(feature = "cuda"), path = "cuda/absent.rs", allow(dead_code))]
pub(crate) mod cuda;
pub(crate) mod cumsum;
pub(crate) mod elementwise;
pub(crate) mod embedding;
pub(crate) mod gemm;
pub(crate) mod group_norm;
pub(crate) mod instructions;
pub(crate) mod interpolate;
pub(crate) mod layer_norm;
pub(crate) mod loss;
pub(crate) mod multi_tensor;
mod ordered;
pub(crate) mod pool;
pub(crate) mod reduce;
pub(crate) mod rnn;
pub(crate) mod rope;
pub(crate) mod softmax;
pub(crate) mod tensors;
#[cfg(test)]
pub(crate) mod testing;

pub(crate) use cast::{accumulator, cast, cast_all, in_dtype};
pub(crate) use elementwise::{add, add_assign};
pub(crate) use ordered::{cat, contiguous, ordered};
pub(crate) use reduce::fingerprint::{fingerprint, is_rounded, same_bits};
pub(crate) use tensors::{WeakTensor, place};
