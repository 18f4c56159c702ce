//! The trait by which an engine on the host moves bytes between ranks.

use std::time::Duration;

/// Moves bytes between ranks. Every method is collective: all ranks call it with as many bytes.
///
/// Each has a time limit of its own. It gives up by an error, or, where what it has begun cannot be given up, calls
/// `stuck` and ends the process some time later.
pub(crate) trait Transport: Sized {
    /// Joins `mine` of all ranks in `all`, in the order of the ranks.
    fn all_gather(&mut self, mine: &[u8], all: &mut [u8], stuck: Stuck<'_>) -> Result<(), Fault>;

    /// Sends the `r`-th of `size` equal pieces of `mine` to rank `r`, and joins what comes in `all`.
    fn all_to_all(&mut self, mine: &[u8], all: &mut [u8], stuck: Stuck<'_>) -> Result<(), Fault>;

    /// Sends `bytes` of rank `root` to all.
    fn broadcast(&mut self, bytes: &mut [u8], root: usize, stuck: Stuck<'_>) -> Result<(), Fault>;

    /// Ends this rank's part in order, after so many calls. `header` is its last, for
    /// [`all_gather`](Self::all_gather).
    fn leave(self, header: &[u8], calls: u64, stuck: Stuck<'_>);

    /// Ends this rank's part after an error, and tells the peers, where that is possible.
    fn fail(self, why: &str);
}

/// Called once with what went wrong, before the process ends.
pub(crate) type Stuck<'a> = &'a dyn Fn(Fault);

/// Why bytes did not move.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The ranks that did not answer, or none where they are not known.
    Timeout { missing: Vec<usize>, waited: Duration },
    /// A peer ended.
    Left { peer: usize, reason: String },
}
