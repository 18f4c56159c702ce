//! Saves a training run to one file, atomically, and resumes it. Activation checkpointing is another thing:
//! [`autograd::checkpoint`](crate::autograd::checkpoint).
//!
//! - [`Checkpoint`] takes what a run consists of, each part under a name, and writes it. Its page has an example.
//! - [`SavedCheckpoint`] reads such a file, and checks it before it changes anything.
//! - [`Checkpointer`] writes to a folder while training goes on, and keeps the last files and the best one.
//! - [`Stateful`] is what a part implements. Optimizers, scaler, parameters, averages and generators do.

mod checkpoint;
mod checkpointer;
mod export;
mod file;
mod header;
mod names;
mod parts;
mod state;
mod verified;

pub use checkpoint::{Checkpoint, SavedCheckpoint};
pub use checkpointer::{Best, Checkpointer, Resumed};
pub use state::{State, Stateful};
