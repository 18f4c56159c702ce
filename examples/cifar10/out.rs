//! The folder of `--out`: what a training leaves behind.

mod folder;
mod images;
mod page;
mod pictures;
mod rows;

pub(crate) use folder::{Folder, RunFolder, Training};
pub(crate) use rows::{EpochRow, Gradients, StepRow};

#[cfg(test)]
mod tests;
