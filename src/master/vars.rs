//! Masters by name, for models that cannot be edited.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, Var, safetensors};
use candle_nn::{Init, VarBuilder, VarMap};

use super::backend::{Backend, Store, converted};
use super::{MissingGradients, Refreshing};
use crate::Parameters;
use crate::autograd::version;
use crate::error::ArgumentError;
use crate::error::bail;
use crate::error::lock::lock;
use crate::scaler::Step;

/// `F32` masters that a model gets 16-bit copies of: mixed precision for a model that cannot be
/// edited, such as those of `candle-transformers`.
///
/// Give the model [`var_builder`](Self::var_builder) in place of candle's. It makes a variable in
/// `F32` for each name and hands out a 16-bit tensor cast from it. So the model computes in 16 bits,
/// and backward, candle's own too, gives the variable an `F32` gradient. Layers that ask for one name
/// share one tensor: tied weights have one gradient. [`bind`](Self::bind) has the 16-bit tensors
/// rewritten in place after every step.
///
/// The variables are a `VarMap`'s. It can be saved and read like any other.
///
/// # Precision
///
/// The model's operators stay candle's: they compute in the dtype of what they are given and, on a
/// CPU, add up in 16 bits. Cast the input yourself, and reduce the loss in `F32`, as those in
/// [`ops`](crate::ops) do. Gradients are rounded to 16 bits once more where they leave the 16-bit
/// tensor. Memory is 4 + 2 bytes per parameter, without optimizer state.
///
/// What was asked for in `F32`, or is kept so by [`dtypes`](Self::dtypes), is the variable itself:
/// running statistics are written to where they are saved from.
///
/// # After a step
///
/// Run the forward pass again. Backward through a graph from before a refresh would use new
/// weights with old activations. It is [`GraphError::Stale`](crate::error::GraphError::Stale) in
/// [`ScaledLoss::backward`](crate::ScaledLoss::backward), and in candle's own `backward` of a loss
/// made by one of this crate's operators. candle's `backward` of candle's loss asks nobody; there
/// it goes unnoticed.
///
/// Where an optimizer of this crate was stepped and nothing refreshed, so that what the model has
/// would never change, it is [`GraphError::NotRefreshed`](crate::error::GraphError::NotRefreshed).
///
/// A model that computes a tensor from its variables when it is built (a view of one is fine)
/// would go on with its old value. That is the same error.
///
/// # Examples
///
/// ```
/// use candle_amp::{GradScaler, MasterVars, ops};
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, SGD, Optimizer};
///
/// let masters = MasterVars::new(DType::F16, &Device::Cpu);
/// let model = candle_nn::linear(4, 2, masters.var_builder())?; // any model
/// let mut sgd = SGD::new(masters.parameters().vars(), 0.1)?;
/// let mut scaler = GradScaler::default();
///
/// let x = Tensor::ones((3, 4), DType::F16, &Device::Cpu)?;
/// let y = Tensor::new(&[0u32, 1, 1], &Device::Cpu)?;
/// let mut losses = vec![];
/// for _ in 0..3 {
///     let loss = ops::cross_entropy(&model.forward(&x)?, &y)?; // F32
///     assert!(masters.missing(&loss).is_empty());
///     losses.push(loss.to_scalar::<f32>()?);
///     scaler.scale(&loss)?.backward()?;
///     let _ = scaler.step(&mut masters.bind(&mut sgd))?;
///     scaler.update()?;
/// }
/// assert!(losses[2] < losses[0]);
/// assert_eq!(model.weight().dtype(), DType::F16);
/// # Ok::<(), candle_amp::Error>(())
/// ```
#[derive(Clone)]
pub struct MasterVars {
    store: Store,
    dtype: DType,
    device: Device,
}

impl std::fmt::Debug for MasterVars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<_> =
            self.store.inventory().handed.iter().map(|one| one.name.clone()).collect();
        let mut s = f.debug_struct("MasterVars");
        s.field("dtype", &self.dtype).field("device", &self.device).field("handed_out", &names);
        s.finish_non_exhaustive()
    }
}

impl MasterVars {
    /// Masters with initial values from the crate's generator: after the same
    /// [`random::manual_seed`](crate::random::manual_seed), the same model.
    ///
    /// A model that names no initial value asks candle's builder for zeros, as many of
    /// candle-transformers do in places, and from zero weights nothing is learnt. So what is asked
    /// for as zeros gets, unless [`init`](Self::init) says otherwise:
    ///
    /// | variable | initial value |
    /// |---|---|
    /// | of two dimensions or more | normal, with a standard deviation of 0.02 |
    /// | of one, its name ending in `weight` | ones: the scale of a norm |
    /// | any other | zeros |
    pub fn new(dtype: DType, device: &Device) -> Self {
        Self::from_varmap(&VarMap::new(), dtype, device)
    }

    /// Masters that are the variables of `varmap`, which must not have 16 bits. What a model asks for
    /// besides is added to the map, with initial values as in [`new`](Self::new).
    pub fn from_varmap(varmap: &VarMap, dtype: DType, device: &Device) -> Self {
        Self { store: Store::new(varmap.clone()), dtype, device: device.clone() }
    }

    /// Masters with the values in safetensors files, of any floating-point dtype. What a model
    /// asks for and no file has is an error, unless [`init`](Self::init) gives it a value.
    ///
    /// # Errors
    ///
    /// A file that cannot be read; [`ArgumentError::DuplicateName`] for a name in two of them.
    pub fn from_safetensors<P: AsRef<Path>>(
        paths: &[P],
        dtype: DType,
        device: &Device,
    ) -> crate::Result<Self> {
        let masters = Self::new(dtype, device).init(|_, _| None);
        for path in paths {
            for (name, tensor) in safetensors::load(path, &Device::Cpu)? {
                if masters.store.inventory().files.insert(name.clone(), tensor).is_some() {
                    return Err(ArgumentError::DuplicateName { name }.into());
                }
            }
        }
        Ok(masters)
    }

    /// Hands out each variable in the dtype that `rule` gives for its name and the dtype it would
    /// have: the builder's, and `F32` for running statistics.
    ///
    /// ```
    /// # use candle_amp::MasterVars;
    /// # use candle_core::{DType, Device};
    /// let masters = MasterVars::new(DType::BF16, &Device::Cpu)
    ///     .dtypes(|name, dtype| if name.contains("norm") { DType::F32 } else { dtype });
    /// let vb = masters.var_builder();
    /// assert_eq!(vb.get(3, "norm.weight")?.dtype(), DType::F32);
    /// assert_eq!(vb.get((3, 3), "proj.weight")?.dtype(), DType::BF16);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    #[must_use]
    pub fn dtypes(self, rule: impl Fn(&str, DType) -> DType + Send + Sync + 'static) -> Self {
        Self { store: Store { dtypes: Arc::new(rule), ..self.store }, ..self }
    }

    /// Gives each new variable the initial value that `rule` gives for its name and the one it
    /// would have; with `None`, asking for it is an error.
    ///
    /// ```no_run
    /// # use candle_amp::MasterVars;
    /// # use candle_core::{DType, Device};
    /// // A new head on a body from a file, where a mistaken name is still an error.
    /// let masters = MasterVars::from_safetensors(&["bert.safetensors"], DType::BF16, &Device::Cpu)?
    ///     .init(|name, init| name.starts_with("classifier.").then_some(init));
    /// # Ok::<(), candle_amp::Error>(())
    /// ```
    #[must_use]
    pub fn init(self, rule: impl Fn(&str, Init) -> Option<Init> + Send + Sync + 'static) -> Self {
        Self { store: Store { init: Arc::new(rule), ..self.store }, ..self }
    }

    /// What a model is built from. Set the rules before.
    pub fn var_builder(&self) -> VarBuilder<'static> {
        let backend = Box::new(Backend(self.store.clone()));
        VarBuilder::from_backend(backend, self.dtype, self.device.clone())
    }

    /// The masters.
    pub fn varmap(&self) -> &VarMap {
        &self.store.varmap
    }

    /// The masters by name, for the optimizer and for reports.
    pub fn parameters(&self) -> Parameters {
        Parameters::from_varmap(&self.store.varmap)
    }

    /// `optimizer`, with a [`refresh`](Self::refresh) after every step, for
    /// [`GradScaler::step`](crate::GradScaler::step).
    pub fn bind<'a, S: Step>(&'a self, optimizer: &'a mut S) -> Refreshing<'a, S> {
        Refreshing::new(&self.store, optimizer)
    }

    /// Rewrites the 16-bit tensors from their masters: after a step of an optimizer that is not
    /// bound, or after writing to a master by hand.
    ///
    /// # Errors
    ///
    /// What the copy meets.
    pub fn refresh(&self) -> Result<()> {
        self.store.refresh_of(|_| true)
    }

    /// The variables that get no gradient from `loss`, and what can be said of why.
    pub fn missing(&self, loss: &Tensor) -> MissingGradients {
        MissingGradients::of(loss, &self.store.inventory().handed, &self.parameters())
    }

    /// Writes the masters to a safetensors file.
    ///
    /// # Errors
    ///
    /// What writing meets.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        self.store.varmap.save(path)
    }

    /// Reads the masters that there are from a safetensors file of any floating-point dtype, and
    /// refreshes. Build the model first.
    ///
    /// # Errors
    ///
    /// A file that cannot be read; a variable that it does not have, or has in another shape.
    /// Nothing is changed then.
    pub fn load(&self, path: impl AsRef<Path>) -> Result<()> {
        let file = safetensors::load(path, &Device::Cpu)?;
        let mut values = Vec::new();
        for (name, var) in sorted(&self.store.varmap) {
            let Some(value) = file.get(&name) else { bail!("the file has no `{name}`") };
            values.push((converted(&name, value, var.shape(), var.dtype())?, var));
        }
        for (value, var) in values {
            var.set(&value.to_device(var.device())?)?;
            version::written([var.as_tensor()]);
        }
        self.refresh()
    }
}

fn sorted(varmap: &VarMap) -> BTreeMap<String, Var> {
    let data = lock(varmap.data());
    data.iter().map(|(name, var)| (name.clone(), var.clone())).collect()
}
