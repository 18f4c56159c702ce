//! The weight of an LSTM, packed once for the products of all steps, or else widened.
//!
//! A BF16 weight is multiplied by AVX512-BF16 or AMX where these are the best for BF16: each step rounds its rows to
//! BF16. Any other weight is widened to F32, and multiplied by the vectors of the processor.

use std::ops::Range;

use candle_core::{Result, Tensor};
use half::bf16;

use super::cpu::widened;
use super::gate::Gate;
use super::recurrent::{Recurrent, WidenedWeight};
use super::sequence::Dims;
use crate::kernels::contiguous;
use crate::kernels::cpu::dtype::Elements;
use crate::kernels::cpu::parallel;
use crate::kernels::gemm::micro::{
    InstructionSet, MatrixView, PackedGemm, PackedWords, WIDTH, with_words,
};
use crate::kernels::gemm::{CUT, Matrix, narrow};

/// A type of arithmetic, and what multiplies in it.
pub(super) trait Multiply: Gate {
    /// A weight `(depth, columns)` for the products of all steps.
    fn recurrent(weight: &Tensor, dims: Dims) -> Result<Box<dyn Recurrent<Self>>>;
}

impl Multiply for f64 {
    fn recurrent(weight: &Tensor, dims: Dims) -> Result<Box<dyn Recurrent<f64>>> {
        Ok(Box::new(WidenedWeight::of(weight, dims)?))
    }
}

impl Multiply for f32 {
    fn recurrent(weight: &Tensor, dims: Dims) -> Result<Box<dyn Recurrent<f32>>> {
        if let Some(packed) = PackedWeight::of(weight, dims)? {
            return Ok(Box::new(packed));
        }
        Ok(Box::new(WidenedWeight::of(weight, dims)?))
    }
}

/// Units up to which a thread multiplies its rows at every step alone: a longer product is worth all threads.
const UNITS: usize = 512;

/// Rows of a batch from which on an F32 weight is packed: a product of few rows would leave most of a block empty.
const FEW_ROWS: usize = 4;

/// A weight in words. In BF16, one of up to 360 units stays in a second-level cache of 1 MiB.
struct PackedWeight {
    weight: PackedWords,
    /// Words of a column.
    words: usize,
    columns: usize,
    isa: InstructionSet,
    /// Rows of the batch that go through all steps together.
    rows: usize,
    /// Threads that share the columns of a step.
    threads: usize,
}

impl PackedWeight {
    /// Of a weight `(depth, columns)`; `None` where it is multiplied unpacked.
    fn of(weight: &Tensor, dims: Dims) -> Result<Option<Self>> {
        let suits = |isa: &InstructionSet| {
            (1..=UNITS).contains(&dims.hidden) && (isa.is_bf16() || dims.batch >= FEW_ROWS)
        };
        let isa = InstructionSet::of([weight]).filter(suits);
        isa.map(|isa| Self::new(weight, isa, dims.batch, parallel::threads())).transpose()
    }

    fn new(weight: &Tensor, isa: InstructionSet, batch: usize, threads: usize) -> Result<Self> {
        let block = isa.rows();
        let (rows, threads) = match batch.div_ceil(block) {
            _ if isa.is_bf16() => (block, 1),
            blocks if blocks < threads => (batch.max(1), threads),
            _ => (batch.div_ceil(threads).next_multiple_of(block), 1),
        };
        let pack = if isa.is_bf16() { Self::of_bf16 } else { Self::of_f32 };
        let (weight, words, columns) = pack(weight)?;
        Ok(Self { weight, words, columns, isa, rows, threads })
    }

    /// Its words, those of a column, and columns.
    fn of_bf16(weight: &Tensor) -> Result<(PackedWords, usize, usize)> {
        let (depth, columns) = weight.dims2()?;
        let (dense, line_stride, depth_stride) = match weight.is_contiguous() {
            true => (weight.clone(), 1, columns),
            false => (contiguous(&weight.t()?)?, depth, 1),
        };
        let data = Elements::<bf16>::of(&dense)?;
        let view = MatrixView { data: &data, lines: columns, depth, line_stride, depth_stride };
        let mut packed = PackedWords::new(columns.next_multiple_of(16) * view.words());
        view.pack_blocks(packed.as_mut_slice());
        Ok((packed, view.words(), columns))
    }

    /// As [`Self::of_bf16`].
    fn of_f32(weight: &Tensor) -> Result<(PackedWords, usize, usize)> {
        let (depth, columns) = weight.dims2()?;
        let rows = widened::<f32>(weight)?;
        let mut packed = PackedWords::new(columns.next_multiple_of(16) * depth);
        for (row, elements) in rows.chunks_exact(columns).enumerate() {
            for (block, elements) in elements.chunks(16).enumerate() {
                let at = (block * depth + row) * 16;
                let words = &mut packed.as_mut_slice()[at..][..16];
                words[elements.len()..].fill(0);
                words.iter_mut().zip(elements).for_each(|(word, x)| *word = x.to_bits());
            }
        }
        Ok((packed, depth, columns))
    }

    /// Packs rows, `self.words` words each, for the left side of a product.
    fn pack(&self, states: Matrix<'_, f32>, words: &mut [u32]) {
        let Matrix { rows, cols: depth, row_stride, .. } = states;
        let state = |row: usize| &states.data[row * row_stride..][..depth];
        if self.isa.is_f32() {
            for (row, words) in words.chunks_exact_mut(depth).enumerate().take(rows) {
                words.iter_mut().zip(state(row)).for_each(|(word, x)| *word = x.to_bits());
            }
            return;
        }
        let mut rounded = vec![bf16::ZERO; rows * depth];
        for (row, rounded) in rounded.chunks_exact_mut(depth).enumerate() {
            narrow(state(row), rounded);
        }
        let (data, lines) = (&rounded[..], rows);
        let view = MatrixView { data, lines, depth, line_stride: depth, depth_stride: 1 };
        view.pack_lines(self.words, words);
    }
}

impl Recurrent<f32> for PackedWeight {
    fn rows(&self) -> usize {
        self.rows
    }

    fn multiply(
        &self,
        states: Matrix<'_, f32>,
        dst: &mut [f32],
        row_stride: usize,
        accumulate: bool,
    ) {
        let Matrix { rows, cols: depth, .. } = states;
        if !accumulate {
            dst.chunks_mut(row_stride).for_each(|row| row[..self.columns].fill(0.0));
        }
        with_words([rows.next_multiple_of(16) * self.words], |[words]| {
            self.pack(states, words);
            let words = &*words;
            let add = |columns: Range<usize>, dst: &mut [f32], row_stride: usize| {
                let gemm = PackedGemm {
                    left: words,
                    left_block: self.isa.rows() * self.words,
                    left_row: self.words,
                    left_step: 1,
                    left_starts: &[0],
                    right: &self.weight.as_slice()[columns.start * self.words..],
                    right_block: 16 * self.words,
                    right_step: 16,
                    right_starts: &[0],
                    rows,
                    columns: columns.len(),
                    depth: depth.div_ceil(self.isa.per_word()),
                    terms: 1,
                    row_panels: false,
                };
                gemm.multiply(self.isa, |tile| tile.add_to(dst, row_stride));
            };
            if self.threads == 1 || rows * depth * self.columns < CUT {
                return add(0..self.columns, dst, row_stride);
            }
            // In whole tiles of results; the cuts change no sum.
            let width = self.columns.div_ceil(self.threads).next_multiple_of(WIDTH);
            let parts = parallel::map(self.columns.div_ceil(width), |part| {
                let columns = part * width..self.columns.min((part + 1) * width);
                let mut sums = vec![0f32; rows * columns.len()];
                add(columns.clone(), &mut sums, columns.len());
                (columns, sums)
            });
            for (columns, sums) in parts {
                for (row, sums) in sums.chunks_exact(columns.len()).enumerate() {
                    let dst = &mut dst[row * row_stride..][columns.clone()];
                    dst.iter_mut().zip(sums).for_each(|(dst, sum)| *dst += sum);
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;
    use crate::kernels::elementwise::testing::{of, random, values};

    /// Of small whole numbers, whose sums are exact in any order.
    #[test]
    fn packed_weights_multiply_as_unpacked_ones() {
        let whole = |dims: &[usize], seed| {
            let numbers = random(dims, DType::F64, seed);
            values(&numbers).into_iter().map(|x| (4.0 * x).round()).collect::<Vec<_>>()
        };
        let bf16 = [InstructionSet::Avx512Bf16, InstructionSet::AmxBf16];
        for isa in InstructionSet::of_f32().chain(bf16) {
            if !isa.is_runnable() {
                continue;
            }
            for ([rows, depth, columns], threads) in [
                ([1, 1, 1], 1),
                ([7, 33, 50], 1),
                ([19, 64, 17], 5),
                ([19, 256, 250], 1),
                ([19, 256, 250], 5),
            ] {
                let (states, weight) = (whole(&[rows, depth], 1), whole(&[depth, columns], 2));
                let tensor = of(weight.clone(), &[depth, columns], DType::BF16);
                let turned = tensor.t().unwrap().force_contiguous().unwrap().t().unwrap();
                for (tensor, accumulate) in
                    [(&tensor, false), (&tensor, true), (&turned, false), (&turned, true)]
                {
                    // Rows of either side begin further apart than they are long.
                    let (gap, stride) = (depth + 3, columns + 2);
                    let mut data = vec![0.5f32; rows * gap];
                    for (i, state) in states.iter().enumerate() {
                        data[i / depth * gap + i % depth] = *state as f32;
                    }
                    let matrix =
                        Matrix { data: &data, rows, cols: depth, row_stride: gap, col_stride: 1 };
                    let mut dst = vec![2f32; rows * stride];
                    let packed = PackedWeight::new(tensor, isa, rows, threads).unwrap();
                    packed.multiply(matrix, &mut dst, stride, accumulate);
                    for (i, &actual) in dst.iter().enumerate() {
                        let (row, column) = (i / stride, i % stride);
                        let product = |k| states[row * depth + k] * weight[k * columns + column];
                        let expected = match (column < columns, accumulate) {
                            (false, _) => 2.0,
                            (true, false) => (0..depth).map(product).sum(),
                            (true, true) => 2.0 + (0..depth).map(product).sum::<f64>(),
                        };
                        assert_eq!(f64::from(actual), expected, "{isa:?} {row} {column}");
                    }
                }
            }
        }
    }

    #[test]
    fn threads_take_rows_or_share_columns() {
        let weight = of(vec![1.0; 4], &[2, 2], DType::F32);
        for isa in InstructionSet::of_f32() {
            for (batch, threads, rows, shared_by) in
                [(16, 1, 16, 1), (16, 2, 8, 1), (17, 2, 16, 1), (16, 4, 16, 4), (0, 2, 1, 2)]
            {
                let packed = PackedWeight::new(&weight, isa, batch, threads).unwrap();
                assert_eq!((packed.rows, packed.threads), (rows, shared_by), "{batch}, {threads}");
            }
        }
    }
}
