//! Where tensors keep their elements.

use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::Tensor;

/// A panic elsewhere leaves nothing half written in what these locks guard.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where a tensor's storage is, which its views share.
pub(super) fn place(tensor: &Tensor) -> usize {
    std::ptr::from_ref(&*tensor.storage_and_layout().0).addr()
}

/// Whether two tensors are views of one CPU storage.
pub(crate) fn share_storage(a: &Tensor, b: &Tensor) -> bool {
    let ((a, _), (b, _)) = (a.storage_and_layout(), b.storage_and_layout());
    std::ptr::eq(&*a, &*b)
}
