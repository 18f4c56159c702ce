//! The arithmetic, away from policy and autograd.
//!
//! One folder (or file, where it is short) a kernel. Each has `mod.rs`, the contract, which picks
//! an implementation by device; `cpu.rs`; and `portable.rs`, the same result out of candle's own
//! tensor operators, which serves every other device and is the oracle of the CPU version's tests.
//!
//! The caller has checked shapes, dtypes and devices. A kernel takes and returns detached tensors,
//! accepts any strides, returns contiguous tensors, and does its arithmetic in `f32` (`f64` for
//! `f64` tensors) whatever the storage dtype.

#![allow(dead_code)] // until every kernel has its operator

mod element;
