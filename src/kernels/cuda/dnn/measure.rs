//! Times engines of cuDNN's graph API on a convolution's own tensors, for `backend::set_cudnn_benchmark`.

use candle_core::Result;
use candle_core::cuda_backend::WrapErr;
use cudarc::driver::{CudaStream, sys::CUevent_flags};

use super::backend::Answer;
use super::graph::ExecutionPlan;

/// The engines that are timed, unless there are fewer. As many as PyTorch's `benchmark_limit`.
pub(super) const MOST: usize = 10;
/// Runs that are timed, each after one that is not.
const RUNS: usize = 3;

/// The plan of the least time, and that in milliseconds. Plans that `run` fails with are passed over; if all are, the last
/// error is the answer.
///
/// `run` launches a plan on `stream`, which this waits for.
pub(super) fn fastest(
    stream: &CudaStream,
    plans: Vec<ExecutionPlan>,
    run: impl Fn(&ExecutionPlan) -> Answer<()>,
) -> Result<Answer<Option<(f32, ExecutionPlan)>>> {
    let (mut best, mut failed) = (None::<(f32, ExecutionPlan)>, None);
    for plan in plans {
        match median(stream, || run(&plan))? {
            Ok(time) if best.as_ref().is_none_or(|(least, _)| time < *least) => {
                best = Some((time, plan));
            }
            Ok(_) => {}
            Err(error) => {
                tracing::debug!(target: "candle_amp::cudnn", name = plan.name, ?error, "not measured");
                // An earlier run of it may not be over.
                stream.synchronize().w()?;
                failed = Some(error);
            }
        }
    }
    Ok(match (best, failed) {
        (None, Some(error)) => Err(error),
        (best, _) => Ok(best),
    })
}

/// What `run` takes on the device, in milliseconds.
fn median(stream: &CudaStream, run: impl Fn() -> Answer<()>) -> Result<Answer<f32>> {
    let timed = Some(CUevent_flags::CU_EVENT_DEFAULT);
    let mut times = [0f32; RUNS];
    for time in &mut times {
        // So that the device is busy while the host prepares the one that is timed.
        if let Err(error) = run() {
            return Ok(Err(error));
        }
        let start = stream.record_event(timed).w()?;
        if let Err(error) = run() {
            return Ok(Err(error));
        }
        let end = stream.record_event(timed).w()?;
        *time = start.elapsed_ms(&end).w()?;
    }
    times.sort_by(f32::total_cmp);
    Ok(Ok(times[RUNS / 2]))
}
