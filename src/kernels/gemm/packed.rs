//! Matrix products of BF16 on processors that multiply pairs of it.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::ops::Range;

use candle_core::{DType, Result, Tensor};
use half::bf16;
use rayon::prelude::*;

use super::cpu::Operand;
use crate::kernels::element::{Elements, tensor};
use crate::kernels::fresh::fresh;
use crate::kernels::panel::{Panel, Rounded, Side, Unit, with_cells};

/// The unit that multiplies these operands, where this module does. Of F32 the `gemm` crate's products
/// are faster.
pub(super) fn unit(lhs: &Tensor, rhs: &Tensor) -> Option<Unit> {
    let halves = lhs.dtype() == DType::BF16 && rhs.dtype() == DType::BF16;
    if !halves || lhs.elem_count() * rhs.elem_count() == 0 {
        return None;
    }
    // Of one row or column, most of a tile is nothing, and packing takes longer than multiplying.
    let thin = lhs.dims()[lhs.rank() - 2].min(rhs.dims()[rhs.rank() - 1]) < 4;
    if thin { None } else { Unit::of([lhs, rhs]).filter(|unit| unit.pairs()) }
}

/// Elements of a sum taken at a time: a block of 64 columns of them is half of a second-level cache
/// of 1 MiB.
const DEPTH: usize = 4096;

/// Rows that a task packs at a time.
const ROWS: usize = 128;

/// See [`super::gemm`].
pub(super) fn gemm<O: Rounded>(
    lhs: &Tensor,
    rhs: &Tensor,
    bias: Option<&Tensor>,
    unit: Unit,
) -> Result<Tensor> {
    let bias: Option<Vec<f32>> = match bias {
        Some(bias) => Some(bias.detach().to_dtype(DType::F32)?.to_vec1()?),
        None => None,
    };
    let bias = bias.as_deref();
    let (lhs, rhs) = (Operand::with_unit_stride(lhs)?, Operand::with_unit_stride(rhs)?);
    let mut dims = lhs.dims.clone();
    dims[lhs.dims.len() - 1] = rhs.cols();
    let size = lhs.rows() * rhs.cols();
    let (left, right) = (Elements::<bf16>::of(&lhs.tensor)?, Elements::<bf16>::of(&rhs.tensor)?);
    let (left, right): (&[bf16], &[bf16]) = (&left, &right);
    let matrices = dims.iter().product::<usize>() / size;
    let together = matrices >= rayon::current_num_threads();
    let sharing = match together {
        true => Sharing::Alone,
        false => Sharing::of(size * lhs.cols(), unit),
    };
    let result = fresh(matrices * size, |out: &mut [MaybeUninit<O>]| {
        let each = |(index, out): (usize, &mut [MaybeUninit<O>])| {
            let (left, right) = (lhs.matrix(left, index), rhs.matrix(right, index).t());
            let [left, right] = [left, right].map(|matrix| Side {
                data: matrix.data,
                lines: matrix.rows,
                depth: matrix.cols,
                line_stride: matrix.row_stride,
                depth_stride: matrix.col_stride,
            });
            let places = &Places { first: out.as_mut_ptr(), stride: rhs.cols() };
            Product { left, right, bias, unit, places }.run(sharing);
        };
        match together && matrices * size * lhs.cols() > short(unit) {
            true => out.par_chunks_mut(size).enumerate().for_each(each),
            false => out.chunks_mut(size).enumerate().for_each(each),
        }
    });
    Ok(tensor(result, &dims))
}

/// Terms of a product that take a thread some 20 µs.
fn short(unit: Unit) -> usize {
    if unit == Unit::Tiles { 1 << 22 } else { 1 << 20 }
}

/// How threads share a product.
#[derive(Clone, Copy)]
enum Sharing {
    /// One thread: waking another takes longer.
    Alone,
    /// Each packs what it multiplies, so that nobody waits between the two.
    Parts,
    /// All pack the right side first, and then take rows as they come.
    Rows,
}

impl Sharing {
    fn of(terms: usize, unit: Unit) -> Self {
        let short = short(unit);
        match terms {
            _ if rayon::current_num_threads() == 1 || terms <= short => Self::Alone,
            _ if terms <= 16 * short => Self::Parts,
            _ => Self::Rows,
        }
    }
}

/// Where a product goes: lines of `stride` places, of which every thread writes others.
struct Places<O> {
    first: *mut MaybeUninit<O>,
    stride: usize,
}

// SAFETY: see `line`.
unsafe impl<O: Send> Sync for Places<O> {}

impl<O> Places<O> {
    /// # Safety
    /// Places of the product, which nobody else reads or writes as long as these are borrowed.
    #[allow(clippy::mut_from_ref)]
    unsafe fn line(&self, row: usize, columns: Range<usize>) -> &mut [MaybeUninit<O>] {
        let at = self.first.wrapping_add(row * self.stride + columns.start);
        // SAFETY: the caller's.
        unsafe { std::slice::from_raw_parts_mut(at, columns.len()) }
    }
}

/// A product, or what one thread makes of it: these rows and columns.
struct Product<'a, O> {
    left: Side<'a>,
    right: Side<'a>,
    bias: Option<&'a [f32]>,
    unit: Unit,
    places: &'a Places<O>,
}

/// Columns of the right side, packed: parts of the sum, each with its start and length.
type Packs<'a> = Vec<(usize, usize, &'a [u32])>;

impl<O: Rounded> Product<'_, O> {
    /// Writes the product.
    fn run(&self, sharing: Sharing) {
        let (rows, columns) = (0..self.left.lines, 0..self.right.lines);
        let threads = rayon::current_num_threads();
        match sharing {
            Sharing::Alone => self.part(rows, columns),
            Sharing::Parts => {
                // The longer side is cut, as the other one is packed by every thread.
                let tall = rows.end >= columns.end;
                let lines = if tall { rows.end } else { columns.end };
                let each = lines.div_ceil(threads).next_multiple_of(16);
                (0..lines.div_ceil(each)).into_par_iter().for_each(|index| {
                    let part = index * each..lines.min((index + 1) * each);
                    match tall {
                        true => self.part(part, columns.clone()),
                        false => self.part(rows.clone(), part),
                    }
                });
            }
            Sharing::Rows => self.with_right(columns.clone(), true, |packs| {
                let each = rows.end.div_ceil(threads).next_multiple_of(16).min(ROWS);
                (0..rows.end.div_ceil(each)).into_par_iter().for_each(|index| {
                    let part = index * each..rows.end.min((index + 1) * each);
                    self.rows(part, columns.clone(), packs);
                });
            }),
        }
    }

    /// Packs and multiplies on this thread.
    fn part(&self, rows: Range<usize>, columns: Range<usize>) {
        self.with_right(columns.clone(), false, |packs| {
            for first in rows.clone().step_by(ROWS) {
                self.rows(first..rows.end.min(first + ROWS), columns.clone(), packs);
            }
        });
    }

    /// Calls `f` with the right side, packed by all threads or by this one.
    fn with_right(&self, columns: Range<usize>, shared: bool, f: impl FnOnce(&Packs<'_>) + Send) {
        let depth = self.right.depth;
        let side =
            |k: usize| self.right.part(columns.start, columns.len(), k, DEPTH.min(depth - k));
        let sizes = || {
            (0..depth).step_by(DEPTH).map(|k| side(k).cells() * columns.len().next_multiple_of(16))
        };
        with_cells([sizes().sum()], |[mut rest]| {
            let mut packs = Packs::with_capacity(depth.div_ceil(DEPTH));
            for (k, size) in (0..depth).step_by(DEPTH).zip(sizes()) {
                let (own, after) = std::mem::take(&mut rest).split_at_mut(size);
                rest = after;
                let side = side(k);
                let pack = |(index, out): (usize, &mut [u32])| {
                    let first = index * 64;
                    let lines = (out.len() / side.cells()).min(columns.len() - first);
                    side.part(first, lines, 0, side.depth).pack_blocks(out);
                };
                let block = 64 * side.cells();
                match shared {
                    true => own.par_chunks_mut(block).enumerate().for_each(pack),
                    false => own.chunks_mut(block).enumerate().for_each(pack),
                }
                packs.push((k, side.depth, &*own));
            }
            f(&packs)
        });
    }

    /// Writes a block of the product, from columns that are packed.
    fn rows(&self, rows: Range<usize>, columns: Range<usize>, packs: &Packs<'_>) {
        let (count, width) = (rows.len(), columns.len());
        let whole = packs.len() == 1;
        let mut sums = if whole { Vec::new() } else { vec![0f32; count * width] };
        for &(k, len, right) in packs {
            let left = self.left.part(rows.start, count, k, len);
            let cells = left.cells();
            // Lines a kilobyte apart, or a multiple, would share few lines of the nearest cache.
            let stride = if cells.is_multiple_of(256) { cells + 16 } else { cells };
            with_cells([count.next_multiple_of(16) * stride], |[packed]| {
                left.pack_lines(stride, packed);
                let panel = Panel {
                    left: packed,
                    left_block: self.unit.rows() * stride,
                    left_row: stride,
                    left_step: 1,
                    left_starts: &[0],
                    right,
                    right_block: 16 * cells,
                    right_step: 16,
                    right_starts: &[0],
                    rows: count,
                    columns: width,
                    depth: len.div_ceil(2),
                };
                panel.multiply(self.unit, |tile| {
                    if !whole {
                        tile.add_to(&mut sums, width);
                        return;
                    }
                    let ends = tile.column..tile.column + tile.columns;
                    for (row, line) in (tile.row..).zip(tile.sums).take(tile.rows) {
                        self.store(rows.start + row, &columns, ends.clone(), line);
                    }
                });
            });
        }
        for (row, line) in rows.zip(sums.chunks(width)) {
            self.store(row, &columns, 0..width, line);
        }
    }

    /// Writes `ends` of a row of a block that has these columns.
    fn store(&self, row: usize, columns: &Range<usize>, ends: Range<usize>, sums: &[f32]) {
        let ends = columns.start + ends.start..columns.start + ends.end;
        let bias = self.bias.map(|bias| &bias[ends.clone()]);
        // SAFETY: inside of the product, and the block is this thread's.
        O::store_all(sums, bias, unsafe { self.places.line(row, ends) });
    }
}
