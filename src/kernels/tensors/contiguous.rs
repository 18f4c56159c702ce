//! Copies of strided tensors, in the order of their shape.
//!
//! candle copies an element at a time, on one thread. On a CPU, this copies rows where the last dimension is dense,
//! else square tiles. So both sides are read and written by whole cache lines, on all threads.

use std::mem::MaybeUninit;

use candle_core::{DType, Result, Tensor};

use crate::kernels::cpu::dtype::{Element, Elements, tensor, with_element};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::simd::GRAIN;
use crate::kernels::cpu::tile::{TILE, transpose};
use crate::kernels::cpu::uninit::uninit_vec;

/// `x`, detached and contiguous: itself, where it is.
pub(crate) fn contiguous(x: &Tensor) -> Result<Tensor> {
    let x = x.detach();
    if x.is_contiguous() || !is_ours(&x) {
        return x.contiguous();
    }
    match dense(x.dims(), x.stride()) {
        Some((outer, last)) => with_element!(x.dtype(), T => copy::<T>(&x, &outer, last)),
        None => x.contiguous(),
    }
}

/// `parts`, one after the other along `dim`; of one dtype and, but for `dim`, one shape.
pub(crate) fn cat(parts: &[Tensor], dim: usize) -> Result<Tensor> {
    match parts.first() {
        Some(first) if is_ours(first) => {
            let parts = parts.iter().map(contiguous).collect::<Result<Vec<_>>>()?;
            with_element!(first.dtype(), T => join::<T>(&parts, dim))
        }
        _ => Tensor::cat(parts, dim)?.contiguous(),
    }
}

fn is_ours(x: &Tensor) -> bool {
    x.device().is_cpu() && matches!(x.dtype(), DType::F16 | DType::BF16 | DType::F32 | DType::F64)
}

/// A dimension: its size, and its stride in the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Dim {
    size: usize,
    stride: usize,
}

/// The dimensions without those of size 1, and neighbours as one where they can be; the last one apart. None of a scalar
/// or of nothing.
fn dense(sizes: &[usize], strides: &[usize]) -> Option<(Vec<Dim>, Dim)> {
    let mut dims: Vec<Dim> = Vec::new();
    for (&size, &stride) in sizes.iter().zip(strides).filter(|(size, _)| **size != 1) {
        match dims.last_mut() {
            Some(last) if last.stride == size * stride => {
                *last = Dim { size: last.size * size, stride };
            }
            _ => dims.push(Dim { size, stride }),
        }
    }
    let last = dims.pop()?;
    (last.size != 0 && dims.iter().all(|dim| dim.size != 0)).then_some((dims, last))
}

fn copy<T: Element>(x: &Tensor, outer: &[Dim], last: Dim) -> Result<Tensor> {
    let data = Elements::<T>::strided(x)?;
    let out = uninit_vec(x.elem_count(), |out| {
        // The dimension across which a tile's rows lie closest in the source.
        let across = outer.iter().enumerate().filter(|(_, dim)| dim.stride != 0);
        match across.min_by_key(|(_, dim)| dim.stride) {
            Some((across, dim)) if dim.stride < last.stride => {
                copy_tiles(&data, &outer[..across], *dim, &outer[across + 1..], last, out);
            }
            _ => copy_rows(&data, outer, last, out),
        }
    });
    Ok(tensor(out, x.dims()))
}

/// [`cat`] of contiguous parts.
fn join<T: Element>(parts: &[Tensor], dim: usize) -> Result<Tensor> {
    let _held = hold(parts);
    let data = parts.iter().map(Elements::<T>::of).collect::<Result<Vec<_>>>()?;
    let width = |part: &Tensor| part.dims()[dim..].iter().product::<usize>();
    let data: Vec<(&[T], usize)> =
        data.iter().zip(parts).map(|(data, part)| (&data[..], width(part))).collect();
    let row: usize = data.iter().map(|(_, width)| width).sum();
    let mut dims = parts[0].dims().to_vec();
    dims[dim] = parts.iter().map(|part| part.dims()[dim]).sum();
    let out = uninit_vec(dims.iter().product(), |out| {
        if row == 0 {
            return;
        }
        let parts_of =
            |number: usize| data.iter().map(move |(data, width)| &data[number * width..][..*width]);
        if row <= GRAIN {
            let together = GRAIN / row;
            parallel::for_each_chunk(out, together * row, |chunk, out| {
                for (number, mut rest) in out.chunks_exact_mut(row).enumerate() {
                    for part in parts_of(chunk * together + number) {
                        let (piece, after) = rest.split_at_mut(part.len());
                        piece.write_copy_of_slice(part);
                        rest = after;
                    }
                }
            });
            return;
        }
        // Pieces of long rows: where each goes, and what it is.
        let mut pieces = Vec::new();
        for (number, mut rest) in out.chunks_exact_mut(row).enumerate() {
            for part in parts_of(number) {
                let (piece, after) = rest.split_at_mut(part.len());
                pieces.extend(piece.chunks_mut(GRAIN).zip(part.chunks(GRAIN)));
                rest = after;
            }
        }
        parallel::for_each_item(pieces, |(to, from)| _ = to.write_copy_of_slice(from));
    });
    Ok(tensor(out, &dims))
}

/// A row of `last` after the other.
fn copy_rows<T: Element>(data: &[T], outer: &[Dim], last: Dim, out: &mut [MaybeUninit<T>]) {
    let together = (GRAIN / last.size).max(1);
    parallel::for_each_chunk(out, together * last.size, |chunk, out| {
        let rows = out.chunks_exact_mut(last.size);
        for (row, from) in rows.zip(Offsets::from(outer, chunk * together)) {
            match last.stride {
                1 => _ = row.write_copy_of_slice(&data[from..][..last.size]),
                0 => row.fill(MaybeUninit::new(data[from])),
                stride => {
                    let values = data[from..].iter().step_by(stride);
                    row.iter_mut().zip(values).for_each(|(to, &value)| _ = to.write(value));
                }
            }
        }
    });
}

/// For each position in `outer`, the rows of a few positions in `across`, in tiles; `between` lies between `across` and
/// `last`.
fn copy_tiles<T: Element>(
    data: &[T],
    outer: &[Dim],
    across: Dim,
    between: &[Dim],
    last: Dim,
    out: &mut [MaybeUninit<T>],
) {
    let count = between.iter().map(|dim| dim.size).product::<usize>() * last.size;
    let slab = |from: usize, out: &mut [MaybeUninit<T>]| {
        let lines = out.len() / count;
        for (row, from) in
            (0..count).step_by(last.size).zip(Offsets::from(between, 0).map(|o| from + o))
        {
            for column in (0..last.size).step_by(TILE) {
                let columns = TILE.min(last.size - column);
                let from = from + column * last.stride;
                let whole = across.stride == 1 && lines == TILE && columns == TILE;
                if whole && transpose(&data[from..], last.stride, &mut out[row + column..], count) {
                    continue;
                }
                let mut tile = [[T::default(); TILE]; TILE];
                for c in 0..columns {
                    let line = &data[from + c * last.stride..];
                    if across.stride == 1 && lines == TILE {
                        let line: &[T] = &line[..TILE];
                        (0..TILE).for_each(|l| tile[l][c] = line[l]);
                    } else {
                        (0..lines).for_each(|l| tile[l][c] = line[l * across.stride]);
                    }
                }
                for (l, tile) in tile.iter().enumerate().take(lines) {
                    let at = l * count + row + column;
                    out[at..at + columns].write_copy_of_slice(&tile[..columns]);
                }
            }
        }
    };
    // Tasks of whole blocks of `across`, or else of a tile's lines.
    let block = across.size * count;
    let together = (GRAIN / block).max(1);
    let per_task = if block > GRAIN { TILE * count } else { together * block };
    let blocks = out.chunks_mut(together * block).enumerate();
    let tasks: Vec<_> = blocks
        .flat_map(|(chunk, out)| {
            let parts = out.chunks_mut(per_task).enumerate();
            parts.map(move |(part, out)| (chunk * together, part * TILE, out))
        })
        .collect();
    parallel::for_each_item(tasks, |(first, line, out)| {
        let lines_left = out.chunks_mut(block);
        for (out, from) in lines_left.zip(Offsets::from(outer, first)) {
            for (number, out) in out.chunks_mut(TILE * count).enumerate() {
                slab(from + (line + number * TILE) * across.stride, out);
            }
        }
    });
}

/// Where the positions of `dims` are in the source, in order, from the one with a given number on.
struct Offsets<'a> {
    dims: &'a [Dim],
    index: Vec<usize>,
    offset: usize,
}

impl<'a> Offsets<'a> {
    fn from(dims: &'a [Dim], mut number: usize) -> Self {
        let mut index = vec![0; dims.len()];
        let mut offset = 0;
        for (index, dim) in index.iter_mut().zip(dims).rev() {
            *index = number % dim.size;
            offset += *index * dim.stride;
            number /= dim.size;
        }
        Self { dims, index, offset }
    }
}

impl Iterator for Offsets<'_> {
    type Item = usize;

    /// Without end: after the last position comes the first.
    fn next(&mut self) -> Option<usize> {
        let offset = self.offset;
        for (index, dim) in self.index.iter_mut().zip(self.dims).rev() {
            *index += 1;
            self.offset += dim.stride;
            if *index < dim.size {
                break;
            }
            self.offset -= dim.size * dim.stride;
            *index = 0;
        }
        Some(offset)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::kernels::elementwise::testing::{random, values};

    fn check(view: &Tensor) {
        let copy = contiguous(view).unwrap();
        assert!(copy.is_contiguous());
        assert_eq!((copy.dims(), copy.dtype()), (view.dims(), view.dtype()));
        let expected = view.contiguous().unwrap();
        assert_eq!(values(&copy), values(&expected), "{:?}", view.layout());
    }

    #[test]
    fn every_order_of_dimensions_is_copied_as_candle_does() {
        for dims in [[2, 3, 4, 5], [17, 1, 33, 16], [3, 40, 18, 2], [1, 65, 5, 70], [2, 16, 3, 600]]
        {
            for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
                let x = random(&dims, dtype, 1);
                for a in 0..4 {
                    for b in (0..4).filter(|&b| b != a) {
                        for c in (0..4).filter(|&c| c != a && c != b) {
                            check(&x.permute((a, b, c, 6 - a - b - c)).unwrap());
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn parts_repeats_and_nothing() {
        let x = random(&[6, 35, 40], DType::F32, 2);
        check(&x.narrow(1, 3, 30).unwrap());
        check(&x.narrow(2, 7, 31).unwrap().transpose(1, 2).unwrap());
        check(&x.narrow(0, 1, 2).unwrap().transpose(0, 2).unwrap());
        let column = x.narrow(2, 4, 1).unwrap();
        check(&column.broadcast_as((6, 35, 50)).unwrap());
        check(&column.broadcast_as((3, 6, 35, 50)).unwrap().transpose(0, 2).unwrap());
        check(&column.t().unwrap().broadcast_as((6, 33, 35)).unwrap());
        check(&column.squeeze(2).unwrap().t().unwrap());
        check(&Tensor::new(2.5f32, &Device::Cpu).unwrap().broadcast_as((3, 700)).unwrap());
        check(&x.narrow(1, 3, 1).unwrap().narrow(0, 2, 1).unwrap().narrow(2, 5, 1).unwrap());
        check(&x.narrow(1, 3, 0).unwrap().transpose(1, 2).unwrap());
    }

    #[test]
    fn parts_are_joined_as_candle_does() {
        for dtype in [DType::F16, DType::F32, DType::F64] {
            for dims in [[3, 5, 7], [2, 1, 20_000], [40, 3, 500]] {
                for dim in 0..3 {
                    let sized = |size: usize, seed| {
                        let mut dims = dims;
                        dims[dim] = size;
                        random(&dims, dtype, seed)
                    };
                    let turned = sized(2, 3).transpose(0, 2).unwrap().contiguous().unwrap();
                    let parts =
                        [sized(1, 1), sized(0, 2), turned.transpose(0, 2).unwrap(), sized(9, 4)];
                    let joined = cat(&parts, dim).unwrap();
                    let expected = Tensor::cat(&parts, dim).unwrap().contiguous().unwrap();
                    assert!(joined.is_contiguous() && joined.dims() == expected.dims());
                    assert_eq!(values(&joined), values(&expected), "{dims:?} along {dim}");
                }
            }
        }
    }

    #[test]
    fn integers_are_candles_to_copy() {
        let x = Tensor::arange(0u32, 12, &Device::Cpu).unwrap().reshape((3, 4)).unwrap();
        let copy = contiguous(&x.t().unwrap()).unwrap();
        assert_eq!(copy.to_vec2::<u32>().unwrap(), x.t().unwrap().to_vec2::<u32>().unwrap());
    }

    #[test]
    fn neighbours_that_follow_each_other_are_one() {
        let dim = |size, stride| Dim { size, stride };
        assert_eq!(dense(&[2, 3, 1, 4], &[12, 4, 9, 1]), Some((vec![], dim(24, 1))));
        assert_eq!(dense(&[2, 4, 3], &[12, 1, 4]), Some((vec![dim(2, 12), dim(4, 1)], dim(3, 4))));
        assert_eq!(dense(&[5, 2, 3], &[0, 0, 1]), Some((vec![dim(10, 0)], dim(3, 1))));
        assert_eq!(dense(&[1, 1], &[3, 9]), None);
        assert_eq!(dense(&[2, 0, 3], &[3, 3, 1]), None);
    }
}
