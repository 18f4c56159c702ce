//! Attention on the CPU, a block of queries of one head at a time.
//!
//! For a block, `q × kᵀ` gives all its scores at once: about half a megabyte, which stays in the second-level
//! cache. A row of scores is scaled, masked and turned into exponentials relative to its largest, and `scores × v`
//! gives the output. The division by the sum of the exponentials comes last, on the output: it has `dv` elements a
//! row, where the scores have one per key. So scores never reach main memory, and there is no online softmax, as a
//! block sees all its keys.
//!
//! Only the statistics of each row's softmax are saved. Backward computes the scores again and gets the probabilities
//! from these without a second softmax. Heads, batches and blocks are tasks of the threads.

use candle_core::{DType, Result, Tensor, WithDType};
use num_traits::Zero;

use super::repeated::unrepeated;
use super::saved::Kept;
use super::scores::{Mask, Query, exponentials, score};
use super::settings::Settings;
use crate::kernels::activation::Math;
use crate::kernels::cpu::dtype::{Element, tensor, with_element};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::heads::View;
use crate::kernels::cpu::lane::Lane;
use crate::kernels::cpu::parallel::threads as threads_of_pool;
use crate::kernels::cpu::simd::{for_each_task, vectorise_in};
use crate::kernels::gemm::{Arithmetic, Matrix, Threads, product};

/// The sizes of an attention.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) batch: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) queries: usize,
    pub(super) keys: usize,
    pub(super) width: usize,
    pub(super) value_width: usize,
}

impl Sizes {
    pub(super) fn of(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Self> {
        let (batch, heads, queries, width) = q.dims4()?;
        let (_, kv_heads, keys, value_width) = v.dims4()?;
        debug_assert_eq!(k.dims(), [batch, kv_heads, keys, width]);
        Ok(Self { batch, heads, kv_heads, queries, keys, width, value_width })
    }

    pub(super) fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Queries of a block, of equal blocks: as many as have half a megabyte of F32 scores, but enough for the product to
    /// be worth its packing. Under a causal mask, a longer block would meet more keys that its first queries do not see.
    pub(super) fn block(&self, settings: Settings) -> usize {
        let most = if settings.causal { 64 } else { 128 };
        let most = ((1 << 17) / self.keys.max(1)).clamp(16, most);
        let blocks = self.queries.div_ceil(most).max(1);
        self.queries.div_ceil(blocks).max(1)
    }

    /// Keys that the queries before `end` see.
    pub(super) fn seen(&self, end: usize, settings: Settings) -> usize {
        if settings.causal { self.keys.min(end) } else { self.keys }
    }

    pub(super) fn is_empty(&self) -> bool {
        [self.batch, self.heads, self.queries, self.keys, self.value_width].contains(&0)
    }
}

/// The mask broadcast to the shape of the scores, in the dtype that the kernel reads.
pub(super) fn spread(mask: Option<&Tensor>, sizes: Sizes, dtype: DType) -> Result<Option<Tensor>> {
    let Some(mask) = mask else { return Ok(None) };
    let mask = unrepeated(mask)?;
    let mask = if mask.dtype().is_float() { mask.to_dtype(dtype)? } else { mask };
    let Sizes { batch, heads, queries, keys, .. } = sizes;
    mask.broadcast_as((batch, heads, queries, keys)).map(Some)
}

pub(super) fn opened<'a, A: Element>(
    view: Option<&'a View<'_>>,
    dtype: Option<DType>,
) -> Result<Mask<'a, A>> {
    match (view, dtype) {
        (Some(view), Some(DType::U8)) => Ok(Mask::Keep(view.heads()?)),
        (Some(view), _) => Ok(Mask::Add(view.heads()?)),
        (None, _) => Ok(Mask::None),
    }
}

/// One thread per task where there are enough tasks.
pub(super) fn threads(tasks: usize) -> Threads {
    if tasks < threads_of_pool() { Threads::All } else { Threads::One }
}

pub(super) fn forward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: Option<&Tensor>,
    settings: Settings,
) -> Result<(Tensor, Kept)> {
    with_element!(q.dtype(), T => forward_typed::<T>(q, k, v, mask, settings))
}

fn forward_typed<T: Lane<Acc: Arithmetic + Math>>(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: Option<&Tensor>,
    settings: Settings,
) -> Result<(Tensor, Kept)> {
    let sizes = Sizes::of(q, k, v)?;
    let Sizes { batch, heads, queries, width, value_width, .. } = sizes;
    let mut out = T::zeros(batch * heads * queries * value_width);
    let mut maxima = vec![T::Acc::zero(); batch * heads * queries];
    let mut inverse_sums = maxima.clone();
    if !sizes.is_empty() {
        let mask = spread(mask, sizes, T::Acc::DTYPE)?;
        let _held = hold([q, k, v].into_iter().chain(&mask));
        let (views, mask_view) = (views([q, k, v])?, mask.as_ref().map(View::of).transpose()?);
        let [q, k, v] = [views[0].heads::<T>()?, views[1].heads()?, views[2].heads()?];
        let mask = opened(mask_view.as_ref(), mask.as_ref().map(Tensor::dtype))?;
        let block = sizes.block(settings);
        let outs = out.chunks_mut(queries * value_width);
        let tasks: Vec<_> = outs
            .zip(maxima.chunks_mut(queries).zip(inverse_sums.chunks_mut(queries)))
            .enumerate()
            .flat_map(|(head, (out, (maxima, inverse_sums)))| {
                let rows = maxima.chunks_mut(block).zip(inverse_sums.chunks_mut(block));
                let blocks = out.chunks_mut(block * value_width).zip(rows);
                blocks.enumerate().map(move |(at, (out, rows))| (head, at * block, out, rows))
            })
            .collect();
        let threads = threads(tasks.len());
        for_each_task(tasks, |(index, first, out, (maxima, inverse_sums))| {
            let (batch, head) = (index / heads, index % heads);
            let rows = inverse_sums.len();
            let seen = sizes.seen(first + rows, settings);
            let lengths =
                [rows * width, seen * width, seen * value_width, rows * seen, rows * value_width];
            T::Acc::with_scratch(lengths.iter().sum(), |buffer| {
                let [q_rows, k_rows, v_rows, scores, result] = split(buffer, lengths);
                let kv = [batch, head / sizes.group()];
                q.read([batch, head], first..first + rows, width, q_rows);
                k.read(kv, 0..seen, width, k_rows);
                v.read(kv, 0..seen, value_width, v_rows);
                let keys = Matrix::new(k_rows, seen, width).t();
                product(Matrix::new(q_rows, rows, width), keys, scores, seen, false, threads);
                let query = Query { batch, head, number: first };
                let statistics = [&mut *maxima, &mut *inverse_sums];
                score_rows(scores, seen, query, mask, settings, statistics);
                let values = Matrix::new(v_rows, seen, value_width);
                let weights = Matrix::new(scores, rows, seen);
                product(weights, values, result, value_width, false, threads);
                vectorise_in::<T::Acc>(
                    #[inline(always)]
                    || {
                        let result = result.chunks_exact(value_width);
                        let rows =
                            out.chunks_exact_mut(value_width).zip(result).zip(&*inverse_sums);
                        for ((out, result), &inverse_sum) in rows {
                            for (out, x) in out.iter_mut().zip(result) {
                                *out = T::narrowed(*x * inverse_sum);
                            }
                        }
                    },
                );
            });
        });
    }
    let out = tensor(out, &[batch, heads, queries, value_width]);
    let [max, inverse_sum] =
        [maxima, inverse_sums].map(|of_rows| tensor(of_rows, &[batch, heads, queries]));
    Ok((out, Kept { max, inverse_sum, unrounded: None }))
}

/// Turns products of queries, from `first` on, with the keys seen into exponentials; and writes the maximum of each row and
/// 1 over its sum.
fn score_rows<A: Math>(
    scores: &mut [A],
    seen: usize,
    first: Query,
    mask: Mask<'_, A>,
    settings: Settings,
    [maxima, inverse_sums]: [&mut [A]; 2],
) {
    vectorise_in::<A>(
        #[inline(always)]
        || {
            let of_rows = maxima.iter_mut().zip(inverse_sums.iter_mut());
            let rows = scores.chunks_exact_mut(seen).zip(of_rows);
            for (at, (row, (max, inverse_sum))) in rows.enumerate() {
                let query = Query { number: first.number + at, ..first };
                score(row, &mut [], query, mask, settings);
                (*max, *inverse_sum) = exponentials(row);
            }
        },
    );
}

pub(super) fn views<'a, const N: usize>(tensors: [&'a Tensor; N]) -> Result<Vec<View<'a>>> {
    tensors.into_iter().map(View::of).collect()
}

/// `buffer` cut into parts of the given lengths.
pub(super) fn split<A, const N: usize>(buffer: &mut [A], lengths: [usize; N]) -> [&mut [A]; N] {
    let mut rest = buffer;
    lengths.map(|length| {
        let (part, more) = std::mem::take(&mut rest).split_at_mut(length);
        rest = more;
        part
    })
}
