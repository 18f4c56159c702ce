//! Rotary position embedding out of candle's operators, for devices without kernels. Tests check it against the same
//! values as `cpu.rs`.
//!
//! The first elements of all pairs are one tensor, `a`, the second ones another, `b`. The result is `a cos - b sin` and
//! `a sin + b cos`, stacked if the elements of a pair are adjacent, else concatenated. Cosines and sines are broadcast
//! over heads, and over the batch unless they have one. `mod.rs` widens them and, for backward, negates the sines.
//!
//! Arithmetic is F32 (F64 for F64), and the result is rounded once.

use candle_core::{D, DType, Result, Tensor};

use super::form::Form;
use crate::kernels::elementwise::portable::upcast;

pub(super) fn rotate(
    x: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    form: Form,
    out: DType,
) -> Result<Tensor> {
    let d = x.dim(D::Minus1)?;
    let (positions, heads) = if form.positions_first { (1, 2) } else { (2, 1) };
    let spread = |angles: &Tensor| {
        let angles = angles.narrow(D::Minus2, 0, x.dim(positions)?)?;
        let angles = if angles.rank() == 2 { angles.unsqueeze(0)? } else { angles };
        angles.unsqueeze(heads)
    };
    let (cos, sin) = (spread(cos)?, spread(sin)?);
    let wide = upcast(x)?;
    let (a, b) = if form.adjacent {
        let pairs = wide.contiguous()?.reshape((x.dim(0)?, x.dim(1)?, x.dim(2)?, d / 2, 2))?;
        (pairs.narrow(4, 0, 1)?.squeeze(4)?, pairs.narrow(4, 1, 1)?.squeeze(4)?)
    } else {
        (wide.narrow(3, 0, d / 2)?, wide.narrow(3, d / 2, d / 2)?)
    };
    let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
    let second = (a.broadcast_mul(&sin)? + b.broadcast_mul(&cos)?)?;
    let y = if form.adjacent {
        Tensor::stack(&[first, second], 4)?.flatten_from(3)?
    } else {
        Tensor::cat(&[first, second], 3)?
    };
    y.contiguous()?.to_dtype(out)
}
