//! Variables that are not trained.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{LazyLock, Mutex};

use candle_core::Tensor;

use super::maps::Ids;
use super::version;
use crate::Parameters;
use crate::error::lock::lock;

/// candle numbers each tensor once, so that what is left of a variable that is gone means no other.
static FROZEN: LazyLock<Mutex<Ids>> = LazyLock::new(Mutex::default);

/// Whether there are any: a program that freezes nothing does not lock.
static ANY: AtomicBool = AtomicBool::new(false);

impl Parameters {
    /// Freezes these variables, on every thread, until [`unfreeze`](Self::unfreeze): PyTorch's `requires_grad_(False)`.
    ///
    /// The crate's operators compute no gradient of a frozen variable; below the first operator that reads a trained
    /// variable they build no graph and save nothing. Above it, frozen linear layers, products and convolutions do not keep
    /// their inputs; other operators save what they would if all were trained. No scaler collects, clips or checks a
    /// frozen variable's gradient, so no optimizer changes it and its overflow skips no step. Its name is not among the
    /// [`missing`](crate::GradScaler::missing). Of [`MasterVars`](crate::MasterVars), freeze the masters.
    ///
    /// Freeze before the forward pass, and unfreeze after backward.
    ///
    /// candle's own operators do not know of it. They compute the gradients of a frozen variable, and of a view that
    /// candle makes of it (`w.t()`): a scaler drops them, and `GradStore` has them.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_amp::{GradScaler, Parameters, nn, ops};
    /// use candle_core::{DType, Device, Module, Tensor};
    ///
    /// let varmap = nn::VarMap::new();
    /// let vb = nn::var_builder(&varmap, DType::F32, &Device::Cpu);
    /// let (body, head) = (nn::linear(3, 5, vb.pp("body"))?, nn::linear(5, 2, vb.pp("head"))?);
    /// let all = Parameters::from_varmap(&varmap);
    /// all.filter(|name| name.starts_with("body.")).freeze();
    /// assert_eq!(all.trainable().names().collect::<Vec<_>>(), ["head.bias", "head.weight"]);
    ///
    /// let features = body.forward(&Tensor::ones((4, 3), DType::F32, &Device::Cpu)?)?;
    /// assert!(!features.track_op()); // no graph
    /// let mut scaler = GradScaler::default();
    /// scaler.scale(&ops::mean(&head.forward(&features)?)?)?.backward()?;
    /// assert!(scaler.grad(head.weight())?.is_some() && scaler.grad(body.weight())?.is_none());
    /// # Ok::<(), candle_amp::Error>(())
    /// ```
    ///
    /// # References
    ///
    /// `torch.nn.Module.requires_grad_`.
    pub fn freeze(&self) {
        let mut frozen = lock(&FROZEN);
        frozen.extend(self.iter().map(|(_, var)| var.id()));
        ANY.store(!frozen.is_empty(), Ordering::Relaxed);
    }

    /// Has these variables get gradients again: PyTorch's `requires_grad_(True)`.
    pub fn unfreeze(&self) {
        let mut frozen = lock(&FROZEN);
        for (_, var) in self.iter() {
            frozen.remove(&var.id());
        }
        ANY.store(!frozen.is_empty(), Ordering::Relaxed);
    }

    /// The parameters that are not [frozen](Self::freeze): what an optimizer needs.
    ///
    /// An optimizer of [`optim`](crate::optim) may have all of them: it makes state for a variable at the first
    /// gradient. [`MasterWeights`](crate::MasterWeights) makes its `F32` copies at once.
    #[must_use]
    pub fn trainable(&self) -> Self {
        self.filter_variables(|var| !is_frozen(var))
    }
}

/// Whether `tensor` is a frozen variable, or the 16-bit copy of one.
pub(crate) fn is_frozen(tensor: &Tensor) -> bool {
    if !ANY.load(Ordering::Relaxed) {
        return false;
    }
    let frozen = lock(&FROZEN);
    frozen.contains(&tensor.id())
        || version::master_of(tensor).is_some_and(|master| frozen.contains(&master))
}

/// Whether operators on `tensor` are to give it a gradient.
pub(super) fn requires_grad(tensor: &Tensor) -> bool {
    tensor.track_op() && tensor.dtype().is_float() && !is_frozen(tensor)
}
