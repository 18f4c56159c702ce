//! The windows of a pool, and the sizes of its input.

use crate::kernels::tensors::format::Format;

/// The sizes of an input, in the order that its layout has them.
pub(crate) type Dims4 = (usize, usize, usize, usize);

/// Where windows lie: `(vertical, horizontal)` pairs, `padding` on both sides.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    pub(crate) kernel: (usize, usize),
    pub(crate) stride: (usize, usize),
    pub(crate) padding: (usize, usize),
    pub(crate) format: Format,
}

impl Window {
    /// How many windows fit a plane of `(h, w)`, which [`Self::fits`].
    pub(crate) fn out_size(self, (h, w): (usize, usize)) -> (usize, usize) {
        (
            (h + 2 * self.padding.0 - self.kernel.0) / self.stride.0 + 1,
            (w + 2 * self.padding.1 - self.kernel.1) / self.stride.1 + 1,
        )
    }

    /// Whether a window fits a plane of `(h, w)`.
    pub(crate) fn fits(self, (h, w): (usize, usize)) -> bool {
        let room = |size: usize, padding: usize| padding.checked_mul(2)?.checked_add(size);
        room(h, self.padding.0).is_some_and(|room| room >= self.kernel.0)
            && room(w, self.padding.1).is_some_and(|room| room >= self.kernel.1)
    }

    pub(super) fn channels_first(self) -> Self {
        Self { format: Format::ChannelsFirst, ..self }
    }

    pub(super) fn area(self) -> usize {
        self.kernel.0 * self.kernel.1
    }
}
