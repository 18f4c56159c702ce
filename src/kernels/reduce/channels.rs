//! A tensor seen as `(outer, channels, inner)`: sums per channel, and maps with channel parameters.
//!
//! Plain sums, batch norm, PReLU, pooling and losses share these loops. Each input is read once and widened to F32 (F64
//! stays F64). A lane adds up at most 64 terms in that type, and the rest is F64. So a long sum has hardly more error
//! than a short one, and the loop still runs at the speed of F32.
//!
//! There are two ways to sum. Where a channel's elements follow each other, as in NCHW, blocks of one channel fill 32
//! lanes; rows of fewer than 64 elements have eight. Where they lie apart, as in NHWC or the columns of a tall matrix,
//! a lane is a column, so that memory is read row by row and not by strides.
//!
//! Threads make F64 partial sums of parts that depend on the shape alone, and the caller adds these up in order. So the
//! number of threads changes no bit. A map reads its inputs once, and rounds and writes its result once.

use std::mem::MaybeUninit;

use num_traits::Zero;

use crate::kernels::cpu::array::from_fn;
use crate::kernels::cpu::dtype::Real;
use crate::kernels::cpu::lane::Lane;
use crate::kernels::cpu::simd::{
    BLOCK, GRAIN, LANES, each_lane, for_each_chunk, generate_in_place, runs,
};

/// Columns added up side by side: a row is then read in order, and two sums of each fit registers.
const COLUMNS: usize = 64;
/// Rows added up in the arithmetic type before a partial sum moves on to `f64`.
const PANEL: usize = 64;
/// Below this, a channel's contiguous run is too short to be worth a loop of its own.
const SHORT: usize = 64;
/// Partial sums of a row shorter than that.
const FEW: usize = 8;

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

    /// Channel parameters repeated for every column, row after row up to `width`, whole rows.
    fn expand<A: Copy, const P: usize>(self, parameters: [&[A]; P], width: usize) -> [Vec<A>; P] {
        parameters.map(|parameter| {
            let row = parameter.iter().flat_map(|&p| std::iter::repeat_n(p, self.inner));
            row.cycle().take(width).collect()
        })
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
        // One channel is cut where threads can share the work, whatever the shape was.
        let cut = Self { outer: self.count().div_ceil(GRAIN), channels: 1, inner: GRAIN };
        let layout = if self.channels == 1 { cut } else { self };
        let (partials, repeat) = if layout.by_columns() {
            (layout.column_sums(inputs, parameters, term), layout.inner)
        } else {
            (layout.run_sums(inputs, parameters, term), 1)
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

    /// For every channel, the sum of its elements.
    pub(crate) fn sum<T: Lane>(self, x: &[T]) -> Vec<f64> {
        if self.outer == 1 && (1..SHORT).contains(&self.inner) {
            return self.short_sums(x);
        }
        let sums = self.sums::<T, 1, 0, 1>(
            [x],
            [],
            #[inline(always)]
            |x, []| x,
        );
        sums.into_iter().map(|[sum]| sum).collect()
    }

    /// [`Channels::sum`] of rows so short that adding up the lanes of a block would take longer than filling them.
    fn short_sums<T: Lane>(self, x: &[T]) -> Vec<f64> {
        let mut sums = vec![0.0; self.channels];
        let per_task = GRAIN.div_ceil(self.inner);
        for_each_chunk::<T::Acc, _>(
            &mut sums,
            per_task,
            #[inline(always)]
            |task, sums| {
                let start = (task * per_task * self.inner).min(x.len());
                for (sum, row) in sums.iter_mut().zip(x[start..].chunks(self.inner)) {
                    let (blocks, rest) = row.as_chunks::<FEW>();
                    let mut lanes = [T::Acc::zero(); FEW];
                    for block in blocks {
                        for lane in 0..FEW {
                            lanes[lane] += block[lane].widened();
                        }
                    }
                    for lane in 0..rest.len() {
                        lanes[lane] += rest[lane].widened();
                    }
                    let lanes: [f64; FEW] = from_fn(|lane| lanes[lane].to_double());
                    let pair = |i: usize| (lanes[i] + lanes[i + 4]) + (lanes[i + 2] + lanes[i + 6]);
                    *sum = pair(0) + pair(1);
                }
            },
        );
        sums
    }

    #[inline(always)]
    fn run_sums<T: Lane, const M: usize, const P: usize, const K: usize>(
        self,
        inputs: [&[T]; M],
        parameters: [&[T::Acc]; P],
        term: impl Fn([T::Acc; M], [T::Acc; P]) -> [T::Acc; K] + Sync,
    ) -> Vec<[f64; K]> {
        // Short runs of several rows are one block: partial sums cost more than such a run.
        let together = (BLOCK / self.inner.max(1)).clamp(1, self.outer.max(1));
        let mut partials = vec![[0.0; K]; self.outer.div_ceil(together) * self.channels];
        let per_task = GRAIN.div_ceil((self.inner * together).max(1));
        for_each_chunk::<T::Acc, _>(
            &mut partials,
            per_task,
            #[inline(always)]
            |task, partials| {
                for (i, partial) in partials.iter_mut().enumerate() {
                    let block = task * per_task + i;
                    let channel = block % self.channels;
                    let parameters = from_fn(|m| parameters[m][channel]);
                    let mut lanes = [[T::Acc::zero(); LANES]; K];
                    let first = block / self.channels * together;
                    for row in first..self.outer.min(first + together) {
                        let run = (row * self.channels + channel) * self.inner;
                        let end = inputs[0].len().min(run + self.inner);
                        for start in (run..end).step_by(BLOCK) {
                            let len = BLOCK.min(end - start);
                            add_block(
                                &mut lanes,
                                from_fn(|m| &inputs[m][start..start + len]),
                                #[inline(always)]
                                |x| term(x, parameters),
                            );
                            if together == 1 {
                                let lanes =
                                    std::mem::replace(&mut lanes, [[T::Acc::zero(); LANES]; K]);
                                *partial = from_fn(|k| partial[k] + total(&lanes[k]));
                            }
                        }
                    }
                    if together > 1 {
                        *partial = from_fn(|k| total(&lanes[k]));
                    }
                }
            },
        );
        partials
    }

    /// Columns of whole rows, as many that a loop over them is worth it, and whole vectors if it can be.
    fn wide(self) -> usize {
        const LONGEST: usize = 1024;
        let columns = self.columns().max(1);
        // The least common multiple, of a power of two.
        let vectors = columns * (COLUMNS >> columns.trailing_zeros().min(COLUMNS.ilog2()));
        if vectors <= LONGEST { vectors } else { columns }
    }

    /// Partial sums, a row of all columns after the other.
    #[inline(always)]
    fn column_sums<T: Lane, const M: usize, const P: usize, const K: usize>(
        self,
        inputs: [&[T]; M],
        parameters: [&[T::Acc]; P],
        term: impl Fn([T::Acc; M], [T::Acc; P]) -> [T::Acc; K] + Sync,
    ) -> Vec<[f64; K]> {
        let (columns, wide) = (self.columns(), self.wide());
        let parameters = self.expand(parameters, wide);
        let panel = PANEL * wide;
        let panels = (self.outer * columns).div_ceil(panel);
        let mut partials = vec![[0.0; K]; panels * columns];
        let per_task = GRAIN.div_ceil(panel);
        for_each_chunk::<T::Acc, _>(
            &mut partials,
            per_task * columns,
            #[inline(always)]
            |task, partials| {
                for (i, partials) in partials.chunks_mut(columns).enumerate() {
                    let start = (task * per_task + i) * panel;
                    let rows: [&[T]; M] = from_fn(|m| {
                        let len = inputs[m].len();
                        &inputs[m][start.min(len)..(start + panel).min(len)]
                    });
                    let parameters = from_fn(|m| &parameters[m][..]);
                    let mut whole = 0;
                    macro_rules! columns {
                        ($lanes:expr) => {
                            while whole + $lanes <= wide {
                                let sums = lane_sums::<T, M, P, K, { $lanes }>(
                                    rows, whole, wide, parameters, &term,
                                );
                                add_columns(partials, whole, &sums);
                                whole += $lanes;
                            }
                        };
                    }
                    columns!(COLUMNS);
                    columns!(16);
                    // What is left of a row, and the row that has no end.
                    let full = rows[0].len() / wide * wide;
                    for row in (0..rows[0].len()).step_by(wide) {
                        let rest = row + if row < full { whole } else { 0 };
                        for at in rest..rows[0].len().min(row + wide) {
                            let x = from_fn(|m| rows[m][at].widened());
                            let terms = term(x, from_fn(|m| parameters[m][at - row]));
                            let partial = &mut partials[(at - row) % columns];
                            *partial = from_fn(|k| partial[k] + terms[k].to_double());
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
        let width = if by_columns { self.wide() } else { self.inner };
        let expanded = self.expand(parameters, if by_columns { width } else { 0 });
        generate_in_place(
            self.outer * self.columns(),
            #[inline(always)]
            |start, out: &mut [MaybeUninit<O>]| {
                let mut channel = start / width % self.channels;
                for (number, run) in runs(start, out.len(), width) {
                    let from = start + run.start;
                    let out = &mut out[run];
                    let inputs = from_fn(|m| &inputs[m][from..from + out.len()]);
                    if by_columns {
                        let column = from - number * width;
                        let parameters = from_fn(|m| &expanded[m][column..column + out.len()]);
                        each_lane(
                            out,
                            inputs,
                            parameters,
                            #[inline(always)]
                            |x: [T; M], p| O::narrowed(f(from_fn(|m| x[m].widened()), p)),
                        );
                    } else {
                        let parameters = from_fn(|m| parameters[m][channel]);
                        channel = if channel + 1 == self.channels { 0 } else { channel + 1 };
                        each_lane::<_, _, T::Acc, M, 0>(
                            out,
                            inputs,
                            [],
                            #[inline(always)]
                            |x: [T; M], []| O::narrowed(f(from_fn(|m| x[m].widened()), parameters)),
                        );
                    }
                }
            },
        )
    }
}

/// Sums, over the whole rows of `wide` elements, of the values of `term` in columns `from` and on.
#[inline(always)]
fn lane_sums<T: Lane, const M: usize, const P: usize, const K: usize, const L: usize>(
    rows: [&[T]; M],
    from: usize,
    wide: usize,
    parameters: [&[T::Acc]; P],
    term: &impl Fn([T::Acc; M], [T::Acc; P]) -> [T::Acc; K],
) -> [[T::Acc; L]; K] {
    let mut sums = [[T::Acc::zero(); L]; K];
    let parameters: [[T::Acc; L]; P] = from_fn(|m| from_fn(|lane| parameters[m][from + lane]));
    for row in 0..rows[0].len() / wide {
        let x: [&[T]; M] = from_fn(|m| &rows[m][row * wide + from..][..L]);
        for lane in 0..L {
            let terms = term(from_fn(|m| x[m][lane].widened()), from_fn(|m| parameters[m][lane]));
            for k in 0..K {
                sums[k][lane] += terms[k];
            }
        }
    }
    sums
}

/// Adds the sums of columns from `from` on to those of a row, which ends and begins again. Not inlined, as [`total`].
#[inline(never)]
fn add_columns<A: Real, const K: usize, const L: usize>(
    row: &mut [[f64; K]],
    from: usize,
    sums: &[[A; L]; K],
) {
    let columns = row.len();
    for lane in 0..L {
        let partial = &mut row[(from + lane) % columns];
        *partial = from_fn(|k| partial[k] + sums[k][lane].to_double());
    }
}

/// Sums of the values of `term` over the elements of `inputs`, no longer than a block.
#[inline(always)]
pub(crate) fn block_sums<T: Lane, const M: usize, const K: usize>(
    inputs: [&[T]; M],
    term: impl Fn([T::Acc; M]) -> [T::Acc; K],
) -> [f64; K] {
    let mut lanes = [[T::Acc::zero(); LANES]; K];
    add_block(&mut lanes, inputs, term);
    from_fn(|k| total(&lanes[k]))
}

/// Adds the values of `term` over the elements of `inputs`, 32 by 32 to the lanes. Of what is left, the last 32 are read,
/// and those which are not in the sums yet count.
#[inline(always)]
fn add_block<T: Lane, const M: usize, const K: usize>(
    lanes: &mut [[T::Acc; LANES]; K],
    inputs: [&[T]; M],
    term: impl Fn([T::Acc; M]) -> [T::Acc; K],
) {
    let len = inputs[0].len();
    // A copy that nothing but this loop uses is in registers.
    let mut sums = *lanes;
    let chunks: [(&[[T; LANES]], &[T]); M] = from_fn(|m| inputs[m].as_chunks());
    for i in 0..chunks[0].0.len() {
        let block: [[T; LANES]; M] = from_fn(|m| chunks[m].0[i]);
        for lane in 0..LANES {
            let terms = term(from_fn(|m| block[m][lane].widened()));
            for k in 0..K {
                sums[k][lane] += terms[k];
            }
        }
    }
    *lanes = sums;
    let rest = len % LANES;
    if len < LANES {
        for lane in 0..rest {
            let terms = term(from_fn(|m| inputs[m][lane].widened()));
            for k in 0..K {
                lanes[k][lane] += terms[k];
            }
        }
    } else if rest > 0 {
        let block: [[T; LANES]; M] = from_fn(|m| inputs[m][len - LANES..].as_chunks().0[0]);
        let mut last = [[T::Acc::zero(); LANES]; K];
        for lane in 0..LANES {
            let terms = term(from_fn(|m| block[m][lane].widened()));
            for k in 0..K {
                last[k][lane] = if lane < LANES - rest { T::Acc::zero() } else { terms[k] };
            }
        }
        for k in 0..K {
            for lane in 0..LANES {
                lanes[k][lane] += last[k][lane];
            }
        }
    }
}

/// The sum of all lanes: by eights, as one addition waits for the one before.
///
/// Not inlined: the compiler would arrange the lanes for these few additions, and leave the loop that fills them
/// scalar.
#[inline(never)]
pub(crate) fn total<A: Real>(lanes: &[A; LANES]) -> f64 {
    let mut sums = [0.0; 8];
    for lanes in lanes.as_chunks::<8>().0 {
        for (sum, lane) in sums.iter_mut().zip(lanes) {
            *sum += lane.to_double();
        }
    }
    sums.iter().sum()
}
