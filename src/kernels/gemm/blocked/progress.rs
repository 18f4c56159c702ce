//! Which tasks of a product have been finished.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

/// Looks before a thread that waits lets others have its processor: some microseconds.
const SPINS: usize = 1 << 9;

/// What is packed and multiplied. Threads take tasks in order, so a task is waited for only when a thread is at it.
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
        let _begun = Begun { progress: self, finished: &self.packed[block] };
        if let Some(before) = block.checked_sub(self.slots) {
            self.multiplied.iter().for_each(|part| self.wait_for(part, before + 1));
        }
        pack();
    }

    /// Prepares a part, and multiplies it by a block when all pieces of that are packed, and when the part has been
    /// multiplied by those before.
    pub(super) fn multiply<T>(
        &self,
        [block, part]: [usize; 2],
        prepare: impl FnOnce() -> T,
        multiply: impl FnOnce(T),
    ) {
        let _begun = Begun { progress: self, finished: &self.multiplied[part] };
        let prepared = prepare();
        self.wait_for(&self.packed[block], self.pieces);
        self.wait_for(&self.multiplied[part], block);
        multiply(prepared);
    }

    /// Waits until so many are finished. `Acquire`: what they wrote can be read.
    ///
    /// # Panics
    /// When a task has: those that need it would wait for ever.
    fn wait_for(&self, finished: &AtomicUsize, count: usize) {
        let mut looks = 0;
        while finished.load(Ordering::Acquire) < count {
            assert!(!self.panicked.load(Ordering::Relaxed), "another part of the product panicked");
            looks += 1;
            if looks < SPINS { std::hint::spin_loop() } else { thread::yield_now() }
        }
    }
}

/// A task that is finished when this is dropped.
struct Begun<'a> {
    progress: &'a Progress,
    finished: &'a AtomicUsize,
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        match thread::panicking() {
            true => self.progress.panicked.store(true, Ordering::Relaxed),
            // `Release`: who has waited for it sees what it wrote.
            false => _ = self.finished.fetch_add(1, Ordering::Release),
        }
    }
}
