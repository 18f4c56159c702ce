//! Streams that are captured, and the graphs that they become.

use std::sync::{Mutex, PoisonError};

use anyhow::Result;

use crate::gpu::{assert_error, compile, cudarc, grid, run, stream};
use cudarc::cublas::{CudaBlas, Gemm, GemmConfig, sys as cublas};
use cudarc::driver::DevicePtr;
use cudarc::driver::sys::{
    self, CUgraphInstantiate_flags as Flags, CUresult, CUstreamCaptureMode as Mode,
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

/// cuBLAS takes the memory of a captured product from the graph, unless its handle has a workspace: of which a stream that
/// is set later knows nothing.
#[test]
fn a_captured_product_allocates_unless_its_handle_has_a_workspace() -> Result<()> {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let stream = stream()?;
    // SAFETY: there is one stream.
    unsafe { stream.context().disable_event_tracking() };
    let blas = CudaBlas::new(stream.clone())?;
    let (a, mut c) = (stream.alloc_zeros::<f32>(4)?, stream.alloc_zeros::<f32>(4)?);
    const SIZE: usize = 1 << 20;
    let workspace = stream.alloc_zeros::<u8>(SIZE)?;
    let address = workspace.device_ptr(&stream).0;
    let set = |from: u64, size: usize| {
        // SAFETY: the handle is alive, and no product is under way.
        unsafe { cublas::cublasSetWorkspace_v2(*blas.handle(), from as *mut _, size) }.result()
    };
    let mut nodes = || -> Result<usize> {
        stream.begin_capture(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
        let n = cublas::cublasOperation_t::CUBLAS_OP_N;
        let (transa, transb, m, n, k) = (n, n, 2, 2, 2);
        let (lda, ldb, ldc, alpha, beta) = (2, 2, 2, 1.0, 0.0);
        let config = GemmConfig { transa, transb, m, n, k, alpha, lda, ldb, beta, ldc };
        // SAFETY: the matrices are of these sizes.
        unsafe { blas.gemm(config, &a, &a, &mut c) }?;
        let graph = stream.end_capture(Flags(0))?.expect("something was captured");
        let mut count = 0;
        // SAFETY: the graph is alive, and only its nodes are counted.
        unsafe { sys::cuGraphGetNodes(graph.cu_graph(), std::ptr::null_mut(), &mut count) }
            .result()?;
        graph.launch()?;
        graph.launch()?;
        Ok(count)
    };
    assert_eq!(nodes()?, 3);
    set(address, SIZE)?;
    assert_eq!(nodes()?, 1);
    // SAFETY: the stream outlives the handle.
    unsafe { cublas::cublasSetStream_v2(*blas.handle(), stream.cu_stream().cast()) }.result()?;
    assert_eq!(nodes()?, 3);
    assert!(set(address + 16, SIZE - 16).is_err() && set(address, SIZE + 256).is_err());
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
