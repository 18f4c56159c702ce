//! A training run on disk: all of it in one file, written whole or not at all.

mod checkpoint;
mod checkpointer;
mod file;
mod parts;
mod state;

pub use checkpoint::{Checkpoint, SavedCheckpoint};
pub use checkpointer::{Best, Checkpointer};
pub(crate) use file::export;
pub use state::{State, Stateful};
