//! Elements by number along a dimension, and sums into them.

use candle_core::shape::Dim;
use candle_core::{DType, Result, Tensor};

use super::check::{check_dims, check_operand, shape_error};
use super::embedding::{MOST, check_ids, check_ids_dtype};
use crate::Op;
use crate::autograd::{Backward, Gradient, Operator, apply};
use crate::kernels::{self, accumulator, cast, contiguous, elementwise, embedding as kernel};

/// The slices of `x` along `dim` that `ids` name, in their order.
///
/// # Shapes
///
/// `x` of one dimension or more, `ids (n)` → as `x`, with `n` for dimension `dim`.
///
/// # Precision
///
/// `ids` in `U8`, `U32` or `I64`, `x` in any floating-point dtype, which the result has too: nothing is rounded, and autocast
/// casts nothing. The gradient is added up in the order of `ids`: in `F32` over 64 of them, and these sums in `F64`. candle's is
/// added up in the dtype of `x`.
///
/// # Errors
///
/// Shapes, dtypes or devices that do not fit; more than 2³² - 1 ids or slices; an id that names no slice, with its
/// position. On CUDA the ids are not checked, as that would synchronise: one that names none gives NaN, and gets no gradient.
///
/// # Examples
///
/// ```
/// use candle_amp::ops;
/// use candle_core::{Device, Tensor};
///
/// let x = Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu)?;
/// let y = ops::index_select(&x, &Tensor::new(&[1u32, 1, 0], &Device::Cpu)?, 1)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[2.0, 2.0, 1.0], [4.0, 4.0, 3.0]]);
/// let error = ops::index_select(&x, &Tensor::new(&[2u32], &Device::Cpu)?, 0).unwrap_err();
/// assert!(error.to_string().contains("the id at [0] is 2, expected one of 2 slices"));
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.index_select`; `candle_core::Tensor::index_select`.
pub fn index_select<D: Dim>(x: &Tensor, ids: &Tensor, dim: D) -> Result<Tensor> {
    let dim = dim.to_index(x.shape(), "index_select")?;
    apply(IndexSelect { dim }, &[x, ids])
}

struct IndexSelect {
    dim: usize,
}

impl IndexSelect {
    /// `x` as rows, one for each place along the dimension, and the dimensions that they are made of.
    fn rows(&self, x: &Tensor) -> Result<(Tensor, Vec<usize>)> {
        let transposed = contiguous(&x.transpose(0, self.dim)?)?;
        let dims = transposed.dims().to_vec();
        let rest = dims[1..].iter().product::<usize>();
        Ok((transposed.reshape((dims[0], rest))?, dims))
    }

    /// The opposite of [`rows`](Self::rows), for another number of rows.
    fn of_rows(&self, rows: &Tensor, mut dims: Vec<usize>) -> Result<Tensor> {
        dims[0] = rows.dim(0)?;
        contiguous(&rows.reshape(dims)?.transpose(0, self.dim)?)
    }
}

impl Operator for IndexSelect {
    /// The ids, `(n)`, and how many places there are.
    type Saved = (Tensor, usize);

    fn op(&self) -> Op {
        Op::IndexSelect
    }

    fn reads(&self, input: usize, _wanted: &[bool]) -> bool {
        input == 1
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Self::Saved)> {
        let (x, ids) = (&inputs[0], &inputs[1]);
        check_operand(self.op(), ids, "x", x, false)?;
        check_ids_dtype(self.op(), "slices", ids)?;
        if ids.rank() != 1 || ids.elem_count() > MOST {
            return shape_error(self.op(), "ids", ids, format!("(n), of at most {MOST}"));
        }
        let size = x.dims()[self.dim];
        if size > MOST {
            return shape_error(self.op(), "x", x, format!("at most {MOST} slices"));
        }
        check_ids(self.op(), "slices", ids, size)?;
        let ids = kernel::numbers(ids)?;
        let (rows, dims) = self.rows(x)?;
        Ok((self.of_rows(&kernel::gather(&ids, &rows)?, dims)?, (ids, size)))
    }

    fn backward(&self, ctx: &Backward<'_, Self::Saved>) -> Result<Vec<Option<Gradient>>> {
        let (ids, size) = ctx.saved;
        let dx = ctx.wants[0].map(|out| {
            let (rows, dims) = self.rows(ctx.gradient)?;
            self.of_rows(&kernel::scatter_add(ids, &rows, *size, out)?, dims)
        });
        Ok(vec![dx.transpose()?.map(Gradient::owned), None])
    }
}

/// The elements of `x` that `ids` name along `dim`: element `[i, j]` is `x[ids[i, j], j]` for `dim` 0, and
/// `x[i, ids[i, j]]` for 1.
///
/// # Shapes
///
/// `x` of one dimension or more; `ids` of as many, none larger than that of `x` but `dim` → that of `ids`.
///
/// # Precision
///
/// As [`index_select`].
///
/// # Errors
///
/// Shapes, dtypes or devices that do not fit; more than 2³² - 1 ids or elements; an id that names no element, with its
/// position. On CUDA the ids are not checked, as that would synchronise: one that names none gives NaN, and gets no gradient.
///
/// # Examples
///
/// The logarithm of the probability of each action that was taken:
///
/// ```
/// use candle_amp::ops;
/// use candle_core::{Device, Tensor};
///
/// let log_probs = Tensor::new(&[[-0.5f32, -1.0], [-2.0, -0.25]], &Device::Cpu)?;
/// let actions = Tensor::new(&[[1u32], [0]], &Device::Cpu)?;
/// let taken = ops::gather(&log_probs, &actions, 1)?;
/// assert_eq!(taken.to_vec2::<f32>()?, [[-1.0], [-2.0]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.gather`; `candle_core::Tensor::gather`.
pub fn gather<D: Dim>(x: &Tensor, ids: &Tensor, dim: D) -> Result<Tensor> {
    let dim = dim.to_index(x.shape(), "gather")?;
    apply(Gather { dim }, &[x, ids])
}

struct Gather {
    dim: usize,
}

impl Operator for Gather {
    /// The number of each element among those of `x`, and the dimensions of `x`.
    type Saved = (Tensor, Vec<usize>);

    fn op(&self) -> Op {
        Op::Gather
    }

    fn reads(&self, _input: usize, _wanted: &[bool]) -> bool {
        false
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Self::Saved)> {
        let (x, ids) = (&inputs[0], &inputs[1]);
        check_operand(self.op(), ids, "x", x, false)?;
        let places = places(self.op(), x, ids, self.dim)?;
        let elements = contiguous(x)?.reshape((x.elem_count(), 1))?;
        let y = kernel::gather(&places, &elements)?.reshape(ids.shape())?;
        Ok((y, (places, x.dims().to_vec())))
    }

    fn backward(&self, ctx: &Backward<'_, Self::Saved>) -> Result<Vec<Option<Gradient>>> {
        let (places, dims) = ctx.saved;
        let dx = ctx.wants[0].map(|out| summed(places, ctx.gradient, dims, out));
        Ok(vec![dx.transpose()?.map(Gradient::owned), None])
    }
}

/// `x`, with each element of `source` added where `ids` say along `dim`: element `[i, j]` of `source` is added to
/// `[ids[i, j], j]` for `dim` 0, and to `[i, ids[i, j]]` for 1.
///
/// # Shapes
///
/// `x` of one dimension or more; `source` and `ids` of one shape, of as many dimensions, none larger than that of `x` but
/// `dim` → that of `x`.
///
/// # Precision
///
/// Under autocast, operands of different dtypes are cast to the wider (`F16` with `BF16` to `F32`); outside they share a
/// dtype. What is added is summed in the order of `source`, on every device: in `F32` over 64 elements, and these sums in `F64`.
/// Then `x` is added in `F32`, and the result rounded once. The gradient of `x`
/// is that of the result, and that of `source` is gathered from it. In candle, elements of `x` that received an
/// addition get a gradient of 0, and a `source` of another size than `x` is an error.
///
/// # Errors
///
/// Shapes, dtypes or devices that do not fit; more than 2³² - 1 ids or elements; an id that names no element, with its
/// position. On CUDA the ids are not checked, as that would synchronise: one that names none adds nothing, and its gradient is NaN.
///
/// # Examples
///
/// ```
/// use candle_amp::ops;
/// use candle_core::{DType, Device, Tensor};
///
/// let (x, ones) = (Tensor::zeros(2, DType::F16, &Device::Cpu)?, Tensor::ones(4096, DType::F16, &Device::Cpu)?);
/// let y = ops::scatter_add(&x, &Tensor::zeros(4096, DType::U32, &Device::Cpu)?, &ones, 0)?;
/// assert_eq!(y.to_dtype(DType::F32)?.to_vec1::<f32>()?, [4096.0, 0.0]); // candle's says 2048
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.scatter_add`; `candle_core::Tensor::scatter_add`.
pub fn scatter_add<D: Dim>(x: &Tensor, ids: &Tensor, source: &Tensor, dim: D) -> Result<Tensor> {
    let dim = dim.to_index(x.shape(), "scatter_add")?;
    apply(ScatterAdd { dim }, &[x, ids, source])
}

struct ScatterAdd {
    dim: usize,
}

impl Operator for ScatterAdd {
    /// The number of each element among those of `x`, and the dimensions of the ids.
    type Saved = (Tensor, Vec<usize>);

    fn op(&self) -> Op {
        Op::ScatterAdd
    }

    fn reads(&self, _input: usize, _wanted: &[bool]) -> bool {
        false
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Self::Saved)> {
        let (x, ids, source) = (&inputs[0], &inputs[1], &inputs[2]);
        check_operand(self.op(), ids, "x", x, false)?;
        check_operand(self.op(), x, "source", source, true)?;
        check_dims(self.op(), "source", source, ids.dims())?;
        let places = places(self.op(), x, ids, self.dim)?;
        let sums = summed(&places, source, x.dims(), accumulator(x.dtype()))?;
        let y = cast(&elementwise::add(&sums, x)?, x.dtype())?;
        Ok((y, (places, ids.dims().to_vec())))
    }

    fn backward(&self, ctx: &Backward<'_, Self::Saved>) -> Result<Vec<Option<Gradient>>> {
        let (places, dims) = ctx.saved;
        let dx = ctx.wants[0].map(|_| Gradient::shared(ctx.gradient.clone()));
        let dsource = ctx.wants[2].map(|out| {
            let elements = ctx.gradient.reshape((ctx.gradient.elem_count(), 1))?;
            kernels::cast(&kernel::gather(places, &elements)?.reshape(dims.as_slice())?, out)
        });
        Ok(vec![dx, None, dsource.transpose()?.map(Gradient::owned)])
    }
}

/// The sums of the elements of `source` that have one of `places`: of shape `dims`, in `out`.
fn summed(places: &Tensor, source: &Tensor, dims: &[usize], out: DType) -> Result<Tensor> {
    let elements = contiguous(source)?.reshape((source.elem_count(), 1))?;
    kernel::scatter_add(places, &elements, dims.iter().product(), out)?.reshape(dims)
}

/// The number of each element among those of `x`, `(n)`, that `ids` name along `dim`. On a GPU an id that names none
/// becomes the largest U32.
fn places(op: Op, x: &Tensor, ids: &Tensor, dim: usize) -> Result<Tensor> {
    check_ids_dtype(op, "elements", ids)?;
    let within = |(at, (id, size)): (usize, (&usize, &usize))| at == dim || id <= size;
    let fits = ids.rank() == x.rank() && ids.dims().iter().zip(x.dims()).enumerate().all(within);
    if !fits {
        let expected = format!("{:?} or less, as x has, but for dimension {dim}", x.shape());
        return shape_error(op, "ids", ids, expected);
    }
    for (name, tensor) in [("x", x), ("ids", ids)] {
        if tensor.elem_count() > MOST {
            return shape_error(op, name, tensor, format!("at most {MOST} elements"));
        }
    }
    let size = x.dims()[dim];
    check_ids(op, "elements", ids, size)?;
    // On CUDA, candle launches no kernel over nothing.
    if ids.elem_count() == 0 {
        return Tensor::zeros(0, DType::U32, ids.device());
    }
    let ids = ids.detach().to_dtype(DType::I64)?;
    let stride = |dim: usize| x.dims()[dim + 1..].iter().product::<usize>() as f64;
    let mut places = ids.affine(stride(dim), 0.0)?;
    for other in (0..x.rank()).filter(|&other| other != dim) {
        let count = ids.dims()[other];
        let mut shape = vec![1; x.rank()];
        shape[other] = count;
        let steps = Tensor::arange(0, count as i64, x.device())?.affine(stride(other), 0.0)?;
        places = places.broadcast_add(&steps.reshape(shape)?)?;
    }
    if x.device().is_cuda() {
        let names_one = (ids.ge(0i64)? * ids.lt(size as i64)?)?;
        places =
            elementwise::where_cond(&names_one, &places, &places.zeros_like()?.affine(1.0, -1.0)?)?;
    }
    kernel::numbers(&places.flatten_all()?)
}
