//! One launch of a kernel: its arguments in order, and the grid.

use std::ffi::c_void;
use std::rc::Rc;
use std::sync::Arc;

use candle_core::cuda_backend::WrapErr;
use candle_core::{Result, Tensor};
use cudarc::driver::{CudaStream, result};

use super::address::{address_mut, start_unwaited, unwaited};
use super::compile::Function;
use super::grid::Grid;
use super::streams::{launched, wait_for_other_threads};
use crate::error::bail;

/// A struct of 64-bit words that a kernel takes by value: no copy to the device, and no wait.
///
/// 31.75 KiB: what a launch carries since CUDA 12.1, less a little for the other arguments.
#[derive(Clone, Debug)]
pub(crate) struct Table(Box<[u64]>);

impl Table {
    pub(crate) const WORDS: usize = 4064;

    /// The `words`, at most [`WORDS`](Self::WORDS), and zeros after them.
    pub(crate) fn new(mut words: Vec<u64>) -> Self {
        words.resize(Self::WORDS, 0); // a launch copies so many, whatever is used
        Self(words.into_boxed_slice())
    }
}

/// The arguments of a kernel, at most.
const MOST: usize = 64;

#[derive(Debug)]
enum Value {
    Word(u64),
    Int(i32),
    Float(f32),
    Double(f64),
    Table(Table),
}

impl Value {
    /// What a launch is given: where it is.
    fn place(&mut self) -> *mut c_void {
        match self {
            Self::Word(word) => std::ptr::from_mut(word).cast(),
            Self::Int(int) => std::ptr::from_mut(int).cast(),
            Self::Float(float) => std::ptr::from_mut(float).cast(),
            Self::Double(double) => std::ptr::from_mut(double).cast(),
            Self::Table(Table(words)) => words.as_mut_ptr().cast(),
        }
    }
}

/// A kernel and the arguments it has so far. A tensor goes in as the address of its first element,
/// and is contiguous.
#[derive(Debug)]
pub(crate) struct Launch {
    function: Rc<Function>,
    stream: Arc<CudaStream>,
    values: Vec<Value>,
}

impl Launch {
    pub(super) fn new(function: Rc<Function>, stream: Arc<CudaStream>) -> Self {
        Self { function, stream, values: Vec::with_capacity(MOST) }
    }

    fn with(mut self, value: Value) -> Self {
        self.values.push(value);
        self
    }

    pub(crate) fn read(self, tensor: &Tensor) -> Result<Self> {
        Ok(self.with(Value::Word(unwaited(tensor)?)))
    }

    pub(crate) fn write(self, tensor: &Tensor) -> Result<Self> {
        Ok(self.with(Value::Word(address_mut(tensor)?)))
    }

    /// Of memory that nobody else holds, as what was made for this launch: candle's lock for writers is not asked.
    pub(crate) fn write_new(self, tensor: &Tensor) -> Result<Self> {
        self.read(tensor)
    }

    /// Of any strides: they are other arguments.
    pub(crate) fn read_strided(self, tensor: &Tensor) -> Result<Self> {
        Ok(self.with(Value::Word(start_unwaited(tensor)?)))
    }

    /// Of any strides, and in storage that nobody else has.
    pub(crate) fn write_strided(self, tensor: &Tensor) -> Result<Self> {
        self.read_strided(tensor)
    }

    /// Those of so many equal parts of a contiguous tensor that `at` names, without views of it.
    pub(crate) fn parts<const N: usize>(
        self,
        tensor: &Tensor,
        parts: usize,
        at: [usize; N],
    ) -> Result<Self> {
        let bytes = tensor.elem_count() / parts * tensor.dtype().size_in_bytes();
        let start = unwaited(tensor)?;
        Ok(at
            .into_iter()
            .fold(self, |launch, at| launch.with(Value::Word(start + (at * bytes) as u64))))
    }

    pub(crate) fn read_or_null(self, tensor: Option<&Tensor>) -> Result<Self> {
        Ok(self.with(Value::Word(tensor.map_or(Ok(0), unwaited)?)))
    }

    pub(crate) fn write_or_null(self, tensor: Option<&Tensor>) -> Result<Self> {
        Ok(self.with(Value::Word(tensor.map_or(Ok(0), address_mut)?)))
    }

    /// A `size_t`.
    pub(crate) fn size(self, size: usize) -> Self {
        self.with(Value::Word(size as u64))
    }

    /// A `size_t` each.
    pub(crate) fn sizes(mut self, sizes: &[usize]) -> Self {
        self.values.extend(sizes.iter().map(|&size| Value::Word(size as u64)));
        self
    }

    /// An address that was asked for before, of a tensor that lives until the launch.
    pub(crate) fn address(self, address: u64) -> Self {
        self.with(Value::Word(address))
    }

    pub(crate) fn int(self, int: i32) -> Self {
        self.with(Value::Int(int))
    }

    pub(crate) fn float(self, float: f32) -> Self {
        self.with(Value::Float(float))
    }

    pub(crate) fn double(self, double: f64) -> Self {
        self.with(Value::Double(double))
    }

    pub(crate) fn table(self, table: Table) -> Self {
        self.with(Value::Table(table))
    }

    /// Launches. An empty grid is nothing to do. Returns at once; what the kernel meets shows in a
    /// later call.
    #[allow(unsafe_code)]
    pub(crate) fn run(mut self, grid: Grid) -> Result<()> {
        if grid.blocks.contains(&0) {
            return Ok(());
        }
        let blocks = grid.blocks.map(u32::try_from);
        let ([Ok(x), Ok(y), Ok(z)], Ok(threads), Ok(shared)) =
            (blocks, u32::try_from(grid.threads), u32::try_from(grid.shared))
        else {
            bail!("{grid:?} is more than a launch can have")
        };
        let function = self.function.with_shared(shared)?;
        let mut places = [std::ptr::null_mut(); MOST];
        let Some(places) = places.get_mut(..self.values.len()) else {
            bail!("a kernel takes {MOST} arguments, and not {}", self.values.len())
        };
        for (place, value) in places.iter_mut().zip(&mut self.values) {
            *place = value.place();
        }
        wait_for_other_threads(&self.stream)?;
        self.stream.context().bind_to_thread().w()?;
        let stream = self.stream.cu_stream();
        // SAFETY: the kernel is one of this crate's. Its folder's `cuda.rs` gives the arguments in
        // the order and of the types its `.cu` declares, addresses of tensors as long as the sizes
        // beside them say, and a grid from which the kernel reaches nothing beyond those: each says
        // so where it launches, and its tests compare every launch with the CPU's result. The
        // tensors are alive here and freed in stream order, so after the kernel. The values stay
        // where they are until the call returns, which has copied them.
        unsafe {
            let threads = (threads, 1, 1);
            result::launch_kernel(function, (x, y, z), threads, shared, stream, places)
        }
        .w()?;
        launched(&self.stream);
        Ok(())
    }
}
