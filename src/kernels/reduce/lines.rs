//! A tensor seen as `(outer, count, inner)`: one line of `count` elements for each position outside the middle.
//!
//! Lines lie side by side, so loops go along rows: `inner` elements, one of each line.

use std::mem::MaybeUninit;

use num_traits::Zero;

use crate::kernels::cpu::array::from_fn;
use crate::kernels::cpu::dtype::Real;
use crate::kernels::cpu::lane::Lane;
use crate::kernels::cpu::simd::{GRAIN, for_each_chunk, for_each_task, runs};
use crate::kernels::cpu::uninit::uninit_vec;

/// Lines that a loop is over: their sums stay in the first-level cache.
const COLUMNS: usize = 512;
/// Elements of a line added up in the arithmetic type before a partial sum moves on to `f64`.
pub(crate) const PANEL: usize = 64;
/// Fewer lines side by side are not worth a loop.
const FEWEST: usize = 16;
/// Elements of a block of lines: with inputs and results of F32 it fits the second-level cache.
const BLOCK: usize = 32 * 1024;
/// Lines of a block, at least: rows of fewer are read from memory more slowly.
const NARROWEST: usize = 64;

/// Parts of some rows, to be written.
pub(crate) type OutputRows<'a, 'b, T> = &'a mut [&'b mut [MaybeUninit<T>]];

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

    /// What `f` writes, in parallel, for lines side by side: it is given where the first one's elements begin, and the
    /// lines' part of each row. What it reads and writes stays in the second-level cache, and is read from memory once.
    pub(crate) fn map_blocks<O: Lane>(
        self,
        f: &(dyn Fn(usize, OutputRows<'_, '_, O>) + Sync),
    ) -> Vec<O> {
        let size = self.count * self.inner;
        let width = (BLOCK / self.count.max(1)).max(NARROWEST);
        uninit_vec(self.outer * size, |out| {
            let mut tasks = Vec::with_capacity(self.outer * self.inner.div_ceil(width));
            for (outer, out) in out.chunks_mut(size.max(1)).enumerate() {
                let first = tasks.len();
                let starts = (0..self.inner).step_by(width);
                tasks.extend(starts.map(|at| (outer * size + at, Vec::with_capacity(self.count))));
                for row in out.chunks_mut(self.inner) {
                    for ((_, rows), part) in tasks[first..].iter_mut().zip(row.chunks_mut(width)) {
                        rows.push(part);
                    }
                }
            }
            for_each_task(tasks, |(from, mut rows)| f(from, &mut rows));
        })
    }

    /// Elements from a line's one to its next.
    pub(crate) fn stride(self) -> usize {
        self.inner
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

/// Adds the values of `term` over a row to `sums`: in arrays of a length that the compiler knows, as in `each_lane`.
#[inline(always)]
pub(crate) fn add_row<T: Lane, const M: usize, const P: usize>(
    sums: &mut [T::Acc],
    inputs: [&[T]; M],
    parameters: [&[T::Acc]; P],
    term: impl Fn([T::Acc; M], [T::Acc; P]) -> T::Acc,
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
