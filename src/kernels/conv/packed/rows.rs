//! Copies rows of NCHW images into row panels: the innermost loop of im2col.
//!
//! [`moves`] turns a row into a list of vectors: which pixels each loads, which of them are padding, and where it goes.
//! All channels and rows of a block share the list, so the loop over them is loads and stores. Masks stand for padding:
//! what lies outside of the row is not read, and becomes zero. There are three kinds of row panels:
//!
//! ```text
//! Widened     F32, F16 or BF16, widened to F32           16 positions per vector
//! Bf16Pairs   BF16 of two channels in a word             16 positions per vector, forward and dgrad
//! Bf16Rows    BF16 of neighbouring positions in a word   32 positions per vector, wgrad
//! ```
//!
//! Nothing is rounded. Stride 1 is a load, stride 2 every other element of one or two loads, and larger strides go
//! pixel by pixel. A block reads a pixel at most once for each kernel column. Rows are not parallel: the thread that
//! packs a block also multiplies it, while it is in that thread's second-level cache.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

use half::{bf16, f16};

use crate::kernels::cpu::vector::{Vector, Vectors, first_lanes, with_vectors};

/// What an image is stored in.
pub(in super::super) trait Stored: Copy + Sync {
    /// Loads the elements of `mask`, and zeros for the others, which are not touched.
    ///
    /// # Safety
    /// As [`Vector::load_masked`].
    unsafe fn load<V: Vector>(at: *const Self, mask: u16) -> V;
    fn widen(self) -> f32;
}

impl Stored for f32 {
    #[inline(always)]
    unsafe fn load<V: Vector>(at: *const Self, mask: u16) -> V {
        // SAFETY: the caller's.
        unsafe { V::load_masked(at, mask) }
    }
    fn widen(self) -> f32 {
        self
    }
}

impl Stored for bf16 {
    #[inline(always)]
    unsafe fn load<V: Vector>(at: *const Self, mask: u16) -> V {
        // SAFETY: the caller's.
        unsafe { V::load_bf16(at, mask) }
    }
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

impl Stored for f16 {
    #[inline(always)]
    unsafe fn load<V: Vector>(at: *const Self, mask: u16) -> V {
        // SAFETY: the caller's.
        unsafe { V::load_f16(at, mask) }
    }
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

/// Runs `$body` with `$data` bound to the elements of a tensor; of one that
/// [is near](crate::kernels::cpu::dtype::is_near) to `$O`, if that is named.
macro_rules! with_stored {
    ($tensor:expr, $data:ident => $body:expr) => {
        $crate::kernels::cpu::dtype::with_single!($tensor.dtype(), S => {
            let $data = $crate::kernels::cpu::dtype::Elements::<S>::of($tensor)?;
            $body
        })
    };
    ($tensor:expr, $O:ident, $data:ident => $body:expr) => {
        $crate::kernels::cpu::dtype::with_near!($tensor.dtype(), $O, S => {
            let $data = $crate::kernels::cpu::dtype::Elements::<S>::of($tensor)?;
            $body
        })
    };
}

pub(super) use with_stored;

/// Writes elements, widened, to as many places.
pub(super) fn widen<S: Stored>(from: &[S], to: &mut [f32]) {
    // SAFETY: F32 of any value, of which none is made uninitialised.
    let to = unsafe { std::slice::from_raw_parts_mut(to.as_mut_ptr().cast(), to.len()) };
    widen_into(from, to);
}

/// [`widen`], to places of no value yet.
pub(super) fn widen_into<S: Stored>(from: &[S], to: &mut [MaybeUninit<f32>]) {
    /// # Safety
    /// The features of `V`; as many places as elements.
    #[inline(always)]
    unsafe fn run<S: Stored, V: Vector>(from: &[S], to: &mut [MaybeUninit<f32>]) {
        for (from, to) in from.chunks(16).zip(to.chunks_mut(16)) {
            let mask = first_lanes(from.len());
            // SAFETY: the mask has no more elements than there are, on both sides.
            unsafe {
                S::load::<V>(from.as_ptr(), mask).store_masked(to.as_mut_ptr().cast(), mask);
            }
        }
    }
    assert!(from.len() == to.len());
    let vectors = Vectors::known();
    // SAFETY: the features of the vectors; the lengths, as asserted.
    with_vectors!(vectors, V => unsafe { run::<S, V>(from, to) });
}

/// A vector of positions of an image row, and where it goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Move {
    /// The pixel of the first position; may lie before the row.
    from: isize,
    /// Its place, from the start of the slot in the first row panel.
    to: usize,
    /// The pixels, from there on, that are in the row.
    inside: u64,
    /// The positions there are.
    places: u32,
    /// Pixels of the row.
    width: usize,
}

/// The bits of `0..64` that lie in `from..to`.
pub(super) fn bits(from: isize, to: isize) -> u64 {
    let below = |n: isize| if n >= 64 { u64::MAX } else { (1u64 << n.max(0)) - 1 };
    below(to) & !below(from)
}

/// The moves of `len` positions of a line, from `position` on, out of a row of `width` pixels. The
/// first position is pixel `first`, and the next are `step` pixels apart. Each is one of at most
/// `lanes` positions, and of one block of positions.
pub(super) fn moves(
    (first, step, width): (isize, usize, usize),
    (position, len): (usize, usize),
    lanes: usize,
    place: impl Fn(usize) -> usize,
    out: &mut Vec<Move>,
) {
    let mut done = 0;
    while done < len {
        let at = position + done;
        let count = (lanes - at % lanes).min(len - done);
        let from = first + (done * step) as isize;
        let inside = bits(-from, width as isize - from);
        // Nor are pixels needed from the next position on. Those between are in the row too: with them, a vector of
        // stride 2 inside of the row is loaded whole, without a mask.
        let inside = inside & bits(0, (count * step) as isize);
        let places = bits(0, count as isize) as u32;
        out.push(Move { from, to: place(at), inside, places, width });
        done += count;
    }
}

/// A kind of row panel: what a vector of it is loaded from, and how.
///
/// # Safety
/// Of all methods: the features of `V`. A row has the pixels that a move has inside; `dst` the places.
pub(super) trait RowPanel {
    type Input: Copy + Sync;
    type Place: Copy;
    /// Positions of a vector.
    const LANES: usize;
    /// Whether its words are those of [`Vectors::for_bf16`].
    const BF16: bool;
    unsafe fn copy_row<V: Vector>(
        rows: [Option<*const Self::Input>; 2],
        by: Move,
        step: usize,
        dst: *mut Self::Place,
    );
    unsafe fn clear<V: Vector>(by: Move, dst: *mut Self::Place);
}

/// Elements, widened.
pub(super) struct Widened<S>(std::marker::PhantomData<S>);

impl<S: Stored> RowPanel for Widened<S> {
    type Input = S;
    type Place = f32;
    const LANES: usize = 16;
    const BF16: bool = false;

    #[inline(always)]
    unsafe fn copy_row<V: Vector>(
        [row, _]: [Option<*const S>; 2],
        by: Move,
        step: usize,
        dst: *mut f32,
    ) {
        let Some(row) = row else { return };
        // SAFETY: the caller's; vectors touch only what their masks say.
        unsafe {
            let vector = match step {
                1 => inside::<S, V>(row, by, 0),
                2 => inside::<S, V>(row, by, 0).evens(inside(row, by, 16)),
                _ => {
                    let mut lanes = [0f32; 16];
                    each_pixel(by, step, |i, at| lanes[i] = (*row.wrapping_offset(at)).widen());
                    V::load(lanes.as_ptr())
                }
            };
            vector.store_masked(dst.add(by.to), by.places as u16);
        }
    }

    #[inline(always)]
    unsafe fn clear<V: Vector>(by: Move, dst: *mut f32) {
        // SAFETY: the caller's.
        unsafe { V::zero().store_masked(dst.add(by.to), by.places as u16) }
    }
}

/// The pixels of a move from the `at`th on, and zeros for those beyond the row.
///
/// # Safety
/// As [`RowPanel`]'s.
#[inline(always)]
unsafe fn inside<S: Stored, V: Vector>(row: *const S, by: Move, at: isize) -> V {
    // SAFETY: the caller's; no others are in the mask.
    unsafe { S::load(row.wrapping_offset(by.from + at), (by.inside >> at) as u16) }
}

/// BF16 as they are.
pub(super) struct Bf16Rows;

impl RowPanel for Bf16Rows {
    type Input = bf16;
    type Place = bf16;
    const LANES: usize = 32;
    const BF16: bool = true;

    #[inline(always)]
    unsafe fn copy_row<V: Vector>(
        [row, _]: [Option<*const bf16>; 2],
        by: Move,
        step: usize,
        dst: *mut bf16,
    ) {
        let Some(row) = row else { return };
        // SAFETY: the caller's; vectors touch only what their masks say.
        unsafe {
            let vector: V = match step {
                1 => inside_pairs(row, by, 0),
                2 => inside_pairs::<V>(row, by, 0).lower_halves(inside_pairs(row, by, 32)),
                _ => {
                    let mut lanes = [bf16::ZERO; 32];
                    each_pixel(by, step, |i, at| lanes[i] = *row.wrapping_offset(at));
                    V::load_pairs(lanes.as_ptr(), u32::MAX)
                }
            };
            vector.store_pairs(dst.add(by.to), by.places);
        }
    }

    #[inline(always)]
    unsafe fn clear<V: Vector>(by: Move, dst: *mut bf16) {
        // SAFETY: the caller's.
        unsafe { V::zero().store_pairs(dst.add(by.to), by.places) }
    }
}

/// As [`inside`], twice as many pixels.
///
/// # Safety
/// As [`RowPanel`]'s.
#[inline(always)]
unsafe fn inside_pairs<V: Vector>(row: *const bf16, by: Move, at: isize) -> V {
    // SAFETY: the caller's; no others are in the mask.
    unsafe { V::load_pairs(row.wrapping_offset(by.from + at), (by.inside >> at) as u32) }
}

/// Pairs of the BF16 of two channels; of one channel and zeros where there is no second.
pub(super) struct Bf16Pairs;

impl RowPanel for Bf16Pairs {
    type Input = bf16;
    type Place = u32;
    const LANES: usize = 16;
    const BF16: bool = true;

    #[inline(always)]
    unsafe fn copy_row<V: Vector>(
        rows: [Option<*const bf16>; 2],
        by: Move,
        step: usize,
        dst: *mut u32,
    ) {
        // SAFETY: the caller's; vectors touch only what their masks say.
        unsafe {
            let first: V = spread(rows[0], by, step);
            let words = first.shift_down().or(spread(rows[1], by, step));
            words.store_masked(dst.add(by.to).cast(), by.places as u16);
        }
    }

    #[inline(always)]
    unsafe fn clear<V: Vector>(by: Move, dst: *mut u32) {
        // SAFETY: the caller's.
        unsafe { V::zero().store_masked(dst.add(by.to).cast(), by.places as u16) }
    }
}

/// The positions of a row, in the upper half of a word each.
///
/// # Safety
/// As [`RowPanel`]'s.
#[inline(always)]
unsafe fn spread<V: Vector>(row: Option<*const bf16>, by: Move, step: usize) -> V {
    // SAFETY: the caller's; vectors touch only what their masks say.
    unsafe {
        let Some(row) = row else { return V::zero() };
        match step {
            1 => inside(row, by, 0),
            2 => inside_pairs::<V>(row, by, 0).shift_up(),
            _ => {
                let mut lanes = [0f32; 16];
                each_pixel(by, step, |i, at| lanes[i] = (*row.wrapping_offset(at)).widen());
                V::load(lanes.as_ptr())
            }
        }
    }
}

/// Calls `f(position, pixel)` with those of a move that lie in the row.
#[inline(always)]
fn each_pixel(by: Move, step: usize, mut f: impl FnMut(usize, isize)) {
    for i in 0..32 - by.places.leading_zeros() as usize {
        let at = by.from + (i * step) as isize;
        if (0..by.width as isize).contains(&at) {
            f(i, at);
        }
    }
}
