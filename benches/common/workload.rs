//! What is measured, and how.

use std::fmt::Debug;

use anyhow::Result;
use candle_core::Device;
use serde::Serialize;

/// Does the work once; the seconds it took, without what had to be set up for it.
pub type Runner = Box<dyn FnMut() -> Result<f64>>;

/// What is measured. PyTorch's side gets the same description, as JSON, so that shapes cannot differ
/// between the two.
pub trait Workload: Copy + Debug + PartialEq + Serialize {
    /// Sets the work up on `device`.
    ///
    /// # Errors
    ///
    /// What setting up meets.
    fn runner(&self, device: &Device) -> Result<Runner>;

    /// What a run gets through, and the unit of that in a second.
    fn amount(&self) -> Option<(f64, &'static str)>;

    /// Makes it small, for a machine that has no time.
    fn shrink(&mut self);

    /// Whether once is all there is time for.
    fn is_slow(&self) -> bool {
        false
    }
}

/// How to measure.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// How often the two sides take turns.
    pub rounds: usize,
    /// Seconds a side and turn, after a warm-up of a fifth of that; 0 for a single run.
    pub seconds: f64,
    /// The fastest runs instead of the median ones.
    pub fastest: bool,
}
