//! Streams that are behind: what has no order is done in the wrong one.

use std::sync::Arc;

use anyhow::Result;

use crate::gpu::{assert_error, child, compile, cudarc, grid, run};
use cudarc::driver::sys::CUresult;
use cudarc::driver::{CudaContext, CudaStream};

const ADD_ONE: &str =
    r#"extern "C" __global__ void k(float *data, int length) { data[threadIdx.x] += 1; }"#;

/// `false` in the process of the test's own, whose streams are behind.
fn elsewhere(test: &str) -> bool {
    child(&format!("streams::{test}"), &[("EMULATED_GPU_DELAY", "5")]).is_some()
}

/// Two streams that the caller has to order.
fn two() -> Result<[Arc<CudaStream>; 2]> {
    let context = CudaContext::new(0)?;
    // SAFETY: that they are not ordered is what is tested.
    unsafe { context.disable_event_tracking() };
    Ok([context.new_stream()?, context.new_stream()?])
}

#[test]
fn work_is_done_in_its_order_when_somebody_waits_for_it() -> Result<()> {
    if elsewhere("work_is_done_in_its_order_when_somebody_waits_for_it") {
        return Ok(());
    }
    let [stream, other] = two()?;
    let kernel = compile(&stream, ADD_ONE)?;
    let mut data = stream.clone_htod(&[1f32, 2., 3.])?;
    stream.synchronize()?;
    let mut early = 0;
    for round in 1..100 {
        run(&stream, &kernel, grid(1, 3), &mut data)?;
        early +=
            usize::from(other.clone_dtoh(&data)? != [1., 2., 3.].map(|x: f32| x + round as f32));
        let done = stream.record_event(None)?;
        other.wait(&done)?;
        assert_eq!(other.clone_dtoh(&data)?, [1., 2., 3.].map(|x: f32| x + round as f32));
    }
    assert!(early > 50, "another stream saw {early} results too soon, of 99");
    // Pageable memory is the caller's again as soon as a copy from it returns.
    let mut host = vec![7f32; 3];
    stream.memcpy_htod(&host, &mut data)?;
    host.fill(8.0);
    assert_eq!(stream.clone_dtoh(&data)?, [7.0; 3]);
    Ok(())
}

#[test]
fn memory_that_is_freed_in_another_stream_than_uses_it() -> Result<()> {
    if elsewhere("memory_that_is_freed_in_another_stream_than_uses_it") {
        return Ok(());
    }
    let [stream, other] = two()?;
    let kernel = compile(&stream, ADD_ONE)?;
    let lend = |waits: bool| -> Result<()> {
        let mut data = other.alloc_zeros::<f32>(3)?;
        other.synchronize()?;
        run(&stream, &kernel, grid(1, 3), &mut data)?;
        if waits {
            other.wait(&stream.record_event(None)?)?;
        }
        drop(data); // in `other`
        other.synchronize()?;
        Ok(stream.synchronize()?)
    };
    lend(true)?;
    assert!(lend(false).is_err());
    assert_error(stream.synchronize(), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    Ok(())
}

/// As candle's default device has one: a stream of each thread's own, and no order among them.
#[test]
fn memory_that_is_freed_on_another_thread() -> Result<()> {
    let test = "streams::memory_that_is_freed_on_another_thread";
    let variables = |kind| [("EMULATED_GPU_DELAY", "5"), ("STREAM", kind)];
    if child(test, &variables("per thread")).is_some() {
        child(test, &variables("one for all"));
        return Ok(());
    }
    let context = CudaContext::new(0)?;
    // SAFETY: that they are not ordered is what is tested.
    unsafe { context.disable_event_tracking() };
    let shared = std::env::var("STREAM")? == "one for all";
    let stream = if shared { context.new_stream()? } else { context.per_thread_stream() };
    let kernel = compile(&stream, ADD_ONE)?;
    let mut data = stream.alloc_zeros::<f32>(3)?;
    stream.synchronize()?;
    run(&stream, &kernel, grid(1, 3), &mut data)?;
    let of_thread = stream.clone();
    std::thread::spawn(move || {
        drop(data);
        of_thread.synchronize()
    })
    .join()
    .expect("nothing panics")?;
    match shared {
        true => stream.synchronize()?,
        false => assert_error(stream.synchronize(), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS),
    }
    Ok(())
}
