//! Joining several tensors, and repeating one.

use candle_core::shape::Dim;
use candle_core::{Result, Shape, Tensor};

use super::check::{check_operand, shape_error};
use crate::Op;
use crate::autograd::{Backward, Gradient, Operator, apply};
use crate::error::bail;
use crate::kernels::{self, cast, reduce};

/// The `parts` one after another along `dim`.
///
/// # Shapes
///
/// Equal but for dimension `dim`, whose sizes add up.
///
/// # Precision
///
/// Under autocast, parts of different dtypes are cast to the widest (`F16` with `BF16` to `F32`);
/// outside they share a dtype. Nothing else is rounded.
///
/// # Errors
///
/// No parts; shapes, dtypes or devices that do not fit.
///
/// # References
///
/// `torch.cat`.
pub fn cat<D: Dim>(parts: &[&Tensor], dim: D) -> Result<Tensor> {
    let Some(first) = parts.first() else {
        bail!("cat was given no tensors, expected at least one")
    };
    let dim = dim.to_index(first.shape(), "cat")?;
    apply(Cat { dim, stack: false }, parts)
}

/// The `parts` side by side along a new dimension `dim`.
///
/// # Shapes
///
/// `n` of one shape → that shape with `n` before dimension `dim`, which may also be the number of dimensions.
///
/// # Precision
///
/// As [`cat`].
///
/// # Errors
///
/// No parts; shapes, dtypes or devices that do not fit.
///
/// # Examples
///
/// ```
/// use candle_amp::ops;
/// use candle_core::{D, Device, Tensor};
///
/// let [a, b] = [[1f32, 2.0], [3.0, 4.0]].map(|row| Tensor::new(&row, &Device::Cpu));
/// let (a, b) = (a?, b?);
/// assert_eq!(ops::stack(&[&a, &b], 0)?.to_vec2::<f32>()?, [[1.0, 2.0], [3.0, 4.0]]);
/// assert_eq!(ops::stack(&[&a, &b], D::Minus1)?.to_vec2::<f32>()?, [[1.0, 3.0], [2.0, 4.0]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.stack`; `candle_core::Tensor::stack`.
pub fn stack<D: Dim>(parts: &[&Tensor], dim: D) -> Result<Tensor> {
    let Some(first) = parts.first() else {
        bail!("stack was given no tensors, expected at least one")
    };
    let dim = dim.to_index_plus_one(first.shape(), "stack")?;
    apply(Cat { dim, stack: true }, parts)
}

struct Cat {
    dim: usize,
    /// Whether `dim` is new.
    stack: bool,
}

impl Operator for Cat {
    /// The size of each part.
    type Saved = Vec<usize>;

    fn op(&self) -> Op {
        if self.stack { Op::Stack } else { Op::Cat }
    }

    fn reads(&self, _input: usize, _wanted: &[bool]) -> bool {
        false
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Vec<usize>)> {
        let first = &inputs[0];
        for part in inputs {
            check_operand(self.op(), first, "a part", part, true)?;
            let mut expected = part.dims().to_vec();
            if !self.stack && expected.len() == first.rank() {
                expected[self.dim] = first.dims()[self.dim];
            }
            if expected != first.dims() {
                let mut like = format!("{:?}, that of the first", first.shape());
                if !self.stack {
                    like += &format!(", but for dimension {}", self.dim);
                }
                return shape_error(self.op(), "a part", part, like);
            }
        }
        if self.stack {
            let parts = inputs.iter().map(|part| part.unsqueeze(self.dim));
            let parts = parts.collect::<Result<Vec<_>>>()?;
            return Ok((kernels::cat(&parts, self.dim)?, vec![1; inputs.len()]));
        }
        let sizes = inputs.iter().map(|part| part.dims()[self.dim]).collect();
        Ok((kernels::cat(inputs, self.dim)?, sizes))
    }

    fn backward(&self, ctx: &Backward<'_, Vec<usize>>) -> Result<Vec<Option<Gradient>>> {
        let mut start = 0;
        let parts = ctx.saved.iter().zip(ctx.wants).map(|(&size, want)| {
            let from = start;
            start += size;
            let part = want.map(|dtype| {
                let part = ctx.gradient.narrow(self.dim, from, size)?;
                let part = if self.stack { part.squeeze(self.dim)? } else { part };
                cast(&part, dtype)
            });
            part.transpose().map(|part| part.map(Gradient::owned))
        });
        parts.collect()
    }
}

/// `x`, repeated to `shape`, as a class token is to a batch. [`add`](super::add), [`mul`](super::mul) and the other operators
/// on two tensors repeat by themselves.
///
/// # Shapes
///
/// One that broadcasts to `shape` → `shape`.
///
/// # Precision
///
/// The dtype of `x` in and out, nothing is rounded. The gradient is summed over the repeats, in `F32` within a
/// block of elements and in `F64` over the blocks. candle's `broadcast_as` sums it in the dtype of `x`.
///
/// # Errors
///
/// A `shape` that `x` does not broadcast to.
///
/// # Examples
///
/// ```
/// use candle_amp::ops;
/// use candle_core::{DType, Device, Var};
///
/// let token = Var::zeros((1, 1, 2), DType::F16, &Device::Cpu)?;
/// let grads = ops::sum(&ops::broadcast_as(&token, (4096, 1, 2))?)?.backward()?;
/// let gradient = grads.get(&token).unwrap().to_dtype(DType::F32)?;
/// assert_eq!(gradient.flatten_all()?.to_vec1::<f32>()?, [4096.0; 2]); // candle's says 2048
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.broadcast_to`, `torch.Tensor.expand`; `candle_core::Tensor::broadcast_as`.
pub fn broadcast_as(x: &Tensor, shape: impl Into<Shape>) -> Result<Tensor> {
    apply(BroadcastAs { shape: shape.into() }, &[x])
}

struct BroadcastAs {
    shape: Shape,
}

impl Operator for BroadcastAs {
    /// The dimensions of the input.
    type Saved = Vec<usize>;

    fn op(&self) -> Op {
        Op::BroadcastAs
    }

    fn reads(&self, _input: usize, _wanted: &[bool]) -> bool {
        false
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Vec<usize>)> {
        let x = &inputs[0];
        check_operand(self.op(), x, "x", x, false)?;
        let fits = x.rank() <= self.shape.rank()
            && x.dims()
                .iter()
                .rev()
                .zip(self.shape.dims().iter().rev())
                .all(|(a, b)| a == b || *a == 1);
        if !fits {
            let expected = format!("one that broadcasts to {:?}", self.shape);
            return shape_error(self.op(), "x", x, expected);
        }
        Ok((kernels::contiguous(&x.broadcast_as(&self.shape)?)?, x.dims().to_vec()))
    }

    fn backward(&self, ctx: &Backward<'_, Vec<usize>>) -> Result<Vec<Option<Gradient>>> {
        let dx = ctx.wants[0].map(|out| reduce::sum_to(ctx.gradient, ctx.saved, out));
        Ok(vec![dx.transpose()?.map(Gradient::owned)])
    }
}
