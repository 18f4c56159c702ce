//! What tests of several kernels need: devices, and a process of their own.

pub(crate) mod devices;
pub(crate) mod own_process;
