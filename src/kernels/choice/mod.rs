//! Which algorithm a kernel takes: what a user allows for the process, and the names of those that ran.

pub(crate) mod algorithm;
pub(crate) mod cudnn;
pub(crate) mod tf32;
