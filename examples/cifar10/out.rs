//! The folder of `--out`: what a training leaves behind.

mod canvas;
mod folder;
mod images;
mod page;
mod pictures;
mod rows;
mod run;

pub(crate) use folder::Folder;
pub(crate) use rows::{EpochRow, StepRow};
pub(crate) use run::RunFolder;

#[cfg(test)]
pub(crate) mod tests;
