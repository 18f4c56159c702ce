//! From products to probabilities, a row of scores at a time.

use super::settings::Settings;
use crate::kernels::activation::Math;
use crate::kernels::cpu::heads::Heads;
use crate::kernels::cpu::simd::BLOCK;
use crate::kernels::reduce::channels::block_sums;
use crate::kernels::softmax::cpu::{Exp, largest};

/// What hides keys from queries.
#[derive(Clone, Copy)]
pub(super) enum Mask<'a, A> {
    None,
    /// Keys whose element is 0 are hidden.
    Keep(Heads<'a, u8>),
    /// Added to the scores.
    Add(Heads<'a, A>),
}

/// Which query a row of scores belongs to.
#[derive(Clone, Copy)]
pub(super) struct Query {
    pub(super) batch: usize,
    pub(super) head: usize,
    pub(super) number: usize,
}

/// Turns products of a query with the keys into scores; what is hidden becomes a negative infinity.
/// Writes the derivatives of the soft cap, where there is one.
#[inline(always)]
pub(super) fn score<A: Math>(
    row: &mut [A],
    derivatives: &mut [A],
    query: Query,
    mask: Mask<'_, A>,
    settings: Settings,
) {
    let scale = A::of(settings.scale);
    match settings.softcap {
        None => row.iter_mut().for_each(|x| *x *= scale),
        Some(cap) => {
            let (inner, cap) = (A::of(settings.scale / cap), A::of(cap));
            for x in row.iter_mut() {
                *x = (*x * inner).hyperbolic_tangent();
            }
            for (derivative, x) in derivatives.iter_mut().zip(&*row) {
                *derivative = A::one() - *x * *x;
            }
            row.iter_mut().for_each(|x| *x *= cap);
        }
    }
    let Query { batch, head, number } = query;
    let hidden = A::neg_infinity();
    match mask {
        Mask::None => {}
        Mask::Keep(keep) => match keep.row(batch, head, number) {
            (keep, 1) => {
                for (x, &keep) in row.iter_mut().zip(keep) {
                    *x = if keep != 0 { *x } else { hidden };
                }
            }
            (keep, stride) => {
                for (i, x) in row.iter_mut().enumerate() {
                    *x = if keep[i * stride] != 0 { *x } else { hidden };
                }
            }
        },
        Mask::Add(add) => match add.row(batch, head, number) {
            (add, 1) => row.iter_mut().zip(add).for_each(|(x, &add)| *x += add),
            (add, stride) => {
                for (i, x) in row.iter_mut().enumerate() {
                    *x += add[i * stride];
                }
            }
        },
    }
    if settings.causal {
        let seen = row.len().min(number + 1);
        row[seen..].fill(hidden);
    }
}

/// Turns scores into their exponentials, relative to the largest. Returns that, and one over their sum; 0 and 0 where
/// every key is hidden.
#[inline(always)]
pub(super) fn exponentials<A: Exp>(row: &mut [A]) -> (A, A) {
    let max = largest(row);
    // Where all are hidden, or NaN, which is no number to be larger.
    let max = if max == A::neg_infinity() { A::zero() } else { max };
    let mut sum = 0.0;
    for row in row.chunks_mut(BLOCK) {
        for x in row.iter_mut() {
            *x = (*x - max).exponential();
        }
        sum += block_sums([&*row], |x| x)[0];
    }
    (max, if sum == 0.0 { A::zero() } else { A::of(1.0 / sum) })
}

/// Turns scores into probabilities, from what [`exponentials`] returned for them.
#[inline(always)]
pub(super) fn probabilities<A: Exp>(row: &mut [A], max: A, inverse_sum: A) {
    row.iter_mut().for_each(|x| *x = (*x - max).exponential() * inverse_sum);
}
