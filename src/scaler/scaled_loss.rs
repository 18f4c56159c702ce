//! From a loss to the gradients that the scaler collects.

use candle_core::{DType, Tensor};

use super::grad_scaler::GradScaler;
use crate::Result;
use crate::autograd::GraphMode;
use crate::error::lock::{get_mut, lock};
use crate::error::{ArgumentError, ScalerError};

impl GradScaler {
    /// Multiplies `loss` by the current scale, in its own dtype.
    ///
    /// # Synchronisation
    ///
    /// None while the losses stay on one device. A loss on another device than the GPU that has the scale waits for it.
    ///
    /// # Errors
    ///
    /// [`ScalerError::LossDType`]: a 16-bit loss must have been reduced in `F32`, before it got
    /// here. A disabled scaler takes it, as PyTorch's does: it multiplies nothing.
    /// [`ScalerError::LossShape`]: `loss` is not one number. [`ArgumentError::DType`]: it is an integer.
    pub fn scale(&mut self, loss: &Tensor) -> Result<ScaledLoss<'_>> {
        get_mut(&mut self.scale).check()?;
        if loss.elem_count() != 1 {
            return Err(ScalerError::LossShape { got: loss.shape().clone() }.into());
        }
        if !loss.dtype().is_float() {
            let (op, name, got) = ("scale", "the loss", loss.dtype());
            return Err(
                ArgumentError::DType { op, name, got, expected: "F32 or F64".into() }.into()
            );
        }
        if self.is_enabled() && !matches!(loss.dtype(), DType::F32 | DType::F64) {
            return Err(ScalerError::LossDType { got: loss.dtype() }.into());
        }
        Ok(ScaledLoss {
            loss: get_mut(&mut self.scale).multiply(loss)?,
            graph: GraphMode::FREED,
            scaler: self,
        })
    }
}

/// A loss multiplied by a [`GradScaler`]'s scale.
#[derive(Debug)]
#[must_use = "call `backward`, or the loss was scaled for nothing"]
pub struct ScaledLoss<'a> {
    loss: Tensor,
    graph: GraphMode,
    scaler: &'a mut GradScaler,
}

impl ScaledLoss<'_> {
    /// The scaled loss itself.
    pub fn loss(&self) -> &Tensor {
        &self.loss
    }

    /// Has [`backward`](Self::backward) keep the graph, for the loss, or another computed from the same
    /// tensors later, to run backward again: PyTorch's `backward(retain_graph=True)`.
    pub fn retain_graph(self) -> Self {
        Self { graph: GraphMode::Kept, ..self }
    }

    /// Back-propagates, and adds the gradients of the loss's variables to those in the scaler. A
    /// variable that was stepped since the last `update` takes no more.
    ///
    /// # Memory
    ///
    /// Each operator of this crate frees what it saved once its backward has run, so a loss runs backward once.
    /// What it shares with the graph of another loss stays until that loss has run backward too, or is dropped.
    /// [`retain_graph`](Self::retain_graph) keeps everything, as candle's own `backward` does.
    ///
    /// # Synchronisation
    ///
    /// None on a CPU or on CUDA. On another GPU one read for each gradient that is added to one unscaled before. With
    /// [`DataParallel`](crate::dist::DataParallel) it waits for the other ranks.
    ///
    /// # Errors
    ///
    /// [`GraphError::NoGradient`](crate::error::GraphError::NoGradient),
    /// [`GraphError::Stale`](crate::error::GraphError::Stale),
    /// [`GraphError::Freed`](crate::error::GraphError::Freed), and whatever backward meets; nothing is added then,
    /// but the loss may not run backward again.
    pub fn backward(self) -> Result<()> {
        let Self { loss, graph, scaler } = self;
        let unscaling = scaler.unscaling(loss.device())?;
        if let Some(reducer) = &scaler.reducer {
            lock(reducer).begin(&|| scaler.state())?;
        }
        let reducer = scaler.reducer.as_ref();
        let f16 = scaler.collected.backward(&loss, graph, &unscaling, reducer)?;
        let enabled = scaler.is_enabled();
        get_mut(&mut scaler.scale).watch.after_backward(f16, enabled);
        Ok(())
    }
}
