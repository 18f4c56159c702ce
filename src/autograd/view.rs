//! Views that have all elements of a tensor, each once: a reshape, a transpose, a permutation.

use candle_core::{Result, Shape, Tensor};

use super::gradient::Gradient;

/// How a view has the elements of a contiguous tensor.
pub(super) struct View {
    /// The tensor's shape.
    shape: Shape,
    /// The view's dimensions in the order of the memory; `None` where that is their own.
    order: Option<Vec<usize>>,
}

impl View {
    /// How `view` has the elements of a tensor of `shape`, whose storage it has too; `None` if it has not all of them.
    pub(super) fn of(view: &Tensor, shape: &Shape) -> Option<Self> {
        if view.elem_count() != shape.elem_count() {
            return None;
        }
        let shape = shape.clone();
        if view.is_contiguous() {
            return Some(Self { shape, order: None });
        }
        // As many elements, without a gap: so it begins where the tensor does.
        let strides = view.stride();
        let mut order: Vec<usize> = (0..view.rank()).collect();
        order.sort_by_key(|&dim| std::cmp::Reverse(strides[dim]));
        let mut step = 1;
        for &dim in order.iter().rev().filter(|&&dim| view.dims()[dim] != 1) {
            if strides[dim] != step {
                return None;
            }
            step *= view.dims()[dim];
        }
        Some(Self { shape, order: Some(order) })
    }

    /// The gradient of the tensor, contiguous, from that of the view: a copy only where that does not lie in memory as the
    /// view does.
    pub(super) fn gradient(&self, gradient: Gradient) -> Result<Gradient> {
        let dtype = gradient.tensor().dtype();
        let gradient = match &self.order {
            Some(order) => gradient.permute(order)?,
            None => gradient.into_dtype(dtype)?,
        };
        gradient.reshape(&self.shape)
    }

    /// Whether the view has the elements in the order of the tensor.
    pub(super) fn is_in_order(&self) -> bool {
        self.order.is_none()
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::autograd::share_storage;

    #[test]
    fn what_has_all_elements_once_is_a_view() -> Result<()> {
        let x = Tensor::arange(0f32, 120.0, &Device::Cpu)?.reshape((2, 3, 1, 4, 5))?;
        let flat = x.flatten_all()?;
        for view in [
            x.clone(),
            x.reshape((6, 20))?,
            x.transpose(1, 3)?,
            x.permute((4, 2, 0, 3, 1))?,
            x.reshape((6, 20))?.t()?,
            x.transpose(0, 2)?,
            x.unsqueeze(0)?.transpose(0, 5)?,
        ] {
            let found = View::of(&view, x.shape()).expect("a view");
            // Each element is its place, so the view is a gradient that says where each has gone.
            let back = found.gradient(Gradient::shared(view.clone()))?.into_tensor();
            assert_eq!(back.dims(), x.dims());
            assert!(share_storage(&back, &x), "a copy of {view:?}");
            assert_eq!(back.flatten_all()?.to_vec1::<f32>()?, flat.to_vec1::<f32>()?, "{view:?}");
        }
        for other in [
            x.narrow(1, 0, 2)?,
            x.narrow(3, 1, 3)?.transpose(1, 3)?,
            x.narrow(4, 0, 1)?.broadcast_as((2, 3, 1, 4, 5))?,
            x.narrow(0, 0, 1)?.broadcast_as((2, 3, 1, 4, 5))?.transpose(1, 3)?,
        ] {
            assert!(View::of(&other, x.shape()).is_none(), "{other:?}");
        }
        Ok(())
    }
}
