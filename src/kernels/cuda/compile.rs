//! From source to a function on a device, once a process; compiled once a machine.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use candle_core::cuda_backend::WrapErr;
use candle_core::{CudaDevice, Result};
use cudarc::driver::{CudaFunction, CudaModule};
use cudarc::nvrtc::{Ptx, result as nvrtc, sys};

use super::Source;
use super::cache::Cache;
use crate::error::bail;

/// What every source begins with.
const COMMON: &str = concat!(include_str!("common.cuh"), include_str!("many.cuh"));

/// The dtypes of a module's kernels, as names of kernels have them. A program uses two or three of them.
const UNITS: [&str; 4] = ["f16", "bf16", "f64", "f32"];

/// By unit; and by name, so that a launch does not ask the driver.
#[derive(Default)]
struct Loaded {
    modules: HashMap<&'static str, Arc<CudaModule>>,
    functions: HashMap<String, CudaFunction>,
}

/// By context, as several devices can be of different architectures; and source.
type Sources = HashMap<(usize, &'static str), Loaded>;

static SOURCES: LazyLock<Mutex<Sources>> = LazyLock::new(Mutex::default);

/// The machine code that earlier processes have compiled.
static CACHE: LazyLock<Option<Cache>> = LazyLock::new(Cache::from_env);

/// The kernel `name` of `source`, on `device`.
pub(super) fn function(
    device: &CudaDevice,
    source: &'static Source,
    name: &str,
) -> Result<CudaFunction> {
    let stream = device.cuda_stream();
    let context = stream.context();
    let mut sources = SOURCES.lock().unwrap_or_else(PoisonError::into_inner);
    let loaded = sources.entry((context.cu_ctx().addr(), source.name)).or_default();
    if let Some(function) = loaded.functions.get(name) {
        return Ok(function.clone());
    }
    let unit = unit(name);
    let module = match loaded.modules.get(unit) {
        Some(module) => module.clone(),
        None => {
            let (major, minor) = context.compute_capability().w()?;
            let job = Job::new(source, unit, format!("sm_{major}{minor}"));
            let module = context.load_module(Ptx::from_binary(job.code(CACHE.as_ref())?)).w()?;
            loaded.modules.entry(unit).or_insert(module).clone()
        }
    };
    let function = module.load_function(name).w()?;
    loaded.functions.insert(name.to_owned(), function.clone());
    Ok(function)
}

/// Where a kernel is: the first dtype in its name that is not F32, or else F32.
fn unit(name: &str) -> &'static str {
    let is_unit = |part| UNITS.into_iter().find(|&unit| unit == part && unit != "f32");
    name.split('_').find_map(is_unit).unwrap_or("f32")
}

/// What NVRTC is to compile, and how.
struct Job {
    name: String,
    architecture: String,
    options: Vec<String>,
    text: String,
}

impl Job {
    /// For machine code, not PTX: PTX of a newer compiler than the driver's is refused.
    fn new(source: &Source, unit: &str, architecture: String) -> Self {
        // Products and sums are fused where a kernel says so, as on the CPU.
        let options = vec![
            format!("--gpu-architecture={architecture}"),
            "--std=c++17".to_owned(),
            "--fmad=false".to_owned(),
            // Lambdas in kernels are the device's, as all of a source is.
            "--device-as-default-execution-space".to_owned(),
        ];
        // The macros of common.cuh around kernels of the other dtypes.
        let others = UNITS.into_iter().filter(|&other| other != unit);
        let without = others.map(|other| format!("#define OF_{}(...)\n", other.to_uppercase()));
        let text = without.chain([COMMON.to_owned(), source.code.to_owned()]).collect();
        Self { name: format!("{}_{unit}", source.name), architecture, options, text }
    }

    /// The machine code, from `cache` if it is there.
    fn code(&self, cache: Option<&Cache>) -> Result<Vec<u8>> {
        let Some(cache) = cache else { return self.compile() };
        let name = format!("{}-{}", self.name, self.architecture);
        cache.get_or(&name, &self.key()?, || self.compile())
    }

    /// All that decides what the machine code is.
    #[allow(unsafe_code)]
    fn key(&self) -> Result<String> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both are there to be written.
        unsafe { sys::nvrtcVersion(&mut major, &mut minor) }
            .result()
            .map_err(|error| self.explain(error))?;
        let (version, options) = (env!("CARGO_PKG_VERSION"), self.options.join(" "));
        Ok(format!("candle-amp {version}, NVRTC {major}.{minor}, {options}\n{}", self.text))
    }

    fn explain(&self, error: nvrtc::NvrtcError) -> candle_core::Error {
        candle_core::Error::Msg(format!(
            "NVRTC could not compile the kernels of {} for {}: {error:?}; an architecture it does not \
             know needs a newer CUDA toolkit",
            self.name, self.architecture
        ))
    }

    #[allow(unsafe_code)]
    fn compile(&self) -> Result<Vec<u8>> {
        /// Destroys the program on every way out.
        struct Program(sys::nvrtcProgram);
        impl Drop for Program {
            fn drop(&mut self) {
                // SAFETY: made by `create_program`, and destroyed here alone.
                let _ = unsafe { nvrtc::destroy_program(self.0) };
            }
        }

        let (Ok(text), Ok(name)) =
            (CString::new(&*self.text), CString::new(format!("candle_amp_{}.cu", self.name)))
        else {
            bail!("the source of {} holds a zero byte", self.name)
        };
        let explain = |error| self.explain(error);
        let program = Program(nvrtc::create_program(&text, Some(&name)).map_err(explain)?);
        // SAFETY: the program is alive.
        if let Err(error) = unsafe { nvrtc::compile_program(program.0, &self.options) } {
            // SAFETY: as above; the log is a string that ends in zero.
            let log = unsafe { nvrtc::get_program_log(program.0) }.map_err(explain)?;
            let log: Vec<u8> = log.into_iter().map(|c| c as u8).collect();
            let log = CStr::from_bytes_until_nul(&log).unwrap_or_default().to_string_lossy();
            return Err(candle_core::Error::Msg(format!("{}\n{log}", explain(error))));
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
}

#[cfg(test)]
mod tests {
    use super::*;

    static SOURCE: Source =
        Source { name: "nothing", code: "extern \"C\" __global__ void nothing() {}\n" };

    fn job(architecture: &str) -> Job {
        Job::new(&SOURCE, "bf16", architecture.to_owned())
    }

    #[test]
    fn what_one_lookup_has_compiled_the_next_one_reads() -> Result<()> {
        let folder = format!("candle-amp-compile-{}", std::process::id());
        let folder = std::env::temp_dir().join(folder);
        let job = job("sm_90");
        let compiled = job.code(Some(&Cache::new(folder.clone())))?;
        assert!(!compiled.is_empty());
        // As another process: with a cache that has seen nothing.
        let read = Cache::new(folder.clone())
            .get_or("nothing_bf16-sm_90", &job.key()?, || bail!("it is compiled again"))?;
        assert_eq!(read, compiled);
        std::fs::remove_dir_all(folder)?;
        Ok(())
    }

    #[test]
    fn a_kernel_is_in_the_module_of_its_dtype() {
        for (name, expected) in [
            ("sort_places", "f32"),
            ("numbers_i64", "f32"),
            ("relu_f32", "f32"),
            ("relu_bf16", "bf16"),
            ("softmax_f16_f32", "f16"),
            ("cast_f32_f64", "f64"),
            ("cast_f64_bf16", "f64"),
            ("cast_bf16_f64", "bf16"),
        ] {
            assert_eq!(unit(name), expected, "{name}");
        }
    }

    #[test]
    fn a_key_has_all_that_machine_code_depends_on() -> Result<()> {
        let key = job("sm_90").key()?;
        let first = format!("candle-amp {}, NVRTC ", env!("CARGO_PKG_VERSION"));
        assert!(key.starts_with(&first), "{key}");
        for part in ["--gpu-architecture=sm_90 --std", "--fmad=false", COMMON, SOURCE.code] {
            assert!(key.contains(part), "{part}");
        }
        assert_ne!(key, job("sm_80").key()?);
        assert_ne!(key, Job::new(&SOURCE, "f16", "sm_90".to_owned()).key()?);
        Ok(())
    }
}
