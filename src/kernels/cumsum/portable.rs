//! Cumulative sums out of candle's operators, for devices without kernels. Tests check it against the same values as
//! `cpu.rs`.
//!
//! Pass by pass, each element adds the one 1, 2, 4, … places before it or, with `from_end`, after it. Passes end when
//! that step reaches the length. Each writes a new tensor. candle's own `cumsum` multiplies by a triangle of ones
//! instead, where an infinity times a zero is NaN.
//!
//! Sums are F32 (F64 for F64), and are cast to the result's dtype at the end.

use candle_core::{DType, Result, Tensor};

use crate::kernels;
use crate::kernels::elementwise::portable::upcast;

pub(super) fn cumsum(x: &Tensor, dim: usize, from_end: bool, out: DType) -> Result<Tensor> {
    let mut y = upcast(x)?.transpose(0, dim)?.contiguous()?;
    let (count, mut step) = (x.dim(dim)?, 1);
    while step < count {
        let (first, last) = (y.narrow(0, 0, count - step)?, y.narrow(0, step, count - step)?);
        let sums = (first + last)?;
        y = match from_end {
            false => Tensor::cat(&[&y.narrow(0, 0, step)?, &sums], 0)?,
            true => Tensor::cat(&[&sums, &y.narrow(0, count - step, step)?], 0)?,
        };
        step *= 2;
    }
    kernels::cast(&y.transpose(0, dim)?, out)
}
