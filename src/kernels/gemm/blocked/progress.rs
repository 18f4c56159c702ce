//! Which tasks of a product have been finished.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

/// Looks before a thread that waits lets others have its processor: some microseconds.
const SPINS: usize = 1 << 9;

/// What is packed and multiplied.
///
/// A thread that waits does not sleep: what it waits for is packed or multiplied in some hundred microseconds.
pub(super) struct Progress {
    /// Of each block, pieces that are packed.
    packed: Vec<AtomicUsize>,
    /// Of each part, blocks that it has been multiplied by.
    multiplied: Vec<AtomicUsize>,
    pieces: usize,
    slots: usize,
    panicked: AtomicBool,
}

impl Progress {
    pub(super) fn new(blocks: usize, pieces: usize, parts: usize, slots: usize) -> Self {
        let zeros = |count| (0..count).map(|_| AtomicUsize::new(0)).collect();
        let (packed, multiplied) = (zeros(blocks), zeros(parts));
        Self { packed, multiplied, pieces, slots, panicked: AtomicBool::new(false) }
    }

    /// Packs a piece of a block, when nobody reads any more what its slot had.
    pub(super) fn pack(&self, block: usize, pack: impl FnOnce()) {
        let task = Begun { progress: self, finished: &self.packed[block] };
        let free = block.checked_sub(self.slots).is_none_or(|before| {
            self.multiplied.iter().all(|part| self.wait_for(part, before + 1))
        });
        if free {
            pack();
            task.finish();
        }
    }

    /// Prepares a part, and multiplies it by a block when all pieces of that are packed, and when the part has been
    /// multiplied by those before.
    pub(super) fn multiply<T>(
        &self,
        [block, part]: [usize; 2],
        prepare: impl FnOnce() -> T,
        multiply: impl FnOnce(T),
    ) {
        let task = Begun { progress: self, finished: &self.multiplied[part] };
        let prepared = prepare();
        if self.wait_for(&self.packed[block], self.pieces)
            && self.wait_for(&self.multiplied[part], block)
        {
            multiply(prepared);
            task.finish();
        }
    }

    /// Waits until so many are finished; false where a task has panicked, as one of these may never be.
    fn wait_for(&self, finished: &AtomicUsize, count: usize) -> bool {
        let mut looks = 0;
        // `Acquire`: what they wrote can be read.
        while finished.load(Ordering::Acquire) < count {
            if self.panicked.load(Ordering::Relaxed) {
                return false;
            }
            looks += 1;
            if looks < SPINS { std::hint::spin_loop() } else { thread::yield_now() }
        }
        true
    }
}

/// A task. Where it ends without being finished, it has panicked, or needed one that has.
struct Begun<'a> {
    progress: &'a Progress,
    finished: &'a AtomicUsize,
}

impl Begun<'_> {
    fn finish(self) {
        // `Release`: who has waited for it sees what it wrote.
        self.finished.fetch_add(1, Ordering::Release);
        std::mem::forget(self);
    }
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        self.progress.panicked.store(true, Ordering::Relaxed);
    }
}
