//! Times engines of cuDNN's graph API on a convolution's own tensors, for `backend::set_cudnn_benchmark`.

use candle_core::Result;
use candle_core::cuda_backend::WrapErr;
use cudarc::driver::{CudaStream, sys::CUevent_flags};

use super::backend::Answer;
use super::graph::ExecutionPlan;

/// The engines that are timed, unless there are fewer. As many as PyTorch's `benchmark_limit`.
pub(super) const MOST: usize = 10;
/// Runs that are timed, after one that is not.
const RUNS: usize = 3;

/// The plan of the least time, and that in milliseconds; `None` if `run` succeeds with none of them.
///
/// `run` launches a plan on `stream`, which this waits for.
pub(super) fn fastest(
    stream: &CudaStream,
    plans: Vec<ExecutionPlan>,
    run: impl Fn(&ExecutionPlan) -> Answer<()>,
) -> Result<Option<(f32, ExecutionPlan)>> {
    let mut best: Option<(f32, ExecutionPlan)> = None;
    for plan in plans {
        let Some(time) = median(stream, || run(&plan))? else { continue };
        if best.as_ref().is_none_or(|(least, _)| time < *least) {
            best = Some((time, plan));
        }
    }
    Ok(best)
}

/// What `run` takes on the device, in milliseconds; `None` if it fails.
fn median(stream: &CudaStream, run: impl Fn() -> Answer<()>) -> Result<Option<f32>> {
    let timed = Some(CUevent_flags::CU_EVENT_DEFAULT);
    if run().is_err() {
        return Ok(None);
    }
    let mut times = [0f32; RUNS];
    for time in &mut times {
        let start = stream.record_event(timed).w()?;
        if run().is_err() {
            return Ok(None);
        }
        let end = stream.record_event(timed).w()?;
        *time = start.elapsed_ms(&end).w()?;
    }
    times.sort_by(f32::total_cmp);
    Ok(Some(times[RUNS / 2]))
}
