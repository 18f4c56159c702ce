//! Element-wise kernels on the CPU: one pass that reads each operand once and writes the result once.
//!
//! A kernel is a closure over numbers. It is compiled for each dtype and, except in F64, for each instruction set. The
//! loop widens elements to F32 (F64 stays F64), applies the closure and rounds to the result's dtype, all in registers.
//! A result of any other dtype than the operands' or the arithmetic's takes a second pass, candle's cast.
//!
//! Threads take chunks of [`GRAIN`] elements. An element depends on its own position alone, so the number of threads
//! changes no bit. The `_assign` forms overwrite their first operand: they need no memory for a result, and so have no
//! page faults. Maximum, minimum and ReLU compare, and do not call `max`, which would drop NaN.

use candle_core::{DType, Result, Tensor, WithDType};
use half::{bf16, f16};
use num_traits::Zero;

use crate::error::bail;
use crate::kernels::accumulator;
use crate::kernels::cpu::array::from_fn;
use crate::kernels::cpu::dtype::{Element, Elements, Real, contiguous, tensor, with_element};
use crate::kernels::cpu::guard::{guard, hold};
use crate::kernels::cpu::in_place::write;
use crate::kernels::cpu::lane::Lane;
use crate::kernels::cpu::simd::{GRAIN, for_each_chunk, generate, map, with_output};

/// Gives `f` the elements of a contiguous CPU tensor of any dtype, integers included.
pub(crate) fn with_slice<T: WithDType, R>(
    tensor: &Tensor,
    f: impl FnOnce(&[T]) -> Result<R>,
) -> Result<R> {
    f(contiguous(guard(tensor).storage(), tensor)?)
}

pub(super) fn relu(x: &Tensor) -> Result<Tensor> {
    with_element!(x.dtype(), T => pointwise::<T, T, 1>([x], #[inline(always)] |[x]| rectify(x)))
}

pub(super) fn relu_backward(y: &Tensor, grad: &Tensor) -> Result<Tensor> {
    with_element!(y.dtype(), T => {
        pointwise::<T, T, 2>([y, grad], #[inline(always)] |[y, grad]| rectified_gradient(y, grad))
    })
}

pub(super) fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    with_element!(a.dtype(), T => pointwise::<T, T, 2>([a, b], #[inline(always)] |[a, b]| a + b))
}

/// `a`, `F32`, and `b`, of 16 bits.
pub(super) fn add_mixed(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    fn typed<T: Lane<Acc = f32>>(a: &Tensor, b: &Tensor) -> Result<Tensor> {
        let _held = hold([a, b]);
        let (a_elements, b_elements) = (Elements::<f32>::of(a)?, Elements::<T>::of(b)?);
        let (from_a, from_b): (&[f32], &[T]) = (&a_elements, &b_elements);
        let y = generate(
            from_a.len(),
            #[inline(always)]
            |start, out: &mut [f32]| {
                let (a, b) = (&from_a[start..][..out.len()], &from_b[start..][..out.len()]);
                for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
                    *out = a + b.widened();
                }
            },
        );
        Ok(tensor(y, a.dims()))
    }
    match b.dtype() {
        DType::F16 => typed::<f16>(a, b),
        DType::BF16 => typed::<bf16>(a, b),
        other => bail!("expected F16 or BF16, got {other:?}"),
    }
}

pub(super) fn sub(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    with_element!(a.dtype(), T => pointwise::<T, T, 2>([a, b], #[inline(always)] |[a, b]| a - b))
}

pub(super) fn mul(a: &Tensor, b: &Tensor, out: DType) -> Result<Tensor> {
    with_element!(a.dtype(), T => with_output!(T, out, O => {
        pointwise::<T, O, 2>([a, b], #[inline(always)] |[a, b]| a * b)
    }))
}

pub(super) fn div(a: &Tensor, b: &Tensor, out: DType) -> Result<Tensor> {
    with_element!(a.dtype(), T => with_output!(T, out, O => {
        pointwise::<T, O, 2>([a, b], #[inline(always)] |[a, b]| a / b)
    }))
}

pub(super) fn maximum(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    with_element!(a.dtype(), T => {
        pointwise::<T, T, 2>([a, b], #[inline(always)] |[a, b]| if a > b || a.is_nan() { a } else { b })
    })
}

pub(super) fn minimum(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    with_element!(a.dtype(), T => {
        pointwise::<T, T, 2>([a, b], #[inline(always)] |[a, b]| if a < b || a.is_nan() { a } else { b })
    })
}

pub(super) fn selection_gradient(a: &Tensor, b: &Tensor, grad: &Tensor) -> Result<Tensor> {
    with_element!(a.dtype(), T => pointwise::<T, T, 3>([a, b, grad], #[inline(always)] |[a, b, grad]| {
        let shared = if a == b { grad * <T as Element>::Acc::of(0.5) } else { grad };
        if a < b { Zero::zero() } else { shared }
    }))
}

pub(super) fn divisor_gradient(
    a: &Tensor,
    b: &Tensor,
    grad: &Tensor,
    out: DType,
) -> Result<Tensor> {
    with_element!(a.dtype(), T => with_output!(T, out, O => {
        pointwise::<T, O, 3>([a, b, grad], #[inline(always)] |[a, b, grad]| -(grad * (a / b)) / b)
    }))
}

pub(super) fn add_relu(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    with_element!(a.dtype(), T => pointwise::<T, T, 2>([a, b], #[inline(always)] |[a, b]| rectify(a + b)))
}

pub(super) fn dropout(x: &Tensor, keep: &Tensor, scale: f64) -> Result<Tensor> {
    fn typed<T: Lane>(x: &Tensor, keep: &[u8], scale: f64) -> Result<Tensor> {
        let elements = Elements::<T>::of(x)?;
        let data: &[T] = &elements;
        let y = generate(
            data.len(),
            #[inline(always)]
            |start, out: &mut [T]| {
                let scale = T::Acc::of(scale);
                let (data, keep) = (&data[start..][..out.len()], &keep[start..][..out.len()]);
                for ((out, x), &keep) in out.iter_mut().zip(data).zip(keep) {
                    let kept = x.widened() * scale;
                    *out = T::narrowed(if keep != 0 { kept } else { T::Acc::zero() });
                }
            },
        );
        Ok(tensor(y, x.dims()))
    }
    let _held = hold([x, keep]);
    with_slice(keep, |keep| with_element!(x.dtype(), T => typed::<T>(x, keep, scale)))
}

/// `$dst`, with each element `$f` of itself and of `$src`'s, which has the same dtype or that of the arithmetic.
macro_rules! assign {
    ($dst:expr, $src:expr, $f:expr) => {{
        with_element!($dst.dtype(), D => if $src.dtype() == D::DTYPE {
            update::<D, D>(&$dst, $src, $f)?
        } else {
            update::<D, <D as Element>::Acc>(&$dst, $src, $f)?
        });
        Ok($dst)
    }};
}

pub(super) fn add_assign(dst: Tensor, src: &Tensor) -> Result<Tensor> {
    let wide = if src.dtype() == dst.dtype() { dst.dtype() } else { accumulator(dst.dtype()) };
    let src = src.to_dtype(wide)?;
    assign!(
        dst,
        &src,
        #[inline(always)]
        |dst, src| dst + src
    )
}

pub(super) fn relu_backward_assign(grad: Tensor, y: &Tensor) -> Result<Tensor> {
    assign!(
        grad,
        y,
        #[inline(always)]
        |grad, y| rectified_gradient(y, grad)
    )
}

pub(super) fn mul_assign(a: Tensor, b: &Tensor) -> Result<Tensor> {
    assign!(
        a,
        b,
        #[inline(always)]
        |a, b| a * b
    )
}

fn update<D: Lane, S: Lane<Acc = D::Acc>>(
    dst: &Tensor,
    src: &Tensor,
    f: impl Fn(D::Acc, D::Acc) -> D::Acc + Sync,
) -> Result<()> {
    let src: &[S] = &Elements::of(src)?;
    write(dst, |dst: &mut [D]| {
        for_each_chunk::<D::Acc, _>(
            dst,
            GRAIN,
            #[inline(always)]
            |chunk, dst| {
                for (dst, src) in dst.iter_mut().zip(&src[chunk * GRAIN..]) {
                    *dst = D::narrowed(f(dst.widened(), src.widened()));
                }
            },
        );
    })
}

/// `x`, or zero where it is negative. NaN is neither, and stays.
#[inline(always)]
pub(in crate::kernels) fn rectify<A: Real>(x: A) -> A {
    if x <= A::zero() { A::zero() } else { x }
}

/// The gradient before [`rectify`], which gave `y`: 0 where that is 0. A NaN lets it through, as PyTorch's does.
#[inline(always)]
pub(in crate::kernels) fn rectified_gradient<A: Real>(y: A, grad: A) -> A {
    if y <= A::zero() { A::zero() } else { grad }
}

/// `f` of the elements of `tensors` at every position.
#[inline(always)]
fn pointwise<T: Lane, O: Lane<Acc = T::Acc>, const M: usize>(
    tensors: [&Tensor; M],
    f: impl Fn([T::Acc; M]) -> T::Acc + Sync + Copy,
) -> Result<Tensor> {
    // One is locked once, and needs nothing held before.
    let _held = (M > 1).then(|| hold(tensors));
    let mut elements = [const { None }; M];
    for (place, tensor) in elements.iter_mut().zip(tensors) {
        *place = Some(Elements::<T>::of(tensor)?);
    }
    let data = from_fn(|m| elements[m].as_deref().unwrap_or_default());
    Ok(tensor(map::<T, O, M>(data, f), tensors[0].dims()))
}
