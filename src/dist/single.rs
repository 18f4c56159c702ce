//! One rank alone.

use candle_core::Tensor;

use super::arguments::{can_combine, can_travel, is_rank, joined, share, wide};
use super::communicator::{Communicator, Pending, ReduceOp};
use crate::error::Result;

/// A group of one rank, so that one program serves one rank or many.
///
/// Its results are copies, as those of the other engines are.
#[derive(Clone, Copy, Debug, Default)]
pub struct Single;

impl Communicator for Single {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn start_all_reduce(&self, x: &Tensor, _: ReduceOp) -> Result<Pending> {
        can_combine("all_reduce", x)?;
        done(copy(x)?)
    }

    fn start_reduce_scatter(&self, x: &Tensor, _: ReduceOp) -> Result<Pending> {
        can_combine("reduce_scatter", x)?;
        share("reduce_scatter", x, 1)?;
        done(copy(x)?.to_dtype(wide(x.dtype()))?)
    }

    fn start_all_gather(&self, x: &Tensor) -> Result<Pending> {
        can_travel("all_gather", x)?;
        done(copy(x)?.reshape(joined(x, 1))?)
    }

    fn start_broadcast(&self, x: &Tensor, root: usize) -> Result<Pending> {
        can_travel("broadcast", x)?;
        is_rank(root, 1)?;
        done(copy(x)?)
    }

    fn barrier(&self) -> Result<()> {
        Ok(())
    }
}

/// `x` in memory of its own.
fn copy(x: &Tensor) -> Result<Tensor> {
    Ok(x.detach().force_contiguous()?)
}

fn done(x: Tensor) -> Result<Pending> {
    Ok(Pending::new(move || Ok(x)))
}
