//! Sums on the CPU: the loops are in `channels.rs` and, for lines side by side, in `lines.rs`.
//!
//! Both add up at most 64 terms in F32 (F64 for F64) and the rest in F64, in an order that depends on the shape alone.
//! So the number of threads changes no bit. This file hands over the F64 sums as a tensor, which candle casts to the
//! dtype asked for. The sum of all elements is that of a matrix with one row.

use candle_core::{DType, Device, Result, Tensor};

use super::channels::Channels;
use super::lines::Lines;
use crate::kernels::cpu::dtype::{Elements, with_element};
use crate::kernels::cpu::lane::Lane;

pub(super) fn sum_all(x: &Tensor, out: DType) -> Result<Tensor> {
    sum_channels(x, Channels::rows(1, x.elem_count()), out)?.reshape(())
}

pub(super) fn sum_to_channel(x: &Tensor, dim: usize, out: DType) -> Result<Tensor> {
    sum_channels(x, Channels::of(x.dims(), dim), out)
}

fn sum_channels(x: &Tensor, layout: Channels, out: DType) -> Result<Tensor> {
    let sums = with_element!(x.dtype(), T => layout.sum::<T>(&Elements::of(x)?));
    Tensor::new(sums, &Device::Cpu)?.to_dtype(out)
}

/// The sum of each line of `x`.
pub(super) fn sum_lines(x: &Tensor, lines: Lines, out: DType) -> Result<Tensor> {
    fn typed<T: Lane>(x: &Tensor, lines: Lines) -> Result<Vec<f64>> {
        Ok(lines.sums::<T, 1, 0>(
            [&Elements::of(x)?],
            [],
            #[inline(always)]
            |[x], []| x,
        ))
    }
    let sums = with_element!(x.dtype(), T => typed::<T>(x, lines)?);
    Tensor::new(sums, &Device::Cpu)?.to_dtype(out)
}
