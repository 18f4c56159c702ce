//! A gradient on its way, and whether it may be written to.

use candle_core::{DType, Result, Shape, Tensor};

use crate::kernels;

/// A gradient, and whether anybody else may hold its storage.
///
/// Where several gradients meet, they are added in place into one that is owned; and an operator that is given
/// one may write over it, see [`Backward::owns_gradient`](super::Backward::owns_gradient).
#[derive(Clone, Debug)]
pub struct Gradient {
    tensor: Tensor,
    owned: bool,
}

impl Gradient {
    /// A gradient whose storage was made for it and is held by nobody else.
    pub fn owned(tensor: Tensor) -> Self {
        Self { tensor, owned: true }
    }

    /// A gradient whose storage others may hold: a view, or a tensor given to several inputs.
    pub fn shared(tensor: Tensor) -> Self {
        Self { tensor, owned: false }
    }

    /// The gradient itself.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    pub(crate) fn is_owned(&self) -> bool {
        self.owned
    }

    /// The gradient itself.
    pub fn into_tensor(self) -> Tensor {
        self.tensor
    }

    /// The same gradient, contiguous, in `dtype`.
    pub(crate) fn into_dtype(self, dtype: DType) -> Result<Self> {
        if self.tensor.dtype() != dtype {
            return Ok(Self::owned(kernels::cast(&self.tensor, dtype)?));
        }
        if !self.tensor.is_contiguous() {
            return Ok(Self::owned(self.tensor.contiguous()?));
        }
        Ok(self)
    }

    /// The same gradient, contiguous as it is, in another shape.
    pub(crate) fn reshape(self, shape: &Shape) -> Result<Self> {
        Ok(Self { tensor: self.tensor.reshape(shape)?, owned: self.owned })
    }

    /// The same gradient in storage of its own.
    pub(crate) fn into_owned(self) -> Result<Self> {
        if self.owned { Ok(self) } else { Ok(Self::owned(self.tensor.force_contiguous()?)) }
    }

    /// The sum of two gradients of one shape and dtype, in place where one of them is owned.
    pub(crate) fn add(self, other: Self) -> Result<Self> {
        let (into, from) = if self.owned { (self, other) } else { (other, self) };
        let sum = if into.owned {
            kernels::add_assign(into.tensor, &from.tensor)?
        } else {
            kernels::add(&into.tensor, &from.tensor)?
        };
        Ok(Self::owned(sum))
    }
}
