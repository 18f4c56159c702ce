//! Squares of elements, transposed in registers.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

use half::bf16;

use super::dtype::Element;
use super::vector::{Vector, Vectors, with_vectors};

/// The side of a tile: a cache line of `F32`.
pub(in crate::kernels) const TILE: usize = 16;

/// Writes a tile of `from`, whose rows are `from_stride` apart, to `to` with rows and columns exchanged, bit for bit.
/// Whether it did: it knows elements of two and of four bytes, on processors with vectors of this crate's.
///
/// # Panics
/// When the tile lies beyond a slice.
pub(in crate::kernels) fn transpose<T: Element>(
    from: &[T],
    from_stride: usize,
    to: &mut [MaybeUninit<T>],
    to_stride: usize,
) -> bool {
    let Some(vectors) = Vectors::widest() else { return false };
    let last = |stride: usize| (TILE - 1) * stride + TILE;
    assert!(last(from_stride) <= from.len() && last(to_stride) <= to.len(), "no whole tile");
    match size_of::<T>() {
        4 => {
            let (from, to) = (from.as_ptr().cast::<f32>(), to.as_mut_ptr().cast::<f32>());
            // SAFETY: the features; 16 rows of 16 elements of four bytes, as asserted, whose bits are only moved.
            with_vectors!(vectors, V => unsafe {
                transpose_words::<V>(from, from_stride, to, to_stride);
            });
        }
        2 => {
            let (from, to) = (from.as_ptr().cast::<bf16>(), to.as_mut_ptr().cast::<bf16>());
            // SAFETY: the features; 16 rows of 16 elements of two bytes, as asserted. Their bits are moved alone: into
            // the upper halves of lanes, and from there.
            with_vectors!(vectors, V => unsafe {
                let mut rows = [V::zero(); TILE];
                for (i, row) in rows.iter_mut().enumerate() {
                    *row = V::load_bf16(from.add(i * from_stride), u16::MAX);
                }
                for (i, row) in V::transpose(rows).into_iter().enumerate() {
                    row.upper_halves(V::zero()).store_pairs(to.add(i * to_stride), 0xffff);
                }
            });
        }
        _ => return false,
    }
    true
}

/// Writes a tile of words with rows and columns exchanged.
///
/// # Safety
/// The features of `V`; 16 rows of 16 words, of any bits, can be read and written.
#[inline(always)]
pub(in crate::kernels) unsafe fn transpose_words<V: Vector>(
    from: *const f32,
    from_stride: usize,
    to: *mut f32,
    to_stride: usize,
) {
    // SAFETY: the caller's.
    unsafe {
        let mut rows = [V::zero(); TILE];
        for (i, row) in rows.iter_mut().enumerate() {
            *row = V::load(from.add(i * from_stride));
        }
        for (i, row) in V::transpose(rows).into_iter().enumerate() {
            row.store(to.add(i * to_stride));
        }
    }
}

#[cfg(test)]
mod tests {
    use half::f16;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    fn check<T: Element>(bits: impl Fn(T) -> u64, any: impl Fn(u64) -> T) {
        let mut rng = ChaCha8Rng::seed_from_u64(31);
        let (from_stride, to_stride) = (19, 33);
        let from: Vec<T> = (0..15 * from_stride + 16).map(|_| any(rng.random())).collect();
        let untouched = any(7);
        let mut to = vec![MaybeUninit::new(untouched); 15 * to_stride + 16];
        let done = transpose(&from, from_stride, &mut to, to_stride);
        assert_eq!(done, Vectors::widest().is_some() && size_of::<T>() != 8);
        for (at, element) in to.iter().enumerate() {
            // SAFETY: all were made with a value.
            let element = bits(unsafe { element.assume_init() });
            let (row, column) = (at / to_stride, at % to_stride);
            let expected = if done && column < TILE {
                bits(from[column * from_stride + row])
            } else {
                bits(untouched)
            };
            assert_eq!(element, expected, "row {row}, column {column}");
        }
    }

    #[test]
    fn every_bit_is_moved_and_no_other_place_written() {
        check(|x: f32| x.to_bits().into(), |bits| f32::from_bits(bits as u32));
        check(|x: f16| x.to_bits().into(), |bits| f16::from_bits(bits as u16));
        check(|x: bf16| x.to_bits().into(), |bits| bf16::from_bits(bits as u16));
        check(f64::to_bits, f64::from_bits);
    }
}
