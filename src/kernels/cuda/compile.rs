//! From source to a function on a device, once a process.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::sync::{LazyLock, Mutex, PoisonError};

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaFunction, CudaModule};
use candle_core::cuda_backend::cudarc::nvrtc::{Ptx, result as nvrtc, sys};
use candle_core::{CudaDevice, Result, bail};

use super::Source;

/// What every source begins with.
const COMMON: &str = include_str!("common.cuh");

/// By context, as several devices can be of different architectures.
type Modules = HashMap<(usize, &'static str), std::sync::Arc<CudaModule>>;

static MODULES: LazyLock<Mutex<Modules>> = LazyLock::new(Mutex::default);

/// The kernel `name` of `source`, on `device`.
pub(super) fn function(
    device: &CudaDevice,
    source: &'static Source,
    name: &str,
) -> Result<CudaFunction> {
    let stream = device.cuda_stream();
    let context = stream.context();
    let key = (context.cu_ctx().addr(), source.name);
    let mut modules = MODULES.lock().unwrap_or_else(PoisonError::into_inner);
    let module = match modules.get(&key) {
        Some(module) => module.clone(),
        None => {
            let (major, minor) = context.compute_capability().w()?;
            let binary = compile(source, &format!("sm_{major}{minor}"))?;
            let module = context.load_module(Ptx::from_binary(binary)).w()?;
            modules.entry(key).or_insert(module).clone()
        }
    };
    module.load_function(name).w()
}

/// Machine code for an architecture, not PTX: PTX of a newer compiler than the driver's is refused.
#[allow(unsafe_code)]
fn compile(source: &Source, architecture: &str) -> Result<Vec<u8>> {
    /// Destroys the program on every way out.
    struct Program(sys::nvrtcProgram);
    impl Drop for Program {
        fn drop(&mut self) {
            // SAFETY: made by `create_program`, and destroyed here alone.
            let _ = unsafe { nvrtc::destroy_program(self.0) };
        }
    }

    let code = [COMMON, source.code].concat();
    let (Ok(code), Ok(name)) =
        (CString::new(code), CString::new(format!("candle_amp_{}.cu", source.name)))
    else {
        bail!("the source of {} holds a zero byte", source.name)
    };
    let explain = |error: nvrtc::NvrtcError| {
        candle_core::Error::msg(format!(
            "NVRTC could not compile the kernels of {} for {architecture}: {error:?}; an architecture \
             it does not know needs a newer CUDA toolkit",
            source.name
        ))
    };
    let program = Program(nvrtc::create_program(&code, Some(&name)).map_err(explain)?);
    // Products and sums are fused where a kernel says so, as on the CPU.
    let options = [
        format!("--gpu-architecture={architecture}"),
        "--std=c++17".to_owned(),
        "--fmad=false".to_owned(),
        // Lambdas in kernels are the device's, as all of a source is.
        "--device-as-default-execution-space".to_owned(),
    ];
    // SAFETY: the program is alive.
    if let Err(error) = unsafe { nvrtc::compile_program(program.0, &options) } {
        // SAFETY: as above; the log is a string that ends in zero.
        let log = unsafe { nvrtc::get_program_log(program.0) }.map_err(explain)?;
        let log: Vec<u8> = log.into_iter().map(|c| c as u8).collect();
        let log = CStr::from_bytes_until_nul(&log).unwrap_or_default().to_string_lossy();
        return Err(candle_core::Error::msg(format!("{}\n{log}", explain(error))));
    }
    let mut size = 0;
    // SAFETY: the program is compiled, and `size` is there to be written.
    unsafe { sys::nvrtcGetCUBINSize(program.0, &mut size) }.result().map_err(explain)?;
    let mut binary = vec![0u8; size];
    // SAFETY: the buffer is as long as the size that was asked for.
    unsafe { sys::nvrtcGetCUBIN(program.0, binary.as_mut_ptr().cast()) }
        .result()
        .map_err(explain)?;
    Ok(binary)
}
