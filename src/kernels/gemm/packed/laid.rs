//! The sides of a product, in the order that the panel reads.

use crate::kernels::cpu::parallel;
use crate::kernels::gemm::micro::{Planes, Side, with_cells};

/// Elements of a sum taken at a time: a block of 64 columns of them is half of a second-level cache: of 1
/// MiB, or of 2 with tile registers, which alone take planes.
const DEPTH: [usize; 3] = [4096, 4096, 2720];

/// A side as the panel reads it, for a part of the sum.
pub(super) struct Laid<'a> {
    /// Cells of a sum.
    pub(super) depth: usize,
    pub(super) cells: &'a [u32],
    /// Cells from a line to the next, or of a line in a block of 16.
    pub(super) stride: usize,
}

/// Calls `f` with the parts of `side`: by line, as it lies where it can be; or else packed, by all threads
/// or by this one.
pub(super) fn laid_out<T: Planes>(
    side: Side<'_, T>,
    by_line: bool,
    shared: bool,
    f: impl FnOnce(&[Laid<'_>]) + Send,
) {
    let most = DEPTH[T::COUNT - 1];
    let parts = (0..side.depth).step_by(most);
    let parts = parts.map(|k| side.part(0, side.lines, k, most.min(side.depth - k)));
    // Planes are of whole registers.
    let depth = |part: &Side<'_, T>| match T::COUNT {
        1 => part.depth.div_ceil(2),
        _ => part.cells(),
    };
    let lying = parts.clone().map(|part| {
        let (cells, stride) = part.in_place().filter(|_| by_line)?;
        Some(Laid { depth: depth(&part), cells, stride })
    });
    if let Some(laid) = lying.collect::<Option<Vec<_>>>() {
        return f(&laid);
    }
    let stride = |part: &Side<'_, T>| match part.cells() {
        // Lines a kilobyte apart, or a multiple, would share few lines of the nearest cache.
        cells if by_line && cells.is_multiple_of(256) => cells + 16,
        cells => cells,
    };
    let lines = side.lines.next_multiple_of(16);
    with_cells([parts.clone().map(|part| lines * stride(&part)).sum()], |[mut rest]| {
        let laid = parts.map(|part| {
            let stride = stride(&part);
            let cells = rest.split_off_mut(..lines * stride).unwrap_or_default();
            let pack = |index: usize, out: &mut [u32]| {
                let first = index * 64;
                let count = (out.len() / stride).min(part.lines - first);
                let lines = part.part(first, count, 0, part.depth);
                if by_line { lines.pack_lines(stride, out) } else { lines.pack_blocks(out) }
            };
            match shared {
                true => parallel::for_each_chunk(cells, 64 * stride, pack),
                false => {
                    cells.chunks_mut(64 * stride).enumerate().for_each(|(i, out)| pack(i, out))
                }
            }
            Laid { depth: depth(&part), cells, stride }
        });
        f(&laid.collect::<Vec<_>>());
    });
}
