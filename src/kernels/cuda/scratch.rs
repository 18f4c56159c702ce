//! Memory that an operator needs until its last launch, kept for the next one.

use std::cell::RefCell;

use candle_core::cuda_backend::DeviceId;
use candle_core::{DType, Result, Tensor};

use super::gpu::Gpu;
use super::quick::Quick;
use super::streams;
use crate::error::bail;
use crate::kernels::capture;

/// By device, which has a stream, place and dtype. One per thread: what two threads launch has no order.
type Kept = Quick<(DeviceId, usize, DType), Tensor>;

thread_local!(static KEPT: RefCell<Kept> = RefCell::default());

impl Gpu {
    /// All that this thread has now, for who names its addresses in a graph.
    pub(crate) fn kept_scratch(&self) -> Vec<Tensor> {
        let here = |(key, tensor): (&(DeviceId, usize, DType), &Tensor)| {
            (key.0 == self.0.id()).then(|| tensor.clone())
        };
        KEPT.with_borrow(|kept| kept.iter().filter_map(here).collect())
    }

    /// `len` elements of any value, which the next call for the same `place` hands out again. What is
    /// launched before that call may use them, as launches go on in order.
    ///
    /// The most that was ever asked for stays allocated.
    pub(crate) fn scratch(&self, place: usize, len: usize, dtype: DType) -> Result<Tensor> {
        self.scratch_from(place, len, dtype)?.narrow(0, 0, len)
    }

    /// The same, `len` elements or more: no view has to be made of them.
    pub(crate) fn scratch_from(&self, place: usize, len: usize, dtype: DType) -> Result<Tensor> {
        streams::leave_last();
        KEPT.with_borrow_mut(|kept| {
            let key = (self.0.id(), place, dtype);
            if let Some(kept) = kept.get(&key).filter(|kept| kept.elem_count() >= len) {
                return Ok(kept.clone());
            }
            if capture::is_active() {
                // It would be the graph's, and is kept for steps that are none.
                bail!("the captured step needs more memory in between than its rehearsal: give it the same inputs")
            }
            let fresh = self.empty(len, dtype)?;
            kept.insert(key, fresh.clone());
            Ok(fresh)
        })
    }
}
