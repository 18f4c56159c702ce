//! Which thread takes which tasks of a loop.
//!
//! Each thread has a share of neighbouring tasks, the same one in every loop of as many tasks: what it has written in
//! one loop it reads in the next, from a cache that is near to it. A thread whose share is empty takes from the
//! others' ends (Markatos and LeBlanc, "Using processor affinity in loop scheduling", 1994).

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Tasks of a loop that nobody has.
pub(super) struct Shares {
    shares: Box<[Share]>,
    /// Whether somebody has found all shares empty.
    empty: AtomicBool,
}

/// `start << 32 | end`, on a cache line of its own.
#[repr(align(64))]
struct Share(AtomicU64);

/// What a thread leaves in a share: all but a quarter, so that threads end together.
const TAKEN: usize = 4;

impl Shares {
    /// Most tasks: numbers of two fit in a word.
    pub(super) const MOST: usize = u32::MAX as usize;

    /// As many numbers for each of so many threads, to one.
    pub(super) fn new(tasks: usize, threads: usize) -> Self {
        assert!(tasks <= Self::MOST && threads > 0);
        // In 128 bits, as the product of two numbers may have 64 and more.
        let start = |thread| (tasks as u128 * thread as u128 / threads as u128) as usize;
        let share = |thread| Share(AtomicU64::new(word(start(thread)..start(thread + 1))));
        Self { shares: (0..threads).map(share).collect(), empty: AtomicBool::new(false) }
    }

    /// Some tasks that nobody else gets, for the thread of this share, or of the one so many times around; `None` where none
    /// are left.
    pub(super) fn take(&self, own: usize) -> Option<Range<usize>> {
        let (before, after) = self.shares.split_at(own % self.shares.len());
        let all = after.iter().chain(before).enumerate();
        let taken = all.into_iter().find_map(|(distance, share)| share.take(distance == 0));
        if taken.is_none() {
            // A share that is empty stays so.
            self.empty.store(true, Ordering::Relaxed);
        }
        taken
    }

    /// Whether all tasks are known to be taken.
    pub(super) fn are_empty(&self) -> bool {
        self.empty.load(Ordering::Relaxed)
    }

    /// Leaves no task to anyone.
    pub(super) fn clear(&self) {
        self.shares.iter().for_each(|share| share.0.store(0, Ordering::Relaxed));
        self.empty.store(true, Ordering::Relaxed);
    }
}

impl Share {
    /// Some tasks of the start of this share, or of its end.
    fn take(&self, first: bool) -> Option<Range<usize>> {
        let mut now = self.0.load(Ordering::Relaxed);
        loop {
            let Range { start, end } = range(now);
            if start == end {
                return None;
            }
            let count = (end - start).div_ceil(TAKEN);
            let (taken, left) = if first {
                (start..start + count, start + count..end)
            } else {
                (end - count..end, start..end - count)
            };
            let order = Ordering::Relaxed;
            match self.0.compare_exchange_weak(now, word(left), order, order) {
                Ok(_) => return Some(taken),
                Err(other) => now = other,
            }
        }
    }
}

fn word(tasks: Range<usize>) -> u64 {
    (tasks.start as u64) << 32 | tasks.end as u64
}

fn range(word: u64) -> Range<usize> {
    (word >> 32) as usize..(word & u64::from(u32::MAX)) as usize
}
