//! Parts that the CPU's kernels share: element types, vector instructions, threads and memory.

pub(in crate::kernels) mod array;
mod convert;
pub(in crate::kernels) mod dtype;
pub(in crate::kernels) mod guard;
pub(in crate::kernels) mod heads;
pub(in crate::kernels) mod in_place;
pub(in crate::kernels) mod lane;
pub(crate) mod limit;
pub(in crate::kernels) mod parallel;
pub(in crate::kernels) mod prefetch;
pub(in crate::kernels) mod simd;
#[cfg(test)]
pub(in crate::kernels) mod testing;
pub(in crate::kernels) mod tile;
pub(in crate::kernels) mod uninit;
pub(in crate::kernels) mod vector;
