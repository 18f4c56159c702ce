//! The trait by which the scaler has the gradients of several ranks combined.

use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use candle_core::Tensor;

use super::step::OptimizerFacts;
use crate::autograd::{Gradient, Ids, OnComplete};
use crate::error::lock::lock;
use crate::kernels::multi_tensor::{FoundInf, NormOfRanks};
use crate::{LossScale, Result};

/// Combines the gradients of several ranks.
pub(crate) trait Reducer: NormOfRanks + Debug + Send {
    /// A backward pass begins. `scale` reads the state of the scaler, should it be compared.
    fn begin(&mut self, scale: &dyn Fn() -> Option<LossScale>) -> Result<()>;

    /// The pass adds nothing more to the gradient of `variable`.
    fn complete(&mut self, variable: &Tensor, gradient: Gradient) -> Result<()>;

    /// The pass has ended, with `rest` not handed over before. Returns the gradients of all ranks, in storage of
    /// their own; none where this pass only accumulates.
    fn finish(&mut self, rest: Vec<(Tensor, Gradient)>) -> Result<Vec<(Tensor, Tensor)>>;

    /// The pass has failed.
    fn abort(&mut self);

    /// This rank has failed to use the gradients of a pass that other ranks may use.
    fn fall_behind(&mut self);

    /// Fails where passes have only accumulated: `call` needs gradients of all ranks.
    fn check_synchronised(&self, call: &'static str) -> Result<()>;

    /// Whether passes have only accumulated.
    fn has_unsynchronised(&self) -> bool;

    /// Drops what was accumulated for `variables`, or everything.
    fn forget(&mut self, variables: Option<&Ids>);

    /// Checks that an optimizer that is to step takes what ranks are given; compares
    /// it with those of other ranks, should it be compared: what `facts` says of it.
    fn check_optimizer(
        &mut self,
        takes_shards: bool,
        facts: &dyn Fn() -> Result<OptimizerFacts>,
    ) -> Result<()>;

    /// Whether a gradient of any rank is not finite.
    fn agree(&self, found: FoundInf) -> Result<FoundInf>;
}

/// A reducer that the scaler shares with its owner.
pub(crate) type SharedReducer = Arc<Mutex<dyn Reducer>>;

/// Hands complete gradients to `reducer`.
pub(super) fn on_complete(reducer: &SharedReducer) -> OnComplete {
    let reducer = reducer.clone();
    Box::new(move |variable, gradient| lock(&reducer).complete(variable, gradient))
}
