//! Matrix products on the CPU by [`product`]: operands are widened to F32 or F64, and results rounded once.
//!
//! That reads any strides. So an [`Operand`] is copied only if no strides over contiguous elements describe it; a
//! transposed or broadcast tensor is not. Elements of another dtype are widened into scratch. A bias is written into
//! the rows of the result first, and the product is added to it. A narrower result is rounded from scratch at the end.
//!
//! A batch of at least as many matrices as threads is one matrix a task. In a smaller one, all threads share each
//! product.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

use candle_core::{Result, Tensor, WithDType};

use super::matrix::Matrix;
use super::operand::{Arithmetic, BLOCK, narrow};
use super::product::{Threads, product, product_uninit};
use crate::kernels::contiguous;
use crate::kernels::cpu::dtype::{Element, tensor};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::uninit::uninit_vec;

/// See [`super::gemm`]; the operands are of formats whose arithmetic is `O::Acc`, the result `O`.
pub(super) fn gemm<O: Element>(lhs: &Tensor, rhs: &Tensor, bias: Option<&Tensor>) -> Result<Tensor>
where
    O::Acc: Arithmetic,
{
    let (lhs, rhs) = (Operand::of(lhs)?, Operand::of(rhs)?);
    let mut shape = lhs.dims.clone();
    shape[lhs.dims.len() - 1] = rhs.cols();
    let size = lhs.rows() * rhs.cols();
    let count: usize = shape.iter().product();
    if count == 0 {
        return Ok(tensor::<O>(Vec::new(), &shape));
    }
    let bias = bias.map(Tensor::contiguous).transpose()?;
    let _held = hold([&lhs.tensor, &rhs.tensor].into_iter().chain(&bias));
    let (left, right) = (O::Acc::open(&lhs.tensor)?, O::Acc::open(&rhs.tensor)?);
    let bias = bias.as_ref().map(O::Acc::open).transpose()?;

    let multiply = |dst: &mut [MaybeUninit<O::Acc>]| {
        let scratch = [(&left, &lhs), (&right, &rhs)]
            .map(|(s, o)| if s.borrowed().is_some() { 0 } else { o.tensor.elem_count() });
        let bias_len = if bias.is_some() { rhs.cols() } else { 0 };
        O::Acc::with_scratch(scratch[0] + scratch[1] + bias_len, |buffer| {
            let (left_buffer, buffer) = buffer.split_at_mut(scratch[0]);
            let (right_buffer, bias_buffer) = buffer.split_at_mut(scratch[1]);
            let left = left.read_all(left_buffer);
            let right = right.read_all(right_buffer);
            let bias = bias.as_ref().map(|bias| bias.read(0..bias_len, bias_buffer));
            let matrices = dst.len() / size;
            let threads = match matrices < parallel::threads() {
                true => Threads::All,
                false => Threads::One,
            };
            parallel::for_each_chunk(dst, size, |index, dst| {
                let (left, right) = (lhs.matrix(left, index), rhs.matrix(right, index));
                let Some(bias) = bias else {
                    return product_uninit(left, right, dst, threads);
                };
                let rows = BLOCK / bias.len() + 1;
                parallel::for_each_chunk(dst, rows * bias.len(), |_, rows| {
                    rows.chunks_mut(bias.len()).for_each(|row| {
                        row.write_copy_of_slice(bias);
                    });
                });
                // SAFETY: the rows have all been written.
                let dst = unsafe { dst.assume_init_mut() };
                product(left, right, dst, rhs.cols(), true, threads);
            });
        });
    };

    if O::DTYPE == O::Acc::DTYPE {
        return Ok(tensor::<O::Acc>(uninit_vec(count, multiply), &shape));
    }
    let mut result = vec![O::default(); count];
    O::Acc::with_scratch(count, |wide| {
        // SAFETY: only initialised elements are written to it.
        multiply(unsafe { &mut *(std::ptr::from_mut(&mut *wide) as *mut [MaybeUninit<O::Acc>]) });
        let to_narrow = |_, narrowed: &mut [O], wide: &[O::Acc]| narrow(wide, narrowed);
        parallel::for_each_chunk_zipped(&mut result, BLOCK, wide, BLOCK, to_narrow);
    });
    Ok(tensor(result, &shape))
}

/// A tensor of shape `(…,rows,cols)`, as contiguous elements and the strides to read them by.
pub(super) struct Operand {
    pub(super) dims: Vec<usize>,
    strides: Vec<usize>,
    pub(super) tensor: Tensor,
}

impl Operand {
    /// Copies only what no strides over contiguous elements describe, such as a narrowed view.
    pub(super) fn of(tensor: &Tensor) -> Result<Self> {
        let dims = tensor.dims().to_vec();
        let dense = Self::dense(tensor)?;
        if dense.is_contiguous() {
            return Ok(Self { dims, strides: tensor.stride().to_vec(), tensor: dense });
        }
        let tensor = contiguous(tensor)?;
        Ok(Self { dims, strides: tensor.stride().to_vec(), tensor })
    }

    /// The elements from a column to the next, as [`Self::of`] has them.
    pub(super) fn column_stride(tensor: &Tensor) -> Result<usize> {
        let stride = tensor.stride().last().copied().unwrap_or(1);
        Ok(if Self::dense(tensor)?.is_contiguous() { stride } else { 1 })
    }

    /// The elements once each, in the order of their strides.
    fn dense(tensor: &Tensor) -> Result<Tensor> {
        let strides = tensor.stride();
        let mut dense = tensor.detach();
        for (dim, (&stride, &size)) in strides.iter().zip(tensor.dims()).enumerate() {
            if stride == 0 && size > 1 {
                dense = dense.narrow(dim, 0, 1)?;
            }
        }
        let mut order: Vec<usize> = (0..strides.len()).collect();
        order.sort_by_key(|&dim| (std::cmp::Reverse(strides[dim]), dim));
        dense.permute(order)
    }

    /// As [`Self::of`], and copied where neither the elements of a row nor those of a column follow
    /// each other.
    pub(super) fn with_unit_stride(tensor: &Tensor) -> Result<Self> {
        let operand = Self::of(tensor)?;
        let last = operand.strides.len() - 1;
        if operand.strides[last - 1..].contains(&1) {
            return Ok(operand);
        }
        Self::of(&tensor.detach().force_contiguous()?)
    }

    pub(super) fn rows(&self) -> usize {
        self.dims[self.dims.len() - 2]
    }

    pub(super) fn cols(&self) -> usize {
        self.dims[self.dims.len() - 1]
    }

    /// Matrix number `index`, counted in row-major order of the leading dimensions.
    pub(super) fn matrix<'a, A>(&self, data: &'a [A], mut index: usize) -> Matrix<'a, A> {
        let leading = self.dims.len() - 2;
        let mut offset = 0;
        for dim in (0..leading).rev() {
            offset += index % self.dims[dim] * self.strides[dim];
            index /= self.dims[dim];
        }
        Matrix {
            // An empty matrix (k = 0) may start beyond its data.
            data: data.get(offset..).unwrap_or_default(),
            rows: self.rows(),
            cols: self.cols(),
            row_stride: self.strides[leading],
            col_stride: self.strides[leading + 1],
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Result, Tensor};

    use super::Operand;
    use crate::kernels::gemm::tests::{generator, random};

    /// A trace names the algorithm by the strides of tensors, and a product is computed by those of matrices.
    #[test]
    fn strides_of_columns_are_those_that_are_read() -> Result<()> {
        let mut rng = generator(8);
        let x = random(&mut rng, &[3, 20, 30], DType::F32);
        for (x, expected) in [
            (x.clone(), 1),
            (x.t()?, 30),
            (x.permute((1, 0, 2))?, 1),
            (x.permute((1, 2, 0))?, 600),
            (x.narrow(2, 3, 20)?, 1),
            (x.t()?.narrow(1, 0, 7)?, 1),
            (x.narrow(0, 1, 1)?.t()?, 30),
            (x.narrow(2, 0, 1)?.broadcast_as((3, 20, 9))?, 1),
            (Tensor::ones((3, 20, 1), DType::F32, &Device::Cpu)?.broadcast_as((3, 20, 9))?, 0),
            (random(&mut rng, &[20, 30], DType::F32).t()?.broadcast_as((3, 30, 20))?, 30),
        ] {
            let operand = Operand::of(&x)?;
            let data = vec![0f32; operand.tensor.elem_count()];
            let read = operand.matrix(&data, 0).col_stride;
            let said = Operand::column_stride(&x)?;
            assert_eq!([said, read], [expected; 2], "{:?} {:?}", x.dims(), x.stride());
        }
        Ok(())
    }
}
