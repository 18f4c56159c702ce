//! Streams that are captured, and the graphs that they become.

use std::sync::{Mutex, PoisonError};

use anyhow::Result;

use crate::gpu::{assert_error, compile, cudarc, grid, run, stream};
use cudarc::driver::sys::{
    CUgraphInstantiate_flags as Flags, CUresult, CUstreamCaptureMode as Mode,
};

/// Who waits for the context spoils the captures of all threads.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

const ADD_ONE: &str = r#"extern "C" __global__ void k(float *data, int length) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < length)
        data[i] += 1;
}"#;

#[test]
fn a_graph_does_again_what_was_captured() -> Result<()> {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let stream = stream()?;
    // SAFETY: there is one stream.
    unsafe { stream.context().disable_event_tracking() };
    let kernel = compile(&stream, ADD_ONE)?;
    let mut data = stream.alloc_zeros::<f32>(100)?;
    stream.begin_capture(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    run(&stream, &kernel, grid(4, 32), &mut data)?;
    let mut copy = stream.alloc_zeros::<f32>(100)?;
    stream.memcpy_dtod(&data, &mut copy)?;
    run(&stream, &kernel, grid(4, 32), &mut copy)?;
    stream.memcpy_dtod(&copy, &mut data)?;
    drop(copy);
    let graph = stream.end_capture(Flags(0))?.expect("something was captured");
    assert_eq!(stream.clone_dtoh(&data)?, [0.; 100]);
    for launches in 1..4 {
        graph.launch()?;
        assert_eq!(stream.clone_dtoh(&data)?, [2. * launches as f32; 100]);
    }
    Ok(())
}

#[test]
fn a_capture_allows_no_waiting() -> Result<()> {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let stream = stream()?;
    // SAFETY: there is one stream.
    unsafe { stream.context().disable_event_tracking() };
    let data = stream.alloc_zeros::<f32>(100)?;
    let mut host = [0f32; 100];
    for what in 0..3 {
        stream.begin_capture(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
        let result = match what {
            0 => stream.synchronize(),
            1 => stream.context().synchronize(),
            _ => stream.memcpy_dtoh(&data, &mut host),
        };
        assert_error(result, CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        let captured = stream.end_capture(Flags(0));
        assert_error(captured, CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    }
    stream.synchronize()?;
    Ok(())
}

#[test]
fn a_capture_frees_only_what_it_allocates() -> Result<()> {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let stream = stream()?;
    // SAFETY: there is one stream.
    unsafe { stream.context().disable_event_tracking() };
    let outside = stream.alloc_zeros::<f32>(100)?;
    stream.begin_capture(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    drop(outside); // which the context remembers
    assert_error(stream.context().check_err(), CUresult::CUDA_ERROR_INVALID_VALUE);
    drop(stream.end_capture(Flags(0))?);
    Ok(())
}
