//! Weak handles to tensors, which candle does not give.
#![allow(unsafe_code)]

use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::ptr;
use std::sync::{Arc, Weak};

use candle_core::Tensor;

/// What a tensor's handles share.
type Shared = <Tensor as Deref>::Target;

/// Knows whether a tensor is still there, and does not keep it: neither its elements nor what its
/// graph holds. What it does keep is the memory of one struct.
#[derive(Debug)]
pub(crate) struct WeakTensor(Weak<Shared>);

impl WeakTensor {
    /// Of `tensor`; `None` if candle keeps tensors in another way than this function knows.
    pub(crate) fn of(tensor: &Tensor) -> Option<Self> {
        const { assert!(size_of::<Tensor>() == size_of::<Arc<Shared>>()) }
        const { assert!(align_of::<Tensor>() == align_of::<Arc<Shared>>()) }
        let shared: *const Shared = ptr::from_ref::<Shared>(tensor);
        // SAFETY: candle 0.11 defines `pub struct Tensor(Arc<Tensor_>)`, whose `Deref` gives the
        // `Tensor_`, which is `Shared`. One field of the whole size is at offset 0, so that a tensor
        // is read as what it is. The copy is never dropped, so that no count changes, and the
        // tensor is borrowed, so that it outlives the copy.
        let handle =
            unsafe { ManuallyDrop::new(ptr::read(ptr::from_ref(tensor).cast::<Arc<Shared>>())) };
        // Another pointer than an `Arc` does not point to two counts before what it derefs to.
        // Neither side of this comparison reads what is pointed to.
        ptr::eq(Arc::as_ptr(&handle), shared).then(|| Self(Arc::downgrade(&handle)))
    }

    /// Whether there is a handle to the tensor.
    pub(crate) fn is_alive(&self) -> bool {
        self.0.strong_count() > 0
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Var};

    use super::*;

    /// Fails with a candle that keeps tensors in another way, where [`WeakTensor::of`] must change.
    #[test]
    fn a_weak_tensor_lives_as_long_as_the_last_handle() -> candle_core::Result<()> {
        let var = Var::zeros(3, DType::F32, &Device::Cpu)?;
        let weak = WeakTensor::of(&var).expect("a tensor is an `Arc`");
        let (clone, detached, view) = (var.clone(), var.detach(), var.detach().narrow(0, 0, 1)?);
        drop(var);
        assert!(weak.is_alive(), "a clone is the variable");
        assert_eq!(clone.to_vec1::<f32>()?, [0.0; 3]);
        drop(clone);
        assert!(!weak.is_alive(), "other tensors on its storage are not");
        assert_eq!((detached.elem_count(), view.elem_count()), (3, 1));
        let kept = WeakTensor::of(&detached).expect("a tensor is an `Arc`");
        drop(weak);
        assert!(kept.is_alive());
        Ok(())
    }
}
