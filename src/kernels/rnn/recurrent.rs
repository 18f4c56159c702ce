//! The recurrent products of LSTM and GRU, `states × weight` once a step, by a weight that is prepared once.
//!
//! A step needs the result of the one before, so its product is small, and every step reads the whole weight. There are
//! two ways to multiply, forward and backward:
//!
//! - [`WidenedWeight`]: the weight in F32 (F64 for F64), multiplied by the `gemm` crate. All threads share each step.
//! - `PackedWeight`, for LSTM: a BF16 weight of at most 512 units, where BF16 is multiplied by AVX512-BF16 or AMX. It
//!   is packed once. Each step rounds its rows to BF16 and packs them. A thread takes one block of the micro-kernel, 8 or
//!   16 rows of the batch, through all steps. So threads do not meet at every step, and a small weight stays in a
//!   cache.
//!
//! Sums are F32 (F64 for F64) both ways, and are not rounded: they go into or onto states and gates of that type.

use candle_core::{Result, Tensor};

use super::cpu::widened;
use super::gate::Gate;
use super::sequence::Dims;
use crate::kernels::gemm::{Matrix, Threads, product};

/// Multiplies rows by a weight, step by step.
pub(super) trait Recurrent<A>: Send + Sync {
    /// How many rows of a batch go through all steps together; those of others go beside them, on other threads.
    fn rows(&self, dims: Dims) -> usize;

    /// `dst = states × weight`, or `+=`: rows of `dst` lie `row_stride` elements apart.
    fn multiply(&self, states: Matrix<'_, A>, dst: &mut [A], row_stride: usize, accumulate: bool);
}

/// A weight in the type of the arithmetic. All threads share the product of a step.
pub(super) struct WidenedWeight<A> {
    weight: Vec<A>,
    columns: usize,
}

impl<A: Gate> WidenedWeight<A> {
    /// Of a weight `(n, columns)`.
    pub(super) fn of(weight: &Tensor) -> Result<Self> {
        Ok(Self { weight: widened(weight)?, columns: weight.dim(1)? })
    }
}

impl<A: Gate> Recurrent<A> for WidenedWeight<A> {
    fn rows(&self, dims: Dims) -> usize {
        dims.batch.max(1)
    }

    fn multiply(&self, states: Matrix<'_, A>, dst: &mut [A], row_stride: usize, accumulate: bool) {
        let weight = Matrix::new(&self.weight, states.cols, self.columns);
        product(states, weight, dst, row_stride, accumulate, Threads::All);
    }
}

/// A type of arithmetic, and what multiplies in it.
pub(super) trait Multiply: Gate {
    /// A weight `(depth, columns)` of so many hidden units, for the products of all steps.
    fn recurrent(weight: &Tensor, hidden: usize) -> Result<Box<dyn Recurrent<Self>>>;
}

impl Multiply for f64 {
    fn recurrent(weight: &Tensor, _: usize) -> Result<Box<dyn Recurrent<f64>>> {
        Ok(Box::new(WidenedWeight::of(weight)?))
    }
}

impl Multiply for f32 {
    fn recurrent(weight: &Tensor, hidden: usize) -> Result<Box<dyn Recurrent<f32>>> {
        if let Some(packed) = packed::PackedWeight::of(weight, hidden)? {
            return Ok(Box::new(packed));
        }
        Ok(Box::new(WidenedWeight::of(weight)?))
    }
}

/// `dst += state × weight` of one step: `dst` holds all `gates` of all steps, `(b, t, gates)`, and
/// `weight` is `(n, gates)`.
pub(super) fn add_recurrent<A: Gate>(
    state: &[A],
    weight: &dyn Recurrent<A>,
    (dst, gates): (&mut [A], usize),
    step: usize,
    dims: Dims,
) {
    let state = Matrix::new(state, dims.batch, dims.hidden);
    weight.multiply(state, &mut dst[step * gates..], dims.steps * gates, true);
}

/// `dst (b, n) = gate_gradients × weight` of one step, or `+=`: `gate_gradients` holds those of all `gates` of all
/// steps, `(b, t, gates)`, and `weight` is `(gates, n)`.
pub(super) fn recurrent_gradient<A: Gate>(
    (gate_gradients, gates): (&[A], usize),
    weight: &dyn Recurrent<A>,
    dst: &mut [A],
    step: usize,
    accumulate: bool,
    dims: Dims,
) {
    let gate_gradients = Matrix {
        data: &gate_gradients[step * gates..],
        rows: dims.batch,
        cols: gates,
        row_stride: dims.steps * gates,
        col_stride: 1,
    };
    weight.multiply(gate_gradients, dst, dims.hidden, accumulate);
}

mod packed {
    use candle_core::{DType, Result, Tensor};
    use half::bf16;

    use crate::kernels::contiguous;
    use crate::kernels::cpu::dtype::Elements;
    use crate::kernels::gemm::micro::{
        InstructionSet, MatrixView, PackedGemm, PackedWords, with_words,
    };
    use crate::kernels::gemm::{Matrix, narrow};
    use crate::kernels::rnn::recurrent::Recurrent;
    use crate::kernels::rnn::sequence::Dims;

    /// Units up to which a thread multiplies its rows at every step alone: a longer product is worth all threads.
    const UNITS: usize = 512;

    /// A weight of BF16. Rows are rounded to BF16 too, and a thread takes one block of them through all steps. It
    /// waits for nobody, and a weight of up to 360 units stays in a second-level cache of 1 MiB.
    pub(in super::super) struct PackedWeight {
        weight: PackedWords,
        /// Words of a column.
        words: usize,
        columns: usize,
        isa: InstructionSet,
    }

    impl PackedWeight {
        /// Of a weight `(depth, columns)` for `hidden` units; `None` where something else multiplies it.
        pub(in super::super) fn of(weight: &Tensor, hidden: usize) -> Result<Option<Self>> {
            let isa = InstructionSet::best_for_bf16().filter(|isa| isa.is_bf16());
            let isa = isa.filter(|_| weight.dtype() == DType::BF16 && hidden <= UNITS);
            isa.map(|isa| Self::new(weight, isa)).transpose()
        }

        fn new(weight: &Tensor, isa: InstructionSet) -> Result<Self> {
            let (depth, columns) = weight.dims2()?;
            let (dense, line_stride, depth_stride) = match weight.is_contiguous() {
                true => (weight.clone(), 1, columns),
                false => (contiguous(&weight.t()?)?, depth, 1),
            };
            let data = Elements::<bf16>::of(&dense)?;
            let view = MatrixView { data: &data, lines: columns, depth, line_stride, depth_stride };
            let mut packed = PackedWords::new(columns.next_multiple_of(16) * view.words());
            view.pack_blocks(packed.as_mut_slice());
            Ok(Self { weight: packed, words: view.words(), columns, isa })
        }
    }

    impl Recurrent<f32> for PackedWeight {
        fn rows(&self, _: Dims) -> usize {
            self.isa.rows()
        }

        fn multiply(
            &self,
            states: Matrix<'_, f32>,
            dst: &mut [f32],
            row_stride: usize,
            accumulate: bool,
        ) {
            let Matrix { rows, cols: depth, .. } = states;
            let mut rounded = vec![bf16::ZERO; rows * depth];
            for (row, rounded) in rounded.chunks_exact_mut(depth).enumerate() {
                narrow(&states.data[row * states.row_stride..][..depth], rounded);
            }
            if !accumulate {
                dst.chunks_mut(row_stride).for_each(|row| row[..self.columns].fill(0.0));
            }
            let (data, lines) = (&rounded[..], rows);
            let view = MatrixView { data, lines, depth, line_stride: depth, depth_stride: 1 };
            with_words([rows.next_multiple_of(16) * self.words], |[words]| {
                view.pack_lines(self.words, words);
                let gemm = PackedGemm {
                    left: words,
                    left_block: self.isa.rows() * self.words,
                    left_row: self.words,
                    left_step: 1,
                    left_starts: &[0],
                    right: self.weight.as_slice(),
                    right_block: 16 * self.words,
                    right_step: 16,
                    right_starts: &[0],
                    rows,
                    columns: self.columns,
                    depth: depth.div_ceil(2),
                    terms: 1,
                    row_panels: false,
                };
                gemm.multiply(self.isa, |tile| tile.add_to(dst, row_stride));
            });
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;
        use crate::kernels::elementwise::testing::{of, random, values};

        /// Of small whole numbers, whose sums are exact in any order.
        #[test]
        fn packed_weights_multiply_as_unpacked_ones() {
            let whole = |dims: &[usize], seed| {
                let numbers = random(dims, DType::F64, seed);
                values(&numbers).into_iter().map(|x| (4.0 * x).round()).collect::<Vec<_>>()
            };
            for isa in [InstructionSet::Avx512Bf16, InstructionSet::AmxBf16] {
                if !isa.is_runnable() {
                    continue;
                }
                for [rows, depth, columns] in [[1, 1, 1], [7, 33, 50], [19, 64, 17]] {
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
                        let matrix = Matrix {
                            data: &data,
                            rows,
                            cols: depth,
                            row_stride: gap,
                            col_stride: 1,
                        };
                        let mut dst = vec![2f32; rows * stride];
                        let packed = PackedWeight::new(tensor, isa).unwrap();
                        packed.multiply(matrix, &mut dst, stride, accumulate);
                        for (i, &actual) in dst.iter().enumerate() {
                            let (row, column) = (i / stride, i % stride);
                            let product =
                                |k| states[row * depth + k] * weight[k * columns + column];
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
    }
}
