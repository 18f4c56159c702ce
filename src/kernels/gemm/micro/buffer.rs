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

/// The largest scratch, in words, a thread keeps: transformed weights of 512 by 1024 channels are somewhat less.
const KEPT: usize = 1 << 25;

thread_local!(static KEEP: RefCell<Vec<PackedWords>> = const { RefCell::new(Vec::new()) });

/// Words of unspecified value on cache lines, from memory that the thread keeps: fresh memory costs page faults, which
/// can take longer than the arithmetic.
#[derive(Debug)]
pub(in crate::kernels) struct KeptWords {
    words: PackedWords,
    len: usize,
}

impl KeptWords {
    /// At least so many: whole lines.
    pub(in crate::kernels) fn new(len: usize) -> Self {
        let len = whole_lines(len);
        // A stack of buffers, as calls nest: see `Arithmetic::with_scratch`.
        let mut words = KEEP.with_borrow_mut(Vec::pop).unwrap_or_default();
        if words.as_slice().len() < len {
            words = PackedWords::new(len);
        }
        // So that a test fails where a result depends on them: NaN in F32, and in both BF16 of a word.
        #[cfg(test)]
        words.as_mut_slice()[..len].fill(0x7fc0_7fc0);
        Self { words, len }
    }

    pub(in crate::kernels) fn as_slice(&self) -> &[u32] {
        &self.words.as_slice()[..self.len]
    }

    pub(in crate::kernels) fn as_mut_slice(&mut self) -> &mut [u32] {
        &mut self.words.as_mut_slice()[..self.len]
    }
}

impl Drop for KeptWords {
    fn drop(&mut self) {
        let words = std::mem::take(&mut self.words);
        if words.as_slice().len() <= KEPT {
            // A thread that ends keeps nothing.
            let _ = KEEP.try_with(|kept| kept.borrow_mut().push(words));
        }
    }
}

/// Calls `f` with buffers of at least these numbers of words, each on a cache line and of unspecified
/// value.
pub(in crate::kernels) fn with_words<const N: usize, R>(
    sizes: [usize; N],
    f: impl FnOnce([&mut [u32]; N]) -> R,
) -> R {
    let len = sizes.iter().map(|&size| whole_lines(size)).sum();
    let mut buffer = KeptWords::new(len);
    f(cut(buffer.as_mut_slice(), sizes))
}

/// The first words, in parts of these sizes, whole lines. Without `f` in its type, it is compiled once.
fn cut<const N: usize>(mut words: &mut [u32], sizes: [usize; N]) -> [&mut [u32]; N] {
    sizes.map(|size| words.split_off_mut(..whole_lines(size)).unwrap_or_default())
}

/// Words as the F32 they hold.
pub(in crate::kernels) fn as_f32(words: &[u32]) -> &[f32] {
    // SAFETY: both are 32 bits, any of them valid.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), words.len()) }
}

/// The same, to be written.
pub(in crate::kernels) fn as_f32_mut(words: &mut [u32]) -> &mut [f32] {
    // SAFETY: as above, borrowed mutably.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), words.len()) }
}

fn whole_lines(size: usize) -> usize {
    size.next_multiple_of(16)
}
