//! The sizes of one convolution.

use candle_core::Result;

use super::geometry::Geometry;
use crate::error::bail;
use crate::kernels::tensors::MOST_ELEMENTS;

/// The dimensions of a convolution's input, weight and output.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) batch: usize,
    pub(super) c_in: usize,
    pub(super) c_out: usize,
    pub(super) height: usize,
    pub(super) width: usize,
    pub(super) kernel_height: usize,
    pub(super) kernel_width: usize,
    pub(super) out_height: usize,
    pub(super) out_width: usize,
    pub(super) geometry: Geometry,
}

impl Shape {
    pub(super) fn new(input: &[usize], weight: &[usize], geometry: Geometry) -> Result<Self> {
        let (&[a, b, c, d], &[c_out, _, kernel_height, kernel_width]) = (input, weight) else {
            bail!("a convolution of {input:?} by {weight:?} is not two-dimensional")
        };
        let [batch, c_in, height, width] = geometry.format.split([a, b, c, d]);
        if [c_in, c_out, kernel_height, kernel_width].contains(&0) {
            bail!("a convolution of {input:?} by {weight:?} has no channels or no taps")
        }
        let (out_height, out_width) =
            geometry.out_size((height, width), (kernel_height, kernel_width));
        // All offsets into images, with and without their padding, are products of these.
        let padded = |size: usize, padding: usize| padding.checked_mul(2)?.checked_add(size);
        let padded_size = (padded(height, geometry.padding.0), padded(width, geometry.padding.1));
        let fits = |sizes: [Option<usize>; 4]| {
            let nothing = sizes.contains(&Some(0));
            let count = sizes.into_iter().try_fold(1usize, |count, size| count.checked_mul(size?));
            nothing || count.is_some_and(|count| count <= MOST_ELEMENTS)
        };
        if !fits([Some(batch), Some(c_in), padded_size.0, padded_size.1])
            || !fits([batch, c_out, out_height, out_width].map(Some))
        {
            let Geometry { padding, stride, .. } = geometry;
            bail!(
                "a convolution of {input:?} by {weight:?} with padding {padding:?} and stride {stride} has more \
                 elements than memory has addresses: {c_in} channels of {height} x {width} pixels in, {c_out} of \
                 {out_height} x {out_width} out"
            )
        }
        Ok(Self {
            batch,
            c_in,
            c_out,
            height,
            width,
            kernel_height,
            kernel_width,
            out_height,
            out_width,
            geometry,
        })
    }

    /// The convolution that takes the output's gradient to the input's: stride 1, kernel turned by
    /// half a turn, input and output channels of each group exchanged. `None` where the stride or
    /// the padding leaves no such convolution.
    pub(super) fn transposed(&self) -> Option<Self> {
        let Geometry { stride, padding, dilation, .. } = self.geometry;
        let reach = |kernel: usize, padding| (dilation * (kernel - 1)).checked_sub(padding);
        let above = reach(self.kernel_height, padding.0)?;
        let left = reach(self.kernel_width, padding.1)?;
        if stride != 1 {
            return None;
        }
        Some(Self {
            c_in: self.c_out,
            c_out: self.c_in,
            height: self.out_height,
            width: self.out_width,
            out_height: self.height,
            out_width: self.width,
            geometry: Geometry { padding: (above, left), ..self.geometry },
            ..*self
        })
    }

    pub(super) fn input_dims(&self) -> [usize; 4] {
        self.geometry.format.join([self.batch, self.c_in, self.height, self.width])
    }

    pub(super) fn out_dims(&self) -> [usize; 4] {
        let dims = [self.batch, self.c_out, self.out_height, self.out_width];
        self.geometry.format.join(dims)
    }

    pub(super) fn weight_dims(&self) -> [usize; 4] {
        [self.c_out, self.group_in(), self.kernel_height, self.kernel_width]
    }

    /// Input channels of a group.
    pub(super) fn group_in(&self) -> usize {
        self.c_in / self.geometry.groups
    }

    /// Output channels of a group.
    pub(super) fn group_out(&self) -> usize {
        self.c_out / self.geometry.groups
    }

    /// Elements of an input image.
    pub(super) fn image(&self) -> usize {
        self.c_in * self.height * self.width
    }

    /// Elements of an output image.
    pub(super) fn out_image(&self) -> usize {
        self.c_out * self.pixels()
    }

    /// Pixels of an output channel.
    pub(super) fn pixels(&self) -> usize {
        self.out_height * self.out_width
    }

    pub(super) fn padded_height(&self) -> usize {
        self.height + 2 * self.geometry.padding.0
    }

    pub(super) fn padded_width(&self) -> usize {
        self.width + 2 * self.geometry.padding.1
    }

    /// Whether an image with its padding is so large, and nearly all of it padding, that nothing should lay it out without
    /// asking whether there is memory.
    pub(super) fn mostly_padding(&self) -> bool {
        let padded = self.padded_height().saturating_mul(self.padded_width());
        padded > 1 << 28 && padded / 4 > self.height * self.width
    }

    /// Elements of an input image with its padding.
    pub(super) fn padded_image(&self) -> usize {
        self.c_in * self.padded_height() * self.padded_width()
    }

    /// Weights of an output channel: the length of the sums of the forward pass.
    pub(super) fn taps(&self) -> usize {
        self.group_in() * self.kernel_height * self.kernel_width
    }

    /// Taps of one row of the kernel, over the input channels of a group.
    pub(super) fn row_taps(&self) -> usize {
        self.group_in() * self.kernel_width
    }

    /// Calls `f` with every tap, and a pixel of the input and of the output, by their numbers in a plane, that meet there:
    /// none of padding. Returns how often that was.
    pub(super) fn meetings(&self, mut f: impl FnMut(usize, usize, usize)) -> usize {
        let Geometry { stride, padding, dilation, .. } = self.geometry;
        let meets = |out: usize, tap: usize, padding: usize, size: usize| {
            let at = (out * stride + tap * dilation).checked_sub(padding)?;
            (at < size).then_some(at)
        };
        let mut count = 0;
        for tap in 0..self.kernel_height * self.kernel_width {
            let (down, across) = (tap / self.kernel_width, tap % self.kernel_width);
            for y in 0..self.out_height {
                let Some(row) = meets(y, down, padding.0, self.height) else { continue };
                for x in 0..self.out_width {
                    let Some(column) = meets(x, across, padding.1, self.width) else { continue };
                    f(tap, row * self.width + column, y * self.out_width + x);
                    count += 1;
                }
            }
        }
        count
    }

    /// Whether every one of several groups has one input channel.
    pub(super) fn depthwise(&self) -> bool {
        self.geometry.groups == self.c_in && self.c_in > 1
    }

    /// Whether an output pixel is made of the input pixel at the same place alone.
    pub(super) fn pointwise(&self) -> bool {
        self.kernel_height == 1
            && self.kernel_width == 1
            && self.geometry.stride == 1
            && self.geometry.padding == (0, 0)
    }

    /// The same convolution of images that are one row, of one that is pointwise.
    pub(super) fn in_one_row(&self) -> Option<Self> {
        let (height, width) = (1, self.pixels());
        let row = Self { height, width, out_height: height, out_width: width, ..*self };
        self.pointwise().then_some(row)
    }
}
