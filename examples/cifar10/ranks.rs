//! What this example asks of its ranks, beyond what all examples do.

use anyhow::Result;
use candle_amp::{
    dist,
    nn::BatchNorm,
    random::{self, RandomState},
};
use candle_core::Tensor;

pub(crate) use crate::common::ranks::*;

/// Runs `f` on the first rank alone. An error is one on all.
pub(crate) fn on_first(f: impl FnOnce() -> Result<()>) -> Result<()> {
    agree(if is_first() { f() } else { Ok(()) })
}

/// Runs `f` on the first rank, and then on the others: they find what it has made.
pub(crate) fn first_on_first<T>(f: impl FnOnce() -> Result<T>) -> Result<T> {
    let ranks = communicator();
    if ranks.rank() == 0 {
        let made = f();
        ranks.barrier()?;
        return made;
    }
    ranks.barrier()?;
    f()
}

/// A text that the first rank makes, on all ranks.
pub(crate) fn from_first(make: impl FnOnce() -> Result<String>) -> Result<String> {
    let made = agree(if is_first() { make() } else { Ok(String::new()) })?;
    let all = gather(made.into_bytes())?;
    Ok(String::from_utf8(all.into_iter().next().unwrap_or_default())?)
}

/// The rows of all ranks, each of which has those of its [`part`](crate::common::ranks::part) of `count` items.
pub(crate) fn joined(rows: &Tensor, count: usize) -> Result<Tensor> {
    let ranks = communicator();
    match ranks.size() {
        1 => Ok(rows.clone()),
        _ => Ok(ranks.all_gather(rows)?.narrow(0, 0, count)?),
    }
}

/// `norm` by the statistics of all ranks.
pub(crate) fn sync_batch_norm(norm: BatchNorm) -> BatchNorm {
    dist::sync_batch_norm(norm, communicator())
}

/// Has each rank draw random numbers of its own from here on: the first one those that it would draw alone.
pub(crate) fn draw_apart() {
    let RandomState { seed, draws } = random::state();
    let apart = (communicator().rank() as u64) << 40; // no run draws as many tensors
    random::set_state(RandomState { seed, draws: draws.wrapping_add(apart) });
}
