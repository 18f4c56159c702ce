//! Compiles CUDA sources by NVRTC and finds their kernels: compiled once per machine, loaded once per process.
//!
//! The sources are text in the library, so a build needs no nvcc. A lookup has three levels:
//!
//! 1. Functions of this thread, by the addresses of context, source and name. A launch takes no lock and does not ask
//!    the driver.
//! 2. Modules of the process, by context, source and dtype. A thread that compiles one holds up only threads that want
//!    the same one.
//! 3. Machine code on disk ([`Cache`]). Its key has all that the code depends on: source, options and versions.
//!
//! A module has the kernels of one dtype, because a program uses two or three dtypes of four and compiling takes long.
//! The output is machine code, because a driver refuses PTX of a newer compiler. `--fmad=false` leaves products and
//! sums apart unless a kernel fuses them, as on the CPU.

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString};
use std::rc::Rc;
use std::sync::{Arc, LazyLock};

use candle_core::Result;
use candle_core::cuda_backend::WrapErr;
use cudarc::driver::{CudaFunction, CudaModule, CudaStream, sys as driver};
use cudarc::nvrtc::{Ptx, result as nvrtc, sys};

use super::cache::Cache;
use super::once::OncePerKey;
use super::quick::Quick;
use crate::error::bail;

/// The source of a kernel folder: `name` is unique in the crate, `code` goes after `common.cuh` and
/// `many.cuh`.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) name: &'static str,
    pub(crate) code: &'static str,
}

/// What every source begins with.
const COMMON: &str = concat!(include_str!("common.cuh"), include_str!("many.cuh"));

/// The dtypes of a module's kernels, as names of kernels have them. A program uses two or three of them.
const UNITS: [&str; 4] = ["f16", "bf16", "f64", "f32"];

/// A source in a context, as several devices can be of different architectures.
type InContext = (usize, &'static str);

/// What a kernel is called: these with `_` between them, without the empty ones. A launch puts no text together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Name([&'static str; Name::PARTS]);

impl Name {
    const PARTS: usize = 5;

    fn text(self) -> String {
        let parts: Vec<_> = self.0.into_iter().filter(|part| !part.is_empty()).collect();
        parts.join("_")
    }
}

impl<const N: usize> From<[&'static str; N]> for Name {
    fn from(parts: [&'static str; N]) -> Self {
        const { assert!(N <= Self::PARTS) }
        let mut all = [""; Self::PARTS];
        all[..N].copy_from_slice(&parts);
        Self(all)
    }
}

impl From<&'static str> for Name {
    fn from(name: &'static str) -> Self {
        [name].into()
    }
}

/// Where context, source and the parts of the name are, and how long those: text of a program stays where it is. What
/// is in two places is kept twice.
#[derive(PartialEq, Eq, Hash)]
struct Place(usize, usize, [(usize, usize); Name::PARTS]);

thread_local! {
    /// So that a launch asks neither the driver nor a lock. Of each thread: it has every function once.
    static FUNCTIONS: RefCell<Quick<Place, Rc<Function>>> = RefCell::default();
}

/// Shared memory that every kernel may have without asking.
const SHARED: u32 = 48 << 10;

/// A kernel on a device.
#[derive(Debug)]
pub(super) struct Function {
    function: CudaFunction,
    /// Bytes of dynamic shared memory that it may have, as this thread knows. A kernel always asks for as many, so that
    /// no other thread has told the driver otherwise.
    shared: Cell<u32>,
}

impl Function {
    /// The driver's, which may have so many bytes of dynamic shared memory. The attribute is set only if they are more
    /// than before.
    pub(super) fn with_shared(&self, bytes: u32) -> Result<driver::CUfunction> {
        if bytes > self.shared.get() {
            let most =
                driver::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            self.function.set_attribute(most, bytes as i32).w()?;
            self.shared.set(bytes);
        }
        Ok(self.function.cu_function())
    }
}

/// By source and unit. What one thread compiles, no other one waits for, unless it wants the same.
static MODULES: LazyLock<OncePerKey<(InContext, &'static str), Arc<CudaModule>>> =
    LazyLock::new(OncePerKey::default);

/// Since then a launch carries the 32 KB of arguments that [`Table`](super::launch::Table) has, and a compiler allows it.
const OLDEST_CUDA: (i32, i32) = (12, 1);

/// The machine code that earlier processes have compiled.
static CACHE: LazyLock<Option<Cache>> = LazyLock::new(Cache::from_env);

/// The kernel `name` of `source`, for `stream`.
pub(super) fn function(
    stream: &CudaStream,
    source: &'static Source,
    name: Name,
) -> Result<Rc<Function>> {
    let context = stream.context();
    let parts = name.0.map(|part| (part.as_ptr().addr(), part.len()));
    let place = Place(context.cu_ctx().addr(), std::ptr::from_ref(source).addr(), parts);
    let known = FUNCTIONS.with_borrow(|all| all.get(&place).cloned());
    if let Some(function) = known {
        return Ok(function);
    }
    let name = name.text();
    let (key, unit) = ((place.0, source.name), unit(&name));
    let module = MODULES.get_or_make((key, unit), || {
        let capability = context.compute_capability().w()?;
        check_driver()?;
        let lines = std::env::var_os("CANDLE_AMP_LINEINFO").is_some_and(|set| set == "1");
        let compilation = Compilation::new(source, unit, architecture(capability), lines);
        context.load_module(Ptx::from_binary(compilation.code(CACHE.as_ref())?)).w()
    })?;
    let function = module.load_function(&name).w()?;
    let function = Rc::new(Function { function, shared: Cell::new(SHARED) });
    FUNCTIONS.with_borrow_mut(|all| all.insert(place, function.clone()));
    Ok(function)
}

/// What NVRTC calls a compute capability, with the instructions that it has and later ones have not.
fn architecture((major, minor): (i32, i32)) -> String {
    let alone = if (major, minor) == (9, 0) { "a" } else { "" };
    format!("sm_{major}{minor}{alone}")
}

/// Fails where the driver is too old to launch the kernels.
#[allow(unsafe_code)]
fn check_driver() -> Result<()> {
    let mut version = 0;
    // SAFETY: `version` is there to be written.
    unsafe { driver::cuDriverGetVersion(&mut version) }.result().w()?;
    check_version("this driver supports CUDA", (version / 1000, version % 1000 / 10))
}

/// Fails where `version`, of `what`, is before [`OLDEST_CUDA`].
fn check_version(what: &str, version: (i32, i32)) -> Result<()> {
    let ((major, minor), (oldest, of_oldest)) = (version, OLDEST_CUDA);
    if version >= OLDEST_CUDA {
        return Ok(());
    }
    bail!(
        "{what} {major}.{minor}, and candle-amp's kernels need CUDA {oldest}.{of_oldest} or later"
    )
}

/// Where a kernel is: the first dtype in its name that is not F32, or else F32.
fn unit(name: &str) -> &'static str {
    let is_unit = |part| UNITS.into_iter().find(|&unit| unit == part && unit != "f32");
    name.split('_').find_map(is_unit).unwrap_or("f32")
}

/// What NVRTC is to compile, and how.
struct Compilation {
    name: String,
    architecture: String,
    options: Vec<String>,
    text: String,
}

impl Compilation {
    /// For machine code, not PTX: PTX of a newer compiler than the driver's is refused. With `lines` tools can say in which
    /// one a kernel goes wrong. Not for all: it is another key of the cache.
    fn new(source: &Source, unit: &str, architecture: String, lines: bool) -> Self {
        // Products and sums are fused where a kernel says so, as on the CPU.
        let mut options = vec![
            format!("--gpu-architecture={architecture}"),
            "--std=c++17".to_owned(),
            "--fmad=false".to_owned(),
            // Lambdas in kernels are the device's, as all of a source is.
            "--device-as-default-execution-space".to_owned(),
        ];
        options.extend(lines.then(|| "--generate-line-info".to_owned()));
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
    fn key(&self) -> Result<String> {
        let (major, minor) = self.compiler()?;
        let (version, options) = (env!("CARGO_PKG_VERSION"), self.options.join(" "));
        Ok(format!("candle-amp {version}, NVRTC {major}.{minor}, {options}\n{}", self.text))
    }

    /// The version of NVRTC.
    #[allow(unsafe_code)]
    fn compiler(&self) -> Result<(i32, i32)> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both are there to be written.
        unsafe { sys::nvrtcVersion(&mut major, &mut minor) }
            .result()
            .map_err(|error| self.explain(error))?;
        Ok((major, minor))
    }

    fn explain(&self, nvrtc::NvrtcError(error): nvrtc::NvrtcError) -> candle_core::Error {
        // All options but the architecture are as old as the oldest version.
        let advice = match error {
            sys::nvrtcResult::NVRTC_ERROR_INVALID_OPTION => {
                "; an architecture that it does not know needs a newer CUDA toolkit"
            }
            _ => "",
        };
        candle_core::Error::Msg(format!(
            "NVRTC could not compile the kernels of {} for {}: {error:?}{advice}",
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

        check_version("NVRTC is of CUDA", self.compiler()?)?;
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

    fn compilation(architecture: &str) -> Compilation {
        Compilation::new(&SOURCE, "bf16", architecture.to_owned(), false)
    }

    #[test]
    fn what_one_lookup_has_compiled_the_next_one_reads() -> Result<()> {
        let folder = format!("candle-amp-compile-{}", std::process::id());
        let folder = std::env::temp_dir().join(folder);
        let one = compilation("sm_90a");
        let compiled = one.code(Some(&Cache::new(folder.clone())))?;
        assert!(!compiled.is_empty());
        // As another process: with a cache that has seen nothing.
        let read = Cache::new(folder.clone())
            .get_or("nothing_bf16-sm_90a", &one.key()?, || bail!("it is compiled again"))?;
        assert_eq!(read, compiled);
        std::fs::remove_dir_all(folder)?;
        Ok(())
    }

    #[test]
    fn cuda_before_12_1_is_named_and_not_taken_for_a_missing_architecture() {
        for old in [(11, 8), (12, 0)] {
            let error = check_version("NVRTC is of CUDA", old).expect_err("too old").to_string();
            let expected = format!("NVRTC is of CUDA {}.{}, ", old.0, old.1);
            assert!(error.starts_with(&expected) && error.contains("need CUDA 12.1"), "{error}");
        }
        for new in [(12, 1), (12, 9), (13, 0)] {
            assert!(check_version("NVRTC is of CUDA", new).is_ok());
        }
        use sys::nvrtcResult as Status;
        let says = |status| compilation("sm_90a").explain(nvrtc::NvrtcError(status)).to_string();
        assert!(says(Status::NVRTC_ERROR_INVALID_OPTION).contains("newer CUDA toolkit"));
        assert!(!says(Status::NVRTC_ERROR_COMPILATION).contains("newer CUDA toolkit"));
    }

    #[test]
    fn a_name_is_its_parts_that_are_not_empty() {
        for (name, expected) in [
            (Name::from("keep_mask"), "keep_mask"),
            (["cast", "bf16", "f32"].into(), "cast_bf16_f32"),
            (["flash", "64", "", "bf16"].into(), "flash_64_bf16"),
        ] {
            assert_eq!(name.text(), expected);
        }
    }

    #[test]
    fn only_hopper_is_asked_for_instructions_of_its_own() {
        let names = [(7, 5), (8, 0), (9, 0), (10, 0), (12, 0)].map(architecture);
        assert_eq!(names, ["sm_75", "sm_80", "sm_90a", "sm_100", "sm_120"]);
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

    /// `scripts/fill-kernel-cache.py`, by whose cache a machine with a GPU need not compile.
    #[test]
    fn the_script_that_fills_a_cache_knows_the_keys() -> Result<()> {
        static EMBEDDING: Source =
            Source { name: "embedding", code: include_str!("../embedding/embedding.cu") };
        static FLASH: Source = Source {
            name: "flash",
            code: concat!(
                include_str!("../attention/scores.cuh"),
                include_str!("../attention/tiles.cuh"),
                include_str!("../attention/warps.cuh"),
                include_str!("../attention/wgmma.cuh"),
                include_str!("../attention/flash.cu")
            ),
        };
        static ADAMW: Source = Source {
            name: "optimizer_adamw",
            code: concat!(
                "#define ONLY 1\n",
                include_str!("../multi_tensor/optimizer/optimizer.cu")
            ),
        };
        let package = std::env::var_os("CARGO_MANIFEST_DIR");
        let package = package.unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        let script = std::path::Path::new(&package).join("scripts/fill-kernel-cache.py");
        let (major, minor) = compilation("sm_90a").compiler()?;
        for lines in [false, true] {
            let output = std::process::Command::new("python3")
                .arg(&script)
                .args(["--keys", "90", &format!("{major}.{minor}")])
                .args(lines.then_some("--lines"))
                .output()?;
            let keys = String::from_utf8_lossy(&output.stdout).into_owned();
            for (source, unit) in
                [(&EMBEDDING, "bf16"), (&EMBEDDING, "f32"), (&FLASH, "f16"), (&ADAMW, "f32")]
            {
                let compilation = Compilation::new(source, unit, architecture((9, 0)), lines);
                let key = crc32fast::hash(compilation.key()?.as_bytes());
                let line = format!("{} {key:08x}\n", compilation.name);
                assert!(keys.contains(&line), "{line} is not in {keys}{output:?}");
            }
        }
        Ok(())
    }

    #[test]
    fn a_key_has_all_that_machine_code_depends_on() -> Result<()> {
        let key = compilation("sm_90a").key()?;
        let first = format!("candle-amp {}, NVRTC ", env!("CARGO_PKG_VERSION"));
        assert!(key.starts_with(&first), "{key}");
        for part in ["--gpu-architecture=sm_90a --std", "--fmad=false", COMMON, SOURCE.code] {
            assert!(key.contains(part), "{part}");
        }
        assert_ne!(key, compilation("sm_80").key()?);
        assert_ne!(key, Compilation::new(&SOURCE, "f16", "sm_90a".to_owned(), false).key()?);
        assert_ne!(key, Compilation::new(&SOURCE, "bf16", "sm_90a".to_owned(), true).key()?);
        Ok(())
    }
}
