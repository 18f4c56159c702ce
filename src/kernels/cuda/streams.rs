//! Order among the streams that each thread has by itself: who launches something says so, and who uses a tensor waits.

use std::cell::RefCell;
use std::sync::{Arc, Once};

use candle_core::Result;
use candle_core::cuda_backend::WrapErr;
use cudarc::driver::CudaStream;

use super::{captures, threads};

/// What a driver calls the stream that each thread has by itself, which candle's devices use.
const PER_THREAD: usize = 2;

/// Whether each thread has a stream of its own where it says `stream`, and candle orders none of them.
pub(super) fn is_of_each_thread(stream: &CudaStream) -> bool {
    stream.cu_stream().addr() == PER_THREAD && !stream.context().is_in_multi_stream_mode()
}

/// Called before a launch, before a tensor is used otherwise, and before memory is taken.
pub(super) fn wait_for_other_threads(stream: &CudaStream) -> Result<()> {
    static WARNED: Once = Once::new();
    if !is_of_each_thread(stream) {
        return Ok(());
    }
    leave_last();
    let context = stream.context();
    // Nothing runs in a capture: a replay waits.
    if captures::is_own(context.ordinal()) {
        return Ok(());
    }
    threads::wait_for_others(context.ordinal(), |others| {
        if others {
            WARNED.call_once(|| {
                tracing::warn!(
                    "several threads use a CUDA device whose streams are each one thread's: they wait for one another; \
                     Device::new_cuda_with_stream makes a device with one stream for all threads"
                );
            });
        }
        synchronise(stream)
    })
}

/// Waits for what all threads have launched on the device of `stream`.
pub(super) fn synchronise(stream: &CudaStream) -> Result<()> {
    let context = stream.context();
    let _held = captures::hold_off(context.ordinal())?;
    context.synchronize().w()
}

/// Has this thread's wait at its end come after what else it drops then, which is in the reverse order of the first uses:
/// tensors and handles of libraries launch and free something once more.
pub(super) fn leave_last() {
    let _ = LEAVING.try_with(|_| ());
}

/// Called after something was launched on `stream`.
pub(super) fn launched(stream: &Arc<CudaStream>) {
    if is_of_each_thread(stream) && !captures::is_own(stream.context().ordinal()) {
        threads::launched(stream.context().ordinal());
        // Where the thread is ending already, nobody waits.
        let _ = LEAVING.try_with(|leaving| {
            let all = &mut *leaving.0.borrow_mut();
            let context = stream.context().cu_ctx();
            if !all.iter().any(|other| other.context().cu_ctx() == context) {
                all.push(stream.clone());
            }
        });
    }
}

/// This thread's stream of each device that it has launched something on. A thread that ends waits for them, because they end
/// with it: no kernel is left in a stream that is no more. On an H200 a test that left some there did not end; whether for this,
/// nobody has seen yet.
#[derive(Debug, Default)]
struct Leaving(RefCell<Vec<Arc<CudaStream>>>);

thread_local!(static LEAVING: Leaving = Leaving::default());

impl Drop for Leaving {
    fn drop(&mut self) {
        for stream in self.0.take() {
            // The next call of another thread says so.
            stream.context().record_err(stream.synchronize());
        }
    }
}
