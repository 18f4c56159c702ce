//! A step of an optimizer, and the refresh that belongs to it.

use candle_core::{Result, TensorId};

use super::backend::Store;
use crate::scaler::{Step, UnscaledGradients};

/// An optimizer of [`MasterVars`](super::MasterVars), whose steps rewrite the 16-bit tensors; see
/// [`MasterVars::bind`](super::MasterVars::bind).
///
/// An optimizer that keeps its variables to itself, as candle's do, is given every gradient, also those of variables that
/// are no masters. Several optimizers each have their [`Parameters`](crate::Parameters):
/// `masters.bind(&mut body.bind(&mut adamw))`.
#[derive(Debug)]
pub struct Refreshing<'a, S> {
    masters: &'a Store,
    optimizer: &'a mut S,
}

impl<'a, S: Step> Refreshing<'a, S> {
    pub(super) fn new(masters: &'a Store, optimizer: &'a mut S) -> Self {
        Self { masters, optimizer }
    }
}

impl<S: Step> Step for Refreshing<'_, S> {
    fn variables(&self) -> Option<Vec<TensorId>> {
        self.optimizer.variables()
    }

    fn rounds_gradients(&self) -> bool {
        self.optimizer.rounds_gradients()
    }

    fn inner(&self) -> Option<&dyn Step> {
        Some(&*self.optimizer)
    }

    fn apply(&mut self, gradients: &UnscaledGradients<'_>) -> Result<()> {
        let stepped = self.optimizer.apply(gradients);
        // After a failure too: some variables may have been updated.
        match self.optimizer.variables() {
            Some(ids) => self.masters.refresh_of(|id| ids.contains(&id))?,
            None => self.masters.refresh_of(|_| true)?,
        }
        stepped
    }
}
