//! Large F32 products with AVX2 or AVX-512, in blocks.
//!
//! A tile of sums ([`tile::size`]) stays in registers for up to [`DEPTH`] terms. The side of the product with fewer
//! lines is packed once, for all threads. A thread takes some lines of the other side, packs them where its
//! second-level cache keeps them, and multiplies them. So a product is a list of [`Task`]s, which threads take one by
//! one, in order. A task that needs what an earlier one makes waits for it. The first that is not finished waits for
//! none, so some thread always goes on.
//!
//! The shared side is packed a block of terms at a time, in memory that blocks take in turns. So it stays in a cache,
//! where memory for all of it would be written to and read from beyond.
//!
//! The order in which terms are added up depends on their number alone: bits depend neither on the other sizes nor on
//! threads.
#![allow(unsafe_code)]

mod pack;
mod progress;
#[cfg(test)]
mod tests;
mod tile;

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::matrix::Matrix;
use super::micro::{KeptWords, as_f32, as_f32_mut};
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::vector::Vectors;
use pack::Side;
use progress::Progress;
use tile::Output;

/// Terms that are added up in registers, at most. With AVX2 a panel of columns takes 24 KiB of a first-level cache of
/// 32 KiB. With AVX-512 it takes 48 KiB, and 256 or 512 terms are slower. Miri is slow, and is to see blocks that
/// take turns.
const DEPTH: usize = if cfg!(miri) { 16 } else { 384 };
/// Lines of a part, about, at least: for fewer, reading the shared side takes longer than the products.
const FEW_LINES: usize = 24;
/// Blocks of the shared side that are in memory, where threads share it: one is packed, one is multiplied, and the last
/// parts may still be multiplied by the one before.
const SLOTS: usize = 3;

/// The vectors for a product of so many rows, terms and columns; `None` where the `gemm` crate is faster.
///
/// That packs less of a product that is small or has few columns. With AVX-512 it is as fast as blocks where the terms of
/// each side lie as it packs them, and slower where they are `turned`: of a left side the terms of a row are apart, of a
/// right one those of a column follow each other. Few rows by such a right side take it several times as long as blocks,
/// with AVX2 too. It is also slower where its threads cannot share a product. Measured on Zen 5.
pub(in crate::kernels) fn vectors(
    [rows, depth, columns]: [usize; 3],
    turned: impl FnOnce() -> [bool; 2],
) -> Option<Vectors> {
    let vectors = Vectors::widest().filter(|vectors| vectors.multiply_in_blocks())?;
    is_faster(vectors, [rows, depth, columns], turned).then_some(vectors)
}

/// See [`vectors`].
fn is_faster(
    vectors: Vectors,
    [rows, depth, columns]: [usize; 3],
    turned: impl FnOnce() -> [bool; 2],
) -> bool {
    const TERMS: usize = 1 << 19;
    let terms = rows.saturating_mul(columns).saturating_mul(depth);
    if columns < 128 || terms < TERMS {
        return false;
    }
    if !vectors.hold_squares() {
        return rows >= 8 || rows >= 2 && depth >= 256 && turned()[1];
    }
    let unshared = rows >= 128 && rows.max(columns) < 256;
    // Of a product of many more rows than columns, packing the rows takes longer than it saves.
    let is_tall = rows >= columns.saturating_mul(16);
    match turned() {
        _ if unshared => true,
        [_, true] => rows >= 2 && depth >= 256 && !is_tall,
        [left, false] => left && rows >= 128 && !is_tall,
    }
}

/// What a thread does in one go.
#[derive(Clone, Copy, Debug)]
enum Task {
    /// Packs a piece of the shared side.
    Pack { block: usize, piece: usize },
    /// Packs a part of the other side, and multiplies it.
    Multiply { block: usize, part: usize },
}

/// `left × right`.
pub(super) struct Product<'a> {
    pub(super) left: Matrix<'a, f32>,
    pub(super) right: Matrix<'a, f32>,
    /// The first element of the result, and the elements from a row to the next.
    pub(super) out: (*mut f32, usize),
    /// Whether the product is added to what is there.
    pub(super) accumulate: bool,
}

// SAFETY: of all that is reached from here, tasks write the result alone, and no two the same element at a time: those
// of a block have parts of their own, and `Progress` keeps the blocks of a part in order.
unsafe impl Sync for Product<'_> {}

impl Product<'_> {
    /// Writes the product.
    ///
    /// # Safety
    /// The result is the caller's alone, its rows do not overlap, and it is initialised where it is added to.
    ///
    /// # Panics
    /// When there is nothing to multiply or the numbers of terms differ, a side reaches beyond its data, or the processor
    /// has no such vectors.
    pub(super) unsafe fn run(&self, vectors: Vectors, threads: usize) {
        let depth = self.left.cols;
        assert!(depth == self.right.rows && depth.min(self.left.rows).min(self.right.cols) > 0);
        let [height, width] = tile::size(vectors);
        let (rows, columns) = (Side::new(self.left, height), Side::new(self.right.t(), width));
        let by_rows = rows.lines() >= columns.lines();
        let (own, shared) = if by_rows { (rows, columns) } else { (columns, rows) };
        let blocks = cut(depth, depth.div_ceil(DEPTH), 16);
        let pieces = cut(shared.lines(), threads, shared.at_once());
        // About two for each thread at least, so that threads end together.
        let least = if threads == 1 { 1 } else { 2 * threads };
        let count = own.lines().div_ceil(tile::lines(vectors)).next_multiple_of(threads).max(least);
        let parts = cut(own.lines(), count.min(own.lines().div_ceil(FEW_LINES)), own.at_once());

        let (ahead, slots) = if threads == 1 { (0, 1) } else { (1, SLOTS.min(blocks.len())) };
        let all = 0..shared.lines();
        let size = shared.len(&all, &blocks[0]);
        let packed = Slots::new(slots, size);
        let progress = Progress::new(blocks.len(), pieces.len(), parts.len(), slots);
        let pack = |block: usize, lines: &Range<usize>| {
            let depth = &blocks[block];
            // SAFETY: this piece is this task's alone, and all parts have been multiplied by what the slot had before.
            let words = unsafe {
                packed.words_mut(block, lines.start * depth.len(), shared.len(lines, depth))
            };
            shared.pack(vectors, lines.clone(), depth.clone(), words);
        };
        let prepare = |block: usize, lines: &Range<usize>| {
            let depth = &blocks[block];
            let mut words = KeptWords::new(own.len(lines, depth));
            own.pack(vectors, lines.clone(), depth.clone(), as_f32_mut(words.as_mut_slice()));
            words
        };
        let multiply = |block: usize, lines: &Range<usize>, words: KeptWords| {
            let depth = blocks[block].len();
            // SAFETY: all pieces of this block are packed, and stay until all parts are multiplied by it.
            let all = unsafe { packed.words(block, shared.len(&all, &blocks[block])) };
            let sides = [(as_f32(words.as_slice()), lines.len()), (all, shared.lines())];
            let sides = if by_rows { sides } else { [sides[1], sides[0]] };
            let (stride, add) = (self.out.1, self.accumulate || block > 0);
            let start = lines.start * if by_rows { stride } else { 1 };
            let out = Output { at: self.out.0.wrapping_add(start), stride, add };
            // SAFETY: these lines of the result are this part's, which has been multiplied by all earlier blocks, and
            // by no later one.
            unsafe { tile::multiply(vectors, sides, depth, out) };
        };
        let run = |task: Task| match task {
            Task::Pack { block, piece } => progress.pack(block, || pack(block, &pieces[piece])),
            Task::Multiply { block, part } => progress.multiply(
                [block, part],
                || prepare(block, &parts[part]),
                |words| multiply(block, &parts[part], words),
            ),
        };
        let tasks = tasks(blocks.len(), ahead, pieces.len(), parts.len());
        if threads == 1 {
            return tasks.into_iter().for_each(run);
        }
        // `for_each` hands out many numbers at once, and here neighbours are for different threads.
        let next = AtomicUsize::new(0);
        parallel::for_each(threads, |_| {
            while let Some(&task) = tasks.get(next.fetch_add(1, Ordering::Relaxed)) {
                run(task);
            }
        });
    }
}

/// All tasks, in an order in which none needs a later one. Blocks are packed so many `ahead` of what is multiplied.
fn tasks(blocks: usize, ahead: usize, pieces: usize, parts: usize) -> Vec<Task> {
    let mut tasks = Vec::with_capacity(blocks * (pieces + parts));
    for step in 0..blocks + ahead {
        if step < blocks {
            tasks.extend((0..pieces).map(|piece| Task::Pack { block: step, piece }));
        }
        if let Some(block) = step.checked_sub(ahead) {
            tasks.extend((0..parts).map(|part| Task::Multiply { block, part }));
        }
    }
    tasks
}

/// `0..len` in at most so many ranges, of multiples of `unit` but for the last.
fn cut(len: usize, count: usize, unit: usize) -> Vec<Range<usize>> {
    let each = len.div_ceil(count.max(1)).next_multiple_of(unit);
    (0..len).step_by(each).map(|start| start..len.min(start + each)).collect()
}

/// Memory that blocks of the shared side take in turns.
struct Slots {
    first: *mut f32,
    slots: usize,
    size: usize,
    /// What `first` points to.
    _words: KeptWords,
}

// SAFETY: `words` and `words_mut` say who may call them.
unsafe impl Sync for Slots {}

impl Slots {
    fn new(slots: usize, size: usize) -> Self {
        let size = size.next_multiple_of(16);
        let mut words = KeptWords::new(slots * size);
        Self { first: words.as_mut_slice().as_mut_ptr().cast(), slots, size, _words: words }
    }

    /// The first words of a block.
    ///
    /// # Safety
    /// They are written, and nobody writes them as long as these are borrowed.
    unsafe fn words(&self, block: usize, len: usize) -> &[f32] {
        assert!(len <= self.size, "the block reaches beyond its slot");
        // SAFETY: inside of the words, which live as long as this; the rest is the caller's.
        unsafe { std::slice::from_raw_parts(self.first.add(block % self.slots * self.size), len) }
    }

    /// So many words of a block, from `at` on.
    ///
    /// # Safety
    /// Nobody else reads or writes them as long as these are borrowed.
    #[allow(clippy::mut_from_ref)]
    unsafe fn words_mut(&self, block: usize, at: usize, len: usize) -> &mut [f32] {
        assert!(at + len <= self.size, "the block reaches beyond its slot");
        let first = block % self.slots * self.size + at;
        // SAFETY: as above. All words are initialised, of any value.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(first), len) }
    }
}
