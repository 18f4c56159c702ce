//! An engine for tensors on the host, over anything that moves bytes.
//!
//! Each rank has a thread that makes its calls one after the other, so that a call that starts returns at once. Before
//! data moves, the ranks compare what they are about to do. Reductions send every rank its piece as it is, and the
//! rank adds the pieces in the order of the ranks: the same bits for every transport.

mod call;
mod combine;
mod moves;
#[cfg(test)]
pub(super) mod tests;
mod transport;
mod worker;

use std::fmt;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use safetensors::View;

pub(crate) use self::call::Collective;
pub(super) use self::call::{Call, HEADER};
pub(crate) use self::transport::{Fault, Stuck, Transport};
use self::worker::{Job, Worker};
pub(super) use self::worker::{before, compare, describe, left};
use super::arguments::{can_combine, can_travel, is_rank, joined, share, wide};
use super::communicator::{Communicator, Pending, ReduceOp};
use crate::error::{DistError, Result};
use crate::kernels;

/// The most bytes that a transport moves at once, of all ranks together.
pub(crate) const SEGMENT: usize = 256 << 20;

/// How often a waiting call looks whether the engine has failed.
const LOOK: Duration = Duration::from_millis(50);

/// One rank of an engine on the host.
pub(crate) struct Host {
    name: &'static str,
    rank: usize,
    size: usize,
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    failure: Arc<OnceLock<String>>,
}

impl Host {
    /// Starts the thread, in which `connect` gives the transport, this rank and the number of ranks.
    ///
    /// `segment`: the most bytes that travel at once, of all ranks together.
    pub(crate) fn start<T: Transport>(
        name: &'static str,
        segment: usize,
        connect: impl FnOnce() -> Result<(T, usize, usize)> + Send + 'static,
    ) -> Result<Self> {
        let failure = Arc::new(OnceLock::new());
        let (jobs, queue) = mpsc::channel();
        let (connected, ranks) = mpsc::channel();
        let run = {
            let failure = failure.clone();
            move || match connect() {
                Ok((transport, rank, size)) => {
                    let _ = connected.send(Ok((rank, size)));
                    Worker { transport, rank, size, segment, failure }.run(&queue);
                }
                Err(error) => {
                    let _ = connected.send(Err(error));
                }
            }
        };
        let start = |reason| DistError::Start { reason };
        let thread = std::thread::Builder::new()
            .name("dist".to_owned())
            .spawn(run)
            .map_err(|error| start(format!("no thread for the calls: {error}")))?;
        let (rank, size) =
            ranks.recv().map_err(|_| start("the thread for the calls panicked".to_owned()))??;
        Ok(Self { name, rank, size, jobs: Some(jobs), thread: Some(thread), failure })
    }

    /// Hands a call to the thread. The result has shape `dims`.
    fn begin(&self, call: Call, x: &Tensor, dims: Vec<usize>, dtype: DType) -> Result<Pending> {
        let bytes = match call.kind {
            Collective::Broadcast { root } if root as usize != self.rank => {
                vec![0; x.elem_count() * x.dtype().size_in_bytes()]
            }
            _ => bytes(x)?,
        };
        let waiting = self.submit(call, bytes)?;
        let device = x.device().clone();
        Ok(Pending::new(move || {
            Ok(Tensor::from_raw_buffer(&waiting.wait()?, dtype, &dims, &device)?)
        }))
    }

    fn submit(&self, call: Call, bytes: Vec<u8>) -> Result<Waiting> {
        let (answer, result) = mpsc::channel();
        let waiting = Waiting {
            rank: self.rank,
            size: self.size,
            call: call.to_string(),
            result,
            failure: self.failure.clone(),
        };
        let job = Job { call, bytes, answer };
        // Not asked after it is sent: it may be the one that has failed, and has an answer of its own.
        let failed = self.failure.get().is_some();
        match &self.jobs {
            Some(jobs) if !failed && jobs.send(job).is_ok() => Ok(waiting),
            _ => Err(waiting.failed().into()),
        }
    }
}

impl Communicator for Host {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn start_all_reduce(&self, x: &Tensor, reduction: ReduceOp) -> Result<Pending> {
        can_combine("all_reduce", x)?;
        let call = Call::with("all_reduce", Collective::AllReduce(reduction), x)?;
        self.begin(call, x, x.dims().to_vec(), x.dtype())
    }

    fn start_reduce_scatter(&self, x: &Tensor, reduction: ReduceOp) -> Result<Pending> {
        can_combine("reduce_scatter", x)?;
        let share = share("reduce_scatter", x, self.size)?;
        let call = Call::with("reduce_scatter", Collective::ReduceScatter(reduction), x)?;
        self.begin(call, x, share, wide(x.dtype()))
    }

    fn start_all_gather(&self, x: &Tensor) -> Result<Pending> {
        can_travel("all_gather", x)?;
        let call = Call::with("all_gather", Collective::AllGather, x)?;
        self.begin(call, x, joined(x, self.size), x.dtype())
    }

    fn start_broadcast(&self, x: &Tensor, root: usize) -> Result<Pending> {
        can_travel("broadcast", x)?;
        is_rank(root, self.size)?;
        let call = Call::with("broadcast", Collective::Broadcast { root: root as u32 }, x)?;
        self.begin(call, x, x.dims().to_vec(), x.dtype())
    }

    fn barrier(&self) -> Result<()> {
        self.submit(Call::bare(Collective::Barrier), Vec::new())?.wait()?;
        Ok(())
    }
}

impl Drop for Host {
    /// Ends the calls in order, unless one failed: then nothing is left to wait for.
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take()
            && !std::thread::panicking()
        {
            while !thread.is_finished() && self.failure.get().is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(self.name)
            .field("rank", &self.rank)
            .field("size", &self.size)
            .finish_non_exhaustive()
    }
}

/// A call whose result is on its way.
struct Waiting {
    rank: usize,
    size: usize,
    call: String,
    result: Receiver<Result<Vec<u8>, DistError>>,
    failure: Arc<OnceLock<String>>,
}

impl Waiting {
    fn wait(self) -> Result<Vec<u8>> {
        loop {
            match self.result.recv_timeout(LOOK) {
                Ok(result) => return Ok(result?),
                Err(RecvTimeoutError::Timeout) if self.failure.get().is_none() => {}
                // An answer may have come between the two.
                Err(_) => {
                    return Ok(self.result.try_recv().unwrap_or_else(|_| Err(self.failed()))?);
                }
            }
        }
    }

    fn failed(&self) -> DistError {
        let first = self.failure.get().cloned();
        DistError::Failed {
            rank: self.rank,
            size: self.size,
            call: self.call.clone(),
            first: first.unwrap_or_else(|| "the thread for the calls has ended".to_owned()),
        }
    }
}

/// The elements of `x` in the order of its shape, copied.
fn bytes(x: &Tensor) -> Result<Vec<u8>> {
    let x = kernels::contiguous(&x.to_device(&Device::Cpu)?)?;
    Ok(x.data().into_owned())
}
