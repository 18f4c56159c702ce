//! Matrix products.

use candle_core::{DType, Result, Tensor};

use super::check::{check_dims, check_operand, shape_error};
use super::wants::{reads_other_operand, trim_operand};
use crate::Op;
use crate::autograd::{Backward, Gradient, Operator, apply};
use crate::error::bail;
use crate::kernels;

/// The matrix product of `lhs` and `rhs`.
///
/// # Shapes
///
/// `(…, m, k) × (…, k, n) → (…, m, n)`. Leading dimensions broadcast: each is that of the other, or 1, or missing. A
/// vector, `(k)`, is one row on the left and one column on the right, which the result has not: `(k) × (k) → ()`,
/// `(…, m, k) × (k) → (…, m)`, `(k) × (…, k, n) → (…, n)`. Transposed and repeated operands are read in place.
///
/// # Precision
///
/// Under autocast both are cast to the compute dtype. Products and sums in `F32`, rounded once to
/// the inputs' dtype, which both must share. Gradients likewise, in the dtypes of the operands as
/// given. Accumulates in `F32` over all of `k`; the gradient of what was broadcast over that too.
///
/// # Errors
///
/// Shapes, dtypes or devices that do not fit.
///
/// # Examples
///
/// ```
/// use candle_amp::ops;
/// use candle_core::{DType, Device, Tensor};
///
/// let ones = |shape: &[usize]| Tensor::ones(shape, DType::F16, &Device::Cpu);
/// let sum = ops::matmul(&ones(&[1, 4096])?, &ones(&[4096, 1])?)?;
/// assert_eq!(sum.to_dtype(DType::F32)?.to_vec2::<f32>()?, [[4096.0]]); // candle says 2048
///
/// // One matrix for all of a batch, and one that each of five has.
/// assert_eq!(ops::matmul(&ones(&[2, 3, 4])?, &ones(&[4, 5])?)?.dims(), [2, 3, 5]);
/// assert_eq!(ops::matmul(&ones(&[2, 1, 3, 4])?, &ones(&[1, 5, 4, 2])?)?.dims(), [2, 5, 3, 2]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.matmul`.
pub fn matmul(lhs: &Tensor, rhs: &Tensor) -> Result<Tensor> {
    apply(Matmul, &[lhs, rhs])
}

pub(super) struct Matmul;

/// Two operands of a product, as matrices of one number of leading dimensions.
struct Operands {
    lhs: Tensor,
    rhs: Tensor,
    /// The leading dimensions of the product.
    batch: Vec<usize>,
    /// Whether `lhs` is a vector, and whether `rhs` is.
    vectors: (bool, bool),
}

impl Operands {
    /// `None` where the shapes do not fit.
    fn of(lhs: &Tensor, rhs: &Tensor) -> Result<Option<Self>> {
        let vectors = (lhs.rank() == 1, rhs.rank() == 1);
        let lhs = if vectors.0 { lhs.unsqueeze(0)? } else { lhs.clone() };
        let rhs = if vectors.1 { rhs.unsqueeze(1)? } else { rhs.clone() };
        let rank = lhs.rank().max(rhs.rank());
        let (lhs, rhs) = (of_rank(lhs, rank)?, of_rank(rhs, rank)?);
        let (left, right) = (lhs.dims().split_last_chunk(), rhs.dims().split_last_chunk());
        let (Some((left, &[_, k])), Some((right, &[rhs_k, _]))) = (left, right) else {
            return Ok(None);
        };
        let common = left.iter().zip(right).map(|pair| match pair {
            (1, &size) | (&size, 1) => Some(size),
            (left, right) => (left == right).then_some(*left),
        });
        let Some(batch) = common.collect::<Option<Vec<_>>>().filter(|_| k == rhs_k) else {
            return Ok(None);
        };
        Ok(Some(Self { lhs, rhs, batch, vectors }))
    }

    /// The dimensions of matrices with the leading ones of the product.
    fn dims(&self, rows: usize, columns: usize) -> Vec<usize> {
        [self.batch.as_slice(), &[rows, columns]].concat()
    }

    /// `x · rhs`, of `x` with the leading dimensions of the product.
    fn times_rhs(&self, x: &Tensor, rhs: &Tensor, out: DType) -> Result<Tensor> {
        let (rank, [rows, shared]) = (self.batch.len(), last_two(x)?);
        let [_, columns] = last_two(rhs)?;
        let same = rhs.dims()[..rank] == self.batch;
        if !same && x.is_contiguous() && rhs.dims()[..rank].iter().all(|&size| size == 1) {
            // One matrix for all: a single product.
            let mut matrix = rhs.clone();
            while matrix.rank() > 2 {
                matrix = matrix.squeeze(0)?;
            }
            let all = x.elem_count() / shared.max(1);
            if all > 0 {
                let y = kernels::gemm::gemm(&x.reshape((all, shared))?, &matrix, None, out)?;
                return y.reshape(self.dims(rows, columns));
            }
        }
        let rhs = if same { rhs.clone() } else { rhs.broadcast_as(self.dims(shared, columns))? };
        kernels::gemm::gemm(x, &rhs, None, out)
    }

    fn forward(&self, out: DType) -> Result<Tensor> {
        let [m, k] = last_two(&self.lhs)?;
        let lhs = self.lhs.broadcast_as(self.dims(m, k))?;
        let y = self.times_rhs(&lhs, &self.rhs, out)?;
        let rank = y.rank();
        match self.vectors {
            (false, false) => Ok(y),
            (true, false) => y.squeeze(rank - 2),
            (false, true) => y.squeeze(rank - 1),
            (true, true) => y.squeeze(rank - 1)?.squeeze(rank - 2),
        }
    }

    /// The gradient of the product as matrices.
    fn gradient(&self, gradient: &Tensor) -> Result<Tensor> {
        let gradient =
            if self.vectors.1 { gradient.unsqueeze(gradient.rank())? } else { gradient.clone() };
        if self.vectors.0 { gradient.unsqueeze(gradient.rank() - 1) } else { Ok(gradient) }
    }

    /// The leading dimensions that an operand has and that it was repeated over.
    fn own_and_repeated(&self, operand: &Tensor) -> (Vec<usize>, Vec<usize>) {
        let repeated = |dim: &usize| operand.dims()[*dim] != self.batch[*dim];
        let (repeated, own) = (0..self.batch.len()).partition(repeated);
        (own, repeated)
    }

    /// The gradient of `lhs`. What it was repeated over is summed with the columns of the product.
    fn dlhs(&self, gradient: &Tensor, out: DType) -> Result<Tensor> {
        let (rank, (own, repeated)) = (self.batch.len(), self.own_and_repeated(&self.lhs));
        if repeated.is_empty() {
            return self.times_rhs(gradient, &self.rhs.transpose(rank, rank + 1)?, out);
        }
        let columns = [&repeated[..], &[rank + 1]].concat();
        let gradient = matrices(gradient, &own, &[rank], &columns)?;
        let rhs = matrices(&self.rhs, &own, &columns, &[rank])?;
        let rhs = self.repeat(&rhs, &own)?;
        kernels::gemm::gemm(&gradient, &rhs, None, out)?.reshape(self.lhs.dims())
    }

    /// The gradient of `rhs`. What it was repeated over is summed with the rows of the product.
    fn drhs(&self, gradient: &Tensor, out: DType) -> Result<Tensor> {
        let (rank, (own, repeated)) = (self.batch.len(), self.own_and_repeated(&self.rhs));
        let rows = [&repeated[..], &[rank]].concat();
        let lhs = self.repeat(&matrices(&self.lhs, &own, &rows, &[rank + 1])?, &own)?;
        let gradient = matrices(gradient, &own, &rows, &[rank + 1])?;
        let lhs = lhs.transpose(own.len(), own.len() + 1)?;
        kernels::gemm::gemm(&lhs, &gradient, None, out)?.reshape(self.rhs.dims())
    }

    /// `x`, of the leading dimensions `own` of an operand, with those of the product.
    fn repeat(&self, x: &Tensor, own: &[usize]) -> Result<Tensor> {
        let mut dims: Vec<usize> = own.iter().map(|&dim| self.batch[dim]).collect();
        dims.extend(last_two(x)?);
        if x.dims() == dims { Ok(x.clone()) } else { x.broadcast_as(dims) }
    }
}

/// `x` with dimensions of 1 before its own, `rank` in all.
fn of_rank(x: Tensor, rank: usize) -> Result<Tensor> {
    (x.rank()..rank).try_fold(x, |x, _| x.unsqueeze(0))
}

fn last_two(x: &Tensor) -> Result<[usize; 2]> {
    match x.dims() {
        &[.., rows, columns] => Ok([rows, columns]),
        dims => bail!("{dims:?} are no matrices"),
    }
}

/// `x` as matrices: the dimensions `own`, then `rows` in one and `columns` in one. A copy only where strides do not say that.
fn matrices(x: &Tensor, own: &[usize], rows: &[usize], columns: &[usize]) -> Result<Tensor> {
    let order = [own, rows, columns].concat();
    let x = if order.is_sorted() { x.clone() } else { x.permute(order)? };
    if rows.len() == 1 && columns.len() == 1 {
        return Ok(x);
    }
    let (own, rest) = x.dims().split_at(own.len());
    let (rows, columns) = rest.split_at(rows.len());
    x.reshape([own, &[rows.iter().product(), columns.iter().product()]].concat())
}

impl Operator for Matmul {
    type Saved = (Tensor, Tensor);

    fn op(&self) -> Op {
        Op::Matmul
    }

    fn reads(&self, input: usize, wanted: &[bool]) -> bool {
        reads_other_operand(input, wanted)
    }

    fn trim(&self, (lhs, rhs): &mut Self::Saved, wanted: &[bool]) -> Result<()> {
        trim_operand(lhs, 0, wanted)?;
        trim_operand(rhs, 1, wanted)
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Self::Saved)> {
        let (lhs, rhs) = (&inputs[0], &inputs[1]);
        check_operand(self.op(), lhs, "lhs", lhs, false)?;
        check_operand(self.op(), lhs, "rhs", rhs, true)?;
        for (name, operand) in [("lhs", lhs), ("rhs", rhs)] {
            if operand.rank() == 0 {
                let expected = "a vector or matrices: multiply by one number with `ops::mul`";
                return shape_error(self.op(), name, operand, expected.into());
            }
        }
        let Some(operands) = Operands::of(lhs, rhs)? else {
            let k = lhs.dims()[lhs.rank() - 1];
            let leading = &lhs.dims()[..lhs.rank().saturating_sub(2)];
            let of_lhs = if lhs.rank() == 1 { "(k)" } else { "(…, m, k)" };
            let expected = format!(
                "({k}) or (…, {k}, n) to fit lhs, {of_lhs} = {:?}, each of its leading dimensions that of lhs, \
                 {leading:?}, or 1, or missing: `transpose` one, or `unsqueeze` where they are to broadcast",
                lhs.shape()
            );
            return shape_error(self.op(), "rhs", rhs, expected);
        };
        Ok((operands.forward(lhs.dtype())?, (lhs.clone(), rhs.clone())))
    }

    fn backward(&self, ctx: &Backward<'_, Self::Saved>) -> Result<Vec<Option<Gradient>>> {
        let (lhs, rhs) = ctx.saved;
        let Some(operands) = Operands::of(lhs, rhs)? else {
            bail!("matmul: {:?} and {:?} do not fit", lhs.shape(), rhs.shape())
        };
        let gradient = operands.gradient(ctx.gradient)?;
        let dlhs = ctx.wants[0].map(|out| operands.dlhs(&gradient, out)?.reshape(lhs.dims()));
        let drhs = ctx.wants[1].map(|out| operands.drhs(&gradient, out)?.reshape(rhs.dims()));
        Ok(vec![dlhs.transpose()?.map(Gradient::owned), drhs.transpose()?.map(Gradient::owned)])
    }
}

/// `x · weightᵀ + bias`.
///
/// # Shapes
///
/// `x (…, k)`, `weight (n, k)`, `bias (n)` → `(…, n)`.
///
/// # Precision
///
/// Under autocast all are cast to the compute dtype. Outside, `x` and `weight` share a dtype;
/// `bias` may have any. Products, sums and the bias are added up in `F32`, rounded once to the
/// dtype of `x`. The gradient of the weight is accumulated in `F32` over all rows. That of the bias is summed in `F32`
/// within a block of rows, and in `F64` over the blocks.
///
/// # Errors
///
/// Shapes, dtypes or devices that do not fit.
///
/// # References
///
/// `torch.nn.functional.linear`.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    match bias {
        Some(bias) => apply(Linear, &[x, weight, bias]),
        None => apply(Linear, &[x, weight]),
    }
}

pub(super) struct Linear;

/// `x` with all leading dimensions in one.
pub(super) fn rows(x: &Tensor) -> Result<Tensor> {
    if x.rank() == 2 { Ok(x.clone()) } else { x.reshape(((), x.dim(candle_core::D::Minus1)?)) }
}

/// `x` in the shape `dims`: itself where it has that, as each of candle's views counts the owners of a device up.
fn shaped(x: Tensor, dims: &[usize]) -> Result<Tensor> {
    if x.dims() == dims { Ok(x) } else { x.reshape(dims) }
}

impl Operator for Linear {
    type Saved = (Tensor, Tensor);

    fn op(&self) -> Op {
        Op::Linear
    }

    fn reads(&self, input: usize, wanted: &[bool]) -> bool {
        reads_other_operand(input, wanted)
    }

    fn trim(&self, (x, ..): &mut Self::Saved, wanted: &[bool]) -> Result<()> {
        trim_operand(x, 0, wanted)
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Self::Saved)> {
        let (x, weight, bias) = (&inputs[0], &inputs[1], inputs.get(2));
        let n = outputs(self.op(), x, weight, bias)?;
        let y = kernels::gemm::gemm(&rows(x)?, &weight.t()?, bias, x.dtype())?;
        let mut dims = x.dims().to_vec();
        dims[x.rank() - 1] = n;
        Ok((shaped(y, &dims)?, (x.clone(), weight.clone())))
    }

    fn backward(&self, ctx: &Backward<'_, Self::Saved>) -> Result<Vec<Option<Gradient>>> {
        let (x, weight) = ctx.saved;
        let bias = ctx.wants.get(2).copied().flatten();
        let wants = [ctx.wants[0], ctx.wants[1], bias];
        let gradients = gradients(x, weight, &rows(ctx.gradient)?, wants)?;
        Ok(gradients.into_iter().take(ctx.wants.len()).map(|dx| dx.map(Gradient::owned)).collect())
    }
}

/// How many outputs `x · weightᵀ + bias` has.
pub(super) fn outputs(op: Op, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<usize> {
    check_operand(op, x, "x", x, false)?;
    check_operand(op, x, "weight", weight, true)?;
    let (Some(k), &[n, weight_k]) = (x.dims().last(), weight.dims()) else {
        return shape_error(op, "weight", weight, "(n, k)".into());
    };
    if *k != weight_k {
        let expected = format!("(n, {k}) for x of shape {:?}", x.shape());
        return shape_error(op, "weight", weight, expected);
    }
    if let Some(bias) = bias {
        check_operand(op, x, "bias", bias, false)?;
        check_dims(op, "bias", bias, &[n])?;
    }
    Ok(n)
}

/// The gradients of `x`, `weight` and a bias, from that of the outputs, `(rows, n)`.
pub(super) fn gradients(
    x: &Tensor,
    weight: &Tensor,
    gradient: &Tensor,
    wants: [Option<DType>; 3],
) -> Result<[Option<Tensor>; 3]> {
    let dx =
        wants[0].map(|dtype| shaped(kernels::gemm::gemm(gradient, weight, None, dtype)?, x.dims()));
    let dweight = wants[1].map(|dtype| kernels::gemm::gemm(&gradient.t()?, &rows(x)?, None, dtype));
    let dbias = wants[2].map(|dtype| kernels::reduce::sum_to_channel(gradient, 1, dtype));
    Ok([dx.transpose()?, dweight.transpose()?, dbias.transpose()?])
}
