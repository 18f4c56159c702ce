//! Rotary position embedding on the CPU: each pair of elements of a row is turned by its position's angle.
//!
//! The pairs are neighbours (`adjacent`), or element `i` and element `i + d / 2`. Views such as the heads of one fused
//! projection are read in place. Backward is the same rotation by the negative angle.

use candle_core::{D, DType, Result, Tensor};

use super::form::Form;
use crate::kernels::cpu::dtype::{Elements, tensor, with_element};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::heads::View;
use crate::kernels::cpu::lane::Lane;
use crate::kernels::cpu::simd::{GRAIN, for_each_chunk, with_output};

/// Cosines and sines are in the type of the arithmetic, contiguous.
pub(super) fn rotate(
    x: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    form: Form,
    out: DType,
) -> Result<Tensor> {
    // Rows may lie anywhere, their elements may not.
    let x = if x.stride().last() == Some(&1) { x.clone() } else { x.contiguous()? };
    with_element!(x.dtype(), T => with_output!(T, out, O => typed::<T, O>(&x, cos, sin, form)))
}

fn typed<T: Lane, O: Lane<Acc = T::Acc>>(
    x: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    form: Form,
) -> Result<Tensor> {
    let (_, first, second, d) = x.dims4()?;
    let positions = cos.dim(D::Minus2)?;
    let per_batch = cos.rank() == 3;
    let _held = hold([x, cos, sin]);
    let (cos, sin) = (Elements::<T::Acc>::of(cos)?, Elements::<T::Acc>::of(sin)?);
    let view = View::of(x)?;
    let rows = view.heads::<T>()?;
    let mut y = O::zeros(x.elem_count());
    let per_task = GRAIN.div_ceil(d.max(1));
    for_each_chunk::<T::Acc, _>(
        &mut y,
        per_task * d,
        #[inline(always)]
        |task, y| {
            for (i, y) in y.chunks_exact_mut(d).enumerate() {
                let row = task * per_task + i;
                let (batch, one, two) =
                    (row / (first * second), row / second % first, row % second);
                let position = if form.positions_first { one } else { two };
                let at = (if per_batch { batch * positions } else { 0 } + position) * (d / 2);
                let (cos, sin) = (&cos[at..at + d / 2], &sin[at..at + d / 2]);
                let x = &rows.row(batch, one, two).0[..d];
                if form.adjacent {
                    turn_adjacent(x, cos, sin, y);
                } else {
                    turn_halves(x, cos, sin, y);
                }
            }
        },
    );
    Ok(tensor(y, x.dims()))
}

#[inline(always)]
fn turn_adjacent<T: Lane, O: Lane<Acc = T::Acc>>(
    x: &[T],
    cos: &[T::Acc],
    sin: &[T::Acc],
    y: &mut [O],
) {
    let pairs = y.as_chunks_mut::<2>().0.iter_mut().zip(x.as_chunks::<2>().0);
    for ((y, [a, b]), (&cos, &sin)) in pairs.zip(cos.iter().zip(sin)) {
        let (a, b) = (a.widened(), b.widened());
        *y = [O::narrowed(a * cos - b * sin), O::narrowed(a * sin + b * cos)];
    }
}

#[inline(always)]
fn turn_halves<T: Lane, O: Lane<Acc = T::Acc>>(
    x: &[T],
    cos: &[T::Acc],
    sin: &[T::Acc],
    y: &mut [O],
) {
    let half = cos.len();
    let ((a, b), (first, second)) = (x.split_at(half), y.split_at_mut(half));
    let (b, second, sin) = (&b[..half], &mut second[..half], &sin[..half]);
    for i in 0..half {
        let (a, b) = (a[i].widened(), b[i].widened());
        first[i] = O::narrowed(a * cos[i] - b * sin[i]);
        second[i] = O::narrowed(a * sin[i] + b * cos[i]);
    }
}
