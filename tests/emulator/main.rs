//! The emulated GPU itself: that candle runs on it, and that it finds what a GPU would not forgive.
#![cfg(feature = "cuda")]
#![allow(unsafe_code)] // kernels are launched

mod candle;
mod faults;
mod gpu;
mod graphs;
mod kernels;
mod streams;
mod warpgroups;
