//! When a captured graph is out of date.

use candle_core::TensorId;

use crate::autograd::is_frozen;
use crate::kernels::choice::{cudnn, tf32};
use crate::optim::{Config, Optim};
use crate::{Autocast, GradScaler};

/// What a captured graph depends on besides its inputs: if any of it changes, the step is captured again.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct GraphKey {
    pub(super) optimizer: Vec<TensorId>,
    frozen: Vec<bool>,
    scaler: (bool, Option<TensorId>),
    policy: Autocast,
    settings: [bool; 3],
}

impl GraphKey {
    pub(super) fn to<C: Config>(scaler: &GradScaler, optimizer: &Optim<C>) -> Self {
        let frozen = optimizer.slots.iter().map(|slot| is_frozen(&slot.variable));
        let settings =
            [tf32::allow_tf32(), cudnn::cudnn_benchmark(), cudnn::cudnn_f32_weight_gradients()];
        Self {
            optimizer: optimizer.tensors(),
            frozen: frozen.collect(),
            scaler: (scaler.is_enabled(), scaler.device_state()),
            policy: Autocast::current(),
            settings,
        }
    }
}

impl<C: Config> Optim<C> {
    /// What a captured step reads and writes, and a mark where a state is still missing.
    fn tensors(&self) -> Vec<TensorId> {
        let mut all = Vec::with_capacity(4 * self.slots.len());
        for slot in &self.slots {
            let states = self.groups[slot.group].config.states().len();
            // A variable that is there twice stands for a state that is not.
            let missing = states.saturating_sub(slot.states.len());
            all.extend(std::iter::repeat_n(slot.variable.id(), 1 + missing));
            // One more than there are stands for a state that the settings no longer have.
            all.extend(slot.states.get(states).map(|_| slot.variable.id()));
            all.extend(slot.master.iter().chain(&slot.states).map(|tensor| tensor.id()));
        }
        all.extend(self.skips.iter().map(|skips| skips.id()));
        all
    }
}
