//! The gradients of attention on the CPU, a head of keys and all its queries at a time.
//!
//! Every query that attends to a head of keys adds to the gradients of `k` and `v`. So a task has one such head:
//! its sums need no locks and have one order. It goes through its queries block by block. For each block it
//! computes the probabilities `p` again, from the saved statistics of their rows, and then `dv += pᵀ × dy`, `dp =
//! dy × vᵀ`, `ds = p ⊙ (dp - sum(p ⊙ dp))`, `dq = ds × k` and `dk += dsᵀ × q`.

use std::ops::Range;

use candle_core::{DType, Result, Tensor, WithDType};
use num_traits::Zero;

use super::cpu::{Sizes, opened, split, spread, threads, views};
use super::repeated::sum_to;
use super::saved::Saved;
use super::scores::{Mask, Query, probabilities, score};
use super::settings::Settings;
use crate::kernels::activation::Math;
use crate::kernels::cpu::dtype::{Element, Elements, Real, tensor, with_element};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::heads::{Heads, View};
use crate::kernels::cpu::lane::Lane;
use crate::kernels::cpu::simd::{BLOCK, for_each_task, pieces, vectorise_in};
use crate::kernels::gemm::{Arithmetic, Matrix, Threads, narrow, product};
use crate::kernels::reduce::channels::block_sums;

pub(super) fn backward(
    saved: Saved<'_>,
    settings: Settings,
    wants: [Option<DType>; 4],
) -> Result<[Option<Tensor>; 4]> {
    with_element!(saved.q.dtype(), T => {
        // Of one dtype mostly, that of the inputs.
        if wants[..3].iter().flatten().all(|&want| want == T::DTYPE) {
            backward_typed::<T, T>(saved, settings, wants)
        } else {
            backward_typed::<T, <T as Element>::Acc>(saved, settings, wants)
        }
    })
}

/// The gradients of one head of keys and of its queries; empty where not wanted.
struct KeyHead<'a, O, A> {
    index: usize,
    dq: &'a mut [O],
    dk: &'a mut [O],
    dv: &'a mut [O],
    dmask: &'a mut [A],
}

fn backward_typed<T, O>(
    saved: Saved<'_>,
    settings: Settings,
    wants: [Option<DType>; 4],
) -> Result<[Option<Tensor>; 4]>
where
    T: Lane<Acc: Arithmetic + Math>,
    O: Lane<Acc = T::Acc>,
{
    let Saved { q, k, v, mask, .. } = saved;
    let sizes = Sizes::of(q, k, v)?;
    let Sizes { batch, heads, kv_heads, queries, keys, .. } = sizes;
    let of = |want: Option<DType>, like: &Tensor| match want {
        Some(_) => O::zeros(like.elem_count()),
        None => Vec::new(),
    };
    let (mut dq, mut dk, mut dv) = (of(wants[0], q), of(wants[1], k), of(wants[2], v));
    let mask_len = if wants[3].is_some() { batch * heads * queries * keys } else { 0 };
    let mut dmask = vec![T::Acc::zero(); mask_len];
    if !sizes.is_empty() {
        let mask = spread(mask, sizes, T::Acc::DTYPE)?;
        let _held = hold([q, k, v, saved.grad].into_iter().chain(&mask));
        let mask_view = mask.as_ref().map(View::of).transpose()?;
        let views = views([q, k, v, saved.grad])?;
        let work = HeadsBackward::<T> {
            sizes,
            settings,
            q: views[0].heads()?,
            k: views[1].heads()?,
            v: views[2].heads()?,
            grad: views[3].heads()?,
            mask: opened(mask_view.as_ref(), mask.as_ref().map(Tensor::dtype))?,
            maxima: &Elements::of(&saved.kept.max)?,
            inverse_sums: &Elements::of(&saved.kept.inverse_sum)?,
            threads: threads(batch * kv_heads),
        };
        let (count, group) = (batch * kv_heads, sizes.group());
        let parts = pieces(&mut dq, group * queries * sizes.width, count).into_iter();
        let parts = parts.zip(pieces(&mut dk, keys * sizes.width, count));
        let parts = parts.zip(pieces(&mut dv, keys * sizes.value_width, count));
        let parts = parts.zip(pieces(&mut dmask, group * queries * keys, count)).enumerate();
        let heads =
            parts.map(|(index, (((dq, dk), dv), dmask))| KeyHead { index, dq, dk, dv, dmask });
        for_each_task(heads.collect(), |head| work.key_head(head));
    }
    let of = |want: Option<DType>, gradient: Vec<O>, like: &Tensor| {
        want.map(|dtype| tensor(gradient, like.dims()).to_dtype(dtype)).transpose()
    };
    let dmask = match (wants[3], mask) {
        (Some(dtype), Some(mask)) => {
            let dmask = tensor(dmask, &[batch, heads, queries, keys]);
            Some(sum_to(dmask, mask.dims())?.to_dtype(dtype)?)
        }
        _ => None,
    };
    Ok([of(wants[0], dq, q)?, of(wants[1], dk, k)?, of(wants[2], dv, v)?, dmask])
}

struct HeadsBackward<'a, T: Lane> {
    sizes: Sizes,
    settings: Settings,
    q: Heads<'a, T>,
    k: Heads<'a, T>,
    v: Heads<'a, T>,
    grad: Heads<'a, T>,
    mask: Mask<'a, T::Acc>,
    maxima: &'a [T::Acc],
    inverse_sums: &'a [T::Acc],
    threads: Threads,
}

impl<T: Lane<Acc: Arithmetic + Math>> HeadsBackward<'_, T> {
    fn key_head<O: Lane<Acc = T::Acc>>(&self, own: KeyHead<'_, O, T::Acc>) {
        let Sizes { kv_heads, queries, keys, width, value_width, .. } = self.sizes;
        let block = self.sizes.block(self.settings);
        let (k_len, v_len) = (keys * width, keys * value_width);
        let rest = block * (2 * width + value_width + 3 * keys);
        let lengths = [k_len, v_len, k_len, v_len, rest];
        T::Acc::with_scratch(lengths.iter().sum(), |buffer| {
            let [k, v, dk, dv, rest] = split(buffer, lengths);
            let [batch, kv_head] = [own.index / kv_heads, own.index % kv_heads];
            self.k.read([batch, kv_head], 0..keys, width, k);
            self.v.read([batch, kv_head], 0..keys, value_width, v);
            dk.fill(T::Acc::zero());
            dv.fill(T::Acc::zero());
            let KeyHead { dq, dmask, .. } = own;
            for member in 0..self.sizes.group() {
                for first in (0..queries).step_by(block) {
                    let rows = block.min(queries - first);
                    let head = kv_head * self.sizes.group() + member;
                    let query = Query { batch, head, number: first };
                    let part = member * queries + first..member * queries + first + rows;
                    let parts = Parts {
                        dq: slice(dq, &part, width),
                        dmask: slice(dmask, &part, keys),
                        dk: if own.dk.is_empty() { &mut [] } else { &mut *dk },
                        dv: if own.dv.is_empty() { &mut [] } else { &mut *dv },
                    };
                    self.block(query, rows, k, v, parts, rest);
                }
            }
            for (wide, gradient) in [(&*dk, own.dk), (&*dv, own.dv)] {
                if !gradient.is_empty() {
                    narrow(wide, gradient);
                }
            }
        });
    }

    /// The gradients of some queries, and what they add to those of the keys and values.
    fn block<O: Lane<Acc = T::Acc>>(
        &self,
        query: Query,
        rows: usize,
        k: &[T::Acc],
        v: &[T::Acc],
        parts: Parts<'_, O, T::Acc>,
        buffer: &mut [T::Acc],
    ) {
        let Sizes { heads, queries, keys, width, value_width, .. } = self.sizes;
        let Query { batch, head, number: first } = query;
        let seen = self.sizes.seen(first + rows, self.settings);
        let capped = if self.settings.softcap.is_some() { rows * seen } else { 0 };
        let lengths =
            [rows * width, rows * value_width, rows * width, rows * seen, rows * seen, capped];
        let [q, grad, dq, scores, dscores, derivatives] = split(buffer, lengths);
        let of_rows = (batch * heads + head) * queries + first;
        let maxima = &self.maxima[of_rows..][..rows];
        let inverse_sums = &self.inverse_sums[of_rows..][..rows];
        self.q.read([batch, head], first..first + rows, width, q);
        self.grad.read([batch, head], first..first + rows, value_width, grad);
        let (q, grad) = (Matrix::new(q, rows, width), Matrix::new(grad, rows, value_width));
        let (k, v) = (Matrix::new(k, seen, width), Matrix::new(v, seen, value_width));
        product(q, k.t(), scores, seen, false, self.threads);
        product(grad, v.t(), dscores, seen, false, self.threads);
        let statistics = (maxima, inverse_sums);
        let of_scores = [&mut *scores, &mut *dscores, derivatives, parts.dmask];
        score_gradients(of_scores, [seen, keys], query, self.mask, self.settings, statistics);
        let (scores, dscores) = (Matrix::new(scores, rows, seen), Matrix::new(dscores, rows, seen));
        if !parts.dq.is_empty() {
            product(dscores, k, dq, width, false, self.threads);
            narrow(dq, parts.dq);
        }
        if !parts.dk.is_empty() {
            product(dscores.t(), q, parts.dk, width, true, self.threads);
        }
        if !parts.dv.is_empty() {
            product(scores.t(), grad, parts.dv, value_width, true, self.threads);
        }
    }
}

/// What a block of queries writes, or adds to; empty where not wanted.
struct Parts<'a, O, A> {
    dq: &'a mut [O],
    dmask: &'a mut [A],
    dk: &'a mut [A],
    dv: &'a mut [A],
}

/// Some rows of `width` elements of what may be empty.
fn slice<'a, T>(data: &'a mut [T], rows: &Range<usize>, width: usize) -> &'a mut [T] {
    data.get_mut(rows.start * width..rows.end * width).unwrap_or_default()
}

/// Turns products of queries, from `first` on, with the keys seen into probabilities, and the gradients of these into those
/// of the products. `derivatives` are the soft cap's. `dmask` has rows of all keys, or is empty.
fn score_gradients<A: Math>(
    [scores, dscores, derivatives, dmask]: [&mut [A]; 4],
    [seen, keys]: [usize; 2],
    first: Query,
    mask: Mask<'_, A>,
    settings: Settings,
    (maxima, inverse_sums): (&[A], &[A]),
) {
    let scale = A::of(settings.scale);
    vectorise_in::<A>(
        #[inline(always)]
        || {
            for (at, (&max, &inverse_sum)) in maxima.iter().zip(inverse_sums).enumerate() {
                let row = at * seen..(at + 1) * seen;
                let query = Query { number: first.number + at, ..first };
                let derivatives = derivatives.get_mut(row.clone()).unwrap_or_default();
                let (p, dp) = (&mut scores[row.clone()], &mut dscores[row]);
                score(p, derivatives, query, mask, settings);
                probabilities(p, max, inverse_sum);
                derivative(p, dp);
                if let Some(dmask) = dmask.get_mut(at * keys..) {
                    dmask.iter_mut().zip(&*dp).for_each(|(d, s)| *d = *s);
                }
                dp.iter_mut().zip(&*derivatives).for_each(|(d, s)| *d *= *s);
                dp.iter_mut().for_each(|d| *d *= scale);
            }
        },
    );
}

/// The softmax's backward: turns the gradients `dp` of the probabilities into those of the scores.
#[inline(always)]
fn derivative<A: Real + Lane<Acc = A>>(p: &[A], dp: &mut [A]) {
    let mut average = 0.0;
    for (p, dp) in p.chunks(BLOCK).zip(dp.chunks(BLOCK)) {
        average += block_sums(
            [p, dp],
            #[inline(always)]
            |[p, dp]| [p * dp],
        )[0];
    }
    let average = A::of(average);
    dp.iter_mut().zip(p).for_each(|(dp, p)| *dp = *p * (*dp - average));
}
