//! Matrix products of BF16 on processors that multiply pairs of it.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

use candle_core::{DType, Result, Tensor};
use half::bf16;
use rayon::prelude::*;

use super::cpu::Operand;
use crate::kernels::element::{Elements, tensor};
use crate::kernels::fresh::fresh;
use crate::kernels::panel::{Panel, Rounded, Side, Tile, Unit, with_cells};

/// The unit that multiplies these operands, where this module does.
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
            Product { left, right, bias, unit }.run(together, out);
        };
        match together {
            true => out.par_chunks_mut(size).enumerate().for_each(each),
            false => out.chunks_mut(size).enumerate().for_each(each),
        }
    });
    Ok(tensor(result, &dims))
}

struct Product<'a> {
    left: Side<'a>,
    right: Side<'a>,
    bias: Option<&'a [f32]>,
    unit: Unit,
}

impl Product<'_> {
    /// Writes the product, on this thread where it is to be `alone`.
    fn run<O: Rounded>(&self, alone: bool, out: &mut [MaybeUninit<O>]) {
        let (columns, depth) = (self.right.lines, self.right.depth);
        let threads = if alone { 1 } else { rayon::current_num_threads() };
        let rows = self.left.lines.div_ceil(threads).next_multiple_of(16).min(ROWS);
        let parts = || (0..depth).step_by(DEPTH).map(|k| (k, DEPTH.min(depth - k)));
        let whole = depth <= DEPTH;
        let sizes: Vec<usize> = parts()
            .map(|(k, len)| self.right.part(0, columns, k, len).cells())
            .map(|cells| cells * columns.next_multiple_of(16))
            .collect();
        with_cells([sizes.iter().sum()], |[packed]| {
            let mut rest = packed;
            let mut rights = Vec::with_capacity(sizes.len());
            for ((k, len), size) in parts().zip(sizes) {
                let (own, after) = rest.split_at_mut(size);
                rest = after;
                let side = self.right.part(0, columns, k, len);
                let block = side.cells() * 16;
                let pack = |(index, out): (usize, &mut [u32])| {
                    let lines = out.len() / side.cells();
                    let first = index * 64;
                    side.part(first, lines.min(columns - first), 0, len).pack_blocks(out);
                };
                match alone {
                    true => own.chunks_mut(4 * block).enumerate().for_each(pack),
                    false => own.par_chunks_mut(4 * block).enumerate().for_each(pack),
                }
                rights.push((k, len, &*own));
            }
            let task = |(index, out): (usize, &mut [MaybeUninit<O>])| {
                self.rows(index * rows, out, &rights, whole);
            };
            match alone {
                true => out.chunks_mut(rows * columns).enumerate().for_each(task),
                false => out.par_chunks_mut(rows * columns).enumerate().for_each(task),
            }
        });
    }

    /// Writes the rows from `first` on.
    fn rows<O: Rounded>(
        &self,
        first: usize,
        out: &mut [MaybeUninit<O>],
        rights: &[(usize, usize, &[u32])],
        whole: bool,
    ) {
        let columns = self.right.lines;
        let rows = out.len() / columns;
        let mut sums = if whole { Vec::new() } else { vec![0f32; rows * columns] };
        for &(k, len, right) in rights {
            let left = self.left.part(first, rows, k, len);
            let depth = left.depth.div_ceil(2);
            // Lines a kilobyte apart, or a multiple, would share few lines of the nearest cache.
            let pad = if left.cells().is_multiple_of(256) { 16 } else { 0 };
            let stride = left.cells() + pad;
            with_cells([rows.next_multiple_of(16) * stride], |[packed]| {
                left.pack_lines(stride, packed);
                let panel = Panel {
                    left: packed,
                    left_block: self.unit.rows() * stride,
                    left_row: stride,
                    left_step: 1,
                    left_segment: 0,
                    right,
                    right_block: 16 * left.cells(),
                    right_step: 16,
                    right_starts: &[0],
                    rows,
                    columns,
                    depth,
                };
                panel.multiply(self.unit, |tile| {
                    if whole {
                        self.store(&tile, columns, out);
                    } else {
                        for (row, line) in tile.sums.iter().enumerate().take(tile.rows) {
                            let start = (tile.row + row) * columns + tile.column;
                            let places = &mut sums[start..start + tile.columns];
                            places.iter_mut().zip(line).for_each(|(place, sum)| *place += sum);
                        }
                    }
                });
            });
        }
        if !whole {
            let bias = |column: usize| self.bias.map_or(0.0, |bias| bias[column]);
            for (index, (out, sum)) in out.iter_mut().zip(sums).enumerate() {
                out.write(O::lower(sum + bias(index % columns)));
            }
        }
    }

    fn store<O: Rounded>(&self, tile: &Tile<'_>, stride: usize, out: &mut [MaybeUninit<O>]) {
        let bias = self.bias.map(|bias| &bias[tile.column..tile.column + tile.columns]);
        for (row, sums) in tile.sums.iter().enumerate().take(tile.rows) {
            let start = (tile.row + row) * stride + tile.column;
            O::store_all(sums, bias, &mut out[start..start + tile.columns]);
        }
    }
}
