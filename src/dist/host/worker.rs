//! The thread that makes a rank's calls.

use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, OnceLock};

use super::call::{Call, Collective, HEADER};
use super::moves::Moves;
use super::transport::{Fault, Transport};
use crate::error::{DistError, RankCall};

/// The most peers that a message lists.
const LISTED: usize = 8;

/// A call, its bytes, and where its result goes.
pub(super) struct Job {
    pub(super) call: Call,
    pub(super) bytes: Vec<u8>,
    pub(super) answer: Sender<Result<Vec<u8>, DistError>>,
}

pub(super) struct Worker<T> {
    pub(super) transport: T,
    pub(super) rank: usize,
    pub(super) size: usize,
    /// The most bytes that travel at once, of all ranks together.
    pub(super) segment: usize,
    /// The first error, once there is one.
    pub(super) failure: Arc<OnceLock<String>>,
}

impl<T: Transport> Worker<T> {
    /// Makes the calls that come, until one fails or none can come any more.
    pub(super) fn run(mut self, queue: &Receiver<Job>) {
        let mut last = None;
        let mut calls = 0;
        while let Ok(Job { mut call, bytes, answer }) = queue.recv() {
            calls += 1;
            call.number = calls;
            match self.perform(&call, last.as_ref(), bytes, &answer) {
                Ok(result) => {
                    let _ = answer.send(Ok(result));
                }
                Err(error) => {
                    let why = error.to_string();
                    let _ = answer.send(Err(error));
                    let _ = self.failure.set(why.clone());
                    return self.transport.fail(&why);
                }
            }
            last = Some(call);
        }
        let mut leave = Call::bare(Collective::Leave);
        leave.number = calls + 1;
        let Self { transport, rank, size, failure, .. } = self;
        let this = || RankCall { rank, size, number: leave.number, call: leave.to_string() };
        transport.leave(&leave.encode(), calls, &|fault| {
            let why = describe(fault, this(), last.as_ref()).to_string();
            // Nobody waits for this one's error.
            tracing::error!("{why}");
            let _ = failure.set(why);
        });
    }

    fn perform(
        &mut self,
        call: &Call,
        last: Option<&Call>,
        bytes: Vec<u8>,
        answer: &Sender<Result<Vec<u8>, DistError>>,
    ) -> Result<Vec<u8>, DistError> {
        let Self { transport, rank, size, segment, failure } = self;
        let (rank, size) = (*rank, *size);
        let this = || RankCall { rank, size, number: call.number, call: call.to_string() };
        // What all ranks did last: this call, once they have agreed on it.
        let stuck = |fault: Fault, done: Option<&Call>| {
            let error = describe(fault, this(), done);
            let why = error.to_string();
            let _ = answer.send(Err(error));
            let _ = failure.set(why);
        };

        let mut headers = vec![0; size * HEADER];
        transport
            .all_gather(&call.encode(), &mut headers, &|fault| stuck(fault, last))
            .map_err(|fault| describe(fault, this(), last))?;
        compare(call, &headers, this)?;
        if bytes.is_empty() {
            return Ok(bytes);
        }

        let stuck = |fault| stuck(fault, Some(call));
        let piece = (*segment / size).next_multiple_of(8);
        let mut moves = Moves { transport, size, dtype: call.dtype(), piece, stuck: &stuck };
        let result = match call.kind {
            Collective::Barrier | Collective::Leave => Ok(Some(Vec::new())),
            Collective::Broadcast { root } => moves.broadcast(bytes, root as usize).map(Some),
            Collective::AllGather => moves.all_gather(&bytes).map(Some),
            Collective::AllReduce(reduction) => moves.all_reduce(bytes, reduction),
            Collective::ReduceScatter(reduction) => moves.reduce_scatter(&bytes, reduction),
        };
        match result {
            Ok(Some(result)) => Ok(result),
            Ok(None) => Err(DistError::IntegerOverflow { call: this() }),
            Err(fault) => Err(describe(fault, this(), Some(call))),
        }
    }
}

/// Checks that all ranks make the same call.
pub(in crate::dist) fn compare(
    call: &Call,
    headers: &[u8],
    this: impl Fn() -> RankCall,
) -> Result<(), DistError> {
    let mut differing = Vec::new();
    for (peer, header) in headers.chunks_exact(HEADER).enumerate() {
        match Call::decode(header) {
            Some(theirs) if theirs == *call => {}
            Some(theirs) if theirs.kind == Collective::Leave => {
                let reason = left(theirs.number.saturating_sub(1));
                return Err(DistError::Left { call: this(), peer, reason });
            }
            Some(theirs) => {
                differing.push(format!("rank {peer} makes call {}, {theirs}", theirs.number))
            }
            None => differing.push(format!("rank {peer} sends what is no call")),
        }
    }
    if differing.is_empty() {
        return Ok(());
    }
    let more = differing.len().saturating_sub(LISTED);
    differing.truncate(LISTED);
    if more > 0 {
        differing.push(format!("and {more} more"));
    }
    Err(DistError::Mismatch { call: this(), peers: differing.join("; ") })
}

/// How a rank ended that makes no more calls.
pub(crate) fn left(calls: u64) -> String {
    format!("has left, after {calls} calls")
}

/// The error of a call; `done` is the last that all ranks had begun.
pub(in crate::dist) fn describe(fault: Fault, call: RankCall, done: Option<&Call>) -> DistError {
    match fault {
        Fault::Left { peer, reason } => DistError::Left { call, peer, reason },
        Fault::Timeout { missing, waited } => {
            let before = before(&call, done);
            let missing = match missing.as_slice() {
                [] => "the peers".to_owned(),
                [rank] => format!("rank {rank}"),
                ranks => format!("ranks {ranks:?}"),
            };
            DistError::Timeout { call, waited, missing, before }
        }
    }
}

/// What is known of the other ranks.
pub(in crate::dist) fn before(call: &RankCall, done: Option<&Call>) -> String {
    match done {
        Some(done) if done.number == call.number => "all ranks had begun this call".to_owned(),
        Some(done) => format!("all ranks made call {}, {done}", done.number),
        None => "there was no call before".to_owned(),
    }
}
