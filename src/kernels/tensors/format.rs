//! Where the channels of images are.

use candle_core::{Result, Tensor};

use super::contiguous::contiguous;

/// The order of an image's dimensions, by shape: no tensor is strided for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum Format {
    /// `(batch, channels, height, width)`
    #[default]
    ChannelsFirst,
    /// `(batch, height, width, channels)`
    ChannelsLast,
}

impl Format {
    /// A tensor's dimensions in the order `[batch, channels, height, width]`.
    pub(crate) fn split(self, [a, b, c, d]: [usize; 4]) -> [usize; 4] {
        match self {
            Self::ChannelsFirst => [a, b, c, d],
            Self::ChannelsLast => [a, d, b, c],
        }
    }

    /// `[batch, channels, height, width]` in the order of a tensor.
    pub(crate) fn join(self, [n, c, h, w]: [usize; 4]) -> [usize; 4] {
        match self {
            Self::ChannelsFirst => [n, c, h, w],
            Self::ChannelsLast => [n, h, w, c],
        }
    }

    /// The dimension of the channels in tensors of a rank: of images 4, of sequences 3.
    pub(crate) fn channels(self, rank: usize) -> usize {
        if self == Self::ChannelsFirst { 1 } else { rank - 1 }
    }

    /// The dimension of an image's height; its width follows.
    pub(crate) fn height(self) -> usize {
        if self == Self::ChannelsFirst { 2 } else { 1 }
    }
}

/// `(b, h, w, c)` as `(b, c, h, w)`.
pub(crate) fn to_nchw(images: &Tensor) -> Result<Tensor> {
    contiguous(&images.permute((0, 3, 1, 2))?)
}

/// `(b, c, h, w)` as `(b, h, w, c)`.
pub(crate) fn to_nhwc(images: &Tensor) -> Result<Tensor> {
    contiguous(&images.permute((0, 2, 3, 1))?)
}
