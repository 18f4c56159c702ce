//! Ranks that are processes which `mpirun` starts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use mpi::Threading;
use mpi::environment::Universe;
use mpi::request::{Request, Scope, scope};
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator as _, CommunicatorCollectives, Root};

use super::communicator::Communicator;
use super::host::{Fault, Host, SEGMENT, Stuck, Transport};
use super::timeout::timeout;
use crate::error::{DistError, Result};

/// How long a process may live after a call failed. It is at most the timeout.
const GRACE: Duration = Duration::from_secs(30);

/// The longest sleep between two looks at a call of MPI.
const LONGEST_SLEEP: Duration = Duration::from_micros(200);

/// Ranks that are processes which `mpirun` starts.
#[derive(Clone, Copy, Debug)]
pub struct Mpi;

impl Mpi {
    /// Joins the processes that `mpirun` has started, once in a process.
    ///
    /// A thread of its own initialises MPI and makes all its calls, on a duplicate of the communicator of all
    /// processes. Dropping the communicator waits for the other ranks to drop theirs, and finalises MPI.
    ///
    /// # Errors
    ///
    /// If MPI is initialised already, or cannot be called from a process with several threads. Calls wait as long as
    /// the environment variable `CANDLE_AMP_DIST_TIMEOUT` says, in seconds, or 30 minutes. 30 seconds after a call
    /// has failed, or as long as the timeout if that is shorter, a process that still lives ends itself and, by
    /// `MPI_Abort`, all others.
    pub fn init() -> Result<Arc<dyn Communicator>> {
        Self::init_within(timeout()?)
    }

    /// [`init`](Self::init), where a call waits for its peers at most as long as `timeout`.
    ///
    /// # Errors
    ///
    /// As [`init`](Self::init).
    pub fn init_within(timeout: Duration) -> Result<Arc<dyn Communicator>> {
        Ok(Arc::new(Host::start("Mpi", SEGMENT, move || {
            let processes = Processes::join(timeout)?;
            let (rank, size) = (processes.all.rank() as usize, processes.all.size() as usize);
            Ok((processes, rank, size))
        })?))
    }
}

struct Processes {
    // Freed before the universe is finalised, by their order.
    all: SimpleCommunicator,
    _universe: Universe,
    timeout: Duration,
}

impl Processes {
    fn join(timeout: Duration) -> Result<Self> {
        let start = |reason: &str| DistError::Start { reason: reason.to_owned() };
        let (universe, threading) = mpi::initialize_with_threading(Threading::Funneled)
            .ok_or_else(|| {
                start("MPI was initialised before: call `Mpi::init` once in a process")
            })?;
        if threading < Threading::Funneled {
            let reason = "this MPI serves processes of one thread only: install one that gives MPI_THREAD_FUNNELED";
            return Err(start(reason).into());
        }
        Ok(Self { all: universe.world().duplicate(), _universe: universe, timeout })
    }

    /// Waits for a call that has begun. MPI cannot give it up, and may write its buffers at any time: without an
    /// answer in time this never returns.
    fn finish<'a, D: ?Sized, S: Scope<'a>>(
        &self,
        mut request: Request<'a, D, S>,
        stuck: Stuck<'_>,
    ) {
        let began = Instant::now();
        let mut sleep = Duration::ZERO;
        while let Err(unfinished) = request.test() {
            request = unfinished;
            let waited = began.elapsed();
            if waited > self.timeout {
                stuck(Fault::Timeout { missing: Vec::new(), waited });
                self.end();
            }
            // Soon at first, for short calls; then rarely, as the cores may be computing.
            if sleep.is_zero() {
                std::thread::yield_now();
            } else {
                std::thread::sleep(sleep);
            }
            if waited > Duration::from_micros(50) {
                sleep = (sleep + Duration::from_micros(10)).min(LONGEST_SLEEP);
            }
        }
    }

    /// Gives this process the time to report its error, then ends all.
    fn end(&self) -> ! {
        std::thread::sleep(GRACE.min(self.timeout));
        tracing::error!("this process goes on after a call to its peers failed: ending all ranks");
        self.all.abort(1)
    }
}

impl Transport for Processes {
    fn all_gather(&mut self, mine: &[u8], all: &mut [u8], stuck: Stuck<'_>) -> Result<(), Fault> {
        scope(|scope| self.finish(self.all.immediate_all_gather_into(scope, mine, all), stuck));
        Ok(())
    }

    fn all_to_all(&mut self, mine: &[u8], all: &mut [u8], stuck: Stuck<'_>) -> Result<(), Fault> {
        scope(|scope| self.finish(self.all.immediate_all_to_all_into(scope, mine, all), stuck));
        Ok(())
    }

    fn broadcast(&mut self, bytes: &mut [u8], root: usize, stuck: Stuck<'_>) -> Result<(), Fault> {
        let root = self.all.process_at_rank(root as i32);
        scope(|scope| self.finish(root.immediate_broadcast_into(scope, bytes), stuck));
        Ok(())
    }

    fn leave(mut self, header: &[u8], _: u64, stuck: Stuck<'_>) {
        let mut headers = vec![0; header.len() * self.all.size() as usize];
        // This one gives no error.
        let _ = self.all_gather(header, &mut headers, stuck);
        if headers.chunks_exact(header.len()).any(|theirs| theirs != header) {
            // The others get an error of the call that this rank does not make. To finalise would wait for them:
            // a process that ends without having done so makes mpirun end all.
            std::mem::forget(self);
        }
    }

    fn fail(self, _: &str) {
        self.end()
    }
}
