//! The collective calls by which ranks exchange tensors: one trait, which each engine implements.

use std::fmt;

use candle_core::Tensor;

use crate::error::Result;

/// How a reduction combines the numbers of all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceOp {
    /// Their sum, in the order of the ranks: the same bits on every rank and in every run.
    Sum,
    /// The largest. NaN wins over every number.
    Max,
}

/// A group of ranks, each with a number from 0.
///
/// Every rank makes the same calls in the same order, with tensors of the same shape and dtype. A call that
/// starts copies its tensor and returns at once, and the next may start before it ends. Results are new tensors on the
/// same device, outside of the graph.
///
/// # Synchronisation
///
/// Most engines of this crate work on the host: a tensor on a GPU is copied there, which waits for the GPU, and back.
/// [`Nccl`](super::Nccl) works on the GPU: [`Pending::wait`] has the stream of the tensor's device wait for the result,
/// and not the host. An error then comes from a later call. [`synchronize`](Self::synchronize) waits for it.
///
/// # Errors
///
/// Of the tensor, before anything is sent: [`ArgumentError`](crate::error::ArgumentError). Of the ranks:
/// [`DistError`](crate::error::DistError), after which no call of this rank succeeds.
pub trait Communicator: fmt::Debug + Send + Sync {
    /// The number of this rank, below [`size`](Self::size).
    fn rank(&self) -> usize;

    /// How many ranks there are.
    fn size(&self) -> usize;

    /// Starts to combine `x` of all ranks, element by element, into a tensor that every rank gets.
    ///
    /// F16 and BF16 travel as they are, are added in F32, and the sum is rounded once.
    fn start_all_reduce(&self, x: &Tensor, reduction: ReduceOp) -> Result<Pending>;

    /// Starts to combine `x` of all ranks; each rank gets its share, the `rank`-th of `size` equal parts of the
    /// first dimension, in F32 for F16 and BF16.
    fn start_reduce_scatter(&self, x: &Tensor, reduction: ReduceOp) -> Result<Pending>;

    /// Starts to join `x` of all ranks along the first dimension, in the order of the ranks. Numbers become a vector.
    fn start_all_gather(&self, x: &Tensor) -> Result<Pending>;

    /// Starts to send `x` of rank `root` to all. The others' `x` gives shape and dtype.
    fn start_broadcast(&self, x: &Tensor, root: usize) -> Result<Pending>;

    /// Waits until every rank is here.
    fn barrier(&self) -> Result<()>;

    /// Waits on the host until this rank's calls have ended, and returns their error: before results are read.
    ///
    /// The engines on the host have nothing to wait for: [`Pending::wait`] has waited.
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    /// [`start_all_reduce`](Self::start_all_reduce), waited for.
    fn all_reduce(&self, x: &Tensor, reduction: ReduceOp) -> Result<Tensor> {
        self.start_all_reduce(x, reduction)?.wait()
    }

    /// [`start_reduce_scatter`](Self::start_reduce_scatter), waited for.
    fn reduce_scatter(&self, x: &Tensor, reduction: ReduceOp) -> Result<Tensor> {
        self.start_reduce_scatter(x, reduction)?.wait()
    }

    /// [`start_all_gather`](Self::start_all_gather), waited for.
    fn all_gather(&self, x: &Tensor) -> Result<Tensor> {
        self.start_all_gather(x)?.wait()
    }

    /// [`start_broadcast`](Self::start_broadcast), waited for.
    fn broadcast(&self, x: &Tensor, root: usize) -> Result<Tensor> {
        self.start_broadcast(x, root)?.wait()
    }
}

/// A call that has started. Dropped, it goes on, and its result is lost.
pub struct Pending(Box<dyn FnOnce() -> Result<Tensor> + Send>);

impl Pending {
    /// Of a function that waits for the result.
    pub fn new(wait: impl FnOnce() -> Result<Tensor> + Send + 'static) -> Self {
        Self(Box::new(wait))
    }

    /// Waits for the result.
    pub fn wait(self) -> Result<Tensor> {
        (self.0)()
    }
}

impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pending")
    }
}
