//! A tensor seen as `(outer, count, inner)`: one line of `count` elements for each position outside the middle.
//!
//! Lines lie side by side, so loops go along rows: `inner` elements, one of each line.

use std::mem::MaybeUninit;

use num_traits::{Float, Zero};

use crate::kernels::cpu::array::from_fn;
use crate::kernels::cpu::dtype::Real;
use crate::kernels::cpu::lane::Lane;
use crate::kernels::cpu::simd::{GRAIN, each_lane, for_each_chunk, generate_in_place, runs};

/// Lines that a loop is over: their sums stay in the first-level cache.
const COLUMNS: usize = 512;
/// Elements of a line added up in the arithmetic type before a partial sum moves on to `f64`.
const PANEL: usize = 64;
/// Fewer lines side by side are not worth a loop.
const FEWEST: usize = 16;

/// The shape of a contiguous tensor around the dimension that lines run along.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lines {
    outer: usize,
    count: usize,
    inner: usize,
}

impl Lines {
    /// A tensor of `dims`, with lines along `dim`; `None` where rows are too short to go along.
    pub(crate) fn of(dims: &[usize], dim: usize) -> Option<Self> {
        let [outer, inner] = [&dims[..dim], &dims[dim + 1..]].map(|dims| dims.iter().product());
        (inner >= FEWEST).then_some(Self { outer, count: dims[dim], inner })
    }

    /// The largest element of each line; NaN is passed over.
    pub(crate) fn maxima<T: Lane>(self, x: &[T]) -> Vec<T::Acc> {
        let mut maxima = vec![T::Acc::neg_infinity(); self.outer * self.inner];
        self.for_each_block::<T::Acc, _>(
            &mut maxima,
            #[inline(always)]
            |first, _, maxima| {
                for row in 0..self.count {
                    let x = &x[first + row * self.inner..][..maxima.len()];
                    for (max, x) in maxima.iter_mut().zip(x) {
                        *max = if x.widened() > *max { x.widened() } else { *max };
                    }
                }
            },
        );
        maxima
    }

    /// For each line, the sum of `term` of the elements of each input and the line's parameters.
    #[inline(always)]
    pub(crate) fn sums<T: Lane, const M: usize, const P: usize>(
        self,
        inputs: [&[T]; M],
        parameters: [&[T::Acc]; P],
        term: impl Fn([T::Acc; M], [T::Acc; P]) -> T::Acc + Sync,
    ) -> Vec<f64> {
        let mut sums = vec![0.0; self.outer * self.inner];
        self.for_each_block::<T::Acc, _>(
            &mut sums,
            #[inline(always)]
            |first, line, sums| {
                let parameters: [&[T::Acc]; P] = from_fn(|m| &parameters[m][line..][..sums.len()]);
                for start in (0..self.count).step_by(PANEL) {
                    let mut panel = [T::Acc::zero(); COLUMNS];
                    let panel = &mut panel[..sums.len()];
                    for row in start..self.count.min(start + PANEL) {
                        let from = first + row * self.inner;
                        let row = from_fn(|m| &inputs[m][from..][..panel.len()]);
                        add_row(panel, row, parameters, &term);
                    }
                    for (sum, partial) in sums.iter_mut().zip(panel) {
                        *sum += partial.to_double();
                    }
                }
            },
        );
        sums
    }

    /// `f` of the element of each input and the parameters of its line, at every position.
    #[inline(always)]
    pub(crate) fn map<T: Lane, O: Lane<Acc = T::Acc>, const M: usize, const P: usize>(
        self,
        inputs: [&[T]; M],
        parameters: [&[T::Acc]; P],
        f: impl Fn([T::Acc; M], [T::Acc; P]) -> T::Acc + Sync,
    ) -> Vec<O> {
        generate_in_place(
            self.outer * self.count * self.inner,
            #[inline(always)]
            |start, out: &mut [MaybeUninit<O>]| {
                for (row, run) in runs(start, out.len(), self.inner) {
                    let from = start + run.start;
                    let line = row / self.count * self.inner + from % self.inner;
                    let out = &mut out[run];
                    each_lane(
                        out,
                        from_fn(|m| &inputs[m][from..from + out.len()]),
                        from_fn(|m| &parameters[m][line..line + out.len()]),
                        #[inline(always)]
                        |x: [T; M], p| O::narrowed(f(from_fn(|m| x[m].widened()), p)),
                    );
                }
            },
        )
    }

    /// Calls `f` with lines side by side, in parallel: where the first one's elements begin, its number, and what
    /// each of `lines` is to become.
    #[inline(always)]
    fn for_each_block<A, S: Send>(
        self,
        lines: &mut [S],
        f: impl Fn(usize, usize, &mut [S]) + Sync,
    ) {
        // Whole blocks: rows are cut where blocks end.
        let enough = GRAIN.div_ceil(self.count.max(1)).next_multiple_of(COLUMNS);
        for_each_chunk::<A, _>(
            lines,
            enough,
            #[inline(always)]
            |chunk, lines| {
                let first = chunk * enough;
                for (outer, run) in runs(first, lines.len(), self.inner) {
                    for start in run.clone().step_by(COLUMNS) {
                        let line = first + start;
                        let end = run.end.min(start + COLUMNS);
                        let from = outer * self.count * self.inner + line % self.inner;
                        f(from, line, &mut lines[start..end]);
                    }
                }
            },
        );
    }
}

/// Adds the values of `term` over a row to `sums`: in arrays of a length that the compiler knows, as in [`each_lane`].
#[inline(always)]
fn add_row<T: Lane, const M: usize, const P: usize>(
    sums: &mut [T::Acc],
    inputs: [&[T]; M],
    parameters: [&[T::Acc]; P],
    term: &impl Fn([T::Acc; M], [T::Acc; P]) -> T::Acc,
) {
    let (blocks, rest) = sums.as_chunks_mut::<FEWEST>();
    let start = blocks.len() * FEWEST;
    for (number, sums) in blocks.iter_mut().enumerate() {
        // Keeps the compiler from taking blocks for the lanes of its vectors, by gathers and scatters.
        std::hint::black_box(());
        let x: [&[T; FEWEST]; M] = from_fn(|m| &inputs[m].as_chunks().0[number]);
        let p: [&[T::Acc; FEWEST]; P] = from_fn(|m| &parameters[m].as_chunks().0[number]);
        // In a copy, which the inputs cannot be.
        let mut row = *sums;
        for lane in 0..FEWEST {
            row[lane] += term(from_fn(|m| x[m][lane].widened()), from_fn(|m| p[m][lane]));
        }
        *sums = row;
    }
    for (i, sum) in rest.iter_mut().enumerate() {
        let x = from_fn(|m| inputs[m][start + i].widened());
        *sum += term(x, from_fn(|m| parameters[m][start + i]));
    }
}
