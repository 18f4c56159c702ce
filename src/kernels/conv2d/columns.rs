//! Images as matrices: one row a tap of the kernel, one column a pixel of the output.

use std::ops::Range;

use super::shape::Shape;
use crate::kernels::element::Real;

/// Runs a loop nest compiled for the widest vectors of the processor.
#[inline(always)]
fn vectorised(f: impl FnOnce()) {
    pulp::Arch::new().dispatch(f)
}

/// Copies whole images to the middle of `padded`, with zeros around them.
pub(super) fn pad<A: Real>(images: &[A], shape: &Shape, padded: &mut [A]) {
    let (width, padding) = (shape.width, shape.geometry.padding);
    let padded_width = shape.padded_width();
    let border = padding * padded_width;
    padded.fill(A::zero());
    if shape.height * width == 0 {
        return;
    }
    let channels = padded.chunks_exact_mut(shape.padded_height() * padded_width);
    for (channel, image) in channels.zip(images.chunks_exact(shape.height * width)) {
        let rows = channel[border..].chunks_exact_mut(padded_width);
        for (row, pixels) in rows.zip(image.chunks_exact(width)) {
            row[padding..padding + width].copy_from_slice(pixels);
        }
    }
}

/// Copies the middle of a padded image: the reverse of [`pad`].
pub(super) fn crop<A: Real>(padded: &[A], shape: &Shape, image: &mut [A]) {
    let (width, padding) = (shape.width, shape.geometry.padding);
    let padded_width = shape.padded_width();
    let channels = padded.chunks_exact(shape.padded_height() * padded_width);
    for (channel, image) in channels.zip(image.chunks_exact_mut(shape.height * width)) {
        let rows = channel[padding * padded_width..].chunks_exact(padded_width);
        for (row, pixels) in rows.zip(image.chunks_exact_mut(width)) {
            pixels.copy_from_slice(&row[padding..padding + width]);
        }
    }
}

/// Writes the columns of one group and some output rows: `taps` rows of `images × rows × out_width`
/// elements, from that many padded images.
pub(super) fn gather<A: Real>(
    padded: &[A],
    shape: &Shape,
    group: usize,
    rows: Range<usize>,
    columns: &mut [A],
) {
    vectorised(
        #[inline(always)]
        || match (shape.geometry.stride, shape.out_width) {
            (1, 8) => gather_with(padded, shape, group, rows, columns, copy_fixed::<A, 8>),
            (1, 16) => gather_with(padded, shape, group, rows, columns, copy_fixed::<A, 16>),
            (1, 32) => gather_with(padded, shape, group, rows, columns, copy_fixed::<A, 32>),
            (1, _) => gather_with(padded, shape, group, rows, columns, |src, dst| {
                dst.copy_from_slice(&src[..dst.len()])
            }),
            (stride, _) => gather_with(padded, shape, group, rows, columns, |src, dst| {
                for (d, s) in dst.iter_mut().zip(src.iter().step_by(stride)) {
                    *d = *s;
                }
            }),
        },
    );
}

/// A copy of known length, which becomes a few moves instead of a call.
#[inline(always)]
fn copy_fixed<A: Copy, const N: usize>(src: &[A], dst: &mut [A]) {
    if let (Some(dst), Some(src)) = (dst.first_chunk_mut::<N>(), src.first_chunk::<N>()) {
        *dst = *src;
    }
}

/// [`gather`], with `copy` to bring one output row from where its pixels start in the image.
#[inline(always)]
fn gather_with<A: Real>(
    padded: &[A],
    shape: &Shape,
    group: usize,
    rows: Range<usize>,
    columns: &mut [A],
    copy: impl Fn(&[A], &mut [A]),
) {
    let row_len = rows.len() * shape.out_width;
    let images = padded.len() / shape.padded_image();
    for (tap, columns) in columns.chunks_exact_mut(images * row_len).enumerate() {
        let start = tap_start(shape, group, tap);
        let step = shape.geometry.stride * shape.padded_width();
        let runs = columns.chunks_exact_mut(row_len);
        for (image, run) in padded.chunks_exact(shape.padded_image()).zip(runs) {
            for (row, dst) in rows.clone().zip(run.chunks_exact_mut(shape.out_width)) {
                copy(&image[start + row * step..], dst);
            }
        }
    }
}

/// Adds the columns of some output rows to the pixels of one padded image that [`gather`] takes
/// them from, in a fixed order.
pub(super) fn scatter_add<A: Real>(
    columns: &[A],
    shape: &Shape,
    group: usize,
    rows: Range<usize>,
    padded: &mut [A],
) {
    let row_len = rows.len() * shape.out_width;
    let stride = shape.geometry.stride;
    let step = stride * shape.padded_width();
    vectorised(
        #[inline(always)]
        || {
            for (tap, columns) in columns.chunks_exact(row_len).enumerate() {
                let start = tap_start(shape, group, tap);
                for (row, src) in rows.clone().zip(columns.chunks_exact(shape.out_width)) {
                    let dst = &mut padded[start + row * step..];
                    if stride == 1 {
                        dst.iter_mut().zip(src).for_each(|(d, s)| *d = *d + *s);
                    } else {
                        dst.iter_mut().step_by(stride).zip(src).for_each(|(d, s)| *d = *d + *s);
                    }
                }
            }
        },
    );
}

/// Where, in a padded image, the pixel lies that tap number `tap` of a group multiplies for the
/// first pixel of the output.
#[inline(always)]
fn tap_start(shape: &Shape, group: usize, tap: usize) -> usize {
    let column = tap % shape.kernel_width;
    let row = tap / shape.kernel_width % shape.kernel_height;
    let channel = tap / shape.kernel_width / shape.kernel_height + group * shape.group_in();
    let dilation = shape.geometry.dilation;
    (channel * shape.padded_height() + row * dilation) * shape.padded_width() + column * dilation
}
