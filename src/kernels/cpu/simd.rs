//! Outputs made a cache-resident block at a time.
//!
//! Block boundaries depend on lengths alone, so neither the number of threads nor their timing
//! changes a result.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::array::from_fn;
use super::lane::Lane;
use super::parallel;
use crate::kernels::cpu::uninit::uninit_vec;

/// Elements handled at a time: a few of these fit the first-level cache together.
pub(crate) const BLOCK: usize = 1024;
/// Elements of the arrays that loops are over: independent sums, so that additions do not wait for each other.
pub(crate) const LANES: usize = 32;
/// Elements that keep a thread busy for much longer than it takes to wake it.
pub(crate) const GRAIN: usize = 16 * BLOCK;

/// Runs `f`, and what is inlined into it, compiled for the widest vectors of the processor.
///
/// `f` and the closures it calls must be `#[inline(always)]`. On targets whose every processor has NEON, or whose vectors
/// this crate does not know, the compiler's choice for all of the crate is the widest.
#[inline(always)]
pub(crate) fn vectorise(mut f: impl FnMut()) {
    #[cfg(target_arch = "x86_64")]
    {
        use super::vector::{Vectors, with_vectors};

        if let Some(vectors) = Vectors::widest() {
            return with_vectors!(vectors, V => f());
        }
    }
    f()
}

/// [`vectorise`] for arithmetic in `A`. In `f64`, which gradients are checked in and nothing is trained in, loops are
/// compiled once, for every processor: such copies would be a tenth of the crate.
#[inline(always)]
pub(crate) fn vectorise_in<A>(mut f: impl FnMut()) {
    if const { size_of::<A>() > size_of::<f32>() } { f() } else { vectorise(f) }
}

/// Calls `f`, whose arithmetic is in `A`, with the number and the elements of each chunk of `size` elements, in
/// parallel.
#[inline(always)]
pub(crate) fn for_each_chunk<A, T: Send>(
    data: &mut [T],
    size: usize,
    f: impl Fn(usize, &mut [T]) + Sync,
) {
    parallel::for_each_chunk(data, size, |chunk, data| {
        vectorise_in::<A>(
            #[inline(always)]
            || f(chunk, data),
        )
    });
}

/// Calls `f` with each of `tasks`, in parallel.
pub(crate) fn for_each_task<T: Send>(tasks: Vec<T>, f: impl Fn(T) + Send + Sync) {
    parallel::for_each_item(tasks, f);
}

/// `data` cut into `count` pieces of `size`: the parts of tasks that write it. Of nothing, each
/// piece is nothing, which stands for a result nobody wants.
pub(crate) fn pieces<T>(data: &mut [T], size: usize, count: usize) -> Vec<&mut [T]> {
    if data.is_empty() {
        return (0..count).map(|_| Default::default()).collect();
    }
    data.chunks_mut(size).collect()
}

/// A vector of `len` elements. `fill` is given where a block starts, and the block to write.
///
/// A block is made in memory that stays in the first-level cache, and copied: the result is written
/// once, where zeroing it first would be one more pass over it.
#[inline(always)]
pub(crate) fn generate<T: Lane>(len: usize, fill: impl Fn(usize, &mut [T]) + Sync) -> Vec<T> {
    generate_in_place(
        len,
        #[inline(always)]
        |start, out| {
            let mut block = [T::default(); BLOCK];
            for (index, out) in out.chunks_mut(BLOCK).enumerate() {
                let block = &mut block[..out.len()];
                fill(start + index * BLOCK, block);
                out.write_copy_of_slice(block);
            }
        },
    )
}

/// [`generate`], where `fill` writes the result itself: every element of what it is given.
#[inline(always)]
pub(crate) fn generate_in_place<T: Lane>(
    len: usize,
    fill: impl Fn(usize, &mut [MaybeUninit<T>]) + Sync,
) -> Vec<T> {
    fn run<T: Lane>(len: usize, fill: &(dyn Fn(usize, &mut [MaybeUninit<T>]) + Sync)) -> Vec<T> {
        let task = |number: usize, out: &mut [MaybeUninit<T>]| fill(number * GRAIN, out);
        uninit_vec(len, |out| {
            if len < 2 * GRAIN {
                out.chunks_mut(GRAIN).enumerate().for_each(|(number, out)| task(number, out));
            } else {
                parallel::for_each_chunk(out, GRAIN, task);
            }
        })
    }
    run(len, &|start, out| {
        vectorise_in::<T::Acc>(
            #[inline(always)]
            || fill(start, out),
        )
    })
}

/// `out[i] = f(element i of each input, element i of each parameter)`, in arrays of a length that the
/// compiler knows: where it has to check each slice, it does not use vectors.
///
/// The last block ends with the slices, and computes some elements once more: none are left for a loop without vectors.
/// Nor can the compiler take the blocks for its vectors' lanes. Where it unrolls the loop over lanes first, it would,
/// by gathers and scatters, which take several times as long.
#[inline(always)]
pub(crate) fn each_lane<O: Copy, T: Copy, A: Copy, const M: usize, const P: usize>(
    out: &mut [MaybeUninit<O>],
    inputs: [&[T]; M],
    parameters: [&[A]; P],
    f: impl Fn([T; M], [A; P]) -> O,
) {
    let len = out.len();
    if len < LANES {
        for (i, out) in out.iter_mut().enumerate() {
            out.write(f(from_fn(|m| inputs[m][i]), from_fn(|m| parameters[m][i])));
        }
        return;
    }
    for number in 0..len.div_ceil(LANES) {
        let at = (number * LANES).min(len - LANES);
        // Copies, which writing results does not change: behind references, nothing would be vectorised.
        let x: [[T; LANES]; M] = from_fn(|m| inputs[m][at..at + LANES].as_chunks().0[0]);
        let p: [[A; LANES]; P] = from_fn(|m| parameters[m][at..at + LANES].as_chunks().0[0]);
        let out = &mut out[at..at + LANES].as_chunks_mut::<LANES>().0[0];
        for lane in 0..LANES {
            out[lane].write(f(from_fn(|m| x[m][lane]), from_fn(|m| p[m][lane])));
        }
    }
}

/// `f` of the elements of `inputs` at every position: all of one length.
///
/// `f` owns what it captures and is copied to each block's stack, where the compiler sees that
/// writing results does not change it. Behind a reference it would keep loops from vectorising.
#[inline(always)]
pub(crate) fn map<T: Lane, O: Lane<Acc = T::Acc>, const M: usize>(
    inputs: [&[T]; M],
    f: impl Fn([T::Acc; M]) -> T::Acc + Sync + Copy,
) -> Vec<O> {
    generate_in_place(
        inputs[0].len(),
        #[inline(always)]
        |start, out: &mut [MaybeUninit<O>]| {
            let (f, inputs) = (f, from_fn(|m| &inputs[m][start..start + out.len()]));
            each_lane::<_, _, T::Acc, M, 0>(
                out,
                inputs,
                [],
                #[inline(always)]
                |x: [T; M], []| O::narrowed(f(from_fn(|m| x[m].widened()))),
            );
        },
    )
}

/// Cuts a block that starts at `start` where multiples of `width` fall: the number of each
/// `width`-long run and the part of the block inside it.
#[inline(always)]
pub(crate) fn runs(
    start: usize,
    len: usize,
    width: usize,
) -> impl Iterator<Item = (usize, Range<usize>)> {
    let (mut at, mut number) = (0, start / width);
    std::iter::from_fn(move || {
        let end = len.min((number + 1) * width - start);
        let run = (at < len).then_some((number, at..end));
        (at, number) = (end, number + 1);
        run
    })
}

/// Runs `$body`, a `Result<Tensor>`, with `$O` bound to a type the result can be written in, where
/// `$T` is the type of the input. `$O` is the type of `$out` if that is `$T` or its arithmetic
/// type, else the arithmetic type. Other pairs are rare, and not worth a compiled loop each.
macro_rules! with_output {
    ($T:ident, $out:expr, $O:ident => $body:expr) => {
        if $out == <$T as candle_core::WithDType>::DTYPE {
            type $O = $T;
            $body
        } else {
            type $O = <$T as $crate::kernels::cpu::dtype::Element>::Acc;
            $body?.to_dtype($out)
        }
    };
}
pub(in crate::kernels) use with_output;
