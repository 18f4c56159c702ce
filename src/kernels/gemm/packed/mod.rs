//! Matrix products by packed GEMM: BF16 by AVX512-BF16 or AMX, F16 and F32 by AMX as sums of BF16 terms.
//!
//! Both operands are packed into the VNNI words that the micro-kernel reads. A BF16 left operand whose rows are such
//! words already is read in place. Sums and bias are F32, and each result is rounded and written once. A sum longer
//! than 4096 terms (2720 of F32) is cut, so that packed blocks stay in a second-level cache. Its parts then meet in an
//! F32 buffer.
//!
//! How threads share a product depends on its size ([`Sharing`]). Waking a thread costs more than a short product. In
//! a medium one, each thread packs all that it multiplies, as a barrier costs more than packing twice. In a long one,
//! all threads pack one side together. Then they take blocks of the other side, each packed into the cache of the
//! thread that multiplies it. A batch of at least as many matrices as threads is one matrix a task.
//!
//! Without AMX, F16 and F32 are multiplied by [`product`](super::product), which is faster there. It also repeats a
//! product with a BF16x3 sum that is not finite.
#![allow(unsafe_code)]

mod pack;
#[cfg(test)]
mod tests;

use std::mem::MaybeUninit;
use std::ops::Range;

use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Result, Tensor};

use super::cpu::Operand;
use crate::kernels::cpu::dtype::{Element, Elements, tensor, with_near};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::uninit::try_uninit_vec;
use crate::kernels::gemm::micro::{Bf16Terms, InstructionSet, MatrixView, PackedGemm, Rounded};
use pack::{Packed, with_packed};

/// The instruction set for these operands; `None` where this module does not multiply them.
pub(super) fn isa(lhs: &Tensor, rhs: &Tensor) -> Option<InstructionSet> {
    if lhs.dims().contains(&0) || rhs.dims().contains(&0) {
        return None;
    }
    let (rows, columns) = (lhs.rank() - 2, rhs.rank() - 1);
    let sizes = [lhs.dims()[rows], rhs.dims()[columns], lhs.dims()[rows + 1]];
    // Of one row or column, most of a tile is nothing, and packing takes longer than multiplying.
    let fits = |least: [usize; 3]| sizes.iter().zip(least).all(|(size, least)| *size >= least);
    match (lhs.dtype(), rhs.dtype()) {
        (DType::BF16, DType::BF16) if fits([4, 4, 1]) => {
            InstructionSet::of([lhs, rhs]).filter(|isa| isa.is_bf16())
        }
        // Without tiles those of F32 are faster.
        (DType::F32, DType::F32) | (DType::F16, DType::F16) if fits(THIN) => {
            Some(InstructionSet::AmxBf16x3).filter(|isa| isa.is_available())
        }
        _ => None,
    }
}

/// Rows, columns and terms of a sum from which on a product as BF16x3 is faster.
const THIN: [usize; 3] = [32, 32, 16];

/// Rows that a task takes at a time: at most half of what is near, in whole blocks.
fn rows_of<T: Bf16Terms>(depth: usize) -> usize {
    (NEAR / 2 / (depth * T::COUNT) / 32 * 32).clamp(32, 128)
}

/// Columns that a task takes at a time.
const COLUMNS: usize = 64;

/// Numbers of BF16 of a side that a second-level cache of 2 MiB holds.
const NEAR: usize = 1 << 20;

/// See [`super::gemm`]; `None` where a sum as BF16x3 is not finite.
pub(super) fn gemm<O: Rounded>(
    lhs: &Tensor,
    rhs: &Tensor,
    bias: Option<&Tensor>,
    isa: InstructionSet,
) -> Result<Option<Tensor>> {
    with_near!(lhs.dtype(), O, T => typed::<T, O>(lhs, rhs, bias, isa))
}

fn typed<T: Bf16Terms + Element, O: Rounded>(
    lhs: &Tensor,
    rhs: &Tensor,
    bias: Option<&Tensor>,
    isa: InstructionSet,
) -> Result<Option<Tensor>> {
    let bias: Option<Vec<f32>> = match bias {
        Some(bias) => Some(bias.detach().to_dtype(DType::F32)?.to_vec1()?),
        None => None,
    };
    let bias = bias.as_deref();
    let (lhs, rhs) = (Operand::with_unit_stride(lhs)?, Operand::with_unit_stride(rhs)?);
    let mut dims = lhs.dims.clone();
    dims[lhs.dims.len() - 1] = rhs.cols();
    let size = lhs.rows() * rhs.cols();
    let _held = hold([&lhs.tensor, &rhs.tensor]);
    let (left, right) = (Elements::<T>::of(&lhs.tensor)?, Elements::<T>::of(&rhs.tensor)?);
    let (left, right): (&[T], &[T]) = (&left, &right);
    let matrices = dims.iter().product::<usize>() / size;
    let together = matrices >= parallel::threads();
    let sharing = match together {
        true => Sharing::Alone,
        false => Sharing::of([lhs.rows(), lhs.cols(), rhs.cols()], T::COUNT, isa),
    };
    let finite = AtomicBool::new(true);
    let result = try_uninit_vec(matrices * size, |out: &mut [MaybeUninit<O>]| {
        let each = |index: usize, out: &mut [MaybeUninit<O>]| {
            let (left, right) = (lhs.matrix(left, index), rhs.matrix(right, index).t());
            let [left, right] = [left, right].map(|matrix| MatrixView {
                data: matrix.data,
                lines: matrix.rows,
                depth: matrix.cols,
                line_stride: matrix.row_stride,
                depth_stride: matrix.col_stride,
            });
            let output = &OutputMatrix { first: out.as_mut_ptr(), stride: rhs.cols() };
            Product { left, right, bias, isa, output, finite: &finite }.run(sharing);
        };
        let terms = (matrices * size).saturating_mul(lhs.cols());
        match together && terms > short(isa) {
            true => parallel::for_each_chunk(out, size, each),
            false => out.chunks_mut(size).enumerate().for_each(|(index, out)| each(index, out)),
        }
        finite.load(Ordering::Relaxed)
    });
    Ok(result.map(|result| tensor(result, &dims)))
}

/// Terms of a product that take a thread some 20 µs.
fn short(isa: InstructionSet) -> usize {
    if isa == InstructionSet::AmxBf16 { 1 << 22 } else { 1 << 20 }
}

/// How threads share a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sharing {
    /// One thread: waking another takes longer.
    Alone,
    /// Each packs what it multiplies, so that nobody waits between the two.
    Parts,
    /// All pack the right side first, and then take rows.
    Rows,
    /// All pack the left side first, and then take columns.
    Columns,
}

impl Sharing {
    /// Of a product of so many rows and columns, and terms of each sum.
    fn of([rows, depth, columns]: [usize; 3], bf16_terms: usize, isa: InstructionSet) -> Self {
        let terms = rows.saturating_mul(columns).saturating_mul(depth);
        let short = short(isa);
        match terms {
            _ if parallel::threads() == 1 || terms <= short => Self::Alone,
            _ if terms <= 16 * short => Self::Parts,
            // The larger side is packed where it is multiplied: by the smaller one, from a cache.
            _ if rows < columns && rows.saturating_mul(depth * bf16_terms) <= NEAR => Self::Columns,
            _ => Self::Rows,
        }
    }
}

/// Where a product goes: lines of `stride` places, of which every thread writes others.
struct OutputMatrix<O> {
    first: *mut MaybeUninit<O>,
    stride: usize,
}

// SAFETY: see `line`.
unsafe impl<O: Send> Sync for OutputMatrix<O> {}

impl<O> OutputMatrix<O> {
    fn at(&self, row: usize, column: usize) -> *mut MaybeUninit<O> {
        self.first.wrapping_add(row * self.stride + column)
    }

    /// # Safety
    /// Places of the product, which nobody else reads or writes as long as these are borrowed.
    #[allow(clippy::mut_from_ref)]
    unsafe fn line(&self, row: usize, columns: Range<usize>) -> &mut [MaybeUninit<O>] {
        // SAFETY: the caller's.
        unsafe { std::slice::from_raw_parts_mut(self.at(row, columns.start), columns.len()) }
    }
}

/// A product, or what one thread makes of it: these rows and columns.
struct Product<'a, T, O> {
    left: MatrixView<'a, T>,
    right: MatrixView<'a, T>,
    bias: Option<&'a [f32]>,
    isa: InstructionSet,
    output: &'a OutputMatrix<O>,
    /// Whether all sums are, of an instruction set for which that matters.
    finite: &'a AtomicBool,
}

impl<T: Bf16Terms, O: Rounded> Product<'_, T, O> {
    /// Writes the product.
    fn run(&self, sharing: Sharing) {
        let (rows, columns) = (0..self.left.lines, 0..self.right.lines);
        let threads = parallel::threads();
        match sharing {
            Sharing::Alone => self.part(rows, columns),
            Sharing::Parts => {
                // The longer side is cut, as the other one is packed by every thread.
                let tall = rows.end >= columns.end;
                let lines = if tall { &rows } else { &columns };
                parts(lines, lines.end.div_ceil(threads), |part| match tall {
                    true => self.part(part, columns.clone()),
                    false => self.part(rows.clone(), part),
                });
            }
            Sharing::Rows => with_packed(self.columns(&columns), false, true, &mut |right| {
                let most = rows_of::<T>(self.left.depth);
                parts(&rows, rows.end.div_ceil(threads).min(most), |rows| {
                    with_packed(self.rows(&rows), true, false, &mut |left| {
                        self.block(rows.clone(), columns.clone(), left, right);
                    });
                });
            }),
            Sharing::Columns => with_packed(self.rows(&rows), true, true, &mut |left| {
                parts(&columns, columns.end.div_ceil(threads).min(COLUMNS), |columns| {
                    with_packed(self.columns(&columns), false, false, &mut |right| {
                        self.block(rows.clone(), columns.clone(), left, right);
                    });
                });
            }),
        }
    }

    /// Packs and multiplies on this thread.
    fn part(&self, rows: Range<usize>, columns: Range<usize>) {
        with_packed(self.columns(&columns), false, false, &mut |right| {
            let most = rows_of::<T>(self.left.depth);
            for first in rows.clone().step_by(most) {
                let rows = first..rows.end.min(first + most);
                with_packed(self.rows(&rows), true, false, &mut |left| {
                    self.block(rows.clone(), columns.clone(), left, right);
                });
            }
        });
    }

    fn rows(&self, rows: &Range<usize>) -> MatrixView<'_, T> {
        self.left.submatrix(rows.start, rows.len(), 0, self.left.depth)
    }

    fn columns(&self, columns: &Range<usize>) -> MatrixView<'_, T> {
        self.right.submatrix(columns.start, columns.len(), 0, self.right.depth)
    }

    /// Writes a block of the product.
    fn block(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
        left: &[Packed<'_>],
        right: &[Packed<'_>],
    ) {
        let (count, width) = (rows.len(), columns.len());
        let whole = left.len() == 1;
        let mut sums = if whole { Vec::new() } else { vec![0f32; count * width] };
        for (left, right) in left.iter().zip(right) {
            let gemm = PackedGemm {
                left: left.words,
                left_block: self.isa.rows() * left.stride,
                left_row: left.stride,
                left_step: 1,
                left_starts: &[0],
                right: right.words,
                right_block: 16 * right.stride,
                right_step: 16,
                right_starts: &[0],
                rows: count,
                columns: width,
                depth: left.depth,
                terms: T::COUNT,
                row_panels: false,
            };
            if whole && T::COUNT == 1 {
                let bias = self.bias.map(|bias| &bias[columns.clone()]);
                let out = self.output.at(rows.start, columns.start);
                // SAFETY: inside of the product, and the block is this thread's.
                unsafe { gemm.round::<O>(self.isa, bias, out, self.output.stride) };
                return;
            }
            if T::COUNT == 1 {
                gemm.add_to(self.isa, &mut sums, width);
                continue;
            }
            gemm.multiply(self.isa, |tile| {
                if !tile.is_finite() {
                    self.finite.store(false, Ordering::Relaxed);
                }
                if !whole {
                    tile.add_to(&mut sums, width);
                    return;
                }
                let column = columns.start + tile.column;
                let bias = self.bias.map(|bias| &bias[column..]);
                let out = self.output.at(rows.start + tile.row, column);
                // SAFETY: inside of the product, and the block is this thread's.
                unsafe { O::store_tile(&tile, bias, out, self.output.stride) };
            });
        }
        let bias = self.bias.map(|bias| &bias[columns.clone()]);
        for (row, sums) in rows.zip(sums.chunks(width)) {
            // SAFETY: as above.
            O::store_all(sums, bias, unsafe { self.output.line(row, columns.clone()) });
        }
    }
}

/// Calls `f` with the lines from 0 on, in parts of about `each`, on all threads.
fn parts(lines: &Range<usize>, each: usize, f: impl Fn(Range<usize>) + Sync) {
    let (end, each) = (lines.end, each.next_multiple_of(16));
    parallel::for_each(end.div_ceil(each), |n| f(n * each..end.min((n + 1) * each)));
}
