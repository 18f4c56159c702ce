//! How a kernel moves over an image, and which positions it has there.

use crate::kernels::tensors::format::Format;

/// How a kernel moves over an image. Of an image and a kernel of one row, which is how a sequence
/// is convolved, stride and dilation say nothing vertically.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Geometry {
    /// Pixels between two positions of the kernel.
    pub stride: usize,
    /// Zeros above and below the image, and left and right of it.
    pub padding: (usize, usize),
    /// Pixels between two taps of the kernel.
    pub dilation: usize,
    /// Parts the channels are split into, each convolved by itself.
    pub groups: usize,
    pub format: Format,
}

impl Geometry {
    pub(super) fn channels_first(self) -> Self {
        Self { format: Format::ChannelsFirst, ..self }
    }

    /// Positions of a kernel of `(rows, columns)` taps on an image of `(height, width)`, vertically
    /// and horizontally; none where it does not fit.
    pub(crate) fn out_size(
        &self,
        (height, width): (usize, usize),
        (rows, columns): (usize, usize),
    ) -> (usize, usize) {
        let positions = |input: usize, padding: usize, kernel: usize| {
            let reach = self.dilation.checked_mul(kernel.checked_sub(1)?)?.checked_add(1)?;
            let room = padding.checked_mul(2)?.checked_add(input)?.checked_sub(reach)?;
            (room / self.stride).checked_add(1)
        };
        let positions = |input, padding, kernel| positions(input, padding, kernel).unwrap_or(0);
        (positions(height, self.padding.0, rows), positions(width, self.padding.1, columns))
    }
}
