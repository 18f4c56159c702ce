//! Which thread takes which tasks of a loop.
//!
//! Each thread has a share of neighbouring tasks: the same one in every loop that is run from its pool, or from outside of any,
//! and has as many tasks. What it has written in one loop it reads in the next, from a cache that is near to it. A thread
//! whose share is empty takes from the ends of the others', as in Markatos and LeBlanc, "Using processor affinity in loop
//! scheduling on shared-memory multiprocessors" (1994).

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Tasks of a loop that nobody has.
#[derive(Debug)]
pub(super) struct Shares {
    shares: Box<[Share]>,
    tasks: usize,
    /// Tasks that are taken together: more than one only where there are more tasks than a number of 32 bits counts.
    unit: usize,
    /// Whether somebody has found all shares empty.
    empty: AtomicBool,
}

/// `start << 32 | end`, in units, on a cache line of its own.
#[derive(Debug)]
#[repr(align(64))]
struct Share(AtomicU64);

/// A thread takes one of so many parts of what a share has: fewer as fewer are left, so that threads end together.
const PARTS: u64 = 8;
/// Units that are taken at once, at most: nobody else can take them, should they be slow.
const MOST: u64 = 16;

impl Shares {
    /// Shares of so many threads, whose sizes differ by one at most.
    pub(super) fn new(tasks: usize, threads: usize) -> Self {
        Self::with_numbers(tasks, threads, u32::MAX as usize)
    }

    /// As [`Self::new`], of at most `most` units.
    fn with_numbers(tasks: usize, threads: usize, most: usize) -> Self {
        let unit = tasks.div_ceil(most).max(1);
        let units = tasks.div_ceil(unit) as u64;
        // Numbers of 32 bits, whose products have 64.
        let start = |thread: usize| units * thread as u64 / threads as u64;
        let share = |thread| Share(AtomicU64::new(start(thread) << 32 | start(thread + 1)));
        Self {
            shares: (0..threads).map(share).collect(),
            tasks,
            unit,
            empty: AtomicBool::new(false),
        }
    }

    /// Some tasks that nobody else gets: of share `own`, counted around, while it has some. `None` where no share has any.
    pub(super) fn take(&self, own: usize) -> Option<Range<usize>> {
        let (before, after) = self.shares.split_at(own % self.shares.len());
        let mut shares = after.iter().chain(before).enumerate();
        let taken = shares.find_map(|(distance, share)| share.take(distance == 0));
        if taken.is_none() {
            // A share that is empty stays so.
            self.empty.store(true, Ordering::Relaxed);
        }
        let first = |unit: u64| (unit as usize).saturating_mul(self.unit).min(self.tasks);
        taken.map(|units| first(units.start)..first(units.end))
    }

    /// Whether a thread has seen that all tasks are taken.
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
    /// Some units of its start, or of its end.
    fn take(&self, at_start: bool) -> Option<Range<u64>> {
        let mut now = self.0.load(Ordering::Relaxed);
        loop {
            let (start, end) = (now >> 32, now & u64::from(u32::MAX));
            if start == end {
                return None;
            }
            let count = (end - start).div_ceil(PARTS).min(MOST);
            let (taken, start, end) = match at_start {
                true => (start..start + count, start + count, end),
                false => (end - count..end, start, end - count),
            };
            let (left, order) = (start << 32 | end, Ordering::Relaxed);
            match self.0.compare_exchange_weak(now, left, order, order) {
                Ok(_) => return Some(taken),
                Err(other) => now = other,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::kernels::cpu::testing::unless_miri;

    #[test]
    fn a_thread_takes_its_own_tasks_in_order_and_then_the_last_of_others() {
        let shares = Shares::new(30, 3);
        let mut next = 10;
        while next < 20 {
            let taken = shares.take(1).unwrap();
            assert_eq!((taken.start, taken.end > taken.start), (next, true));
            next = taken.end;
        }
        assert_eq!(next, 20);
        assert_eq!(shares.take(1), Some(28..30), "an eighth of the next share, from its end");
        assert_eq!(shares.take(2), Some(20..21));
        assert_eq!(shares.take(3), Some(0..2), "counted around");
        assert!(!shares.are_empty());
        shares.clear();
        assert!(shares.are_empty() && (0..4).all(|own| shares.take(own).is_none()));
    }

    #[test]
    fn numbers_of_more_tasks_than_there_are_stand_for_several() {
        let shares = Shares::with_numbers(1001, 3, 10);
        let all: Vec<_> = std::iter::from_fn(|| shares.take(0)).collect();
        let mut tasks: Vec<usize> = all.iter().cloned().flatten().collect();
        tasks.sort_unstable();
        assert!(tasks.into_iter().eq(0..1001) && all.len() <= 10);
        assert!(shares.are_empty());
        let huge = Shares::new(usize::MAX, 2);
        let first = huge.take(0).unwrap();
        assert_eq!(first, 0..MOST as usize * huge.unit);
        let last = huge.shares[1].take(false).unwrap();
        assert_eq!((last.end as usize).saturating_mul(huge.unit), usize::MAX);
    }

    /// Threads that take what is left of one another's shares.
    #[test]
    fn each_task_is_taken_once() {
        for tasks in [1, 2, 3, 7, 64, 1000] {
            for threads in [1, 2, 3, 5] {
                for _ in 0..unless_miri(50, 1) {
                    let (shares, all) = (Shares::new(tasks, threads), Mutex::new(Vec::new()));
                    std::thread::scope(|scope| {
                        // Not everyone comes, and one comes who has no share of its own.
                        for own in (0..=threads).skip(usize::from(threads > 2)) {
                            let (shares, all) = (&shares, &all);
                            scope.spawn(move || {
                                while let Some(taken) = shares.take(own) {
                                    all.lock().unwrap().extend(taken);
                                }
                                assert!(shares.are_empty());
                            });
                        }
                    });
                    let mut all = all.into_inner().unwrap();
                    all.sort_unstable();
                    assert!(all.into_iter().eq(0..tasks), "{tasks} tasks of {threads} threads");
                }
            }
        }
    }
}
