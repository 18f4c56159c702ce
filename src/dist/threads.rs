//! Ranks that are threads of one process.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::communicator::Communicator;
use super::host::{Fault, Host, SEGMENT, Stuck, Transport, left};
use super::timeout::timeout;
use crate::error::lock::lock;
use crate::error::{ArgumentError, DistError, Error, Result};

/// The stack of a rank: as much as a main thread has.
const STACK: usize = 8 << 20;

/// Ranks that are threads of one process: for tests, and to try a program out.
#[derive(Clone, Copy, Debug)]
pub struct Threads;

impl Threads {
    /// Runs `function` on `size` threads, each with its rank of one group, and returns what they returned, in the order
    /// of the ranks.
    ///
    /// # Errors
    ///
    /// That of the rank that failed first, by an error or a panic; it ends the calls of the others. Calls wait as
    /// long as the environment variable `CANDLE_AMP_DIST_TIMEOUT` says, in seconds, or 30 minutes. A thread cannot be
    /// ended from outside: a rank that hangs between its calls keeps this function waiting.
    pub fn run<T: Send>(
        size: usize,
        function: impl Fn(Arc<dyn Communicator>) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        Self::run_within(timeout()?, size, function)
    }

    /// [`run`](Self::run), where a call waits for its peers at most as long as `timeout`.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    pub fn run_within<T: Send>(
        timeout: Duration,
        size: usize,
        function: impl Fn(Arc<dyn Communicator>) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        Self::run_with(timeout, SEGMENT, size, function)
    }

    pub(super) fn run_with<T: Send>(
        timeout: Duration,
        segment: usize,
        size: usize,
        function: impl Fn(Arc<dyn Communicator>) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        if size == 0 {
            let (name, got, expected) = ("size", 0.0, "at least 1 rank");
            return Err(ArgumentError::Setting { name, got, expected }.into());
        }
        let exchange = Arc::new(Exchange::new(size, timeout));
        let rank = |rank| {
            // Outlives `function`: dropped, it says that this rank has left in order.
            let mut host = None;
            let run = || {
                let exchange = exchange.clone();
                let connect = move || Ok((Rank { rank, exchange }, rank, size));
                let started = host.insert(Arc::new(Host::start("Threads", segment, connect)?));
                function(started.clone())
            };
            let result = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
                let message = message(panic.as_ref());
                Err(DistError::Panicked { rank, size, message }.into())
            });
            if let Err(error) = &result {
                exchange.fail(rank, format!("has failed: {error}"));
            }
            result
        };
        let mut results: Vec<Result<T>> = std::thread::scope(|scope| {
            let start = |number| {
                let thread =
                    std::thread::Builder::new().name(format!("rank {number}")).stack_size(STACK);
                let started = thread.spawn_scoped(scope, move || rank(number));
                if let Err(error) = &started {
                    exchange.fail(number, format!("could not start: {error}"));
                }
                started
            };
            let threads: Vec<_> = (0..size).map(start).collect();
            let join = |thread: std::io::Result<std::thread::ScopedJoinHandle<'_, _>>| match thread
            {
                // Panics are caught within.
                Ok(thread) => {
                    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                }
                Err(error) => {
                    Err(DistError::Start { reason: format!("no thread for a rank: {error}") }
                        .into())
                }
            };
            threads.into_iter().map(join).collect()
        });
        let first = exchange.first_failed();
        if let Some(rank) = first.filter(|rank| results[*rank].is_err())
            && let Err(error) = results.swap_remove(rank)
        {
            return Err(match error {
                Error::Dist(error @ (DistError::Panicked { .. } | DistError::Start { .. })) => {
                    error.into()
                }
                error => DistError::Rank { rank, size, source: Box::new(error) }.into(),
            });
        }
        results.into_iter().collect()
    }
}

/// What a panic said.
fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned())
}

/// Where the threads hand one another their bytes.
struct Exchange {
    size: usize,
    timeout: Duration,
    state: Mutex<ExchangeState>,
    changed: Condvar,
}

struct ExchangeState {
    /// What each rank has brought, until every rank has taken all.
    parcels: Vec<Option<Arc<[u8]>>>,
    takers: usize,
    /// How the ranks ended that make no more calls.
    ended: Vec<Option<String>>,
    first_failed: Option<usize>,
}

impl Exchange {
    fn new(size: usize, timeout: Duration) -> Self {
        let state = ExchangeState {
            parcels: vec![None; size],
            takers: 0,
            ended: vec![None; size],
            first_failed: None,
        };
        Self { size, timeout, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// The state is whole between any two statements, so that a panic elsewhere does it no harm.
    fn state(&self) -> MutexGuard<'_, ExchangeState> {
        lock(&self.state)
    }

    /// Brings `mine`, waits for all ranks to bring theirs, and takes all.
    fn swap(&self, rank: usize, mine: &[u8]) -> Result<Vec<Arc<[u8]>>, Fault> {
        let began = Instant::now();
        let mine: Arc<[u8]> = mine.into();
        // A rank may be slow to take what the last exchange has brought.
        let mut state =
            self.wait(self.state(), began, |state| state.parcels[rank].is_some(), |_, _| true)?;
        state.parcels[rank] = Some(mine);
        self.changed.notify_all();
        let is_missing = |state: &ExchangeState, peer: usize| state.parcels[peer].is_none();
        let any_missing = |state: &ExchangeState| state.parcels.iter().any(Option::is_none);
        match self.wait(state, began, any_missing, is_missing) {
            Ok(mut state) => {
                let all = state.parcels.iter().flatten().cloned().collect();
                state.takers += 1;
                if state.takers == self.size {
                    state.takers = 0;
                    state.parcels.fill(None);
                    self.changed.notify_all();
                }
                Ok(all)
            }
            Err(fault) => {
                self.state().parcels[rank] = None;
                Err(fault)
            }
        }
    }

    /// Waits while `blocked`, on ranks of which `awaited` is true, until one of these has ended or the time is over.
    fn wait<'a>(
        &self,
        mut state: MutexGuard<'a, ExchangeState>,
        began: Instant,
        blocked: impl Fn(&ExchangeState) -> bool,
        awaited: impl Fn(&ExchangeState, usize) -> bool,
    ) -> Result<MutexGuard<'a, ExchangeState>, Fault> {
        while blocked(&state) {
            let ranks = || (0..self.size).filter(|peer| awaited(&state, *peer));
            for peer in ranks() {
                if let Some(reason) = state.ended[peer].clone() {
                    return Err(Fault::Left { peer, reason });
                }
            }
            let waited = began.elapsed();
            let Some(left) = self.timeout.checked_sub(waited).filter(|left| !left.is_zero()) else {
                return Err(Fault::Timeout { missing: ranks().collect(), waited });
            };
            state =
                self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(state)
    }

    /// Marks a rank as ended, the first time.
    fn end(&self, rank: usize, reason: String) {
        let mut state = self.state();
        if state.ended[rank].is_none() {
            state.ended[rank] = Some(reason);
        }
        self.changed.notify_all();
    }

    /// Marks a rank as failed.
    fn fail(&self, rank: usize, reason: String) {
        self.state().first_failed.get_or_insert(rank);
        self.end(rank, reason);
    }

    fn first_failed(&self) -> Option<usize> {
        self.state().first_failed
    }
}

/// A rank's end of an [`Exchange`].
struct Rank {
    rank: usize,
    exchange: Arc<Exchange>,
}

impl Transport for Rank {
    fn all_gather(&mut self, mine: &[u8], all: &mut [u8], _: Stuck<'_>) -> Result<(), Fault> {
        let parcels = self.exchange.swap(self.rank, mine)?;
        for (to, parcel) in all.chunks_exact_mut(mine.len()).zip(parcels) {
            to.copy_from_slice(&parcel);
        }
        Ok(())
    }

    fn all_to_all(&mut self, mine: &[u8], all: &mut [u8], _: Stuck<'_>) -> Result<(), Fault> {
        let parcels = self.exchange.swap(self.rank, mine)?;
        let piece = mine.len() / self.exchange.size;
        for (to, parcel) in all.chunks_exact_mut(piece).zip(parcels) {
            to.copy_from_slice(&parcel[self.rank * piece..][..piece]);
        }
        Ok(())
    }

    fn broadcast(&mut self, bytes: &mut [u8], root: usize, _: Stuck<'_>) -> Result<(), Fault> {
        let mine = if self.rank == root { &*bytes } else { &[] };
        let parcels = self.exchange.swap(self.rank, mine)?;
        bytes.copy_from_slice(&parcels[root]);
        Ok(())
    }

    fn leave(self, _: &[u8], calls: u64, _: Stuck<'_>) {
        self.exchange.end(self.rank, left(calls));
    }

    fn fail(self, why: &str) {
        self.exchange.fail(self.rank, format!("has failed: {why}"));
    }
}
