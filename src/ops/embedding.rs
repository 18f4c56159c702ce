//! Rows of a table by number.

use candle_core::{DType, Result, Tensor};

use super::check::{check_operand, shape_error};
use crate::Op;
use crate::autograd::{Backward, Gradient, Operator, apply};
use crate::error::ArgumentError;
use crate::error::bail;
use crate::kernels::embedding as kernel;

/// The rows of `table` that `ids` name.
///
/// # Shapes
///
/// `ids` of any shape, `table (rows, d)` → that of `ids`, then `d`.
///
/// # Precision
///
/// `ids` in `U8`, `U32` or `I64`, `table` in any floating-point dtype, which the result has too:
/// nothing is rounded, and autocast casts nothing. The gradient of the table is added up in the order of `ids`, whatever the
/// dtypes: in `F32` over 64 of them, and these sums in `F64`. So a row named 4,096 times gets 4,096 times
/// the gradient; candle's gives 2,048 times in `F16`.
///
/// # Errors
///
/// Shapes, dtypes or devices that do not fit; more than 2³² - 1 ids or rows; an id that names no row, with its position. On a CUDA
/// device nobody waits to look at the ids: one that names no row gives NaN, and gets no gradient.
///
/// # Examples
///
/// ```
/// use candle_amp::ops;
/// use candle_core::{Device, Tensor};
///
/// let table = Tensor::new(&[[1f32, 2.], [3., 4.]], &Device::Cpu)?;
/// let y = ops::embedding(&Tensor::new(&[1u32, 0, 1], &Device::Cpu)?, &table)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[3., 4.], [1., 2.], [3., 4.]]);
/// let error = ops::embedding(&Tensor::new(&[[0i64, -1]], &Device::Cpu)?, &table).unwrap_err();
/// assert!(error.to_string().contains("the id at [0, 1] is -1, expected one of 2 rows"));
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.nn.functional.embedding`.
pub fn embedding(ids: &Tensor, table: &Tensor) -> Result<Tensor> {
    apply(Embedding, &[ids, table])
}

struct Embedding;

/// The most ids, and rows of a table.
pub(super) const MOST: usize = u32::MAX as usize;

impl Operator for Embedding {
    /// The ids, `(n)`, and the number of rows.
    type Saved = (Tensor, usize);

    fn op(&self) -> Op {
        Op::Embedding
    }

    fn reads(&self, input: usize, _wanted: &[bool]) -> bool {
        input == 0
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Self::Saved)> {
        let (ids, table) = (&inputs[0], &inputs[1]);
        check_operand(self.op(), ids, "table", table, false)?;
        let &[rows, d] = table.dims() else {
            return shape_error(self.op(), "table", table, "(rows, d)".into());
        };
        check_ids_dtype(self.op(), "rows", ids)?;
        // Kernels number ids, and rows, by U32.
        if rows > MOST {
            let expected = format!("(rows, d) of at most {MOST} rows");
            return shape_error(self.op(), "table", table, expected);
        }
        let count = ids.dims().iter().try_fold(1usize, |count, &size| count.checked_mul(size));
        if !ids.dims().contains(&0) && count.is_none_or(|count| count > MOST) {
            return shape_error(self.op(), "ids", ids, format!("at most {MOST} ids: split them"));
        }
        check_ids(self.op(), "rows", ids, rows)?;
        let flat = kernel::numbers(&ids.flatten_all()?)?;
        let dims = [ids.dims(), &[d]].concat();
        Ok((kernel::gather(&flat, table)?.reshape(dims)?, (flat, rows)))
    }

    fn backward(&self, ctx: &Backward<'_, Self::Saved>) -> Result<Vec<Option<Gradient>>> {
        let (ids, rows) = ctx.saved;
        let dtable = ctx.wants[1].map(|out| {
            let d = ctx.gradient.dims().last().copied().unwrap_or(0);
            let grad = ctx.gradient.reshape((ids.elem_count(), d))?;
            kernel::scatter_add(ids, &grad, *rows, out)
        });
        Ok(vec![None, dtable.transpose()?.map(Gradient::owned)])
    }
}

/// The ids are numbers of `things`.
pub(super) fn check_ids_dtype(op: Op, things: &str, ids: &Tensor) -> Result<()> {
    if matches!(ids.dtype(), DType::U8 | DType::U32 | DType::I64) {
        return Ok(());
    }
    let expected = format!("U8, U32 or I64 numbers of {things}");
    let (op, got) = (op.name(), ids.dtype());
    Err(ArgumentError::DType { op, name: "ids", got, expected }.into())
}

/// Each id names one of `count` `things`; before the cast to U32, which would wrap a negative one around. Not on a CUDA
/// device, where nobody waits to look.
pub(super) fn check_ids(op: Op, things: &str, ids: &Tensor, count: usize) -> Result<()> {
    if ids.device().is_cuda() {
        return Ok(());
    }
    let numbers = ids.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
    let wrong = |&(_, &id): &(usize, &i64)| id < 0 || id >= count as i64;
    let Some((mut at, id)) = numbers.iter().enumerate().find(wrong) else { return Ok(()) };
    let mut position = ids.dims().to_vec();
    for index in position.iter_mut().rev() {
        (at, *index) = (at / *index, at % *index);
    }
    bail!("{}: the id at {position:?} is {id}, expected one of {count} {things}, from 0", op.name())
}
