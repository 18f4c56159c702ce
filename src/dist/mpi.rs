//! Ranks that are processes which `mpirun` starts.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mpi::Threading;
use mpi::environment::Universe;
use mpi::request::{Request, Scope, multiple_scope, scope};
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator as _, CommunicatorCollectives, Destination, Root, Source};

use super::communicator::Communicator;
use super::host::{Fault, Host, SEGMENT, Stuck, Transport};
use super::timeout::timeout;
use crate::error::{DistError, Result};

/// How long a process may live after a call failed. It is at most the timeout.
const GRACE: Duration = Duration::from_secs(30);

/// Up to here a rank sends each peer a message of its own. The header of a call is shorter.
const SHORT: usize = 256;

/// How long a rank asks for an answer all the time.
const EAGER: Duration = Duration::from_micros(50);

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
    /// the environment variable `CANDLE_AMP_DIST_TIMEOUT` says, in seconds, or 30 minutes. If a call fails, a
    /// process that still lives 30 seconds later (or the timeout, if that is shorter) ends itself and, by
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

    /// [`all_gather`](Transport::all_gather) by a message to each peer, so that one which does not answer is known.
    fn tell_each(&self, mine: &[u8], all: &mut [u8], stuck: Stuck<'_>) {
        let (rank, size) = (self.all.rank() as usize, self.all.size() as usize);
        // The peers whose message is awaited, by the place of the request.
        let mut awaited = vec![None; 2 * size];
        multiple_scope(2 * size, |scope, requests| {
            for (peer, theirs) in all.chunks_exact_mut(mine.len()).enumerate() {
                if peer == rank {
                    theirs.copy_from_slice(mine);
                    continue;
                }
                let process = self.all.process_at_rank(peer as i32);
                let place = requests.add(process.immediate_receive_into(scope, theirs));
                awaited[place] = Some(peer);
                requests.add(process.immediate_send(scope, mine));
            }
            let awaited = RefCell::new(awaited);
            let is_done = || {
                while requests.incomplete() > 0 {
                    let Some((place, ..)) = requests.test_any() else { return false };
                    awaited.borrow_mut()[place] = None;
                }
                true
            };
            self.wait(is_done, || awaited.borrow().iter().flatten().copied().collect(), stuck);
        });
    }

    /// Waits for a call that has begun.
    fn finish<'a, D: ?Sized, S: Scope<'a>>(&self, request: Request<'a, D, S>, stuck: Stuck<'_>) {
        let mut request = Some(request);
        let is_done = || {
            request = request.take().and_then(|request| request.test().err());
            request.is_none()
        };
        self.wait(is_done, Vec::new, stuck);
    }

    /// Waits until what has begun is done. MPI cannot give it up, and may write its buffers at any time: without an
    /// answer in time this never returns. `missing`: the ranks that are known not to have answered.
    fn wait(
        &self,
        mut is_done: impl FnMut() -> bool,
        missing: impl Fn() -> Vec<usize>,
        stuck: Stuck<'_>,
    ) {
        let began = Instant::now();
        let mut sleep = Duration::ZERO;
        while !is_done() {
            let waited = began.elapsed();
            if waited > self.timeout {
                stuck(Fault::Timeout { missing: missing(), waited });
                self.end();
            }
            // Soon at first, for short calls; then rarely, as the cores may be computing.
            if sleep.is_zero() {
                std::thread::yield_now();
            } else {
                std::thread::sleep(sleep);
            }
            if waited > EAGER {
                sleep = (sleep + LONGEST_SLEEP / 20).min(LONGEST_SLEEP);
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
        if mine.len() <= SHORT {
            self.tell_each(mine, all, stuck);
        } else {
            scope(|scope| self.finish(self.all.immediate_all_gather_into(scope, mine, all), stuck));
        }
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
