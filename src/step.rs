//! What the scaler asks of an optimizer, and tells of a step.

use std::collections::HashMap;

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, TensorId};
use candle_nn::Optimizer;

use crate::overflow::{NonFinite, OverflowReport};
use crate::{Parameters, Result, kernels};

/// An optimizer that [`GradScaler::step`](crate::GradScaler::step) can drive.
///
/// Every `candle_nn::Optimizer` is one, and [`MasterWeights`](crate::MasterWeights), the
/// optimizers of this crate, and [`Bound`]. Implement it for an optimizer that wants `F32`
/// gradients of half variables; implement candle's trait otherwise.
pub trait Step {
    /// The variables it updates, or `None` where it keeps them to itself, as candle's do. Then it
    /// is given every gradient, and can be the only such optimizer in an iteration.
    fn variables(&self) -> Option<Vec<TensorId>>;

    /// Whether it rounds gradients to the dtype of their variable, as candle's optimizers do. What
    /// is finite in `F32` may then overflow in `F16`, and the scaler skips the step. `false` unless
    /// said otherwise.
    fn rounds_gradients(&self) -> bool {
        false
    }

    /// Updates the variables from unscaled, finite gradients.
    ///
    /// # Errors
    ///
    /// Whatever the update meets.
    fn apply(&mut self, gradients: &Gradients<'_>) -> candle_core::Result<()>;
}

/// Unscaled gradients by variable, as an optimizer gets them: `F32`, whatever the dtype of the
/// variable (`F64` for `F64` ones), contiguous.
#[derive(Debug)]
pub struct Gradients<'a> {
    by_variable: HashMap<TensorId, (&'a Tensor, &'a Tensor)>,
}

impl<'a> Gradients<'a> {
    pub(crate) fn new(pairs: impl Iterator<Item = (&'a Tensor, &'a Tensor)>) -> Self {
        Self { by_variable: pairs.map(|(var, grad)| (var.id(), (var, grad))).collect() }
    }

    /// The gradient of `variable`, or `None` where backward did not reach it.
    pub fn get(&self, variable: &Tensor) -> Option<&'a Tensor> {
        self.by_variable.get(&variable.id()).map(|(_, gradient)| *gradient)
    }

    /// The gradients in the dtypes of their variables, as candle's optimizers expect them.
    fn to_store(&self) -> candle_core::Result<GradStore> {
        let mut store = GradStore::default();
        for (variable, gradient) in self.by_variable.values() {
            store.insert(variable, cast(gradient, variable.dtype())?);
        }
        Ok(store)
    }
}

fn cast(gradient: &Tensor, dtype: DType) -> candle_core::Result<Tensor> {
    if gradient.dtype() == dtype { Ok(gradient.clone()) } else { kernels::cast(gradient, dtype) }
}

impl<O: Optimizer> Step for O {
    fn variables(&self) -> Option<Vec<TensorId>> {
        None
    }

    fn rounds_gradients(&self) -> bool {
        true
    }

    fn apply(&mut self, gradients: &Gradients<'_>) -> candle_core::Result<()> {
        self.step(&gradients.to_store()?)
    }
}

/// A candle optimizer and the variables it has; see [`Parameters::bind`].
#[derive(Debug)]
pub struct Bound<'a, O> {
    parameters: &'a Parameters,
    optimizer: &'a mut O,
}

impl<'a, O: Optimizer> Bound<'a, O> {
    pub(crate) fn new(parameters: &'a Parameters, optimizer: &'a mut O) -> Self {
        Self { parameters, optimizer }
    }
}

impl<O: Optimizer> Step for Bound<'_, O> {
    fn variables(&self) -> Option<Vec<TensorId>> {
        Some(self.parameters.vars().iter().map(|var| var.id()).collect())
    }

    fn rounds_gradients(&self) -> bool {
        true
    }

    fn apply(&mut self, gradients: &Gradients<'_>) -> candle_core::Result<()> {
        self.optimizer.apply(gradients)
    }
}

/// What became of a step. Nothing about it is an error: a run with a dynamic scale skips a step
/// whenever the scale turns out too high.
///
/// ```
/// use candle_amp::{GradScaler, Parameters};
/// use candle_core::{Device, Tensor, Var};
/// use candle_nn::{Optimizer, SGD};
///
/// let (a, b) = (Var::zeros(3, candle_core::DType::F32, &Device::Cpu)?, Var::new(1f32, &Device::Cpu)?);
/// let parameters = Parameters::named([("layer.weight", a.clone()), ("layer.bias", b.clone())])?;
/// let mut sgd = SGD::new(parameters.vars(), 0.1)?;
/// let mut scaler = GradScaler::default();
///
/// let factors = Tensor::new(&[1f32, f32::INFINITY, f32::NAN], &Device::Cpu)?;
/// let loss = ((a.as_tensor() * factors)?.sum_all()? + b.as_tensor())?;
/// scaler.scale(&loss)?.backward()?;
/// let outcome = scaler.step(&mut sgd)?;
/// assert_eq!(outcome.report(&parameters)?.to_string(), "\
/// skipped at scale 65536: 1 of 2 gradients are not finite
/// variable      infinite  NaN  of
/// layer.weight         1    1   3");
/// # Ok::<(), candle_amp::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct StepOutcome {
    scale: f32,
    checked: usize,
    overflowed: Vec<(TensorId, NonFinite)>,
}

impl StepOutcome {
    pub(crate) fn new(scale: f32, checked: usize, overflowed: Vec<(TensorId, NonFinite)>) -> Self {
        Self { scale, checked, overflowed }
    }

    /// True when a gradient was infinite or NaN, and neither the variables nor the optimizer were
    /// touched.
    ///
    /// # Synchronisation
    ///
    /// Waits for the device where the flag is still on its way.
    ///
    /// # Errors
    ///
    /// What reading it from the device meets.
    pub fn skipped(&self) -> Result<bool> {
        Ok(!self.overflowed.is_empty())
    }

    /// The scale the gradients were made with; 1 for a disabled scaler.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// The names of the variables whose gradient was infinite or NaN, sorted; empty when the step
    /// was taken.
    ///
    /// # Errors
    ///
    /// As [`skipped`](Self::skipped).
    pub fn overflowed<'p>(&self, parameters: &'p Parameters) -> Result<Vec<&'p str>> {
        let overflowed = |id: TensorId| self.overflowed.iter().any(|(other, _)| *other == id);
        let named = parameters.iter().filter(|(_, var)| overflowed(var.id()));
        Ok(named.map(|(name, _)| name).collect())
    }

    /// Which gradients were infinite or NaN, in how many elements, and at which scale: a table by
    /// name, to print. A variable with several names is listed by the first.
    ///
    /// The elements were counted when the gradient was unscaled, before any clipping, which turns
    /// an infinity to NaN. Counting is one more pass over a gradient that overflowed, and none over
    /// the others.
    ///
    /// # Errors
    ///
    /// As [`skipped`](Self::skipped).
    pub fn report(&self, parameters: &Parameters) -> Result<OverflowReport> {
        let named = |&(id, found)| (parameters.name_of_id(id).map(str::to_owned), found);
        let mut rows: Vec<_> = self.overflowed.iter().map(named).collect();
        rows.sort_by(|(a, _), (b, _)| (a.is_none(), a).cmp(&(b.is_none(), b)));
        Ok(OverflowReport { scale: self.scale, rows, checked: self.checked })
    }
}
