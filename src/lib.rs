//! Automatic mixed precision for candle.

mod kernels;
