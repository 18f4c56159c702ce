//! A training run on disk: all of it in one file, written whole or not at all.

mod checkpoint;
mod checkpointer;
mod export;
mod file;
mod parts;
mod state;

pub use checkpoint::{Checkpoint, SavedCheckpoint};
pub use checkpointer::{Best, Checkpointer};
pub use state::{State, Stateful};
