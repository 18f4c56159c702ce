//! Pooling to a given size, as layers.

use candle_core::{Result, Tensor, ToUsize2};
use candle_nn::Module;

use crate::kernels::tensors::format::Format;
use crate::ops;

macro_rules! layers {
    ($($layer:ident: $op:ident, $torch:literal;)*) => { $(
        #[doc = concat!("[`ops::", stringify!($op), "`] to a fixed size.")]
        ///
        /// # References
        ///
        #[doc = concat!("`", $torch, "`.")]
        #[derive(Clone, Copy, Debug)]
        pub struct $layer {
            output: (usize, usize),
            format: Format,
        }

        impl $layer {
            /// To one number or `(height, width)`.
            pub fn new(output: impl ToUsize2) -> Self {
                Self { output: output.to_usize2(), format: Format::ChannelsFirst }
            }

            /// The layer for images `(b, h, w, c)`, of [`ops::channels_last`].
            pub fn channels_last(self) -> Self {
                Self { format: Format::ChannelsLast, ..self }
            }
        }

        impl Module for $layer {
            fn forward(&self, x: &Tensor) -> Result<Tensor> {
                match self.format {
                    Format::ChannelsFirst => ops::$op(x, self.output),
                    Format::ChannelsLast => ops::channels_last::$op(x, self.output),
                }
            }
        }
    )* };
}

layers! {
    AdaptiveAvgPool2d: adaptive_avg_pool2d, "torch.nn.AdaptiveAvgPool2d";
    AdaptiveMaxPool2d: adaptive_max_pool2d, "torch.nn.AdaptiveMaxPool2d";
}
