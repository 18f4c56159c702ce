//! Outputs made a cache-resident block at a time.
//!
//! Every loop that touches many elements has this shape: widen a block of each input to the
//! arithmetic type, compute, round the block once, write it. Block boundaries depend on lengths
//! alone, so neither the number of threads nor their timing changes a result.

use std::ops::Range;

use num_traits::Zero;
use pulp::Arch;
use rayon::prelude::*;

use crate::kernels::element::Element;

/// Elements handled at a time: a few of these fit the first-level cache together.
pub(crate) const BLOCK: usize = 1024;
/// Elements that keep a thread busy for much longer than it takes to wake it.
pub(crate) const GRAIN: usize = 16 * BLOCK;

/// Calls `f` with the number and the elements of each chunk of `size` elements, in parallel.
#[inline(always)]
pub(crate) fn for_each_chunk<T: Send>(
    data: &mut [T],
    size: usize,
    f: impl Fn(usize, &mut [T]) + Sync,
) {
    // Only the inner loops are compiled for every kernel, and every set of vector instructions.
    fn run<T: Send>(data: &mut [T], size: usize, f: &(dyn Fn(usize, &mut [T]) + Sync)) {
        let each = |(chunk, data): (usize, &mut [T])| f(chunk, data);
        if data.len() <= size {
            data.chunks_mut(size.max(1)).enumerate().for_each(each);
        } else {
            data.par_chunks_mut(size.max(1)).enumerate().for_each(each);
        }
    }
    run(data, size, &|chunk, data| {
        Arch::new().dispatch(
            #[inline(always)]
            || f(chunk, data),
        )
    });
}

/// Room for a block of each of the inputs, in their arithmetic type.
pub(crate) type Wide<A> = [[A; BLOCK]];

/// Writes a block, given where it starts and buffers.
type Fill<'a, T> = dyn Fn(usize, &mut Wide<<T as Element>::Acc>, &mut [T]) + Sync + 'a;

/// A vector of `len` elements. `fill` is given where a block starts, `wide` buffers of undefined
/// content, and the block to write.
///
/// The blocks are arrays collected by value, so that memory is written once: a vector that is
/// zeroed first and filled afterwards would cost one more pass.
#[inline(always)]
pub(crate) fn generate<T: Element>(
    len: usize,
    wide: usize,
    fill: impl Fn(usize, &mut Wide<T::Acc>, &mut [T]) + Sync,
) -> Vec<T> {
    fn run<T: Element>(len: usize, wide: usize, fill: &Fill<T>) -> Vec<T> {
        let buffers = || vec![[T::Acc::zero(); BLOCK]; wide];
        let block = |wide: &mut Vec<[T::Acc; BLOCK]>, number: usize| {
            let start = number * BLOCK;
            let mut out = [T::default(); BLOCK];
            fill(start, wide, &mut out[..BLOCK.min(len - start)]);
            out
        };
        let (whole, tail) = (len / BLOCK, len % BLOCK);
        let mut blocks = Vec::with_capacity(len.div_ceil(BLOCK));
        let mut wide = buffers();
        if len < 2 * GRAIN {
            blocks.extend((0..whole).map(|number| block(&mut wide, number)));
        } else {
            let numbers = (0..whole).into_par_iter().with_min_len(GRAIN / BLOCK);
            numbers.map_init(buffers, block).collect_into_vec(&mut blocks);
        }
        let mut data = blocks.into_flattened();
        if tail > 0 {
            data.extend_from_slice(&block(&mut wide, whole)[..tail]);
        }
        data
    }
    run(len, wide, &|start, wide, out| {
        Arch::new().dispatch(
            #[inline(always)]
            || fill(start, wide, out),
        )
    })
}

/// `f` of the elements of `inputs` at every position: all of one length.
#[inline(always)]
pub(crate) fn map<T: Element, O: Element<Acc = T::Acc>, const M: usize>(
    inputs: [&[T]; M],
    f: impl Fn([T::Acc; M]) -> T::Acc + Sync,
) -> Vec<O> {
    generate(
        inputs[0].len(),
        M,
        #[inline(always)]
        |start, wide, out: &mut [O]| {
            let len = out.len();
            widen(inputs, start, len, wide);
            let Some((result, others)) = wide.split_first_mut() else { return };
            let result = &mut result[..len];
            for i in 0..len {
                result[i] = f(std::array::from_fn(|m| match m {
                    0 => result[i],
                    m => others[m - 1][i],
                }));
            }
            O::narrow(result, out);
        },
    )
}

/// Widens the `len` elements from `start` of each input to its buffer.
#[inline(always)]
pub(crate) fn widen<T: Element, const M: usize>(
    inputs: [&[T]; M],
    start: usize,
    len: usize,
    wide: &mut Wide<T::Acc>,
) {
    for (wide, input) in wide.iter_mut().zip(inputs) {
        T::widen(&input[start..start + len], &mut wide[..len]);
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

/// Runs `$body`, a `Result<Tensor>`, with `$O` bound to a type the result can be written in, where
/// `$T` is the type of the input: the one of `$out` if that is `$T` or its arithmetic type, else
/// the arithmetic type. Other pairs are rare, and not worth a compiled loop each.
macro_rules! with_output {
    ($T:ident, $out:expr, $O:ident => $body:expr) => {
        if $out == <$T as candle_core::WithDType>::DTYPE {
            type $O = $T;
            $body
        } else {
            type $O = <$T as $crate::kernels::element::Element>::Acc;
            $body?.to_dtype($out)
        }
    };
}
pub(crate) use with_output;
