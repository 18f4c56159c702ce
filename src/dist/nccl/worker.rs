//! The thread that starts a rank's calls, and watches them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use candle_core::Tensor;

use crate::dist::host::{Call, Collective, Fault, HEADER, before, compare, describe};
use crate::error::lock::lock;
use crate::error::{DistError, RankCall};
use crate::kernels::cuda::{Event, Gpu, Id, Link, Step};

/// How long a process may live after a call has failed and before something returned the error.
const GRACE: Duration = Duration::from_secs(30);

/// The most calls under way at once.
const SLOTS: usize = 64;

/// How often calls under way are looked at: while somebody waits for them, and while nobody does.
const AWAITED: Duration = Duration::from_micros(50);
const UNAWAITED: Duration = Duration::from_millis(1);

/// The first error of a rank.
#[derive(Debug, Default)]
pub(super) struct Failure {
    text: OnceLock<String>,
    /// Until a call returns it.
    error: Mutex<Option<DistError>>,
    reported: AtomicBool,
}

impl Failure {
    fn set(&self, error: DistError) {
        let text = error.to_string();
        *lock(&self.error) = Some(error);
        let _ = self.text.set(text);
    }

    /// Whether there is an error that has not been reported.
    pub(super) fn is_unreported(&self) -> bool {
        self.is_set() && !self.reported.load(Ordering::Acquire)
    }

    pub(super) fn is_set(&self) -> bool {
        self.text.get().is_some()
    }

    /// The error itself for whoever asks first, and after that its text.
    pub(super) fn report(&self, rank: usize, size: usize, call: &str) -> DistError {
        self.reported.store(true, Ordering::Release);
        let first = lock(&self.error).take();
        first.unwrap_or_else(|| DistError::Failed {
            rank,
            size,
            call: call.to_owned(),
            first: match self.text.get() {
                Some(text) => text.clone(),
                None => "the thread for the calls has ended".to_owned(),
            },
        })
    }
}

pub(super) enum Job {
    Call(Work),
    /// To be answered once the calls until now have ended.
    Confirm(Sender<()>),
}

/// A call for the thread to start.
pub(super) struct Work {
    pub(super) call: Call,
    pub(super) steps: Vec<Step>,
    /// When candle's stream has written what the steps read.
    pub(super) ready: Option<Event>,
    pub(super) kept: Vec<Tensor>,
    /// Empty once the caller has it.
    pub(super) result: Arc<Mutex<Option<Tensor>>>,
    /// Is given the event after the last step.
    pub(super) begun: Sender<Arc<Event>>,
}

impl Work {
    /// A call without a tensor.
    pub(super) fn bare(call: Call) -> Self {
        let (begun, _) = std::sync::mpsc::channel();
        let (steps, kept) = (Vec::new(), Vec::new());
        Self { call, steps, ready: None, kept, result: Arc::default(), begun }
    }
}

/// A call under way.
///
/// Its tensors are dropped by this thread, once the streams are done with them.
struct Flight {
    call: Call,
    slot: usize,
    ready: Option<Event>,
    /// When the headers of all ranks are here.
    headers: Event,
    done: Arc<Event>,
    adds_integers: bool,
    /// Whether all ranks make this call.
    is_agreed: bool,
    /// Since when nothing but the peers kept it.
    since: Instant,
    _kept: Vec<Tensor>,
    _result: Arc<Mutex<Option<Tensor>>>,
}

pub(super) struct Worker {
    link: Link,
    rank: usize,
    size: usize,
    timeout: Duration,
    failure: Arc<Failure>,
    calls: u64,
    /// The last call that all ranks had begun.
    last: Option<Call>,
    flights: VecDeque<Flight>,
    free: Vec<usize>,
    /// What is being started: its caller learns of an error after the failure is set.
    starting: Option<Sender<Arc<Event>>>,
    /// With the number of the last call before.
    confirmations: VecDeque<(u64, Sender<()>)>,
}

impl Worker {
    /// Connects the ranks.
    pub(super) fn connect(
        gpu: &Gpu,
        id: &Id,
        [rank, size]: [usize; 2],
        timeout: Duration,
        failure: Arc<Failure>,
    ) -> crate::Result<Self> {
        let start = |reason: String| {
            let reason = format!("rank {rank} of {size}: {reason}");
            crate::Error::from(DistError::Start { reason })
        };
        let link = Link::new(gpu, id, [rank, size], [SLOTS, HEADER]).map_err(start)?;
        let began = Instant::now();
        while !link.is_settled().map_err(start)? {
            if began.elapsed() > timeout {
                return Err(start(format!(
                    "NCCL has not connected all ranks in {:.1} s: one is missing, or cannot be reached. \
                     NCCL_DEBUG=INFO shows what NCCL does",
                    timeout.as_secs_f64()
                )));
            }
            std::thread::sleep(UNAWAITED);
        }
        Ok(Self {
            link,
            rank,
            size,
            timeout,
            failure,
            calls: 0,
            last: None,
            flights: VecDeque::new(),
            free: (0..SLOTS).collect(),
            starting: None,
            confirmations: VecDeque::new(),
        })
    }

    /// Makes the calls that come, until one fails or none can come any more.
    pub(super) fn run(mut self, queue: &Receiver<Job>) {
        let Err(error) = self.serve(queue) else {
            // Nobody waits for this one's error, nor for a result.
            if let Err(error) = self.part() {
                tracing::error!("{error}");
                self.failure.reported.store(true, Ordering::Release);
                self.failure.set(error);
            } else if let Err(reason) = self.link.leave() {
                tracing::error!("{reason}");
            }
            return;
        };
        let why = error.to_string();
        self.failure.set(error);
        self.starting = None;
        self.confirmations.clear();
        // What the stream writes is not to be read: it stays as it is until the error is reported.
        let failed = Instant::now();
        while self.failure.is_unreported() {
            while queue.try_recv().is_ok() {}
            if failed.elapsed() > GRACE.min(self.timeout) {
                eprintln!("{why}. No call has returned this error: the process ends");
                std::process::abort();
            }
            std::thread::sleep(UNAWAITED);
        }
    }

    fn serve(&mut self, queue: &Receiver<Job>) -> Result<(), DistError> {
        loop {
            self.look()?;
            let patience = match (self.confirmations.is_empty(), self.flights.is_empty()) {
                (false, _) => AWAITED,
                (true, false) => UNAWAITED,
                (true, true) => Duration::from_secs(1),
            };
            match queue.recv_timeout(patience) {
                Ok(Job::Call(work)) => self.start(work)?,
                Ok(Job::Confirm(answer)) => self.confirmations.push_back((self.calls, answer)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
        }
    }

    /// Gives the stream a call.
    fn start(&mut self, work: Work) -> Result<(), DistError> {
        let Work { mut call, steps, ready, kept, result, begun } = work;
        self.calls += 1;
        call.number = self.calls;
        self.starting = Some(begun);
        let slot = loop {
            self.look()?;
            match self.free.pop() {
                Some(slot) => break slot,
                None => std::thread::sleep(AWAITED),
            }
        };
        let headers = self.exchange_headers(&call, slot)?;
        let mut adds_integers = false;
        let refused = |worker: &Self, reason| worker.refused(&call, reason);
        if let Some(ready) = &ready {
            self.link.wait_for(ready).map_err(|reason| refused(self, reason))?;
        }
        for step in &steps {
            self.link.start(step).map_err(|reason| refused(self, reason))?;
            self.settle(&call)?;
            adds_integers |=
                matches!(step, Step::Combine(combine) if !combine.max && !combine.dtype.is_float());
        }
        if adds_integers {
            self.link.fetch_overflow(slot).map_err(|reason| refused(self, reason))?;
        }
        let done = Arc::new(self.link.record().map_err(|reason| refused(self, reason))?);
        if let Some(begun) = self.starting.take() {
            let _ = begun.send(done.clone());
        }
        self.flights.push_back(Flight {
            call,
            slot,
            ready,
            headers,
            done,
            adds_integers,
            is_agreed: false,
            since: Instant::now(),
            _kept: kept,
            _result: result,
        });
        Ok(())
    }

    /// Starts to exchange the headers of a call; the event is when those of all ranks are here.
    fn exchange_headers(&mut self, call: &Call, slot: usize) -> Result<Event, DistError> {
        let header = call.encode();
        self.link.start_headers(slot, &header).map_err(|reason| self.refused(call, reason))?;
        self.settle(call)?;
        self.link.fetch_headers(slot).map_err(|reason| self.refused(call, reason))?;
        self.link.record().map_err(|reason| self.refused(call, reason))
    }

    /// Waits until NCCL has given its work to the stream, for which it may wait for the peers.
    fn settle(&mut self, call: &Call) -> Result<(), DistError> {
        let began = Instant::now();
        while !self.link.is_settled().map_err(|reason| self.refused(call, reason))? {
            // An earlier call, for which this one waits, may have failed.
            self.look()?;
            self.check_time(began, call, self.last.as_ref())?;
            match began.elapsed() < AWAITED {
                true => std::thread::yield_now(),
                false => std::thread::sleep(AWAITED),
            }
        }
        Ok(())
    }

    /// Looks at the calls under way, and ends those that are done.
    fn look(&mut self) -> Result<(), DistError> {
        while let Some(flight) = self.flights.front() {
            let is_done = |event: &Event| {
                event.is_done().map_err(|reason| self.refused(&flight.call, reason))
            };
            let (mut is_agreed, mut since) = (flight.is_agreed, flight.since);
            if !is_agreed && is_done(&flight.headers)? {
                let headers = self.link.headers(flight.slot);
                compare(&flight.call, &headers, || self.this(&flight.call))?;
                (is_agreed, since) = (true, Instant::now());
            }
            let ended = is_agreed && is_done(&flight.done)?;
            if !ended {
                let done = if is_agreed { Some(&flight.call) } else { self.last.as_ref() };
                match &flight.ready {
                    // This rank's own work keeps it.
                    Some(ready) if is_agreed && !is_done(ready)? => since = Instant::now(),
                    _ => self.check_time(since, &flight.call, done)?,
                }
                self.link.is_settled().map_err(|reason| self.refused(&flight.call, reason))?;
                if let Some(flight) = self.flights.front_mut() {
                    (flight.is_agreed, flight.since) = (is_agreed, since);
                }
                break;
            }
            if flight.adds_integers && self.link.has_overflown(flight.slot) {
                return Err(DistError::IntegerOverflow { call: self.this(&flight.call) });
            }
            if let Some(Flight { call, slot, .. }) = self.flights.pop_front() {
                self.free.push(slot);
                self.last = Some(call);
            }
            if let Some(next) = self.flights.front_mut() {
                next.since = Instant::now();
            }
        }
        let pending = self.flights.front().map_or(u64::MAX, |flight| flight.call.number);
        while let Some((_, answer)) = self.confirmations.pop_front_if(|(last, _)| *last < pending) {
            let _ = answer.send(());
        }
        Ok(())
    }

    /// Ends the calls, and parts from the other ranks.
    fn part(&mut self) -> Result<(), DistError> {
        while !self.flights.is_empty() {
            self.look()?;
            std::thread::sleep(AWAITED);
        }
        let mut call = Call::bare(Collective::Leave);
        call.number = self.calls + 1;
        let slot = self.free.pop().unwrap_or_default();
        let headers = self.exchange_headers(&call, slot)?;
        let began = Instant::now();
        while !headers.is_done().map_err(|reason| self.refused(&call, reason))? {
            self.check_time(began, &call, self.last.as_ref())?;
            self.link.is_settled().map_err(|reason| self.refused(&call, reason))?;
            std::thread::sleep(UNAWAITED);
        }
        self.link.start_to_leave().map_err(|reason| self.refused(&call, reason))?;
        self.timeout = self.timeout.min(GRACE);
        self.settle(&call)
    }

    fn check_time(
        &self,
        since: Instant,
        call: &Call,
        done: Option<&Call>,
    ) -> Result<(), DistError> {
        let waited = since.elapsed();
        if waited < self.timeout {
            return Ok(());
        }
        Err(describe(Fault::Timeout { missing: Vec::new(), waited }, self.this(call), done))
    }

    /// The error of NCCL or CUDA.
    fn refused(&self, call: &Call, reason: String) -> DistError {
        let call = self.this(call);
        let before = before(&call, self.last.as_ref());
        DistError::Nccl { call, reason, before }
    }

    fn this(&self, call: &Call) -> RankCall {
        let Self { rank, size, .. } = *self;
        RankCall { rank, size, number: call.number, call: call.to_string() }
    }
}
