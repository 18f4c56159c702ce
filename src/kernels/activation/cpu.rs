//! Pointwise operators and SwiGLU on the CPU: one pass that reads each input once and writes the result once.
//!
//! A block of 1024 elements is widened to F32 (F64 for F64) in the first-level cache. `functions.rs` overwrites it with
//! values or derivatives there, and it is rounded once. So functions are compiled for the two arithmetic types, and
//! only these loops for every dtype. Large 16-bit tensors look slow functions up in a table (`lookup.rs`).
//!
//! A derivative is multiplied by the gradient before it is rounded, and may overwrite the gradient. SwiGLU is one
//! function, which is in its loops. Threads take chunks whose bounds depend on the length alone.

use std::mem::MaybeUninit;

use candle_core::{Result, Tensor};

use super::functions::sigmoid;
use super::halves::half_dims;
use super::lookup::{Computed, Of, Tables};
use super::math::Math;
use super::pointwise::Pointwise;
use crate::kernels::cpu::dtype::{Elements, tensor, with_element};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::in_place::write;
use crate::kernels::cpu::lane::Lane;
use crate::kernels::cpu::simd::{BLOCK, GRAIN, for_each_chunk, generate, generate_in_place, runs};

pub(super) fn value(function: Pointwise, x: &Tensor) -> Result<Tensor> {
    fn typed<T: Tables>(function: Pointwise, x: &Tensor) -> Result<Tensor> {
        let data: &[T] = &Elements::of(x)?;
        let computed = Computed::<T>::new(function, Of::Value, data.len());
        let y = generate_in_place(
            data.len(),
            #[inline(always)]
            |start, out: &mut [MaybeUninit<T>]| {
                for (out, x) in out.chunks_mut(BLOCK).zip(data[start..].chunks(BLOCK)) {
                    let mut wide = [T::Acc::default(); BLOCK];
                    let wide = &mut wide[..out.len()];
                    computed.write(x, wide);
                    for (out, wide) in out.iter_mut().zip(wide) {
                        out.write(T::narrowed(*wide));
                    }
                }
            },
        );
        Ok(tensor(y, x.dims()))
    }
    with_element!(x.dtype(), T => typed::<T>(function, x))
}

pub(super) fn derivative(function: Pointwise, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
    fn typed<T: Tables>(function: Pointwise, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
        let _held = hold([x, grad]);
        let (data, grad): (&[T], &[T]) = (&Elements::of(x)?, &Elements::of(grad)?);
        let computed = Computed::<T>::new(function, Of::Derivative, data.len());
        let dx = generate_in_place(
            data.len(),
            #[inline(always)]
            |start, out: &mut [MaybeUninit<T>]| {
                let inputs = data[start..].chunks(BLOCK).zip(grad[start..].chunks(BLOCK));
                for (out, (x, grad)) in out.chunks_mut(BLOCK).zip(inputs) {
                    let mut wide = [T::Acc::default(); BLOCK];
                    let wide = &mut wide[..out.len()];
                    computed.write(x, wide);
                    for ((out, wide), grad) in out.iter_mut().zip(wide).zip(grad) {
                        out.write(T::narrowed(*wide * grad.widened()));
                    }
                }
            },
        );
        Ok(tensor(dx, x.dims()))
    }
    with_element!(x.dtype(), T => typed::<T>(function, x, grad))
}

pub(super) fn derivative_assign(function: Pointwise, grad: &Tensor, x: &Tensor) -> Result<()> {
    fn typed<T: Tables>(function: Pointwise, grad: &Tensor, x: &Tensor) -> Result<()> {
        let data: &[T] = &Elements::of(x)?;
        let computed = Computed::<T>::new(function, Of::Derivative, data.len());
        write(grad, |grad: &mut [T]| {
            for_each_chunk::<T::Acc, _>(
                grad,
                GRAIN,
                #[inline(always)]
                |chunk, grad| {
                    for (grad, x) in grad.chunks_mut(BLOCK).zip(data[chunk * GRAIN..].chunks(BLOCK))
                    {
                        let mut wide = [T::Acc::default(); BLOCK];
                        let wide = &mut wide[..grad.len()];
                        computed.write(x, wide);
                        for (grad, wide) in grad.iter_mut().zip(wide) {
                            *grad = T::narrowed(*wide * grad.widened());
                        }
                    }
                },
            );
        })
    }
    with_element!(x.dtype(), T => typed::<T>(function, grad, x))
}

pub(super) fn swiglu(x: &Tensor) -> Result<Tensor> {
    fn typed<T: Lane<Acc: Math>>(x: &Tensor) -> Result<Tensor> {
        let (dims, data) = (half_dims(x), Elements::<T>::of(x)?);
        let (data, width): (&[T], usize) = (&data, dims[dims.len() - 1]);
        let y = generate(
            data.len() / 2,
            #[inline(always)]
            |start, out: &mut [T]| {
                for (row, run) in runs(start, out.len(), width) {
                    let from = row * width + start + run.start;
                    let out = &mut out[run];
                    let gates = &data[from..from + out.len()];
                    let ups = &data[from + width..from + width + out.len()];
                    for ((out, gate), up) in out.iter_mut().zip(gates).zip(ups) {
                        let gate = gate.widened();
                        *out = T::narrowed(gate * sigmoid(gate) * up.widened());
                    }
                }
            },
        );
        Ok(tensor(y, &dims))
    }
    with_element!(x.dtype(), T => typed::<T>(x))
}

pub(super) fn swiglu_backward(x: &Tensor, grad: &Tensor) -> Result<Tensor> {
    fn typed<T: Lane<Acc: Math>>(x: &Tensor, grad: &Tensor) -> Result<Tensor> {
        let dims = half_dims(x);
        let _held = hold([x, grad]);
        let (data, grad): (&[T], &[T]) = (&Elements::of(x)?, &Elements::of(grad)?);
        let width = dims[dims.len() - 1];
        let dx = generate(
            data.len(),
            #[inline(always)]
            |start, out: &mut [T]| {
                // Runs of `width` are by turns gradients of gates and of what they gate.
                for (half, run) in runs(start, out.len(), width) {
                    let (row, second) = (half / 2, half % 2 == 1);
                    let column = start + run.start - half * width;
                    let out = &mut out[run];
                    let from = 2 * row * width + column;
                    let gates = &data[from..from + out.len()];
                    let ups = &data[from + width..from + width + out.len()];
                    let grads = &grad[row * width + column..][..out.len()];
                    for (((out, gate), up), grad) in out.iter_mut().zip(gates).zip(ups).zip(grads) {
                        let (gate, up, grad) = (gate.widened(), up.widened(), grad.widened());
                        let share = sigmoid(gate);
                        let one = num_traits::One::one();
                        let derivative = up * share * (gate * (one - share) + one);
                        *out = T::narrowed(grad * if second { gate * share } else { derivative });
                    }
                }
            },
        );
        Ok(tensor(dx, x.dims()))
    }
    with_element!(x.dtype(), T => typed::<T>(x, grad))
}
