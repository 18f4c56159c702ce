//! F32 products in blocks, on processors whose widest vectors are AVX2's: there this is faster than the `gemm` crate.
//!
//! A tile of 6 by 16 sums stays in registers for up to [`DEPTH`] terms. The side of the product with fewer lines is
//! packed once, for all threads. A thread takes some lines of the other side, packs them where its second-level cache
//! keeps them, and multiplies them. So a product is a list of [`Task`]s, which threads take in order. A task that needs
//! what an earlier one makes waits for it: a thread is at it.
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

use super::micro::KeptWords;
use super::product::Matrix;
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::vector::Vectors;
use pack::{Side, floats, floats_mut};
use progress::Progress;
use tile::{COLUMNS, Output, ROWS};

/// Terms that are added up in registers, at most: a panel of columns takes 24 KiB of a first-level cache of 32 KiB.
const DEPTH: usize = 384;
/// Lines that a thread packs for itself, at most: 108 KiB.
const LINES: usize = 72;
/// Lines of a part, but for the last, at least: for fewer, reading the shared side takes longer than the products.
const FEW_LINES: usize = 24;
/// Blocks of the shared side that are in memory, where threads share it: one is packed, one multiplied, and parts of
/// a third are not finished.
const SLOTS: usize = 3;

/// The vectors for a product of so many rows, terms and columns; `None` where the `gemm` crate is faster.
pub(in crate::kernels) fn vectors(rows: usize, depth: usize, columns: usize) -> Option<Vectors> {
    const TERMS: usize = 1 << 19;
    let terms = rows.saturating_mul(columns).saturating_mul(depth);
    let large = rows >= 8 && columns >= 128 && terms >= TERMS;
    Vectors::widest().filter(|vectors| large && vectors.multiply_in_blocks())
}

/// What a thread does in one go.
#[derive(Clone, Debug)]
enum Task {
    /// Packs lines of the shared side.
    Pack { block: usize, lines: Range<usize> },
    /// Packs a part of the other side, and multiplies it.
    Multiply { block: usize, part: usize, lines: Range<usize> },
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

// SAFETY: of all that is reached from here, tasks write the result alone, and no two the same element at a time; see
// `multiply`.
unsafe impl Sync for Product<'_> {}

impl Product<'_> {
    /// Writes the product.
    ///
    /// # Safety
    /// The result is the caller's alone, and initialised where it is added to.
    ///
    /// # Panics
    /// When a side reaches beyond its data, or the processor has no such vectors.
    pub(super) unsafe fn run(&self, vectors: Vectors, threads: usize) {
        let (rows, columns) = (Side::new(self.left, ROWS), Side::new(self.right.t(), COLUMNS));
        let by_rows = rows.lines() >= columns.lines();
        let (own, shared) = if by_rows { (rows, columns) } else { (columns, rows) };
        let blocks = cut(self.left.cols, self.left.cols.div_ceil(DEPTH), 16);
        let pieces = cut(shared.lines(), threads, shared.width());
        // As many for each thread, and two at least, so that threads end together.
        let least = if threads == 1 { 1 } else { 2 * threads };
        let count = own.lines().div_ceil(LINES).next_multiple_of(threads).max(least);
        let parts = cut(own.lines(), count.min(own.lines().div_ceil(FEW_LINES)), own.width());

        let (ahead, slots) = if threads == 1 { (0, 1) } else { (1, SLOTS.min(blocks.len())) };
        let all = 0..shared.lines();
        let size = shared.len(&all, &blocks[0]);
        let packed = Slots::new(slots, size);
        let progress = Progress::new(blocks.len(), pieces.len(), parts.len(), slots);
        let pack = |block: usize, lines: &Range<usize>| {
            let depth = &blocks[block];
            // SAFETY: this piece is this task's alone, and what the slot had before has been multiplied.
            let words = unsafe {
                packed.words_mut(block, lines.start * depth.len(), shared.len(lines, depth))
            };
            shared.pack(vectors, lines.clone(), depth.clone(), words);
        };
        let prepare = |block: usize, lines: &Range<usize>| {
            let depth = &blocks[block];
            let mut words = KeptWords::new(own.len(lines, depth));
            own.pack(vectors, lines.clone(), depth.clone(), floats_mut(words.as_mut_slice()));
            words
        };
        let multiply = |block: usize, lines: &Range<usize>, words: KeptWords| {
            let depth = blocks[block].len();
            // SAFETY: all pieces of this block are packed, and stay until all parts are multiplied by it.
            let all = unsafe { packed.words(block, shared.len(&all, &blocks[block])) };
            let sides = [(floats(words.as_slice()), lines.len()), (all, shared.lines())];
            let [left, right] = if by_rows { sides } else { [sides[1], sides[0]] };
            let (stride, add) = (self.out.1, self.accumulate || block > 0);
            let start = lines.start * if by_rows { stride } else { 1 };
            let out = Output { at: self.out.0.wrapping_add(start), stride, add };
            // SAFETY: these lines of the result are this part's, which has been multiplied by all earlier blocks, and
            // by no later one.
            unsafe { tile::multiply(vectors, left, right, depth, out) };
        };
        let run = |task: &Task| match task {
            Task::Pack { block, lines } => progress.pack(*block, || pack(*block, lines)),
            Task::Multiply { block, part, lines } => progress.multiply(
                [*block, *part],
                || prepare(*block, lines),
                |words| multiply(*block, lines, words),
            ),
        };
        let tasks = tasks(blocks.len(), ahead, &pieces, &parts);
        match threads {
            1 => tasks.iter().for_each(run),
            _ => parallel::for_each(tasks.len(), |task| run(&tasks[task])),
        }
    }
}

/// All tasks, in an order in which none needs a later one: a block is packed so many blocks ahead.
fn tasks(
    blocks: usize,
    ahead: usize,
    pieces: &[Range<usize>],
    parts: &[Range<usize>],
) -> Vec<Task> {
    let mut tasks = Vec::with_capacity(blocks * (pieces.len() + parts.len()));
    for step in 0..blocks + ahead {
        if step < blocks {
            tasks.extend(
                pieces.iter().map(|lines| Task::Pack { block: step, lines: lines.clone() }),
            );
        }
        if let Some(block) = step.checked_sub(ahead) {
            let part = |(part, lines): (usize, &Range<usize>)| Task::Multiply {
                block,
                part,
                lines: lines.clone(),
            };
            tasks.extend(parts.iter().enumerate().map(part));
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
        // SAFETY: as above. Words that were never written are zeros.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(first), len) }
    }
}
