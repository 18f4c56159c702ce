//! Losses of pairs on the CPU. They read both tensors once, and their backward is one pass that computes the derivative.

use candle_core::{DType, Device, Result, Tensor, WithDType};

use super::pairwise::{self, Pairwise, Side};
use crate::kernels::activation::Math;
use crate::kernels::cpu::dtype::{Elements, Real, tensor, with_element};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::lane::Lane;
use crate::kernels::cpu::simd::{BLOCK, generate, with_output};
use crate::kernels::reduce::channels::Channels;

pub(super) fn pairwise_forward(loss: Pairwise, input: &Tensor, target: &Tensor) -> Result<Tensor> {
    fn typed<T: Lane<Acc: Math>>(
        loss: Pairwise,
        input: &Tensor,
        target: &Tensor,
    ) -> Result<Tensor> {
        let _held = hold([input, target]);
        let (a, b): (&[T], &[T]) = (&Elements::of(input)?, &Elements::of(target)?);
        let terms = generate(
            a.len(),
            #[inline(always)]
            |start, out: &mut [T::Acc]| {
                let mut wide = [T::Acc::default(); BLOCK];
                let wide = widened(&b[start..], &mut wide[..out.len()]);
                pairwise::terms(loss, widened(&a[start..], out), wide);
            },
        );
        let layout = Channels::rows(1, terms.len());
        let sums = layout.sums::<T::Acc, 1, 0, 1>(
            [&terms],
            [],
            #[inline(always)]
            |x, []| x,
        );
        Tensor::new(sums[0][0] / a.len() as f64, &Device::Cpu)?.to_dtype(T::Acc::DTYPE)
    }
    with_element!(input.dtype(), T => typed::<T>(loss, input, target))
}

pub(super) fn pairwise_backward(
    (loss, side): (Pairwise, Side),
    input: &Tensor,
    target: &Tensor,
    grad_scale: &Tensor,
    out: DType,
) -> Result<Tensor> {
    fn typed<T: Lane<Acc: Math>, O: Lane<Acc = T::Acc>>(
        (loss, side): (Pairwise, Side),
        input: &Tensor,
        target: &Tensor,
        grad_scale: &Tensor,
    ) -> Result<Tensor> {
        let _held = hold([input, target]);
        let (a, b): (&[T], &[T]) = (&Elements::of(input)?, &Elements::of(target)?);
        let scale = T::Acc::of(scalar(grad_scale)? / a.len() as f64);
        let dx = generate(
            a.len(),
            #[inline(always)]
            |start, out: &mut [O]| {
                let [mut derivatives, mut wide] = [[T::Acc::default(); BLOCK]; 2];
                let wide = widened(&b[start..], &mut wide[..out.len()]);
                let derivatives = widened(&a[start..], &mut derivatives[..out.len()]);
                pairwise::derivatives(loss, side, derivatives, wide);
                for (out, derivative) in out.iter_mut().zip(derivatives) {
                    *out = O::narrowed(*derivative * scale);
                }
            },
        );
        Ok(tensor(dx, input.dims()))
    }
    with_element!(input.dtype(), T => with_output!(T, out, O => {
        typed::<T, O>((loss, side), input, target, grad_scale)
    }))
}

/// The first elements of `src` in `dst`.
#[inline(always)]
fn widened<'a, T: Lane>(src: &[T], dst: &'a mut [T::Acc]) -> &'a mut [T::Acc] {
    for (dst, src) in dst.iter_mut().zip(src) {
        *dst = src.widened();
    }
    dst
}

fn scalar(tensor: &Tensor) -> Result<f64> {
    tensor.detach().to_dtype(DType::F64)?.to_scalar()
}
