//! The sides of a product, in the order that the micro-kernel reads.

use crate::kernels::cpu::parallel;
use crate::kernels::gemm::micro::{Bf16Terms, MatrixView, with_words};

/// Elements of a sum taken at a time. A block of 64 columns of them is half of a second-level cache: of 1
/// MiB, or of 2 MiB with tile registers, which alone take terms.
const DEPTH: [usize; 3] = [4096, 4096, 2720];

/// A side as the micro-kernel reads it, for a part of the sum.
pub(super) struct Packed<'a> {
    /// Words of a sum.
    pub(super) depth: usize,
    pub(super) words: &'a [u32],
    /// Words from a line to the next, or of a line in a block of 16.
    pub(super) stride: usize,
}

/// Calls `f` with the parts of `view`. With `by_line`, an operand whose lines the instruction set can read is not
/// packed. Otherwise all threads pack it if it is `shared`, or this one does.
pub(super) fn with_packed<T: Bf16Terms>(
    view: MatrixView<'_, T>,
    by_line: bool,
    shared: bool,
    f: &mut dyn FnMut(&[Packed<'_>]),
) {
    let most = DEPTH[T::COUNT - 1];
    let parts = (0..view.depth).step_by(most);
    let parts = parts.map(|k| view.submatrix(0, view.lines, k, most.min(view.depth - k)));
    // Planes are of whole registers.
    let depth = |part: &MatrixView<'_, T>| match T::COUNT {
        1 => part.depth.div_ceil(2),
        _ => part.words(),
    };
    let borrowed = parts.clone().map(|part| {
        let (words, stride) = part.as_packed().filter(|_| by_line)?;
        Some(Packed { depth: depth(&part), words, stride })
    });
    if let Some(packed) = borrowed.collect::<Option<Vec<_>>>() {
        return f(&packed);
    }
    let stride = |part: &MatrixView<'_, T>| match part.words() {
        // Lines a kilobyte apart, or a multiple, would share few lines of the nearest cache.
        words if by_line && words.is_multiple_of(256) => words + 16,
        words => words,
    };
    let lines = view.lines.next_multiple_of(16);
    with_words([parts.clone().map(|part| lines * stride(&part)).sum()], |[mut rest]| {
        let packed = parts.map(|part| {
            let stride = stride(&part);
            let words = rest.split_off_mut(..lines * stride).unwrap_or_default();
            let pack = |index: usize, out: &mut [u32]| {
                let first = index * 64;
                let count = (out.len() / stride).min(part.lines - first);
                let lines = part.submatrix(first, count, 0, part.depth);
                if by_line { lines.pack_lines(stride, out) } else { lines.pack_blocks(out) }
            };
            match shared {
                true => parallel::for_each_chunk(words, 64 * stride, pack),
                false => {
                    words.chunks_mut(64 * stride).enumerate().for_each(|(i, out)| pack(i, out))
                }
            }
            Packed { depth: depth(&part), words, stride }
        });
        f(&packed.collect::<Vec<_>>());
    });
}
