//! A gradient on its way, and whether it may be written to.

use std::sync::Arc;

use candle_core::{DType, Result, Shape, Tensor};

use crate::kernels;

/// A gradient, and whether anybody else may hold its storage.
///
/// Where several gradients meet, they are added in place into one that is owned; and an operator that is given
/// one may write over it, see [`Backward::owns_gradient`](super::Backward::owns_gradient).
///
/// A clone shares the storage. While there is one, neither it nor the original is owned.
#[derive(Clone, Debug)]
pub struct Gradient {
    tensor: Tensor,
    /// `None` where others may hold the storage. Else shared by the clones.
    claim: Option<Arc<()>>,
}

impl Gradient {
    /// A gradient whose storage was made for it and is held by nobody else.
    ///
    /// Of an operator outside of this crate, the claim is not relied on, and a sum of gradients is a new tensor:
    /// `ctx.gradient.clone()` reads like a copy and is none.
    pub fn owned(tensor: Tensor) -> Self {
        Self { tensor, claim: Some(Arc::new(())) }
    }

    /// A gradient whose storage others may hold: a view, or a tensor given to several inputs.
    pub fn shared(tensor: Tensor) -> Self {
        Self { tensor, claim: None }
    }

    /// The gradient itself.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Gives the claim up.
    pub(crate) fn share(&mut self) {
        self.claim = None;
    }

    pub(crate) fn is_owned(&self) -> bool {
        self.claim.as_ref().is_some_and(|claim| Arc::strong_count(claim) == 1)
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
            return Ok(Self::owned(kernels::contiguous(&self.tensor)?));
        }
        Ok(self)
    }

    /// The same gradient, contiguous as it is, in another shape.
    pub(crate) fn reshape(self, shape: &Shape) -> Result<Self> {
        Ok(Self { tensor: self.tensor.reshape(shape)?, claim: self.claim })
    }

    /// The same gradient, contiguous, with its dimensions in another order.
    pub(crate) fn permute(self, order: &[usize]) -> Result<Self> {
        let tensor = self.tensor.permute(order)?;
        if tensor.is_contiguous() {
            return Ok(Self { tensor, claim: self.claim });
        }
        Ok(Self::owned(kernels::contiguous(&tensor)?))
    }

    /// The same gradient in storage of its own.
    pub(crate) fn into_owned(self) -> Result<Self> {
        if self.is_owned() { Ok(self) } else { Ok(Self::owned(self.tensor.force_contiguous()?)) }
    }

    /// The sum of two gradients of one shape and dtype, in place where one of them is owned.
    pub(crate) fn add(self, other: Self) -> Result<Self> {
        let (into, from) = if self.is_owned() { (self, other) } else { (other, self) };
        let sum = if into.is_owned() {
            kernels::add_assign(into.tensor, &from.tensor)?
        } else {
            kernels::add(&into.tensor, &from.tensor)?
        };
        Ok(Self::owned(sum))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn a_clone_is_not_written_over() -> Result<()> {
        let of = |x: f32| Tensor::new(&[x, x], &Device::Cpu);
        let gradient = Gradient::owned(of(3.0)?);
        let clone = gradient.clone();
        assert!(!gradient.is_owned() && !clone.is_owned());
        let sum = gradient.add(Gradient::shared(of(4.0)?))?;
        assert_eq!(sum.tensor().to_vec1::<f32>()?, [7.0, 7.0]);
        assert_eq!(clone.tensor().to_vec1::<f32>()?, [3.0, 3.0]);
        assert!(sum.is_owned() && clone.is_owned(), "each is alone by now");
        Ok(())
    }
}
