//! Outputs made a cache-resident block at a time.
//!
//! Every loop that touches many elements has this shape: widen a block of each input to the
//! arithmetic type, compute, round the block once, write it. Block boundaries depend on lengths
//! alone, so neither the number of threads nor their timing changes a result.

use std::ops::Range;

use num_traits::Zero;
use pulp::Arch;
use rayon::prelude::*;

use crate::kernels::element::{Element, Real};

/// Elements handled at a time: a few of these fit the first-level cache together.
pub(crate) const BLOCK: usize = 1024;
/// Elements that keep a thread busy for much longer than it takes to wake it.
pub(crate) const GRAIN: usize = 16 * BLOCK;

/// Calls `f` with the number and the elements of each chunk of `size` elements, in parallel.
pub(crate) fn for_each_chunk<T: Send>(
    data: &mut [T],
    size: usize,
    f: impl Fn(usize, &mut [T]) + Sync,
) {
    let run = |(chunk, data): (usize, &mut [T])| {
        Arch::new().dispatch(
            #[inline(always)]
            || f(chunk, data),
        )
    };
    if data.len() <= size {
        data.chunks_mut(size.max(1)).enumerate().for_each(run);
    } else {
        data.par_chunks_mut(size.max(1)).enumerate().for_each(run);
    }
}

/// A vector of `len` elements. `fill` is given where a block starts and writes its elements.
///
/// The blocks are arrays collected by value, so that memory is written once: a vector that is
/// zeroed first and filled afterwards would cost one more pass.
pub(crate) fn generate<T: Element>(len: usize, fill: impl Fn(usize, &mut [T]) + Sync) -> Vec<T> {
    let block = |number: usize| {
        let start = number * BLOCK;
        let mut out = [T::default(); BLOCK];
        let used = &mut out[..BLOCK.min(len - start)];
        Arch::new().dispatch(
            #[inline(always)]
            || fill(start, used),
        );
        out
    };
    let (whole, tail) = (len / BLOCK, len % BLOCK);
    let mut blocks = Vec::with_capacity(len.div_ceil(BLOCK));
    if len < 2 * GRAIN {
        blocks.extend((0..whole).map(block));
    } else {
        let numbers = (0..whole).into_par_iter().with_min_len(GRAIN / BLOCK);
        numbers.map(block).collect_into_vec(&mut blocks);
    }
    let mut data = blocks.into_flattened();
    if tail > 0 {
        data.extend_from_slice(&block(whole)[..tail]);
    }
    data
}

/// `f` of the elements of `inputs` at every position: all of one length.
#[inline(always)]
pub(crate) fn map<T: Element, O: Element, const M: usize>(
    inputs: [&[T]; M],
    f: impl Fn([T::Acc; M]) -> T::Acc + Sync,
) -> Vec<O> {
    generate(
        inputs[0].len(),
        #[inline(always)]
        |start, out: &mut [O]| {
            let mut wide = widen(inputs, start, out.len());
            for i in 0..out.len().min(BLOCK) {
                wide[0][i] = f(std::array::from_fn(|m| wide[m][i]));
            }
            narrow(&wide[0][..out.len()], out);
        },
    )
}

/// The `len` elements from `start` of each input, in its arithmetic type.
#[inline(always)]
pub(crate) fn widen<T: Element, const M: usize>(
    inputs: [&[T]; M],
    start: usize,
    len: usize,
) -> [[T::Acc; BLOCK]; M] {
    let mut wide = [[T::Acc::zero(); BLOCK]; M];
    for (wide, input) in wide.iter_mut().zip(inputs) {
        T::widen(&input[start..start + len], &mut wide[..len]);
    }
    wide
}

/// Writes `src`, rounded once, to `dst` of the same length, whose arithmetic type may be another.
#[inline(always)]
pub(crate) fn narrow<A: Real, O: Element>(src: &[A], dst: &mut [O]) {
    for (src, dst) in src.chunks(BLOCK).zip(dst.chunks_mut(BLOCK)) {
        let mut wide = [O::Acc::zero(); BLOCK];
        for (wide, src) in wide.iter_mut().zip(src) {
            *wide = O::Acc::of(src.to_double());
        }
        O::narrow(&wide[..src.len()], dst);
    }
}

/// Cuts a block that starts at `start` where multiples of `width` fall: the number of each
/// `width`-long run and the part of the block inside it.
#[inline(always)]
pub(crate) fn runs(
    start: usize,
    len: usize,
    width: usize,
) -> impl Iterator<Item = (usize, Range<usize>)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let number = (start + at) / width;
        let end = len.min((number + 1) * width - start);
        let run = (at < len).then_some((number, at..end));
        at = end;
        run
    })
}
