//! Scratch memory for packed matrices.
#![allow(unsafe_code)]

use std::cell::RefCell;

/// Words on a cache line: a tile register that reads rows across two lines takes twice the time.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
pub(in crate::kernels) struct Line([u32; 16]);

/// Packed words that a value keeps, such as a weight's.
#[derive(Debug, Default)]
pub(in crate::kernels) struct PackedWords(Vec<Line>);

impl PackedWords {
    /// Zeros.
    pub(in crate::kernels) fn new(len: usize) -> Self {
        Self(vec![Line::default(); len.div_ceil(16)])
    }

    pub(in crate::kernels) fn as_slice(&self) -> &[u32] {
        // SAFETY: a line is 16 words without padding.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * 16) }
    }

    pub(in crate::kernels) fn as_mut_slice(&mut self) -> &mut [u32] {
        // SAFETY: as above, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * 16) }
    }
}

/// The largest scratch, in words, a thread keeps.
const KEPT: usize = 1 << 24;

/// Calls `f` with buffers of at least these numbers of words, each on a cache line and of unspecified
/// value, from memory the thread keeps: fresh memory costs page faults, which can take longer than
/// the arithmetic.
pub(in crate::kernels) fn with_words<const N: usize, R>(
    sizes: [usize; N],
    f: impl FnOnce([&mut [u32]; N]) -> R,
) -> R {
    let mut buffer = PackedWords::take(&sizes);
    let result = f(cut(buffer.as_mut_slice(), sizes));
    buffer.give_back();
    result
}

/// The first words, in parts of these sizes, whole lines. Without `f` in its type, it is compiled once.
fn cut<const N: usize>(mut words: &mut [u32], sizes: [usize; N]) -> [&mut [u32]; N] {
    sizes.map(|size| words.split_off_mut(..whole_lines(size)).unwrap_or_default())
}

fn whole_lines(size: usize) -> usize {
    size.next_multiple_of(16)
}

// A stack of buffers, as calls nest: see `Arithmetic::with_scratch`.
thread_local!(static KEEP: RefCell<Vec<PackedWords>> = const { RefCell::new(Vec::new()) });

impl PackedWords {
    /// Words for parts of these sizes, from this thread's buffers.
    fn take(sizes: &[usize]) -> Self {
        let len = sizes.iter().map(|&size| whole_lines(size)).sum();
        let buffer = KEEP.with_borrow_mut(Vec::pop).unwrap_or_default();
        if buffer.as_slice().len() < len { Self::new(len) } else { buffer }
    }

    fn give_back(self) {
        if self.as_slice().len() <= KEPT {
            KEEP.with_borrow_mut(|kept| kept.push(self));
        }
    }
}
