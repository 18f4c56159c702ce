//! The folder of `--out`: what a training leaves behind.

mod canvas;
mod folder;
mod images;
mod page;
mod pictures;
mod rows;
mod run;

pub(crate) use folder::Folder;
#[cfg(all(test, feature = "mpi"))]
pub(crate) use rows::Row;
pub(crate) use rows::{EpochRow, StepRow};
pub(crate) use run::RunFolder;

#[cfg(test)]
pub(crate) mod tests;
