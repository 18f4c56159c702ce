//! How a caller knows that no helper touches its closure any more.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Set once the caller has closed the gate. The other bits count the helpers inside.
const CLOSED: usize = 1 << (usize::BITS - 1);

/// The atomic operations of a [`Gate`]: of `AtomicUsize`, or of a test that tries every order of them.
pub(super) trait Word {
    fn load(&self, order: Ordering) -> usize;
    fn fetch_or(&self, bits: usize, order: Ordering) -> usize;
    fn fetch_sub(&self, by: usize, order: Ordering) -> usize;
    fn compare_exchange(&self, old: usize, new: usize, order: Ordering) -> Result<usize, usize>;
}

impl Word for AtomicUsize {
    fn load(&self, order: Ordering) -> usize {
        self.load(order)
    }
    fn fetch_or(&self, bits: usize, order: Ordering) -> usize {
        self.fetch_or(bits, order)
    }
    fn fetch_sub(&self, by: usize, order: Ordering) -> usize {
        self.fetch_sub(by, order)
    }
    fn compare_exchange(&self, old: usize, new: usize, order: Ordering) -> Result<usize, usize> {
        self.compare_exchange_weak(old, new, order, Ordering::Relaxed)
    }
}

/// Open, then closed for good. A helper touches what the gate guards only between [`enter`](Self::enter) and
/// [`leave`](Self::leave). After [`close`](Self::close) none enters, and once [`is_left`](Self::is_left),
/// none is inside: what they wrote is visible to the caller.
#[derive(Debug, Default)]
pub(super) struct Gate<W = AtomicUsize>(pub(super) W);

impl<W: Word> Gate<W> {
    /// Whether the helper is inside now; not where the gate is closed.
    pub(super) fn enter(&self) -> bool {
        let mut word = self.0.load(Ordering::Relaxed);
        while word & CLOSED == 0 {
            // A successful exchange means that the bit was not set: the caller, who sets it, has yet to
            // read the count, and finds this helper in it.
            match self.0.compare_exchange(word, word + 1, Ordering::Acquire) {
                Ok(_) => return true,
                Err(now) => word = now,
            }
        }
        false
    }

    /// Ends what [`Self::enter`] began. Whether the caller waits for it, and is to be woken.
    ///
    /// `Release`: all that the helper did is before it.
    pub(super) fn leave(&self) -> bool {
        self.0.fetch_sub(1, Ordering::Release) == CLOSED + 1
    }

    /// Closes the gate. Whether nobody is inside.
    ///
    /// `Acquire` reads the last `leave`, and through the chain of read-modify-writes every one before.
    pub(super) fn close(&self) -> bool {
        self.0.fetch_or(CLOSED, Ordering::Acquire) & !CLOSED == 0
    }

    /// Whether the gate is closed, and all have left.
    pub(super) fn is_left(&self) -> bool {
        self.0.load(Ordering::Acquire) == CLOSED
    }
}
