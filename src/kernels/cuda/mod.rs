//! CUDA devices as kernels see them: compile, launch, allocate, read back.
//!
//! Without the feature `cuda` this module is `absent.rs`, which has the same items and no device, so
//! that kernels' `cuda.rs` need no `cfg` and are type-checked on every machine.
//!
//! Everything runs on candle's stream of the device, in order. Only [`Gpu::to_host`] waits, and a thread
//! that uses what another has launched: see `streams` and `threads`.

mod address;
mod blas;
mod cache;
mod captures;
mod compile;
mod convolution;
#[cfg_attr(not(feature = "cudnn"), path = "dnn/absent.rs")]
mod dnn;
mod gpu;
mod graph;
mod grid;
mod launch;
mod many;
mod memory;
#[cfg_attr(not(feature = "nccl"), path = "nccl/absent.rs")]
mod nccl;
mod once;
mod product;
mod quick;
mod scratch;
mod streams;
mod strided;
mod threads;

pub(crate) use address::{address, address_mut, is_aligned, len, start};
pub(crate) use compile::Source;
pub(crate) use convolution::{Bias, Convolution, PassKind};
pub(crate) use gpu::{Gpu, reads};
pub(crate) use graph::Graph;
pub(crate) use grid::{Grid, pack, suffix};
pub(crate) use launch::Launch;
pub(crate) use many::Many;
pub(crate) use memory::{forget_peaks, keep, of_one, statistics, take, trim};
pub(crate) use nccl::{Combine, Event, HAS_NCCL, ID, Id, Link, Step, new_id};
pub(crate) use product::{Matrices, Product};
pub(crate) use strided::Strided;
