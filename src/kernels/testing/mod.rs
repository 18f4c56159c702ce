//! Helpers for the tests of several kernels: devices, and a process of their own.

pub(crate) mod devices;
pub(crate) mod own_process;
