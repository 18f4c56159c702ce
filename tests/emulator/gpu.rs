//! What the tests share: a stream, and kernels for it.

use std::env;
use std::process::Command;
use std::sync::Arc;

use anyhow::{Result, anyhow};
pub(crate) use candle_core::cuda_backend::cudarc;
use cudarc::driver::{
    CudaContext, CudaFunction, CudaSlice, CudaStream, DriverError, LaunchConfig, PushKernelArg, sys,
};
use cudarc::nvrtc::{self, CompileOptions};

pub(crate) fn stream() -> Result<Arc<CudaStream>> {
    Ok(CudaContext::new(0)?.new_stream()?)
}

/// The kernel `k` of a source.
pub(crate) fn compile(stream: &CudaStream, source: &str) -> Result<CudaFunction> {
    let options = CompileOptions { arch: Some("sm_90a"), ..Default::default() };
    let ptx =
        nvrtc::compile_ptx_with_opts(source, options).map_err(|error| anyhow!("{error:?}"))?;
    Ok(stream.context().load_module(ptx)?.load_function("k")?)
}

/// Blocks, and threads of each.
pub(crate) fn grid(blocks: u32, threads: u32) -> LaunchConfig {
    LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (threads, 1, 1), shared_mem_bytes: 0 }
}

/// Runs a kernel that has one array and the array's length.
pub(crate) fn run(
    stream: &Arc<CudaStream>,
    kernel: &CudaFunction,
    config: LaunchConfig,
    data: &mut CudaSlice<f32>,
) -> Result<(), DriverError> {
    let length = data.len() as i32;
    let mut launch = stream.launch_builder(kernel);
    launch.arg(data).arg(&length);
    // SAFETY: the kernels have these parameters. That some of them do what they may not is the
    // point, and found by the emulator before it does harm.
    unsafe { launch.launch(config) }.map(drop)
}

#[track_caller]
pub(crate) fn assert_error<T>(result: Result<T, DriverError>, error: sys::CUresult) {
    assert_eq!(result.err().map(|error| error.0), Some(error));
}

/// The variable by which a test's own process knows that it is it.
pub(crate) const CHILD: &str = "EMULATED_GPU_TEST";

/// Runs the test `test`, by its whole path, in a process of its own with these variables, and returns what that prints:
/// nothing in that process.
pub(crate) fn child(test: &str, variables: &[(&str, &str)]) -> Option<String> {
    if env::var_os(CHILD).is_some() {
        return None;
    }
    let output = Command::new(env::current_exe().expect("a test is a program"))
        .args(["--exact", "--nocapture", test])
        .env(CHILD, test)
        .env("EMULATED_GPU_TIMEOUT", "1")
        .envs(variables.iter().copied())
        .output()
        .expect("it runs a second time");
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    Some(text.into_owned())
}
