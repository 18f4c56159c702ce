//! Saves a training run to one file, atomically, and resumes it.

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
