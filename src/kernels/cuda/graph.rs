//! Launches that are recorded once, and repeated as one graph.

use std::sync::Arc;

use candle_core::cuda_backend::{CudaStorageSlice, WrapErr};
use candle_core::{CudaStorage, InplaceOp1, Layout, Result, Tensor};
use cudarc::driver::{CudaGraph, CudaStream, sys};

use super::gpu::Gpu;
use super::streams::{launched, wait_for_other_threads};
use super::{captures, memory};
use crate::error::{CaptureError, Error, bail};

/// What a stream was given during a capture.
///
/// Its launches name addresses: what they are to find there must live as long as this does.
pub(crate) struct Graph(CudaGraph, Arc<CudaStream>);

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Graph")
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // It may still be running.
        let _ = self.1.synchronize();
    }
}

/// Ends a capture, on a panic too.
struct Capturing<'a>(&'a Gpu);

impl Drop for Capturing<'_> {
    fn drop(&mut self) {
        let stream = self.0.0.cuda_stream();
        let _ = stream.end_capture(sys::CUgraphInstantiate_flags(0));
        memory::forget_errors(&stream);
    }
}

impl Gpu {
    /// Runs `f` as a rehearsal of what is to be captured: candle then keeps its small uploads, such as strides, on the
    /// device, for the capture to find there.
    pub(crate) fn rehearse<T>(&self, f: impl FnOnce() -> T) -> T {
        let _uploads = self.0.enable_cuda_graph_htod_cache();
        f()
    }

    /// Records what `f` launches on this thread's stream instead of running it. Whatever waits for the device, or uploads
    /// what no rehearsal has, is an error. After an error the stream is as it was, and nothing has run.
    pub(crate) fn capture<T>(
        &self,
        f: impl FnOnce() -> crate::Result<T>,
    ) -> crate::Result<(T, Graph), CaptureError> {
        let stream = self.0.cuda_stream();
        let refused = |error: &dyn std::fmt::Display| CaptureError::Refused(error.to_string());
        // One stream of all threads would record what others launch too, with events or without.
        if stream.context().is_in_multi_stream_mode() {
            return Err(CaptureError::Events);
        }
        // Nothing that other threads have launched may be waited for in the capture.
        wait_for_other_threads(&stream).map_err(|error| refused(&error))?;
        let held = captures::begin(stream.context().ordinal()).map_err(|error| refused(&error))?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        stream.begin_capture(mode).map_err(|error| refused(&error))?;
        let capturing = Capturing(self);
        let result = self.rehearse(f).map_err(|error| match error {
            Error::Capture(error) => error,
            other => refused(&other),
        })?;
        std::mem::forget(capturing);
        // What a tensor that outlives the capture has in the graph is freed when it is launched again.
        let free = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let ended = stream.end_capture(free);
        drop(held);
        memory::forget_errors(&stream);
        match ended {
            Ok(Some(graph)) => Ok((result, Graph(graph, stream))),
            Ok(None) => Err(refused(&"it launches nothing")),
            Err(error) => Err(refused(&error)),
        }
    }

    /// Runs a graph, after what this thread has launched before.
    pub(crate) fn replay(&self, graph: &Graph) -> Result<()> {
        let stream = self.0.cuda_stream();
        wait_for_other_threads(&stream)?;
        graph.0.launch().w()?;
        launched(&stream);
        Ok(())
    }

    /// Writes `words` to the front of `tensor`, which is I64, in stream order.
    pub(crate) fn upload(tensor: &Tensor, words: &[u64]) -> Result<()> {
        struct Upload(Vec<i64>);
        impl InplaceOp1 for Upload {
            fn name(&self) -> &'static str {
                "upload"
            }

            fn cpu_fwd(&self, _: &mut candle_core::CpuStorage, _: &Layout) -> Result<()> {
                bail!("expected a CUDA tensor, found one on the CPU")
            }

            fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
                let device = storage.device.clone();
                match &mut storage.slice {
                    CudaStorageSlice::I64(slice) => device.memcpy_htod(&self.0, slice),
                    other => bail!("expected I64, found {other:?}"),
                }
            }
        }
        if words.is_empty() {
            return Ok(());
        }
        tensor.inplace_op1(&Upload(words.iter().map(|word| word.cast_signed()).collect()))
    }
}
