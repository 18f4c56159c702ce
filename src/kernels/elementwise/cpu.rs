use candle_core::{
    CpuStorage, DType, InplaceOp2, Layout, Result, Storage, Tensor, WithDType, bail,
};
use num_traits::Zero;

use super::blocks::{BLOCK, GRAIN, for_each_chunk, generate, map, widen};
use super::portable::arithmetic;
use crate::kernels::element::{Element, Elements, Real, tensor, with_element};

/// Gives `f` the elements of a contiguous CPU tensor of any dtype, integers included.
pub(crate) fn with_slice<T: WithDType, R>(
    tensor: &Tensor,
    f: impl FnOnce(&[T]) -> Result<R>,
) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (Storage::Cpu(cpu), Some((start, end))) => f(&T::cpu_storage_as_slice(cpu)?[start..end]),
        _ => bail!("expected a contiguous tensor on the CPU, got {layout:?}"),
    }
}

pub(super) fn relu(x: &Tensor) -> Result<Tensor> {
    fn typed<T: Element>(x: &Tensor) -> Result<Tensor> {
        unary::<T>(x, rectify)
    }
    with_element!(x.dtype(), T => typed::<T>(x))
}

pub(super) fn relu_backward(y: &Tensor, grad: &Tensor) -> Result<Tensor> {
    fn typed<T: Element>(y: &Tensor, grad: &Tensor) -> Result<Tensor> {
        let zero = T::Acc::zero();
        binary::<T>(
            y,
            grad,
            #[inline(always)]
            |y, g| if y > zero { g } else { zero },
        )
    }
    with_element!(y.dtype(), T => typed::<T>(y, grad))
}

pub(super) fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    fn typed<T: Element>(a: &Tensor, b: &Tensor) -> Result<Tensor> {
        binary::<T>(
            a,
            b,
            #[inline(always)]
            |a, b| a + b,
        )
    }
    with_element!(a.dtype(), T => typed::<T>(a, b))
}

pub(super) fn add_relu(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    fn typed<T: Element>(a: &Tensor, b: &Tensor) -> Result<Tensor> {
        binary::<T>(
            a,
            b,
            #[inline(always)]
            |a, b| rectify(a + b),
        )
    }
    with_element!(a.dtype(), T => typed::<T>(a, b))
}

pub(super) fn dropout(x: &Tensor, keep: &Tensor, scale: f64) -> Result<Tensor> {
    fn typed<T: Element>(x: &Tensor, keep: &[u8], scale: f64) -> Result<Tensor> {
        let (elements, scale) = (Elements::<T>::of(x)?, T::Acc::of(scale));
        let data: &[T] = &elements;
        let y = generate(
            data.len(),
            1,
            #[inline(always)]
            |start, wide, out: &mut [T]| {
                widen([data], start, out.len(), wide);
                let wide = &mut wide[0][..out.len()];
                for (x, &keep) in wide.iter_mut().zip(&keep[start..]) {
                    *x = if keep != 0 { *x * scale } else { T::Acc::zero() };
                }
                T::narrow(wide, out);
            },
        );
        Ok(tensor(y, x.dims()))
    }
    with_slice(keep, |keep| with_element!(x.dtype(), T => typed::<T>(x, keep, scale)))
}

pub(super) fn add_assign(dst: Tensor, src: &Tensor) -> Result<Tensor> {
    if src.dtype() == dst.dtype() {
        dst.inplace_op2(src, &AddAssign)?;
    } else {
        dst.inplace_op2(&src.to_dtype(arithmetic(dst.dtype()))?, &AddAssign)?;
    }
    Ok(dst)
}

/// Adds a tensor of the same dtype or of the dtype of the arithmetic.
struct AddAssign;

impl InplaceOp2 for AddAssign {
    fn name(&self) -> &'static str {
        "add_assign"
    }

    fn cpu_fwd(
        &self,
        dst: &mut CpuStorage,
        dst_layout: &Layout,
        src: &CpuStorage,
        src_layout: &Layout,
    ) -> Result<()> {
        fn typed<D: Element, S: Element<Acc = D::Acc>>(
            dst: &mut CpuStorage,
            dst_range: (usize, usize),
            src: &CpuStorage,
            src_range: (usize, usize),
        ) -> Result<()> {
            let dst = &mut D::slice_mut(dst)?[dst_range.0..dst_range.1];
            let src = &S::cpu_storage_as_slice(src)?[src_range.0..src_range.1];
            accumulate(dst, src);
            Ok(())
        }
        let (Some(dst_range), Some(src_range)) =
            (dst_layout.contiguous_offsets(), src_layout.contiguous_offsets())
        else {
            bail!("add_assign needs contiguous tensors, got {dst_layout:?} and {src_layout:?}")
        };
        let (to, from) = (dtype(dst), dtype(src));
        with_element!(to, D => if from == to {
            typed::<D, D>(dst, dst_range, src, src_range)
        } else {
            typed::<D, <D as Element>::Acc>(dst, dst_range, src, src_range)
        })
    }
}

fn dtype(storage: &CpuStorage) -> DType {
    candle_core::backend::BackendStorage::dtype(storage)
}

fn accumulate<D: Element, S: Element<Acc = D::Acc>>(dst: &mut [D], src: &[S]) {
    for_each_chunk(
        dst,
        GRAIN,
        #[inline(always)]
        |chunk, dst| {
            let mut sum = [D::Acc::zero(); BLOCK];
            let mut addend = [D::Acc::zero(); BLOCK];
            for (block, dst) in dst.chunks_mut(BLOCK).enumerate() {
                let start = chunk * GRAIN + block * BLOCK;
                let (sum, addend) = (&mut sum[..dst.len()], &mut addend[..dst.len()]);
                D::widen(dst, sum);
                S::widen(&src[start..start + dst.len()], addend);
                for (sum, addend) in sum.iter_mut().zip(addend) {
                    *sum += *addend;
                }
                D::narrow(sum, dst);
            }
        },
    );
}

/// `x`, or zero where it is negative. NaN is neither, and stays.
#[inline(always)]
fn rectify<A: Real>(x: A) -> A {
    if x <= A::zero() { A::zero() } else { x }
}

#[inline(always)]
fn unary<T: Element>(x: &Tensor, f: impl Fn(T::Acc) -> T::Acc + Sync) -> Result<Tensor> {
    let elements = Elements::<T>::of(x)?;
    Ok(tensor(
        map::<T, T, 1>(
            [&elements],
            #[inline(always)]
            |[x]: [T::Acc; 1]| f(x),
        ),
        x.dims(),
    ))
}

#[inline(always)]
fn binary<T: Element>(
    a: &Tensor,
    b: &Tensor,
    f: impl Fn(T::Acc, T::Acc) -> T::Acc + Sync,
) -> Result<Tensor> {
    let (a_elements, b_elements) = (Elements::<T>::of(a)?, Elements::<T>::of(b)?);
    Ok(tensor(
        map::<T, T, 2>(
            [&a_elements, &b_elements],
            #[inline(always)]
            |[a, b]: [T::Acc; 2]| f(a, b),
        ),
        a.dims(),
    ))
}
