//! Traces of a forward pass: which operator ran in which dtype.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;

use candle_core::{DType, Shape, Tensor};

use super::policy::Op;
use super::scope::Autocast;

thread_local! {
    /// The traces being taken on this thread, innermost last, each with what it has counted, by place.
    static TRACES: RefCell<Vec<(Trace, HashMap<usize, Tensor>)>> = const { RefCell::new(Vec::new()) };
}

/// An activation that backward keeps.
pub(crate) struct KeptActivation {
    /// Where its storage is.
    pub(crate) place: usize,
    /// Those of its storage.
    pub(crate) bytes: usize,
    /// Keeps the storage until the trace ends, so that no other gets its place.
    pub(crate) handle: Tensor,
}

/// One operator of a traced forward pass.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceRow {
    /// The operator.
    pub op: Op,
    /// The dtype of each input, as given.
    pub inputs: Vec<DType>,
    /// What its floating-point inputs were cast to, or read as; `None` where they were left as they
    /// were.
    pub cast: Option<DType>,
    /// The shape of each input.
    pub input_shapes: Vec<Shape>,
    /// The dtype that came out.
    pub output: DType,
    /// The shape that came out.
    pub output_shape: Shape,
    /// The bytes of activations that backward keeps for this operator, in the dtype they were cast to. They are the
    /// storages of the inputs and the output that it reads, except variables, their casts, and anything counted by an
    /// earlier row. Views of variables count. Tensors that an operator makes for its backward do not: statistics, masks,
    /// indices, gates of recurrent layers, the logits of `linear_cross_entropy`.
    pub saved_bytes: usize,
    /// 16-bit copies of variables that were found in the cache of the scope rather than made.
    pub cache_hits: usize,
    /// How a convolution, a product or attention was computed, as
    /// [`Autocast::trace`] lists it; `None` for other operators.
    pub algorithm: Option<&'static str>,
}

/// Which dtypes a forward pass ran in, from [`Autocast::trace`]: printed, a table.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    rows: Vec<TraceRow>,
}

impl Trace {
    /// The operators in the order they ran. One that failed has no row.
    pub fn rows(&self) -> &[TraceRow] {
        &self.rows
    }

    /// How many 16-bit copies of variables were found in the cache rather than made.
    pub fn cache_hits(&self) -> usize {
        self.rows.iter().map(|row| row.cache_hits).sum()
    }

    /// The bytes of activations that backward keeps, as [`TraceRow::saved_bytes`] counts them.
    pub fn saved_bytes(&self) -> usize {
        self.rows.iter().map(|row| row.saved_bytes).sum()
    }
}

/// A table; `{:#}` adds the algorithms, which depend on the machine.
impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |dtype: DType| format!("{dtype:?}");
        let head = ["operator", "inputs", "cast to", "output", "cached", "algorithm"];
        let mut table = vec![head.map(str::to_owned)];
        for row in &self.rows {
            let inputs: Vec<_> = row.inputs.iter().map(|&dtype| name(dtype)).collect();
            table.push([
                row.op.name().to_owned(),
                inputs.join(" "),
                row.cast.map_or("-".to_owned(), name),
                name(row.output),
                if row.cache_hits == 0 { String::new() } else { row.cache_hits.to_string() },
                row.algorithm.unwrap_or_default().to_owned(),
            ]);
        }
        let columns = if f.alternate() { 6 } else { 5 };
        let width = |column: usize| table.iter().map(|row| row[column].len()).max().unwrap_or(0);
        let widths: Vec<_> = (0..columns).map(width).collect();
        for row in &table {
            let cells: Vec<_> =
                row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
            writeln!(f, "{}", cells.join("  ").trim_end())?;
        }
        Ok(())
    }
}

impl Autocast {
    /// Runs `f` as [`scope`](Self::scope) does, and reports the crate's operators that ran in it,
    /// on this thread: to see why a tensor has the dtype it has.
    ///
    /// candle's own operators ask nobody for their dtype, and leave no row. Operators that
    /// `backward` recomputes run outside of `f`.
    ///
    /// Rows also have shapes, from which arithmetic can be counted, and the bytes of activations that backward keeps:
    /// [`TraceRow::saved_bytes`]. What is counted stays in memory until `f` returns.
    ///
    /// `{:#}` prints how convolutions, products and attention were computed, too:
    ///
    /// | algorithm | runs on | is |
    /// |---|---|---|
    /// | `packed, avx512`, `packed, avx2`, `packed, neon` | CPU | convolutions by packed GEMM in F32 |
    /// | `winograd, avx512`, `winograd, avx2`, `winograd, neon` | CPU | convolutions by Winograd's tiles in F32: 3x3, and at stride 2 three or four taps a side |
    /// | `winograd 4x4, avx512`, `winograd 4x4, avx2`, `winograd 4x4, neon` | CPU | convolutions of 16-bit operands by larger tiles, in F32: 3x3 at stride 1 |
    /// | `few channels, avx512`, `few channels, avx2`, `few channels, neon` | CPU | first layers: two to four channels by 3x3 at stride 1, in F32 |
    /// | `images in lanes, avx512-bf16` | CPU | convolutions of small images in BF16, sixteen images in the lanes of a vector |
    /// | `packed, avx512-bf16`, `packed, amx-bf16` | CPU | packed GEMM of BF16 pairs, by the instructions named |
    /// | `packed, amx-bf16x3` | CPU | F32 as sums of three BF16 terms, on AMX; F16 of two, in convolutions of three (see below) |
    /// | `depthwise, avx512`, `depthwise, avx2`, `depthwise, neon` | CPU | a group for each channel, by the instructions named |
    /// | `depthwise` | CPU | the same, by the compiler's loops |
    /// | `product` | CPU | a convolution by one tap, or by a kernel as large as the image, as a matrix product |
    /// | `via nchw` | CPU | in the log: a channels-last convolution is moved to channels first and back; what computes it there is next |
    /// | `blocked, avx512`, `blocked, avx2` | CPU | large products in blocks, operands widened to F32 |
    /// | `gemm crate` | CPU | other products by the `gemm` crate, operands widened to F32 |
    /// | `im2col` | CPU | a convolution, by products of either kind |
    /// | `im2col, f64`, `gemm crate, f64` | CPU | by the `gemm` crate in F64 |
    /// | `blocks` | CPU | attention, a block of queries at a time |
    /// | `cudnn, FWD_ALGO_GEMM, TENSOR_OP_MATH` | CUDA | cuDNN's older functions, with its names of algorithm and math type |
    /// | `cudnn graph, engine 7, tensor cores` | CUDA | an engine of cuDNN's graph API, with its number |
    /// | `cublas`, `cublaslt` | CUDA | the library named |
    /// | `im2col, cublas` | CUDA | a convolution that cuDNN did not take |
    /// | `depthwise kernel` | CUDA | a kernel of this crate |
    /// | `flash, wgmma`, `flash` | CUDA | attention in one kernel: of 16 bits on Hopper, and other |
    /// | `products` | CUDA | attention as two products and a softmax |
    /// | `cublas, cell kernel` | CUDA | LSTM and GRU: a product and a kernel of this crate per step |
    /// | `candle` | other devices | candle's operators |
    ///
    /// Some compute again by another algorithm if a result is not finite, and a row has the name of what did. With `amx-bf16x3`
    /// products do so in F32.
    ///
    /// Backward has no rows, but its convolutions and products are logged by the same names. Each choice is a `tracing` event
    /// of level `TRACE` and target `candle_amp::algorithm`. Its fields are `pass` (such as `conv dgrad`), `algorithm` and `sizes`.
    /// Of several for one pass, the last one is what computed it.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_amp::{Autocast, nn, ops};
    /// use candle_core::{DType, Device, Module, Tensor};
    ///
    /// let varmap = nn::VarMap::new();
    /// let vb = nn::var_builder(&varmap, DType::F32, &Device::Cpu);
    /// let layer = nn::linear(4, 4, vb)?;
    /// let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu)?;
    /// let forward = || ops::log_softmax(&layer.forward(&layer.forward(&x)?)?, 1);
    /// let (y, trace) = Autocast::new(DType::BF16).trace(forward);
    /// assert_eq!(y?.dtype(), DType::F32);
    /// assert_eq!(trace.to_string(), "\
    /// operator     inputs        cast to  output  cached
    /// linear       F32 F32 F32   BF16     BF16
    /// linear       BF16 F32 F32  BF16     BF16    2
    /// log_softmax  BF16          F32      F32
    /// ");
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn trace<T>(&self, f: impl FnOnce() -> T) -> (T, Trace) {
        /// Takes the trace away again, on panic too.
        struct Open;
        impl Drop for Open {
            fn drop(&mut self) {
                TRACES.with_borrow_mut(Vec::pop);
            }
        }
        TRACES.with_borrow_mut(|traces| traces.push(Default::default()));
        let open = Open;
        let result = self.scope(f);
        let trace = TRACES
            .with_borrow_mut(|traces| traces.last_mut().map(|(trace, _)| std::mem::take(trace)));
        drop(open);
        (result, trace.unwrap_or_default())
    }
}

/// Whether anybody asks for rows.
pub(crate) fn is_active() -> bool {
    TRACES.with_borrow(|traces| !traces.is_empty())
}

/// Adds a row to every trace being taken.
pub(crate) fn record(row: &TraceRow, kept: &[KeptActivation]) {
    TRACES.with_borrow_mut(|traces| {
        for (trace, counted) in traces {
            let new = kept
                .iter()
                .filter(|kept| counted.insert(kept.place, kept.handle.clone()).is_none());
            let saved_bytes = new.map(|kept| kept.bytes).sum();
            trace.rows.push(TraceRow { saved_bytes, ..row.clone() });
        }
    });
}
