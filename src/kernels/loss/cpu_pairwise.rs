//! Losses of pairs on the CPU. They read both tensors once, and their backward is one pass that computes the derivative.

use candle_core::{DType, Device, Result, Tensor, WithDType};

use super::class::{Reduction, count};
use super::pairwise::{self, LossArgument, Pairwise};
use crate::kernels::activation::Math;
use crate::kernels::cast;
use crate::kernels::cpu::dtype::{Elements, Real, tensor, with_element};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::lane::Lane;
use crate::kernels::cpu::simd::{BLOCK, generate, with_output};
use crate::kernels::reduce::channels::Channels;

pub(super) fn pairwise_forward(
    loss: Pairwise,
    reduction: Reduction,
    input: &Tensor,
    target: &Tensor,
) -> Result<Tensor> {
    fn typed<T: Lane<Acc: Math>>(
        loss: Pairwise,
        reduction: Reduction,
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
        if reduction == Reduction::None {
            return Ok(tensor(terms, input.dims()));
        }
        let sums = Channels::rows(1, terms.len()).sum(&terms);
        let mean = sums[0] / count(reduction, a.len());
        Tensor::new(mean, &Device::Cpu)?.to_dtype(T::Acc::DTYPE)
    }
    with_element!(input.dtype(), T => typed::<T>(loss, reduction, input, target))
}

pub(super) fn pairwise_backward(
    of: (Pairwise, LossArgument),
    reduction: Reduction,
    tensors: [&Tensor; 3],
    out: DType,
) -> Result<Tensor> {
    fn typed<T: Lane<Acc: Math>, O: Lane<Acc = T::Acc>>(
        (loss, argument): (Pairwise, LossArgument),
        reduction: Reduction,
        [input, target, gradient]: [&Tensor; 3],
    ) -> Result<Tensor> {
        let gradient = cast(gradient, T::Acc::DTYPE)?;
        let _held = hold([input, target, &gradient]);
        let (a, b): (&[T], &[T]) = (&Elements::of(input)?, &Elements::of(target)?);
        let gradient: &[T::Acc] = &Elements::of(&gradient)?;
        let each = (reduction == Reduction::None).then_some(gradient);
        let scale = T::Acc::of(gradient[0].to_double() / count(reduction, a.len()));
        let dx = generate(
            a.len(),
            #[inline(always)]
            |start, out: &mut [O]| {
                let [mut derivatives, mut wide] = [[T::Acc::default(); BLOCK]; 2];
                let wide = widened(&b[start..], &mut wide[..out.len()]);
                let derivatives = widened(&a[start..], &mut derivatives[..out.len()]);
                pairwise::derivatives(loss, argument, derivatives, wide);
                match each {
                    None => {
                        for (out, derivative) in out.iter_mut().zip(derivatives) {
                            *out = O::narrowed(*derivative * scale);
                        }
                    }
                    Some(each) => {
                        let products = derivatives.iter().zip(&each[start..]);
                        for (out, (derivative, gradient)) in out.iter_mut().zip(products) {
                            *out = O::narrowed(*derivative * *gradient);
                        }
                    }
                }
            },
        );
        Ok(tensor(dx, input.dims()))
    }
    with_element!(tensors[0].dtype(), T => with_output!(T, out, O => {
        typed::<T, O>(of, reduction, tensors)
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
