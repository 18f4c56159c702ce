//! A leaky relu whose slope is a parameter: one, or one per channel, of dimension 1.

use candle_core::{DType, Result, Tensor};
use num_traits::Zero;

use super::cuda;
use crate::kernels::accumulator;
use crate::kernels::cpu::dtype::{Elements, tensor, with_element};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::lane::Lane;
use crate::kernels::cuda::Gpu;
use crate::kernels::elementwise::plain;
use crate::kernels::elementwise::portable::{at_most, upcast};
use crate::kernels::reduce::channels::Channels;
use crate::kernels::{cast, reduce};

/// `x` above 0, `weight x` below, in the dtype of `x`.
pub(crate) fn prelu(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    fn typed<T: Lane>(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        let _held = hold([x, weight]);
        let (data, weight) = (Elements::<T>::of(x)?, Elements::<T::Acc>::of(weight)?);
        let y = channels(x, weight.len()).map::<T, T, 1, 1>(
            [&data],
            [&weight],
            #[inline(always)]
            |[x], [weight]| if x > T::Acc::zero() { x } else { weight * x },
        );
        Ok(tensor(y, x.dims()))
    }
    let (x, weight) = (plain(x)?, wide(x, weight)?);
    if let Some(gpu) = Gpu::of(x.device()) {
        return cuda::prelu(gpu, &x, &weight, None);
    }
    if x.device().is_cpu() {
        return with_element!(x.dtype(), T => typed::<T>(&x, &weight));
    }
    let slopes = spread(&x, &weight)?;
    let wide = upcast(&x)?;
    wide.gt(0.0)?.where_cond(&wide, &wide.mul(&slopes)?)?.to_dtype(x.dtype())
}

/// The gradient of [`prelu`] in `x`, in its dtype.
pub(crate) fn input_gradient(x: &Tensor, weight: &Tensor, grad: &Tensor) -> Result<Tensor> {
    fn typed<T: Lane>(x: &Tensor, weight: &Tensor, grad: &Tensor) -> Result<Tensor> {
        let _held = hold([x, grad, weight]);
        let (data, grad) = (Elements::<T>::of(x)?, Elements::<T>::of(grad)?);
        let weight = Elements::<T::Acc>::of(weight)?;
        let dx = channels(x, weight.len()).map::<T, T, 2, 1>(
            [&data, &grad],
            [&weight],
            #[inline(always)]
            |[x, grad], [weight]| if x > T::Acc::zero() { grad } else { weight * grad },
        );
        Ok(tensor(dx, x.dims()))
    }
    let (x, grad, weight) = (plain(x)?, plain(grad)?, wide(x, weight)?);
    if let Some(gpu) = Gpu::of(x.device()) {
        return cuda::prelu(gpu, &x, &weight, Some(&grad));
    }
    if x.device().is_cpu() {
        return with_element!(x.dtype(), T => typed::<T>(&x, &weight, &grad));
    }
    let (slopes, wide) = (spread(&x, &weight)?, upcast(&grad)?);
    x.gt(0.0)?.where_cond(&wide, &wide.mul(&slopes)?)?.to_dtype(x.dtype())
}

/// The gradient of [`prelu`] in a weight of `count` elements, in `out`: sums of `min(x, 0) grad`.
pub(crate) fn weight_gradient(
    x: &Tensor,
    grad: &Tensor,
    count: usize,
    out: DType,
) -> Result<Tensor> {
    fn typed<T: Lane>(x: &Tensor, grad: &Tensor, count: usize) -> Result<Vec<f64>> {
        let _held = hold([x, grad]);
        let (data, grad) = (Elements::<T>::of(x)?, Elements::<T>::of(grad)?);
        let sums = channels(x, count).sums::<T, 2, 0, 1>(
            [&data, &grad],
            [],
            #[inline(always)]
            |[x, grad], []| [if x > T::Acc::zero() { T::Acc::zero() } else { x * grad }],
        );
        Ok(sums.into_iter().map(|[sum]| sum).collect())
    }
    let (x, grad) = (plain(x)?, plain(grad)?);
    if x.device().is_cpu() {
        let sums = with_element!(x.dtype(), T => typed::<T>(&x, &grad, count)?);
        return Tensor::new(sums, x.device())?.to_dtype(out);
    }
    let product = match Gpu::of(x.device()) {
        Some(gpu) => cuda::prelu_terms(gpu, &x, &grad)?,
        None => (at_most(&upcast(&x)?, 0.0)? * upcast(&grad)?)?,
    };
    match count {
        1 => reduce::sum_all(&product, out)?.reshape(1),
        _ => reduce::sum_to_channel(&product, 1, out),
    }
}

/// Channels are those of dimension 1, or all elements are one channel's.
fn channels(x: &Tensor, count: usize) -> Channels {
    if count == 1 { Channels::rows(1, x.elem_count()) } else { Channels::of(x.dims(), 1) }
}

fn wide(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    cast(weight, accumulator(x.dtype()))?.flatten_all()
}

fn spread(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let mut dims = vec![1; x.rank()];
    if weight.elem_count() > 1 {
        dims[1] = weight.elem_count();
    }
    weight.reshape(dims)?.broadcast_as(x.shape())
}
