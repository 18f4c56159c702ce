//! Depthwise NCHW convolutions of stride 1 by 3x3 or 5x5 taps, in vectors.
//!
//! A plane, one channel of one image, is widened into a buffer with its padding. The loop then goes down a block of
//! columns. It loads a row of the buffer once for each tap of a row of the kernel. It adds the products to as many rows
//! of the output as the kernel is high:
//!
//! ```text
//!   row y of the plane  ──▶  output rows  y (taps' row 0),  y - 1 (row 1),  y - 2 (row 2): complete, is stored
//! ```
//!
//! dgrad is the same convolution of the gradient by the turned kernel. In wgrad the loop goes down the plane too.
//! Registers hold a sum for every tap, and the last rows of the gradient.
//!
//! Sums are in F32, in the order of the taps; those of wgrad are of at most [`STRIP`] terms in a lane before they are
//! added up in F64. No order depends on the number of threads.
#![allow(unsafe_code)]
// Loops over taps and vectors name both of their indices.
#![allow(clippy::needless_range_loop)]

use std::mem::MaybeUninit;

use candle_core::{Result, Tensor};

use super::super::packed::Stored;
use super::super::shape::Shape;
use super::widened;
use crate::kernels::cpu::dtype::{Element, Elements, tensor, with_near, with_single};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::prefetch::{is_far, prefetch_at};
use crate::kernels::cpu::simd::GRAIN;
use crate::kernels::cpu::uninit::uninit_vec;
use crate::kernels::cpu::vector::{Vector, Vectors, first_lanes, with_vectors};
use crate::kernels::gemm::micro::{Rounded, as_f32_mut, with_words};

/// Lanes of a vector.
const LANES: usize = 16;
/// Rows of the output whose products a lane adds up in F32.
const STRIP: usize = 128;

/// The vectors to use for this shape; `None` if this module or the CPU does not support it.
pub(in super::super) fn vectors(shape: &Shape) -> Option<Vectors> {
    let geometry = shape.geometry;
    let square = shape.kernel_height == shape.kernel_width && [3, 5].contains(&shape.kernel_width);
    let suits = square
        && super::suits(shape)
        && shape.group_out() == 1
        && (geometry.stride, geometry.dilation) == (1, 1)
        && shape.transposed().is_some();
    Vectors::widest().filter(|_| suits)
}

/// See [`super::super::forward`]; operands as [`super::forward`] takes them.
pub(in super::super) fn forward<O: Rounded>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
    vectors: Vectors,
) -> Result<Tensor> {
    convolve::<O>(x, &widened(weight)?, bias, shape, vectors)
}

/// See [`super::super::dgrad`]; operands as [`super::dgrad`] takes them. `None` where `shape` has no transposed
/// convolution, for which there are no [`vectors`].
pub(in super::super) fn dgrad<O: Rounded>(
    grad: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
    vectors: Vectors,
) -> Result<Option<Tensor>> {
    let Some(transposed) = shape.transposed() else { return Ok(None) };
    let mut turned = widened(weight)?;
    let taps = shape.kernel_height * shape.kernel_width;
    turned.chunks_exact_mut(taps).for_each(<[f32]>::reverse);
    convolve::<O>(grad, &turned, bias, &transposed, vectors).map(Some)
}

fn convolve<O: Rounded>(
    x: &Tensor,
    weight: &[f32],
    bias: Option<&Tensor>,
    shape: &Shape,
    vectors: Vectors,
) -> Result<Tensor> {
    fn typed<S: Stored + Element, O: Rounded>(
        x: &[S],
        weight: &[f32],
        bias: Option<&[f32]>,
        shape: &Shape,
        vectors: Vectors,
    ) -> Tensor {
        let (plane, pixels) = (Plane::of(shape), shape.pixels());
        let (image, taps) = (shape.height * shape.width, weight.len() / shape.c_in);
        let per_task = GRAIN.div_ceil(pixels);
        let run = |task: usize, out: &mut [MaybeUninit<O>]| {
            with_words([plane.len()], |[padded]| {
                let padded = &mut as_f32_mut(padded)[..plane.len()];
                padded.fill(0.0);
                for (i, out) in out.chunks_exact_mut(pixels).enumerate() {
                    let at = task * per_task + i;
                    let channel = at % shape.c_in;
                    plane.fill(&x[at * image..][..image], image, padded, vectors);
                    let weight = &weight[channel * taps..][..taps];
                    let bias = bias.map_or(0.0, |bias| bias[channel]);
                    match plane.kernel {
                        3 => plane.convolve::<O, 3>(padded, weight, bias, out, vectors),
                        _ => plane.convolve::<O, 5>(padded, weight, bias, out, vectors),
                    }
                }
            });
        };
        let out = uninit_vec(shape.batch * shape.out_image(), |out| {
            parallel::for_each_chunk(out, per_task * pixels, run);
        });
        tensor(out, &shape.out_dims())
    }
    let bias = bias.map(widened).transpose()?;
    with_near!(x.dtype(), O, S => {
        let x = Elements::<S>::of(x)?;
        Ok(typed::<S, O>(&x, weight, bias.as_deref(), shape, vectors))
    })
}

/// See [`super::super::wgrad`]; operands as [`super::wgrad`] takes them. `None` if a sum is not finite: padding (0)
/// times infinity is NaN.
pub(in super::super) fn wgrad(
    x: &Tensor,
    grad: &Tensor,
    shape: &Shape,
    vectors: Vectors,
) -> Result<Option<Tensor>> {
    fn typed<S: Stored + Element>(
        x: &[S],
        grad: &[S],
        shape: &Shape,
        vectors: Vectors,
    ) -> Vec<f64> {
        let (plane, pixels) = (Plane::of(shape), shape.pixels());
        let (image, taps) = (shape.height * shape.width, shape.kernel_height * shape.kernel_width);
        let channels = parallel::map(shape.c_in, |channel| {
            let mut sums = vec![0.0; taps];
            with_words([plane.len(), taps * LANES], |[padded, lanes]| {
                let padded = &mut as_f32_mut(padded)[..plane.len()];
                let lanes = as_f32_mut(lanes);
                padded.fill(0.0);
                lanes.fill(0.0);
                let mut terms = 0;
                for at in (0..shape.batch).map(|image| image * shape.c_in + channel) {
                    let next = shape.c_in * image;
                    plane.fill(&x[at * image..][..image], next, padded, vectors);
                    let grad = &grad[at * pixels..][..pixels];
                    for first in (0..shape.out_height).step_by(STRIP) {
                        let rows = STRIP.min(shape.out_height - first);
                        for column in (0..shape.out_width).step_by(LANES) {
                            if terms + rows > STRIP {
                                add_up(lanes, &mut sums);
                                terms = 0;
                            }
                            terms += rows;
                            let next = shape.c_in * pixels;
                            let strip = Strip { first, rows, column, next };
                            match plane.kernel {
                                3 => plane.wgrad::<S, 3>(padded, grad, strip, lanes, vectors),
                                _ => plane.wgrad::<S, 5>(padded, grad, strip, lanes, vectors),
                            }
                        }
                    }
                }
                add_up(lanes, &mut sums);
            });
            sums
        });
        channels.into_iter().flatten().collect()
    }
    let _held = hold([x, grad]);
    let sums = with_single!(x.dtype(), S => {
        let (x, grad) = (Elements::<S>::of(x)?, Elements::<S>::of(grad)?);
        typed::<S>(&x, &grad, shape, vectors)
    });
    if !sums.iter().all(|sum| sum.is_finite()) {
        return Ok(None);
    }
    let sums = sums.into_iter().map(|sum| sum as f32).collect();
    Ok(Some(tensor(sums, &shape.weight_dims())))
}

/// Adds the lanes of each tap to its sum, and leaves zeros.
fn add_up(lanes: &mut [f32], sums: &mut [f64]) {
    for (sum, lanes) in sums.iter_mut().zip(lanes.chunks_exact_mut(LANES)) {
        *sum += lanes.iter().map(|lane| f64::from(*lane)).sum::<f64>();
        lanes.fill(0.0);
    }
}

/// What a vector of the gradient goes over: rows of the output, from a column on.
#[derive(Clone, Copy)]
struct Strip {
    first: usize,
    rows: usize,
    column: usize,
    /// Elements from there to the same place in the next image.
    next: usize,
}

/// A plane with its padding. Its rows are padded to whole output vectors; lanes past the edge read zeros. The first pixel
/// of a row is at the start of a cache line: a vector that lies in two takes twice as long to load.
struct Plane {
    kernel: usize,
    size: (usize, usize),
    padding: (usize, usize),
    out_size: (usize, usize),
    pitch: usize,
    /// Elements before the padding of the first row.
    origin: usize,
}

impl Plane {
    fn of(shape: &Shape) -> Self {
        Self {
            kernel: shape.kernel_width,
            size: (shape.height, shape.width),
            padding: shape.geometry.padding,
            out_size: (shape.out_height, shape.out_width),
            pitch: shape.out_width.next_multiple_of(LANES) + LANES,
            origin: LANES - shape.geometry.padding.1,
        }
    }

    /// Elements of the buffer.
    fn len(&self) -> usize {
        self.origin + (self.out_size.0 + self.kernel - 1) * self.pitch
    }

    /// Where the padding of a row starts.
    fn row(&self, row: usize) -> usize {
        self.origin + row * self.pitch
    }

    /// Writes `image`, widened, into the buffer, whose padding is left. Asks for the one `next` elements further, which is
    /// read after it.
    fn fill<S: Stored>(&self, image: &[S], next: usize, padded: &mut [f32], vectors: Vectors) {
        let ((height, width), (above, left), pitch) = (self.size, self.padding, self.pitch);
        assert!(image.len() == height * width && padded.len() == self.len());
        assert!(height + above < self.out_size.0 + self.kernel && left + width <= pitch);
        let (from, to) = (image.as_ptr(), padded[self.row(above) + left..].as_mut_ptr());
        let next = ahead::<S>(next);
        with_vectors!(vectors, V => for column in (0..width).step_by(LANES) {
            let mask = first_lanes(width - column);
            let (mut from, mut to) = (from.wrapping_add(column), to.wrapping_add(column));
            for _ in 0..height {
                prefetch_at(from.wrapping_add(next), 1);
                // SAFETY: the elements of the mask lie in the row, in the image as in the buffer: the second assertion
                // says that the buffer's rows have room for it.
                unsafe { S::load::<V>(from, mask).store_masked(to, mask) };
                (from, to) = (from.wrapping_add(width), to.wrapping_add(pitch));
            }
        });
    }

    /// Writes `first` plus the sum of the products, rounded.
    fn convolve<O: Rounded, const K: usize>(
        &self,
        padded: &[f32],
        weight: &[f32],
        first: f32,
        out: &mut [MaybeUninit<O>],
        vectors: Vectors,
    ) {
        let (height, width) = self.out_size;
        assert!(padded.len() == self.len() && out.len() == height * width);
        assert!(weight.len() == K * K && self.kernel == K);
        let (from, to) = (padded[self.row(0)..].as_ptr(), out.as_mut_ptr().cast::<O>());
        with_vectors!(vectors, V => {
            let mut column = 0;
            while column < width {
                let two = column + LANES < width;
                let mask = first_lanes(width - column - if two { LANES } else { 0 });
                // SAFETY: the buffer has `height + K - 1` rows of whole vectors and `K - 1` elements more; lanes of the
                // masks lie in the row of the output.
                unsafe {
                    let (from, to) = (from.add(column), to.add(column));
                    if two {
                        down::<V, O, K, 2>((from, self.pitch), weight, first, (to, width), height, mask);
                    } else {
                        down::<V, O, K, 1>((from, self.pitch), weight, first, (to, width), height, mask);
                    }
                }
                column += if two { 2 * LANES } else { LANES };
            }
        });
    }

    /// Adds to the lanes of each tap the products of a strip of the gradient with the plane.
    fn wgrad<G: Stored, const K: usize>(
        &self,
        padded: &[f32],
        grad: &[G],
        Strip { first, rows, column, next }: Strip,
        lanes: &mut [f32],
        vectors: Vectors,
    ) {
        let (height, width) = self.out_size;
        assert!(padded.len() == self.len() && grad.len() == height * width);
        assert!(lanes.len() == K * K * LANES && self.kernel == K);
        assert!(first + rows <= height && column < width);
        let mask = first_lanes(width - column);
        let plane = padded[self.row(first) + column..].as_ptr();
        let grad = grad[first * width + column..].as_ptr();
        let (pitch, next) = (self.pitch, ahead::<G>(next));
        with_vectors!(vectors, V => {
            // SAFETY: the features. The buffer has `rows + K - 1` rows from `first` on, of whole vectors and `K - 1`
            // elements more; the gradient has `rows` rows, and lanes of the mask lie in them. `lanes` has 16 for
            // each tap.
            unsafe {
                let mut sums = [[V::zero(); K]; K];
                for (tap, sum) in sums.as_flattened_mut().iter_mut().enumerate() {
                    *sum = V::load(lanes.as_ptr().add(tap * LANES));
                }
                let mut above = [V::zero(); K];
                for row in 0..rows {
                    let grad = grad.add(row * width);
                    prefetch_at(grad.wrapping_add(next), 1);
                    add_row(&mut sums, &mut above, plane.add(row * pitch), G::load(grad, mask));
                }
                for row in rows..rows + K - 1 {
                    add_row(&mut sums, &mut above, plane.add(row * pitch), V::zero());
                }
                for (tap, sum) in sums.as_flattened().iter().enumerate() {
                    sum.store(lanes.as_mut_ptr().add(tap * LANES));
                }
            }
        });
    }
}

/// Adds the products of a row of the plane. The first row of taps meets it with `grad`, the next one with the row of the
/// gradient above that, and so on: `above` has these rows, and gets `grad`.
///
/// # Safety
/// The features of `V`; a vector and `K - 1` elements can be read from `line` on.
#[inline(always)]
unsafe fn add_row<V: Vector, const K: usize>(
    sums: &mut [[V; K]; K],
    above: &mut [V; K],
    line: *const f32,
    grad: V,
) {
    for dy in (1..K).rev() {
        above[dy] = above[dy - 1];
    }
    above[0] = grad;
    for dx in 0..K {
        // SAFETY: the caller's.
        unsafe {
            let x = V::load(line.add(dx));
            for dy in 0..K {
                sums[dy][dx] = x.mul_add(above[dy], sums[dy][dx]);
            }
        }
    }
}

/// How far ahead to ask for a plane that is `next` elements further: not at all where the processor does so by itself. Then
/// what is asked for is what is read anyway.
fn ahead<S>(next: usize) -> usize {
    if is_far::<S>(next) { next } else { 0 }
}

/// Convolves a block of columns, `N` vectors wide, from the first row to the last. Pointers come with the elements
/// from row to row; `mask` is of the last vector.
///
/// # Safety
/// The features of `V`; `height + K - 1` rows of `N` vectors and `K - 1` elements can be read, and `height` rows of
/// `N - 1` vectors and the lanes of `mask` can be written. `weight` has `K * K` elements.
#[inline(always)]
unsafe fn down<V: Vector, O: Rounded, const K: usize, const N: usize>(
    (from, pitch): (*const f32, usize),
    weight: &[f32],
    first: f32,
    (to, width): (*mut O, usize),
    height: usize,
    mask: u16,
) {
    // SAFETY: the caller's. An output row is stored when the plane has come to the last row that it needs.
    unsafe {
        let first = V::splat(first);
        let mut taps = [[V::zero(); K]; K];
        for (tap, weight) in taps.as_flattened_mut().iter_mut().zip(weight) {
            *tap = V::splat(*weight);
        }
        // Of the output rows that this row of the plane is the first of, the second of, and so on.
        let mut sums = [[first; N]; K];
        for row in 0..height + K - 1 {
            let line = from.add(row * pitch);
            for dx in 0..K {
                for n in 0..N {
                    let x = V::load(line.add(n * LANES + dx));
                    for dy in 0..K {
                        sums[dy][n] = x.mul_add(taps[dy][dx], sums[dy][n]);
                    }
                }
            }
            if row + 1 >= K {
                let line = to.add((row + 1 - K) * width);
                match sums[K - 1].as_chunks().0 {
                    [pair] if mask == u16::MAX => O::store_pair(line, *pair),
                    _ => {
                        for n in 0..N {
                            let mask = if n + 1 == N { mask } else { u16::MAX };
                            O::store(line.add(n * LANES), mask, sums[K - 1][n]);
                        }
                    }
                }
            }
            for dy in (1..K).rev() {
                sums[dy] = sums[dy - 1];
            }
            sums[0] = [first; N];
        }
    }
}
