//! Settings for a machine: threads, memory, and how a GPU's libraries compute.

mod memory;
mod threads;

pub use crate::kernels::choice::algorithm::{Fallback, fallbacks};
pub use crate::kernels::choice::cudnn::{
    cudnn_benchmark, cudnn_f32_weight_gradients, set_cudnn_benchmark,
    set_cudnn_f32_weight_gradients,
};
pub use crate::kernels::choice::tf32::{allow_tf32, set_allow_tf32};
pub use crate::kernels::instructions::{InstructionSets, instruction_sets};
pub use memory::{MemoryStats, empty_cache, keep_memory, memory_stats, reset_peak_memory_stats};
pub use threads::on_workers;

/// How often this thread has waited for a CUDA device, to read from it in this crate; 0 without the
/// feature `cuda`. candle's own reads (`to_scalar`, `to_vec1`) are not among them.
///
/// A training step with the crate's optimizers waits for nothing: the number stays as it is, until somebody asks for
/// [`StepOutcome::skipped`](crate::StepOutcome::skipped) or the scale, as [`Scheduler::step`](crate::optim::Scheduler::step)
/// does for the step before. Checkpoints, comparisons of weights and [`empty_cache`] are not counted.
pub fn device_reads() -> u64 {
    crate::kernels::cuda::reads()
}
