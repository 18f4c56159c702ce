//! A tensor seen as `(outer, channels, inner)`: sums per channel, and maps with channel parameters.

use std::array::from_fn;

use num_traits::Zero;

use crate::kernels::element::Real;
use crate::kernels::elementwise::blocks::{BLOCK, GRAIN, for_each_chunk, generate, runs};
use crate::kernels::elementwise::lane::Lane;

/// Independent partial sums, so that additions do not wait for each other.
const LANES: usize = 32;
/// Rows added up in the arithmetic type before a partial sum moves on to `f64`.
const PANEL: usize = 64;
/// Below this, a channel's contiguous run is too short to be worth a loop of its own.
const SHORT: usize = 64;

/// The shape of a contiguous tensor around one dimension.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Channels {
    pub(crate) outer: usize,
    pub(crate) channels: usize,
    pub(crate) inner: usize,
}

impl Channels {
    /// A tensor of `dims`, whose channels are counted by dimension `dim`.
    pub(crate) fn of(dims: &[usize], dim: usize) -> Self {
        Self {
            outer: dims[..dim].iter().product(),
            channels: dims[dim],
            inner: dims[dim + 1..].iter().product(),
        }
    }

    /// A matrix whose rows are the channels.
    pub(crate) fn rows(rows: usize, columns: usize) -> Self {
        Self { outer: 1, channels: rows, inner: columns }
    }

    /// Elements a channel.
    pub(crate) fn count(self) -> usize {
        self.outer * self.inner
    }

    /// Whether to go row by row over `channels * inner` columns, not run by run.
    fn by_columns(self) -> bool {
        self.inner < SHORT && self.outer >= PANEL
    }

    fn columns(self) -> usize {
        self.channels * self.inner
    }

    /// Channel parameters repeated for every column.
    fn expand<A: Copy>(self, parameter: &[A]) -> Vec<A> {
        parameter.iter().flat_map(|&p| std::iter::repeat_n(p, self.inner)).collect()
    }

    /// For every channel, the sum of the `K` values of `term` over its elements.
    ///
    /// `term` is given the element of each input and the channel's parameters. Blocks are added up
    /// in the arithmetic type, blocks in `f64`, in an order that depends on the shape alone.
    /// Inputs may stop short of the shape: missing elements count for nothing.
    #[inline(always)]
    pub(crate) fn sums<T: Lane, const M: usize, const P: usize, const K: usize>(
        self,
        inputs: [&[T]; M],
        parameters: [&[T::Acc]; P],
        term: impl Fn([T::Acc; M], [T::Acc; P]) -> [T::Acc; K] + Sync,
    ) -> Vec<[f64; K]> {
        let mut sums = vec![[0.0; K]; self.channels];
        if self.channels == 1 {
            // Cut where threads can share the work, whatever the shape was.
            let layout = Self { outer: self.count().div_ceil(GRAIN), channels: 1, inner: GRAIN };
            for partial in layout.run_sums(inputs, parameters, term) {
                sums[0] = from_fn(|k| sums[0][k] + partial[k]);
            }
            return sums;
        }
        let (partials, repeat) = if self.by_columns() {
            (self.column_sums(inputs, parameters, term), self.inner)
        } else {
            (self.run_sums(inputs, parameters, term), 1)
        };
        for row in partials.chunks((self.channels * repeat.max(1)).max(1)) {
            for (sum, partials) in sums.iter_mut().zip(row.chunks(repeat.max(1))) {
                for partial in partials {
                    *sum = from_fn(|k| sum[k] + partial[k]);
                }
            }
        }
        sums
    }

    #[inline(always)]
    fn run_sums<T: Lane, const M: usize, const P: usize, const K: usize>(
        self,
        inputs: [&[T]; M],
        parameters: [&[T::Acc]; P],
        term: impl Fn([T::Acc; M], [T::Acc; P]) -> [T::Acc; K] + Sync,
    ) -> Vec<[f64; K]> {
        let mut partials = vec![[0.0; K]; self.outer * self.channels];
        let per_task = GRAIN.div_ceil(self.inner.max(1));
        for_each_chunk(
            &mut partials,
            per_task,
            #[inline(always)]
            |task, partials| {
                for (i, partial) in partials.iter_mut().enumerate() {
                    let run = task * per_task + i;
                    let parameters = parameters.map(|p| p[run % self.channels]);
                    let end = inputs[0].len().min((run + 1) * self.inner);
                    for start in (run * self.inner..end).step_by(BLOCK) {
                        let len = BLOCK.min(end - start);
                        let sums = block_sums(
                            inputs.map(|input| &input[start..start + len]),
                            #[inline(always)]
                            |x| term(x, parameters),
                        );
                        *partial = from_fn(|k| partial[k] + sums[k]);
                    }
                }
            },
        );
        partials
    }

    #[inline(always)]
    fn column_sums<T: Lane, const M: usize, const P: usize, const K: usize>(
        self,
        inputs: [&[T]; M],
        parameters: [&[T::Acc]; P],
        term: impl Fn([T::Acc; M], [T::Acc; P]) -> [T::Acc; K] + Sync,
    ) -> Vec<[f64; K]> {
        let columns = self.columns();
        let parameters = parameters.map(|p| self.expand(p));
        let mut partials = vec![[0.0; K]; self.outer.div_ceil(PANEL) * columns];
        let per_task = GRAIN.div_ceil((PANEL * columns).max(1));
        for_each_chunk(
            &mut partials,
            per_task * columns,
            #[inline(always)]
            |task, partials| {
                for (i, panel) in partials.chunks_mut(columns).enumerate() {
                    let first = (task * per_task + i) * PANEL;
                    for (tile, partials) in panel.chunks_mut(BLOCK).enumerate() {
                        let (from, len) = (tile * BLOCK, partials.len().min(BLOCK));
                        let parameters = parameters.each_ref().map(|p| &p[from..from + len]);
                        let mut sums = [[T::Acc::zero(); BLOCK]; K];
                        for row in first..self.outer.min(first + PANEL) {
                            let start = row * columns + from;
                            let inputs = inputs.map(|input| &input[start..start + len]);
                            for i in 0..len {
                                let x = inputs.map(|input| input[i].raise());
                                let terms = term(x, parameters.map(|p| p[i]));
                                for k in 0..K {
                                    sums[k][i] += terms[k];
                                }
                            }
                        }
                        for (i, partial) in partials.iter_mut().enumerate() {
                            *partial = from_fn(|k| sums[k][i].to_double());
                        }
                    }
                }
            },
        );
        partials
    }

    /// `f` of the element of each input and the parameters of its channel, at every position.
    #[inline(always)]
    pub(crate) fn map<T: Lane, O: Lane<Acc = T::Acc>, const M: usize, const P: usize>(
        self,
        inputs: [&[T]; M],
        parameters: [&[T::Acc]; P],
        f: impl Fn([T::Acc; M], [T::Acc; P]) -> T::Acc + Sync,
    ) -> Vec<O> {
        let by_columns = self.by_columns();
        let expanded = parameters.map(|p| if by_columns { self.expand(p) } else { Vec::new() });
        let width = if by_columns { self.columns() } else { self.inner };
        generate(
            self.outer * self.columns(),
            #[inline(always)]
            |start, out: &mut [O]| {
                for (number, run) in runs(start, out.len(), width) {
                    let from = start + run.start;
                    let out = &mut out[run];
                    let inputs = inputs.map(|input| &input[from..from + out.len()]);
                    if by_columns {
                        let column = from - number * width;
                        let parameters =
                            expanded.each_ref().map(|p| &p[column..column + out.len()]);
                        for i in 0..out.len() {
                            let x = inputs.map(|input| input[i].raise());
                            out[i] = O::lower(f(x, parameters.map(|p| p[i])));
                        }
                    } else {
                        let parameters = parameters.map(|p| p[number % self.channels]);
                        for i in 0..out.len() {
                            out[i] = O::lower(f(inputs.map(|x| x[i].raise()), parameters));
                        }
                    }
                }
            },
        )
    }
}

/// Sums of the values of `term` over the elements of `inputs`, no longer than a block.
#[inline(always)]
pub(crate) fn block_sums<T: Lane, const M: usize, const K: usize>(
    inputs: [&[T]; M],
    term: impl Fn([T::Acc; M]) -> [T::Acc; K],
) -> [f64; K] {
    let mut lanes = [[T::Acc::zero(); LANES]; K];
    let chunks = inputs.map(|input| input.as_chunks::<LANES>());
    for i in 0..chunks[0].0.len() {
        let block: [&[T; LANES]; M] = from_fn(|m| &chunks[m].0[i]);
        for lane in 0..LANES {
            let terms = term(block.map(|x| x[lane].raise()));
            for k in 0..K {
                lanes[k][lane] += terms[k];
            }
        }
    }
    let rest = chunks.map(|(_, rest)| rest);
    for lane in 0..rest[0].len().min(LANES) {
        let terms = term(rest.map(|x| x[lane].raise()));
        for k in 0..K {
            lanes[k][lane] += terms[k];
        }
    }
    lanes.map(|lanes| lanes.iter().map(|lane| lane.to_double()).sum())
}
