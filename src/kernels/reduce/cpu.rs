use candle_core::{DType, Device, Result, Tensor};

use super::channels::Channels;
use super::lines::Lines;
use crate::kernels::cpu::dtype::{Elements, with_element};
use crate::kernels::cpu::lane::Lane;

pub(super) fn sum_all(x: &Tensor, out: DType) -> Result<Tensor> {
    with_element!(x.dtype(), T => {
        let layout = Channels::rows(1, x.elem_count());
        let sums = layout.sums::<T, 1, 0, 1>([&Elements::of(x)?], [], #[inline(always)] |x, []| x);
        Tensor::new(sums[0][0], &Device::Cpu)?.to_dtype(out)
    })
}

pub(super) fn sum_to_channel(x: &Tensor, dim: usize, out: DType) -> Result<Tensor> {
    fn typed<T: Lane>(x: &Tensor, dim: usize) -> Result<Vec<f64>> {
        let sums = Channels::of(x.dims(), dim).sums::<T, 1, 0, 1>(
            [&Elements::of(x)?],
            [],
            #[inline(always)]
            |x, []| x,
        );
        Ok(sums.into_iter().map(|[sum]| sum).collect())
    }
    let sums = with_element!(x.dtype(), T => typed::<T>(x, dim)?);
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
