//! Sums that do not saturate, and a number that changes with the elements.
//!
//! A 16-bit tensor is widened before it is added up. Each block is added up in F32 (F64 for F64),
//! and the sums of blocks in F64, in a fixed order. The result is rounded to the dtype
//! asked for, on CUDA through F32 where that has 16 bits.

pub(crate) mod channels;
mod cpu;
pub(crate) mod cuda;
pub(crate) mod fingerprint;
pub(crate) mod lines;
pub(in crate::kernels) mod norm;
mod portable;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor};

use crate::kernels::cuda::Gpu;
use crate::kernels::elementwise::plain;
use channels::Channels;
use lines::Lines;

/// The sum of all elements: a scalar, in `out`.
pub(crate) fn sum_all(x: &Tensor, out: DType) -> Result<Tensor> {
    let x = plain(x)?;
    if let Some(gpu) = Gpu::of(x.device()) {
        return cuda::sums(gpu, &x, Channels::rows(1, x.elem_count()), out)?.reshape(());
    }
    if x.device().is_cpu() { cpu::sum_all(&x, out) } else { portable::sum_all(&x, out) }
}

/// The sums over every dimension but `dim`: `(dims[dim])`, in `out`.
pub(crate) fn sum_to_channel(x: &Tensor, dim: usize, out: DType) -> Result<Tensor> {
    let x = plain(x)?;
    if let Some(gpu) = Gpu::of(x.device()) {
        return cuda::sums(gpu, &x, Channels::of(x.dims(), dim), out);
    }
    if x.device().is_cpu() {
        cpu::sum_to_channel(&x, dim, out)
    } else {
        portable::sum_to_channel(&x, dim, out)
    }
}

/// The means over the dimensions along which `dims` was broadcast to `x`, each of `count` elements: of shape `dims`, in
/// `x`'s accumulator. Divided in F64 before they are rounded, where the device has that: equal numbers are their mean.
pub(crate) fn mean_to(x: &Tensor, dims: &[usize], count: usize) -> Result<Tensor> {
    let wide = super::accumulator(x.dtype());
    let exact = if x.device().is_metal() { wide } else { DType::F64 };
    let sum = sum_to(x, dims, exact)?;
    let mean = super::ordered(x.device(), || sum.affine(1.0 / count as f64, 0.0))?;
    super::in_dtype(&mean, wide)
}

/// The sums over the dimensions along which `dims` was broadcast to `x`: of shape `dims`, in `out`.
pub(crate) fn sum_to(x: &Tensor, dims: &[usize], out: DType) -> Result<Tensor> {
    let fresh = x.rank() - dims.len();
    let repeats = |dim: &usize| *dim < fresh || dims[dim - fresh] != x.dims()[*dim];
    let (summed, kept): (Vec<usize>, Vec<usize>) = (0..x.rank()).partition(repeats);
    if summed.is_empty() {
        return super::cast(x, out);
    }
    if kept.is_empty() {
        return sum_all(x, out)?.reshape(dims);
    }
    // Of dimensions that follow each other, as of rows or of a tensor's channels, nothing is copied.
    if let (Some(&first), Some(&last)) = (kept.first(), kept.last())
        && last - first + 1 == kept.len()
    {
        let count = |dims: &[usize]| dims.iter().product::<usize>();
        let [before, columns, after] =
            [&x.dims()[..first], &x.dims()[first..=last], &x.dims()[last + 1..]].map(count);
        let x = plain(x)?.reshape((before, columns, after))?;
        return sum_to_channel(&x, 1, out)?.reshape(dims);
    }
    // Nor on a CPU, of what is summed over, where that follows each other.
    if let (true, Some(&first), Some(&last)) = (x.device().is_cpu(), summed.first(), summed.last())
        && last - first + 1 == summed.len()
    {
        let count = x.dims()[first..=last].iter().product();
        let around = [&x.dims()[..first], &[count], &x.dims()[last + 1..]].concat();
        if let Some(lines) = Lines::of(&around, first) {
            return cpu::sum_lines(&plain(x)?, lines, out)?.reshape(dims);
        }
    }
    let order: Vec<usize> = summed.into_iter().chain(kept.iter().copied()).collect();
    let columns: usize = kept.iter().map(|&dim| x.dims()[dim]).product();
    let rows = plain(&x.permute(order)?)?;
    let count = rows.elem_count().checked_div(columns).unwrap_or(0);
    sum_to_channel(&rows.reshape((count, columns))?, 1, out)?.reshape(dims)
}
