//! Ranks that NCCL connects, for tensors on CUDA devices.
//!
//! A rank's tensors wait on candle's stream, by events, for what a stream of NCCL's own does. A thread gives that stream
//! its work and watches it, as NCCL's calls may wait for the peers.

mod plan;
#[cfg(test)]
mod tests;
mod worker;

use std::fmt;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};

use self::plan::DeviceCall;
use self::worker::{Failure, Job, Work, Worker};
use super::arguments::{can_combine, can_travel, is_rank, joined, share};
use super::communicator::{Communicator, Pending, ReduceOp};
use super::environment::{self, Start};
use super::host::{Call, Collective};
use super::rendezvous;
use super::timeout::timeout;
use crate::error::lock::lock;
use crate::error::{ArgumentError, CaptureError, DistError, Result};
use crate::kernels::cuda::{Event, Gpu, ID, Id, new_id};
use crate::kernels::{self, capture};

/// Ranks that NCCL connects, for tensors on CUDA devices: the feature `nccl`.
#[derive(Clone, Copy, Debug)]
pub struct Nccl;

impl Nccl {
    /// Joins the processes that a launcher has started: `mpirun` with the feature `mpi`, torchrun, or Slurm's `srun`.
    ///
    /// Tensors are exchanged on `device`, which no other rank has: [`local_rank`](super::local_rank) is its number on
    /// this machine.
    ///
    /// # Errors
    ///
    /// If the environment does not name the ranks, or if they do not meet: within the seconds that the environment
    /// variable `CANDLE_AMP_DIST_TIMEOUT` says, or 30 minutes. Calls wait as long. If a call fails and nothing
    /// returns the error for 30 seconds (or the timeout, if that is shorter), the process prints it and ends itself
    /// by `abort`.
    pub fn init(device: &Device) -> Result<Arc<dyn Communicator>> {
        Self::init_within(timeout()?, device)
    }

    /// [`init`](Self::init), where a call waits for its peers at most as long as `timeout`.
    ///
    /// # Errors
    ///
    /// As [`init`](Self::init).
    pub fn init_within(timeout: Duration, device: &Device) -> Result<Arc<dyn Communicator>> {
        is_gpu(device)?;
        match environment::start()? {
            Start::Communicator(ranks) => Self::over_within(timeout, ranks, device),
            Start::Rendezvous(place) => {
                let id = rendezvous::exchange(&place, timeout, make_id)?;
                Ok(Arc::new(Rank::join(timeout, device, [place.rank, place.size], id, None)?))
            }
        }
    }

    /// Joins the ranks of another communicator, such as [`Threads`](super::Threads), by which they find one another.
    ///
    /// # Errors
    ///
    /// As [`init`](Self::init), and those of `ranks`.
    pub fn over(ranks: Arc<dyn Communicator>, device: &Device) -> Result<Arc<dyn Communicator>> {
        Self::over_within(timeout()?, ranks, device)
    }

    /// [`over`](Self::over), where a call waits for its peers at most as long as `timeout`.
    ///
    /// # Errors
    ///
    /// As [`over`](Self::over).
    pub fn over_within(
        timeout: Duration,
        ranks: Arc<dyn Communicator>,
        device: &Device,
    ) -> Result<Arc<dyn Communicator>> {
        is_gpu(device)?;
        let place = [ranks.rank(), ranks.size()];
        let made = if place[0] == 0 { make_id() } else { Ok([0; ID]) };
        // All zeros where rank 0 has none, so that no rank waits for it.
        let id = made.as_ref().unwrap_or(&[0; ID]);
        let received = ranks.broadcast(&Tensor::new(&id[..], &Device::Cpu)?, 0)?;
        let id = Id::try_from(received.to_vec1::<u8>()?);
        match (made, id) {
            (Err(error), _) => Err(error),
            (Ok(_), Ok(id)) if id != [0; ID] => {
                Ok(Arc::new(Rank::join(timeout, device, place, id, Some(ranks))?))
            }
            _ => Err(start("rank 0 could not start NCCL: its error says why".to_owned())),
        }
    }
}

fn start(reason: String) -> crate::Error {
    DistError::Start { reason }.into()
}

fn is_gpu(device: &Device) -> Result<()> {
    match device {
        Device::Cuda(_) => Ok(()),
        other => Err(start(format!(
            "`Nccl` was given the device {:?}, and exchanges tensors on CUDA devices: give it \
             `Device::new_cuda(dist::local_rank()?)?`, or take `dist::from_environment`",
            other.location()
        ))),
    }
}

fn make_id() -> Result<Id> {
    new_id().map_err(start)
}

/// One rank.
struct Rank {
    rank: usize,
    size: usize,
    device: Device,
    gpu: Gpu,
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    failure: Arc<Failure>,
    /// By which the ranks met; it ends after NCCL does.
    _beside: Option<Arc<dyn Communicator>>,
}

impl Rank {
    fn join(
        timeout: Duration,
        device: &Device,
        [rank, size]: [usize; 2],
        id: Id,
        beside: Option<Arc<dyn Communicator>>,
    ) -> Result<Self> {
        let Some(gpu) = Gpu::of(device) else {
            is_gpu(device)?;
            return Err(start("this program was built without the feature `cuda`".to_owned()));
        };
        let failure = Arc::new(Failure::default());
        let (jobs, queue) = mpsc::channel();
        let (connected, answer) = mpsc::channel();
        let run = {
            let (gpu, failure) = (gpu.clone(), failure.clone());
            move || match Worker::connect(&gpu, &id, [rank, size], timeout, failure) {
                Ok(worker) => {
                    let _ = connected.send(Ok(()));
                    worker.run(&queue);
                }
                Err(error) => drop(connected.send(Err(error))),
            }
        };
        let thread = std::thread::Builder::new()
            .name("nccl".to_owned())
            .spawn(run)
            .map_err(|error| start(format!("no thread for the calls: {error}")))?;
        answer.recv().map_err(|_| start("the thread for the calls panicked".to_owned()))??;
        let (jobs, thread) = (Some(jobs), Some(thread));
        let device = device.clone();
        Ok(Self { rank, size, device, gpu: gpu.clone(), jobs, thread, failure, _beside: beside })
    }

    /// Starts a call as `plan` says, for a copy of `x` on the device.
    fn begin(
        &self,
        op: &'static str,
        kind: Collective,
        x: &Tensor,
        plan: impl FnOnce(&Gpu, &Tensor) -> Result<DeviceCall>,
    ) -> Result<Pending> {
        let call = Call::with(op, kind, x)?;
        self.check(&call.to_string())?;
        let from_host = x.device().is_cpu();
        if !from_host && x.device().location() != self.device.location() {
            let (got, expected) = (x.device().location(), self.device.location());
            let Self { rank, size, .. } = *self;
            let call = call.to_string();
            return Err(DistError::Device { rank, size, call, got, expected }.into());
        }
        if x.dtype() == DType::F8E4M3 {
            let (name, got) = ("x", x.dtype());
            let expected = "another dtype: `Nccl` has no F8E4M3, cast it".to_owned();
            return Err(ArgumentError::DType { op, name, got, expected }.into());
        }
        let x = match from_host {
            true if x.elem_count() == 0 => self.gpu.empty(x.shape().clone(), x.dtype())?,
            true => x.to_device(&self.device)?,
            false => x.detach(),
        };
        let x = kernels::contiguous(&x)?;
        // Of the tensor's stream.
        let gpu = Gpu::of(x.device()).unwrap_or(&self.gpu).clone();
        let DeviceCall { steps, kept, result } = plan(&gpu, &x)?;
        let ready = gpu.record()?;
        let result = Arc::new(Mutex::new(Some(result)));
        let name = call.to_string();
        let (begun, starting) = mpsc::channel();
        let sent = Work { call, steps, ready: Some(ready), kept, result: result.clone(), begun };
        self.send(Job::Call(sent), &name)?;
        let confirmed = from_host.then(|| self.confirm(&name)).transpose()?;
        let waiting = self.waiting(name);
        Ok(Pending::new(move || {
            let done: Arc<Event> = waiting.answer(&starting)?;
            gpu.wait_for(&done)?;
            // Taken out, so that its memory is freed in the order of the stream that has waited.
            let result = lock(&result).take();
            let Some(result) = result else { return Err(waiting.failed().into()) };
            match confirmed {
                Some(confirmed) => {
                    waiting.answer(&confirmed)?;
                    Ok(result.to_device(&Device::Cpu)?)
                }
                None => Ok(result),
            }
        }))
    }

    /// Checks that a call can start.
    fn check(&self, call: &str) -> Result<()> {
        if self.failure.is_set() {
            return Err(self.waiting(call.to_owned()).failed().into());
        }
        if capture::is_active() {
            let what =
                format!("{call} is a call to other ranks, which `dist::Nccl` does not capture");
            return Err(CaptureError::Refused(what).into());
        }
        Ok(())
    }

    fn send(&self, job: Job, call: &str) -> Result<()> {
        match &self.jobs {
            Some(jobs) if jobs.send(job).is_ok() => Ok(()),
            _ => Err(self.waiting(call.to_owned()).failed().into()),
        }
    }

    /// Asks for an answer once the calls until now have ended.
    fn confirm(&self, call: &str) -> Result<Receiver<()>> {
        let (answer, confirmed) = mpsc::channel();
        self.send(Job::Confirm(answer), call)?;
        Ok(confirmed)
    }

    fn waiting(&self, call: String) -> Waiting {
        Waiting { rank: self.rank, size: self.size, call, failure: self.failure.clone() }
    }
}

/// Who waits for the thread.
struct Waiting {
    rank: usize,
    size: usize,
    call: String,
    failure: Arc<Failure>,
}

impl Waiting {
    /// The answer, unless a call has failed: the thread then drops what it would answer by.
    fn answer<T>(&self, answer: &Receiver<T>) -> Result<T> {
        match answer.recv() {
            Ok(answer) if !self.failure.is_set() => Ok(answer),
            _ => Err(self.failed().into()),
        }
    }

    fn failed(&self) -> DistError {
        self.failure.report(self.rank, self.size, &self.call)
    }
}

impl Communicator for Rank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn start_all_reduce(&self, x: &Tensor, reduction: ReduceOp) -> Result<Pending> {
        can_combine("all_reduce", x)?;
        let plan =
            |gpu: &Gpu, x: &Tensor| plan::all_reduce(gpu, x, reduction, self.rank, self.size);
        self.begin("all_reduce", Collective::AllReduce(reduction), x, plan)
    }

    fn start_reduce_scatter(&self, x: &Tensor, reduction: ReduceOp) -> Result<Pending> {
        can_combine("reduce_scatter", x)?;
        let share = share("reduce_scatter", x, self.size)?;
        let plan =
            |gpu: &Gpu, x: &Tensor| plan::reduce_scatter(gpu, x, reduction, self.size, share);
        self.begin("reduce_scatter", Collective::ReduceScatter(reduction), x, plan)
    }

    fn start_all_gather(&self, x: &Tensor) -> Result<Pending> {
        can_travel("all_gather", x)?;
        let joined = joined(x, self.size);
        let plan = |gpu: &Gpu, x: &Tensor| plan::all_gather(gpu, x, joined);
        self.begin("all_gather", Collective::AllGather, x, plan)
    }

    fn start_broadcast(&self, x: &Tensor, root: usize) -> Result<Pending> {
        can_travel("broadcast", x)?;
        is_rank(root, self.size)?;
        let plan = |gpu: &Gpu, x: &Tensor| plan::broadcast(gpu, x, root);
        self.begin("broadcast", Collective::Broadcast { root: root as u32 }, x, plan)
    }

    fn barrier(&self) -> Result<()> {
        let call = Call::bare(Collective::Barrier);
        let name = call.to_string();
        self.check(&name)?;
        self.send(Job::Call(Work::bare(call)), &name)?;
        let confirmed = self.confirm(&name)?;
        self.waiting(name).answer(&confirmed)
    }

    fn synchronize(&self) -> Result<()> {
        let name = "synchronize";
        self.check(name)?;
        let confirmed = self.confirm(name)?;
        self.waiting(name.to_owned()).answer(&confirmed)
    }
}

/// How long a rank that ends waits for NCCL to abort.
const ABORT: Duration = Duration::from_secs(5);

impl Drop for Rank {
    /// Ends the calls in order. After an error that somebody knows of nothing is waited for but NCCL's end.
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take()
            && !std::thread::panicking()
        {
            let mut failed = None;
            while !thread.is_finished() && !self.failure.is_unreported() {
                let failed =
                    self.failure.is_set().then(|| *failed.get_or_insert_with(Instant::now));
                if failed.is_some_and(|failed| failed.elapsed() > ABORT) {
                    break;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        if self.failure.is_unreported() {
            tracing::error!(
                "rank {} of {} ends after an error that no call returned",
                self.rank,
                self.size
            );
        }
    }
}

impl fmt::Debug for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nccl")
            .field("rank", &self.rank)
            .field("size", &self.size)
            .finish_non_exhaustive()
    }
}
