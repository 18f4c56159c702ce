//! The emulated GPU itself: that candle runs on it, and that it finds what a GPU would not forgive.
#![cfg(feature = "cuda")]

mod candle;
