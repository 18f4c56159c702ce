//! The autocast scope: which policy is active on this thread, and the casts it has made.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::{DType, Tensor};

use super::cache::CastCache;
use super::policy::{Cast, Op, Policy, is_castable};
use crate::error::AutocastError;
use crate::{Result, kernels};

thread_local! {
    /// The scopes entered on this thread, innermost last, and the number of each one's guard.
    static SCOPES: RefCell<Vec<(u64, Autocast)>> = const { RefCell::new(Vec::new()) };
    /// The guards made on this thread.
    static GUARDS: Cell<u64> = const { Cell::new(0) };
    static CACHE: RefCell<CastCache> = RefCell::new(CastCache::default());
}

/// Counts the events after which a cached cast may be stale, on any thread.
static CACHE_EPOCH: AtomicU64 = AtomicU64::new(0);

/// Chooses, operator by operator, the dtype a forward pass runs in.
///
/// An `Autocast` is a plain value. It does nothing until it is entered with [`scope`](Self::scope)
/// or [`enter`](Self::enter), and then only on the current thread. It acts on this crate's
/// operators and layers only: candle's own ask nobody for their dtype. Scopes nest; the innermost
/// wins. Run forward pass and loss inside, `backward` outside; backward runs in the dtypes the
/// forward pass chose, wherever it is called.
///
/// # Precision
///
/// The output of an operator is that of casting its inputs by hand, bit for bit. A variable stays in its own dtype. Under plain
/// `backward` its gradient has that dtype; under a [`GradScaler`](crate::GradScaler) it is `F32` (`F64` for `F64`).
///
/// # Examples
///
/// ```
/// use candle_amp::{Autocast, Op, ops};
/// use candle_core::{DType, Device, Tensor};
///
/// let x = Tensor::ones((2, 3), DType::F32, &Device::Cpu)?;
/// let w = Tensor::ones((3, 4), DType::F32, &Device::Cpu)?;
/// let amp = Autocast::new(DType::BF16);
/// let y = amp.scope(|| ops::matmul(&x, &w))?;
/// assert_eq!(y.dtype(), DType::BF16);
/// let y = amp.deny(Op::Matmul).scope(|| ops::matmul(&x, &w))?;
/// assert_eq!(y.dtype(), DType::F32);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.autocast`; `jmp.Policy`.
#[derive(Clone, Debug, PartialEq)]
pub struct Autocast {
    /// `None` when disabled.
    dtype: Option<DType>,
    policy: Policy,
}

impl Autocast {
    /// Autocast to `dtype`: [`DType::F16`] or [`DType::BF16`], or [`DType::F32`] for the casts of
    /// a policy without 16-bit dtypes.
    ///
    /// Another `dtype` is an [`AutocastError::ComputeDType`] from the first operator in the scope; see
    /// [`try_new`](Self::try_new) to have it here.
    pub fn new(dtype: DType) -> Self {
        Self { dtype: Some(dtype), policy: Policy::default() }
    }

    /// As [`new`](Self::new), checking `dtype` at once.
    ///
    /// # Errors
    ///
    /// [`AutocastError::ComputeDType`].
    pub fn try_new(dtype: DType) -> Result<Self> {
        let amp = Self::new(dtype);
        check(dtype).map(|()| amp)
    }

    /// An autocast that changes nothing, so that one loop serves every precision.
    ///
    /// Entered inside another scope, it turns that scope off for its duration.
    pub fn disabled() -> Self {
        Self { dtype: None, policy: Policy::default() }
    }

    /// Drops the 16-bit copies of variables that the scopes of every thread keep. Needed only after a
    /// variable was written inside a scope by other means than this crate's: [`Var::set`](candle_core::Var::set), and the steps
    /// of candle's optimizers that no scaler takes. The crate's steps, `update`, backward, and the end of
    /// [`no_grad`](crate::no_grad) do it themselves.
    ///
    /// `torch.clear_autocast_cache`.
    pub fn clear_cache() {
        clear_cast_cache();
    }

    /// The autocast active on this thread, to enter on another; [`disabled`](Self::disabled)
    /// outside any scope.
    pub fn current() -> Self {
        let innermost = SCOPES.with_borrow(|scopes| scopes.last().map(|(_, amp)| amp.clone()));
        innermost.unwrap_or_else(Self::disabled)
    }

    /// The same autocast under another policy.
    #[must_use]
    pub fn with_policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// The same autocast with `op` in the compute dtype.
    #[must_use]
    pub fn allow(mut self, op: Op) -> Self {
        self.policy = self.policy.allow(op);
        self
    }

    /// The same autocast with `op` in `F32`.
    #[must_use]
    pub fn deny(mut self, op: Op) -> Self {
        self.policy = self.policy.deny(op);
        self
    }

    /// The compute dtype, or `None` when disabled.
    pub fn dtype(&self) -> Option<DType> {
        self.dtype
    }

    /// The policy it follows.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Runs `f` under this autocast and restores what was active before, even if `f` panics.
    ///
    /// In a task of a rayon pool, `f` should not wait in rayon, as candle's own `matmul` does on a CPU. Another
    /// task that runs on the thread meanwhile would run in this scope. The crate's operators do not wait there.
    pub fn scope<T>(&self, f: impl FnOnce() -> T) -> T {
        let _guard = self.enter();
        f()
    }

    /// Activates this autocast until the returned guard is dropped.
    ///
    /// Prefer [`scope`](Self::scope), which cannot be misused. Bind the guard to a name:
    /// `let _ = amp.enter();` drops it, and ends the scope, at once.
    pub fn enter(&self) -> AutocastGuard {
        let number = GUARDS.replace(GUARDS.get() + 1);
        SCOPES.with_borrow_mut(|scopes| scopes.push((number, self.clone())));
        AutocastGuard { number, _not_send: PhantomData }
    }
}

/// Keeps an [`Autocast`] active; dropping it ends that scope, and no other: in `guard = amp.enter()`, the new scope is
/// entered before the old one ends.
///
/// The guard belongs to the thread that made it:
///
/// ```compile_fail,E0277
/// let guard = candle_amp::Autocast::disabled().enter();
/// std::thread::spawn(move || drop(guard));
/// ```
#[derive(Debug)]
#[must_use = "autocast ends as soon as the guard is dropped; bind it to a name"]
pub struct AutocastGuard {
    number: u64,
    _not_send: PhantomData<*mut ()>,
}

impl Drop for AutocastGuard {
    fn drop(&mut self) {
        // At the end of a thread, where a guard may be dropped too, the scopes can be gone already.
        let outermost = SCOPES.try_with(|scopes| {
            let mut scopes = scopes.borrow_mut();
            scopes.retain(|(number, _)| *number != self.number);
            scopes.is_empty()
        });
        if outermost.unwrap_or(false) {
            drop_cast_cache();
        }
    }
}

/// Leaves all scopes of this thread until the guard is dropped.
pub(crate) fn suspend() -> Option<AutocastGuard> {
    let is_active =
        SCOPES.with_borrow(|scopes| scopes.last().is_some_and(|(_, amp)| amp.dtype.is_some()));
    is_active.then(|| Autocast::disabled().enter())
}

fn check(dtype: DType) -> Result<()> {
    if is_castable(dtype) { Ok(()) } else { Err(AutocastError::ComputeDType { got: dtype }.into()) }
}

/// The dtype to cast the inputs of `op` to under the active scope, or `None` to leave them alone.
pub(crate) fn target(op: Op, inputs: impl Iterator<Item = DType> + Clone) -> Result<Option<DType>> {
    let rule: Option<(DType, Cast)> = SCOPES.with_borrow(|scopes| {
        let (_, amp) = scopes.last()?;
        Some((amp.dtype?, amp.policy.cast(op)))
    });
    let Some((compute, cast)) = rule else { return Ok(None) };
    check(compute)?;
    let doubles = inputs.clone().any(|dtype| dtype == DType::F64);
    if cast == Cast::Banned && compute != DType::F32 && !doubles {
        let (name, reason) = (op.name(), op.reason());
        return Err(AutocastError::Banned { op: name, reason, dtype: compute }.into());
    }
    Ok(cast.target(compute, inputs))
}

/// `tensor` in `dtype`, detached, and whether it was found rather than cast. A variable is cast
/// once per scope.
pub(crate) fn cast(tensor: &Tensor, dtype: DType) -> candle_core::Result<(Tensor, bool)> {
    if tensor.dtype() == dtype || !is_castable(tensor.dtype()) {
        return Ok((tensor.detach(), false));
    }
    let in_scope = SCOPES.with_borrow(|scopes| !scopes.is_empty());
    if !(tensor.is_variable() && in_scope) {
        return Ok((kernels::cast(tensor, dtype)?, false));
    }
    let epoch = CACHE_EPOCH.load(Ordering::Acquire);
    let cached = CACHE.with_borrow_mut(|cache| cache.get(tensor, dtype, epoch));
    if let Some(cached) = cached {
        return Ok((cached, true));
    }
    let fresh = kernels::cast(tensor, dtype)?;
    CACHE.with_borrow_mut(|cache| cache.insert(tensor, fresh.clone()));
    Ok((fresh, false))
}

/// Forgets the 16-bit copies of variables that autocast scopes hold, on every thread.
///
/// Needed only after writing to a variable *inside* a scope by other means than this crate
/// (`Var::set` leaves no trace that could be seen). The end of the outermost scope, every backward
/// of a crate operator, and every scaler or optimizer step of the crate do it themselves.
pub(crate) fn clear_cast_cache() {
    CACHE_EPOCH.fetch_add(1, Ordering::Release);
}

/// Forgets this thread's copies of `variables`, and leaves those of weights.
pub(crate) fn forget_casts<'a>(variables: impl IntoIterator<Item = &'a Tensor>) {
    CACHE.with_borrow_mut(|cache| variables.into_iter().for_each(|one| cache.forget(one)));
}

/// Drops this thread's copies now. A graph that is captured must not find them or free them. And an evaluation under
/// `no_grad`, between backward and a step of candle's, may have made copies of weights that the step then changes without
/// a trace.
pub(crate) fn drop_cast_cache() {
    // At the end of a thread, where a guard may be dropped too, it can be gone already.
    let _ = CACHE.try_with(|cache| cache.borrow_mut().clear());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a matmul of `f32` inputs is cast to right now.
    fn matmul_dtype() -> Option<DType> {
        target(Op::Matmul, [DType::F32; 2].into_iter()).unwrap()
    }

    #[test]
    fn scopes_nest_and_restore() {
        Autocast::new(DType::F16).scope(|| {
            assert_eq!(matmul_dtype(), Some(DType::F16));
            Autocast::disabled().scope(|| assert_eq!(matmul_dtype(), None));
            Autocast::new(DType::BF16).scope(|| assert_eq!(matmul_dtype(), Some(DType::BF16)));
            assert_eq!(matmul_dtype(), Some(DType::F16));
        });
        assert_eq!(matmul_dtype(), None);
    }

    #[test]
    fn a_panic_inside_a_scope_restores_the_outer_one() {
        let amp = Autocast::new(DType::F16);
        let result = std::panic::catch_unwind(|| amp.scope(|| panic!("boom")));
        assert!(result.is_err());
        assert_eq!(matmul_dtype(), None);
    }

    #[test]
    fn guards_dropped_out_of_order_leave_nothing_behind() {
        let outer = Autocast::new(DType::F16).enter();
        let inner = Autocast::new(DType::BF16).enter();
        drop(outer);
        assert_eq!(matmul_dtype(), Some(DType::BF16));
        drop(inner);
        assert_eq!(matmul_dtype(), None);
    }

    /// The new guard is made before the old one is dropped.
    #[test]
    fn a_guard_is_replaced_by_another() {
        let _outer = Autocast::new(DType::F16).enter();
        let mut part = Some(Autocast::new(DType::BF16).enter());
        assert_eq!((matmul_dtype(), part.is_some()), (Some(DType::BF16), true));
        part = Some(Autocast::disabled().enter());
        assert_eq!((matmul_dtype(), part.is_some()), (None, true));
        drop(part);
        assert_eq!(matmul_dtype(), Some(DType::F16));
    }

    #[test]
    fn other_threads_are_unaffected_until_they_enter_the_captured_scope() {
        Autocast::new(DType::F16).scope(|| {
            let captured = Autocast::current();
            let elsewhere = std::thread::spawn(move || {
                let before = matmul_dtype();
                (before, captured.scope(matmul_dtype))
            });
            assert_eq!(elsewhere.join().unwrap(), (None, Some(DType::F16)));
        });
    }

    #[test]
    fn a_variable_is_cast_once_a_scope_and_dtype() -> candle_core::Result<()> {
        let var = candle_core::Var::ones(3, DType::F32, &candle_core::Device::Cpu)?;
        let _scope = Autocast::new(DType::BF16).enter();
        // Other tests' backward passes empty the cache too: look at a moment without one.
        loop {
            let before = CACHE_EPOCH.load(Ordering::Acquire);
            let [a, b, other] = [DType::BF16, DType::BF16, DType::F16].map(|d| cast(&var, d));
            let (a, b, other) = (a?.0, b?.0, other?.0);
            assert_eq!((a.dtype(), other.dtype()), (DType::BF16, DType::F16));
            if CACHE_EPOCH.load(Ordering::Acquire) == before {
                assert_eq!(a.id(), b.id());
                break;
            }
        }
        let (before, _) = cast(&var, DType::BF16)?;
        clear_cast_cache();
        assert_ne!(cast(&var, DType::BF16)?.0.id(), before.id());
        // Tensors that are no variables are not kept alive by the scope.
        let tensor = var.affine(1.0, 0.0)?;
        assert_ne!(cast(&tensor, DType::BF16)?.0.id(), cast(&tensor, DType::BF16)?.0.id());
        Ok(())
    }

    #[test]
    fn a_compute_dtype_that_is_no_float_of_ours_is_refused() {
        for dtype in [DType::F64, DType::U32, DType::I64] {
            assert!(Autocast::try_new(dtype).is_err());
            let error = Autocast::new(dtype)
                .scope(|| target(Op::Matmul, [DType::F32].into_iter()))
                .unwrap_err()
                .to_string();
            assert!(error.contains(&format!("not in {dtype:?}")), "{error}");
        }
    }
}
