//! Computing without a graph.

use std::marker::PhantomData;

use super::scopes;
use crate::autocast;

pub(crate) fn is_active() -> bool {
    scopes::current().no_grad > 0
}

/// Runs `f` without tracking this crate's operators, on this thread: for evaluation, where the
/// graph and what it saves would be built for nothing. candle's own operators are not affected.
///
/// In a task of a rayon pool, the same holds as for [`Autocast::scope`](crate::Autocast::scope).
///
/// ```
/// use candle_amp::{no_grad, ops};
/// use candle_core::{DType, Device, Var};
///
/// let w = Var::ones((2, 2), DType::F32, &Device::Cpu)?;
/// assert!(ops::matmul(&w, &w)?.track_op());
/// assert!(!no_grad(|| ops::matmul(&w, &w))?.track_op());
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn no_grad<T>(f: impl FnOnce() -> T) -> T {
    let _guard = no_grad_guard();
    f()
}

/// Tracks operators again until the guard is dropped, whatever the caller's scope: a backward pass that builds a
/// graph of its own must not depend on where it is called.
pub(super) fn enable_grad() -> EnableGrad {
    let before = scopes::current().no_grad;
    scopes::change(|scopes| scopes.no_grad = 0);
    EnableGrad(before)
}

pub(super) struct EnableGrad(isize);

impl Drop for EnableGrad {
    fn drop(&mut self) {
        // A guard may have been dropped meanwhile that was made before.
        scopes::change(|scopes| scopes.no_grad += self.0);
    }
}

/// As [`no_grad`], until the returned guard is dropped.
pub fn no_grad_guard() -> NoGradGuard {
    scopes::change(|scopes| scopes.no_grad += 1);
    NoGradGuard { _not_send: PhantomData }
}

/// Keeps tracking off on the thread that made it; see [`no_grad_guard`].
#[derive(Debug)]
#[must_use = "tracking resumes as soon as the guard is dropped; bind it to a name"]
pub struct NoGradGuard {
    _not_send: PhantomData<*mut ()>,
}

impl Drop for NoGradGuard {
    fn drop(&mut self) {
        scopes::change(|scopes| scopes.no_grad -= 1);
        if !is_active() {
            autocast::drop_cast_cache();
        }
    }
}
