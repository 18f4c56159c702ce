//! Ranks that train one model together, as threads.

mod averages;
mod batch_norm;
mod checks;
mod overlap;
mod sharded;
mod trajectory;

use std::sync::Arc;
use std::time::Duration;

use candle_amp::Result;
use candle_amp::dist::{Communicator, Threads};

use crate::ranks::{attached, cpu, layers, loss, samples, small_buckets};

/// Runs `function` on `size` ranks; a test that hangs fails.
fn on_ranks<T: Send>(
    size: usize,
    function: impl Fn(Arc<dyn Communicator>) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    Threads::run_within(Duration::from_secs(120), size, function)
}
