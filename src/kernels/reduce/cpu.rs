use candle_core::{DType, Device, Result, Tensor};

use super::channels::Channels;
use crate::kernels::element::{Element, Elements, with_element};
use crate::kernels::elementwise::blocks::GRAIN;

pub(super) fn sum_all(x: &Tensor, out: DType) -> Result<Tensor> {
    with_element!(x.dtype(), T => {
        let [sum] = sum_terms([&Elements::<T>::of(x)?], #[inline(always)] |x| x);
        Tensor::new(sum, &Device::Cpu)?.to_dtype(out)
    })
}

pub(super) fn sum_to_channel(x: &Tensor, dim: usize, out: DType) -> Result<Tensor> {
    fn typed<T: Element>(x: &Tensor, dim: usize) -> Result<Vec<f64>> {
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

/// The sums of the `K` values of `term` over the positions of `inputs`, all of one length.
#[inline(always)]
pub(crate) fn sum_terms<T: Element, const M: usize, const K: usize>(
    inputs: [&[T]; M],
    term: impl Fn([T::Acc; M]) -> [T::Acc; K] + Sync,
) -> [f64; K] {
    // One channel, in runs that threads can share; the last may be short.
    let outer = inputs[0].len().div_ceil(GRAIN);
    let layout = Channels { outer, channels: 1, inner: GRAIN };
    layout.sums(
        inputs,
        [],
        #[inline(always)]
        |x, []| term(x),
    )[0]
}
