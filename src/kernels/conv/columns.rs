//! im2col: an image as a matrix with a row for each tap of the kernel and a column for each output pixel.
//!
//! Only the taps of *one* row of the kernel are gathered, for all image rows that any row of the kernel meets. The
//! matrix of another row of the kernel is the same memory, starting some image rows further on. For a kernel of
//! three rows this saves two thirds of the copies.

use std::ops::Range;

use super::shape::Shape;
use crate::kernels::cpu::dtype::Real;
use crate::kernels::cpu::simd::vectorise;
use crate::kernels::gemm::Matrix;

/// Copies whole images to the middle of `padded`, with zeros around them.
pub(super) fn pad<A: Real>(images: &[A], shape: &Shape, padded: &mut [A]) {
    let (width, (above, left)) = (shape.width, shape.geometry.padding);
    let padded_width = shape.padded_width();
    let border = above * padded_width;
    padded.fill(A::zero());
    if shape.height * width == 0 {
        return;
    }
    let channels = padded.chunks_exact_mut(shape.padded_height() * padded_width);
    for (channel, image) in channels.zip(images.chunks_exact(shape.height * width)) {
        let rows = channel[border..].chunks_exact_mut(padded_width);
        for (row, pixels) in rows.zip(image.chunks_exact(width)) {
            row[left..left + width].copy_from_slice(pixels);
        }
    }
}

/// Copies the middle of a padded image: the reverse of [`pad`].
pub(super) fn crop<A: Real>(padded: &[A], shape: &Shape, image: &mut [A]) {
    let (width, (above, left)) = (shape.width, shape.geometry.padding);
    let padded_width = shape.padded_width();
    let channels = padded.chunks_exact(shape.padded_height() * padded_width);
    for (channel, image) in channels.zip(image.chunks_exact_mut(shape.height * width)) {
        let rows = channel[above * padded_width..].chunks_exact(padded_width);
        for (row, pixels) in rows.zip(image.chunks_exact_mut(width)) {
            pixels.copy_from_slice(&row[left..left + width]);
        }
    }
}

/// Some output pixels of an image: whole rows, or a part of one row.
#[derive(Clone, Debug)]
pub(super) struct PixelBlock {
    pub(super) rows: Range<usize>,
    pub(super) columns: Range<usize>,
}

impl PixelBlock {
    /// The number of pixels.
    pub(super) fn len(&self) -> usize {
        self.rows.len() * self.columns.len()
    }

    /// The first pixel.
    pub(super) fn start(&self, shape: &Shape) -> usize {
        self.rows.start * shape.out_width + self.columns.start
    }
}

/// The layout of a group's row panels: `(channel, kernel column, phase, row, image, output column)`.
///
/// Row `r` of the kernel meets rows `r * dilation` of the padded images, a stride apart. Those with one remainder by the
/// stride are a phase: row `q` of it is the `q * stride`th after its first. So the rows that a row of the kernel meets lie
/// one after the other. Remainders that no row of the kernel has, of which a large stride has many, take no room.
#[derive(Clone, Debug)]
pub(super) struct RowPanels {
    images: usize,
    /// The output pixels they serve.
    part: PixelBlock,
    /// Rows of each phase.
    depth: usize,
}

impl RowPanels {
    pub(super) fn new(shape: &Shape, images: usize, part: PixelBlock) -> Self {
        let reach = (shape.kernel_height - 1) * shape.geometry.dilation;
        Self { images, depth: part.rows.len() + reach / shape.geometry.stride, part }
    }

    /// Phases that rows of the kernel are in. Rows so far apart are in one.
    pub(super) fn phases(shape: &Shape) -> usize {
        let (mut stride, mut rest) = (shape.geometry.stride, shape.geometry.dilation);
        while rest > 0 {
            (stride, rest) = (rest, stride % rest);
        }
        shape.kernel_height.min(shape.geometry.stride / stride)
    }

    /// Elements of all row panels.
    pub(super) fn len(&self, shape: &Shape) -> usize {
        shape.row_taps() * self.stride(shape)
    }

    /// Elements of the row panels of one tap.
    pub(super) fn stride(&self, shape: &Shape) -> usize {
        Self::phases(shape) * self.depth * self.row()
    }

    /// Columns of a matrix: the output pixels, `(row, image, column)`.
    fn pixels(&self) -> usize {
        self.part.rows.len() * self.row()
    }

    fn row(&self) -> usize {
        self.images * self.part.columns.len()
    }

    /// Where the matrix of row `kernel_row` of the kernel starts.
    pub(super) fn start(&self, shape: &Shape, kernel_row: usize) -> usize {
        let row = kernel_row * shape.geometry.dilation / shape.geometry.stride;
        (kernel_row % Self::phases(shape) * self.depth + row) * self.row()
    }

    /// The matrix of row `kernel_row` of the kernel, `(row_taps, pixels)`.
    pub(super) fn matrix<'a, A>(
        &self,
        row_panels: &'a [A],
        shape: &Shape,
        kernel_row: usize,
    ) -> Matrix<'a, A> {
        Matrix {
            data: &row_panels[self.start(shape, kernel_row)..],
            rows: shape.row_taps(),
            cols: self.pixels(),
            row_stride: self.stride(shape),
            col_stride: 1,
        }
    }

    /// Calls `f(row_panel, pixel)` for every run of elements in use, as long as the part has columns:
    /// where it starts in the row panels, and in the padded images.
    #[inline(always)]
    fn for_each(&self, shape: &Shape, group: usize, mut f: impl FnMut(usize, usize)) {
        let (stride, dilation) = (shape.geometry.stride, shape.geometry.dilation);
        let (height, width) = (shape.padded_height(), shape.padded_width());
        let (phases, len) = (Self::phases(shape), self.part.columns.len());
        let left = self.part.columns.start * stride;
        for tap in 0..shape.row_taps() {
            let channel = group * shape.group_in() + tap / shape.kernel_width;
            let column = left + tap % shape.kernel_width * dilation;
            for phase in 0..phases {
                let row_panel = (tap * phases + phase) * self.depth;
                let first = self.part.rows.start * stride + phase * dilation % stride;
                for (row, y) in (first..height).step_by(stride).take(self.depth).enumerate() {
                    for image in 0..self.images {
                        let run = (row_panel + row) * self.images + image;
                        let line = (image * shape.c_in + channel) * height + y;
                        f(run * len, line * width + column);
                    }
                }
            }
        }
    }

    /// Writes the row panels of a group, from that many padded images.
    pub(super) fn gather<A: Real>(
        &self,
        padded: &[A],
        shape: &Shape,
        group: usize,
        row_panels: &mut [A],
    ) {
        let (stride, len) = (shape.geometry.stride, self.part.columns.len());
        vectorise(
            #[inline(always)]
            || match (stride, len) {
                (1, 8) => self.gather_fixed::<A, 8>(padded, shape, group, row_panels),
                (1, 16) => self.gather_fixed::<A, 16>(padded, shape, group, row_panels),
                (1, 32) => self.gather_fixed::<A, 32>(padded, shape, group, row_panels),
                (1, _) => self.for_each(shape, group, |row_panel, pixel| {
                    row_panels[row_panel..row_panel + len]
                        .copy_from_slice(&padded[pixel..pixel + len]);
                }),
                (2, _) => self.for_each(shape, group, |row_panel, pixel| {
                    // Pairs, not steps, so that the loop vectorises; the last pair may be halved by
                    // the end of the image.
                    let (dst, src) =
                        (&mut row_panels[row_panel..row_panel + len], &padded[pixel..]);
                    let pairs = src.as_chunks::<2>().0;
                    for (d, [s, _]) in dst.iter_mut().zip(pairs) {
                        *d = *s;
                    }
                    dst[len - 1] = src[2 * (len - 1)];
                }),
                _ => self.for_each(shape, group, |row_panel, pixel| {
                    let dst = &mut row_panels[row_panel..row_panel + len];
                    for (d, s) in dst.iter_mut().zip(padded[pixel..].iter().step_by(stride)) {
                        *d = *s;
                    }
                }),
            },
        );
    }

    /// [`Self::gather`] of runs of a known length, which become a few moves instead of a call.
    #[inline(always)]
    fn gather_fixed<A: Real, const LEN: usize>(
        &self,
        padded: &[A],
        shape: &Shape,
        group: usize,
        row_panels: &mut [A],
    ) {
        self.for_each(shape, group, |row_panel, pixel| {
            let dst = row_panels[row_panel..row_panel + LEN].first_chunk_mut::<LEN>();
            let src = padded[pixel..pixel + LEN].first_chunk::<LEN>();
            if let (Some(dst), Some(src)) = (dst, src) {
                *dst = *src;
            }
        });
    }

    /// Adds the row panels to the pixels they are gathered from, in a fixed order.
    pub(super) fn scatter_add<A: Real>(
        &self,
        row_panels: &[A],
        shape: &Shape,
        group: usize,
        padded: &mut [A],
    ) {
        let (stride, len) = (shape.geometry.stride, self.part.columns.len());
        vectorise(
            #[inline(always)]
            || {
                self.for_each(shape, group, |row_panel, pixel| {
                    let src = &row_panels[row_panel..row_panel + len];
                    for (d, s) in padded[pixel..].iter_mut().step_by(stride).zip(src) {
                        *d += *s;
                    }
                });
            },
        );
    }
}
