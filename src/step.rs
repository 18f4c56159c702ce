//! What the scaler asks of an optimizer, and tells of a step.

use std::collections::HashMap;

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, TensorId};
use candle_nn::Optimizer;

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

    fn apply(&mut self, gradients: &Gradients<'_>) -> candle_core::Result<()> {
        self.optimizer.apply(gradients)
    }
}

/// What became of a step. Nothing about it is an error: a run with a dynamic scale skips a step
/// whenever the scale turns out too high.
#[derive(Clone, Debug)]
pub struct StepOutcome {
    scale: f32,
    overflowed: Vec<TensorId>,
}

impl StepOutcome {
    pub(crate) fn new(scale: f32, overflowed: Vec<TensorId>) -> Self {
        Self { scale, overflowed }
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
        let named = parameters.iter().filter(|(_, var)| self.overflowed.contains(&var.id()));
        Ok(named.map(|(name, _)| name).collect())
    }
}
