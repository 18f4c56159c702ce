//! One step for several micro-batches.

use candle_core::Tensor;

use super::config::check;
use crate::{Result, ops};

/// Counts micro-batches, and divides their losses: one step for every so many.
///
/// The scaler adds up the gradients by itself. A checkpoint is saved between steps, when nothing is counted, so there is
/// nothing of this to save.
///
/// # Examples
///
/// Two batches of a step each, and one that is left over at the end:
///
/// ```
/// use candle_amp::optim::{Accumulation, Sgd, SgdConfig};
/// use candle_amp::{GradScaler, ops};
/// use candle_core::{DType, Device, Var};
///
/// let w = Var::zeros(1, DType::F32, &Device::Cpu)?;
/// let mut sgd = Sgd::new(vec![w.clone()], SgdConfig { lr: 1.0, ..Default::default() })?;
/// let (mut scaler, mut accumulation) = (GradScaler::default(), Accumulation::new(2)?);
/// let batches = [1.0, 3.0, 5.0, 7.0, 9.0];
/// let mut weights = Vec::new();
/// for (i, x) in batches.iter().enumerate() {
///     let loss = ops::mean(&(w.as_tensor() * -x)?)?;
///     scaler.scale(&accumulation.divide(&loss)?)?.backward()?;
///     if accumulation.is_step(i + 1 == batches.len()) {
///         let _ = scaler.step(&mut sgd)?;
///         scaler.update()?;
///     }
///     weights.push(w.to_vec1::<f32>()?[0]);
/// }
/// assert_eq!(weights, [0.0, 2.0, 2.0, 8.0, 12.5]); // a step of 9 / 2 at the end
/// # Ok::<(), candle_amp::Error>(())
/// ```
///
/// # References
///
/// `accelerate.Accelerator.accumulate`, which divides by the same number at the end of an epoch too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accumulation {
    steps: usize,
    counted: usize,
}

impl Accumulation {
    /// One step for every `steps` micro-batches.
    ///
    /// # Errors
    ///
    /// [`ArgumentError::Setting`](crate::error::ArgumentError::Setting) for 0.
    pub fn new(steps: usize) -> Result<Self> {
        check("steps", steps as f64, steps > 0, "at least 1")?;
        Ok(Self { steps, counted: 0 })
    }

    /// How many micro-batches a step has.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// How many were counted since the last step.
    pub fn counted(&self) -> usize {
        self.counted
    }

    /// A loss divided by the number of micro-batches, in its own dtype: their gradients add up to that of the mean.
    ///
    /// # Errors
    ///
    /// Those of [`ops::affine`].
    pub fn divide(&self, loss: &Tensor) -> Result<Tensor> {
        match self.steps {
            1 => Ok(loss.clone()),
            steps => Ok(ops::affine(loss, 1.0 / steps as f64, 0.0)?),
        }
    }

    /// Counts a micro-batch: call it once after each backward. `true` if it is time for a step, as always where `last` says that
    /// none follows in the epoch.
    pub fn is_step(&mut self, last: bool) -> bool {
        self.counted += 1;
        let due = last || self.counted >= self.steps;
        if due {
            self.counted = 0;
        }
        due
    }
}
