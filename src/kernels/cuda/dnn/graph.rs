//! Convolutions by cuDNN's graph API: what its newer engines are asked by.
//!
//! A pass is a graph of one operation, or of two: a bias is added to the sums in F32, before they are rounded once. A
//! weight gradient may be wider than what it is computed from. cuDNN's heuristics name engines, fastest first. Those that
//! are deterministic, fit the workspace, and sum the products themselves will do; of F32, unless TF32 is allowed, those
//! that do not use tensor cores. The choice is the first of them, or the fastest of those that [`super::measure`] has
//! timed. Where there is none, the older functions are asked: see [`super::plan`].
//!
//! Statistics of a batch norm are not fused in: cuDNN's are sums of squares in F32, which lose the variance of numbers
//! far from zero.
//!
//! # References
//!
//! cuDNN's developer guide, "Graph API"; `cudnn-frontend`.

use std::ffi::c_void;
use std::rc::Rc;

use candle_core::{DType, Result, Tensor};
use cudarc::cudnn::sys::{
    self, cudnnBackendAttributeName_t as Name, cudnnBackendDescriptorType_t as Kind,
    cudnnBackendHeurMode_t as Mode, cudnnBackendNumericalNote_t as Note,
};

use super::backend::{Answer, Descriptor, Raw};
use super::descriptors::data_type;
use super::memory::WORKSPACE;
use super::names::lasting;
use crate::kernels::cuda::{Convolution, PassKind};
use crate::kernels::tensors::format::Format;

/// The engines that a heuristic is asked for: more than it has, as those that are not to be used may come first.
const ENGINES: usize = 64;
/// Bytes that addresses are a multiple of, where engines make use of it.
const ALIGNMENT: u64 = 16;

/// The tensors' numbers in a graph.
const INPUT: i64 = 1;
const WEIGHT: i64 = 2;
const OUTPUT: i64 = 3;
const BIAS: i64 = 4;
const SUM: i64 = 5;

/// Of engines that round sums or operands in between, transform them, or add in another order each time.
const REFUSED: [Note; 8] = [
    Note::CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS,
    Note::CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION,
    Note::CUDNN_NUMERICAL_NOTE_FFT,
    Note::CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC,
    Note::CUDNN_NUMERICAL_NOTE_WINOGRAD,
    Note::CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_4x4,
    Note::CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_6x6,
    Note::CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_13x13,
];

/// What a plan is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ExecutionPlanKey {
    convolution: Convolution,
    pass: PassKind,
    /// Of what is read, and of what is written.
    dtypes: [DType; 2],
    bias: Option<DType>,
    /// What all addresses are a multiple of, in bytes.
    alignment: u64,
    /// Whether engines are timed.
    pub(super) measured: bool,
}

impl ExecutionPlanKey {
    /// `None` where the graph API is not asked: for other dtypes.
    pub(super) fn of(
        convolution: &Convolution,
        pass: PassKind,
        tensors: [&Tensor; 3],
        bias: Option<&Tensor>,
        addresses: &[u64],
        measured: bool,
    ) -> Option<Self> {
        let [input, weight, output] = tensors.map(Tensor::dtype);
        let (read, written) = match pass {
            PassKind::Forward => ([input, weight], output),
            PassKind::Dgrad => ([weight, output], input),
            PassKind::Wgrad => ([input, output], weight),
        };
        // Engines may count elements in 32 bits, as the older functions do, which say so.
        if tensors.iter().any(|tensor| tensor.elem_count() > i32::MAX as usize) {
            return None;
        }
        let known = matches!(read[0], DType::F16 | DType::BF16 | DType::F32) && read[0] == read[1];
        let wanted = known && (written == read[0] || written == DType::F32);
        let all = addresses.iter().fold(ALIGNMENT, |all, address| all | address);
        wanted.then(|| Self {
            convolution: *convolution,
            pass,
            dtypes: [read[0], written],
            bias: bias.map(Tensor::dtype),
            alignment: 1 << all.trailing_zeros(),
            measured,
        })
    }
}

/// An engine that has been set up for a graph.
#[derive(Debug)]
pub(super) struct ExecutionPlan {
    plan: Descriptor,
    pub(super) workspace: usize,
    /// The engine, as a trace shows it.
    pub(super) name: &'static str,
    /// What it was made of, and may refer to: the graph's parts, and its own configuration.
    _parts: (Rc<Vec<Descriptor>>, Descriptor),
}

impl ExecutionPlan {
    /// The first engines that will do, `most` at most, by the heuristics' order.
    ///
    /// An engine that cannot be set up, for whatever reason, is passed over.
    pub(super) fn first(
        handle: sys::cudnnHandle_t,
        key: &ExecutionPlanKey,
        most: usize,
    ) -> Result<Answer<Vec<Self>>> {
        let mut parts = Vec::new();
        let graph = match key.graph(handle, &mut parts)? {
            Ok(graph) => graph,
            Err(error) => return Ok(Err(error)),
        };
        let raw = graph.raw();
        parts.push(graph);
        let (parts, mut plans) = (Rc::new(parts), Vec::new());
        for mode in [Mode::CUDNN_HEUR_MODE_A, Mode::CUDNN_HEUR_MODE_FALLBACK] {
            let Ok(configurations) = proposed(raw, mode) else { continue };
            for configuration in configurations {
                if plans.len() >= most {
                    return Ok(Ok(plans));
                }
                if let Ok(Some((plan, workspace, name))) = set_up(handle, key, &configuration) {
                    plans.push(Self {
                        plan,
                        workspace,
                        name,
                        _parts: (parts.clone(), configuration),
                    });
                }
            }
        }
        Ok(Ok(plans))
    }

    /// Computes the pass. The addresses are those of the convolution's input, weight and output, as large as the key
    /// says. Then come those of the bias, if it has one, and of as many bytes of workspace as this plan needs.
    pub(super) fn run(
        &self,
        handle: sys::cudnnHandle_t,
        addresses: &[u64],
        workspace: u64,
    ) -> Answer<()> {
        let ids = [INPUT, WEIGHT, OUTPUT, BIAS];
        let mut pointers = [std::ptr::null_mut::<c_void>(); 4];
        let count = addresses.len().min(pointers.len());
        for (pointer, &address) in pointers.iter_mut().zip(addresses) {
            *pointer = address as *mut c_void;
        }
        let pack = Descriptor::new(Kind::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?
            .with(Name::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, &ids[..count])?
            .with(Name::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, &pointers[..count])?
            .with(Name::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, &[workspace as *mut c_void])?
            .finish()?;
        self.plan.execute(handle, &pack)
    }
}

/// The engines that a heuristic proposes, fastest first.
fn proposed(graph: Raw, mode: Mode) -> Answer<Vec<Descriptor>> {
    let heuristic = Descriptor::new(Kind::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?
        .with(Name::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, &[graph])?
        .with(Name::CUDNN_ATTR_ENGINEHEUR_MODE, &[mode])?
        .finish()?;
    let (name, kind) =
        (Name::CUDNN_ATTR_ENGINEHEUR_RESULTS, Kind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    heuristic.descriptors(name, kind, ENGINES)
}

/// A plan of this engine, its workspace in bytes, and the engine's name; `None` if it is not to be used.
fn set_up(
    handle: sys::cudnnHandle_t,
    key: &ExecutionPlanKey,
    configuration: &Descriptor,
) -> Answer<Option<(Descriptor, usize, &'static str)>> {
    let (name, kind) = (Name::CUDNN_ATTR_ENGINECFG_ENGINE, Kind::CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    let engines = configuration.descriptors(name, kind, 1)?;
    let Some(engine) = engines.first() else { return Ok(None) };
    let notes = engine.notes()?;
    let has = |note: &Note| notes.contains(&(*note as u32));
    let tensor_cores = has(&Note::CUDNN_NUMERICAL_NOTE_TENSOR_CORE);
    if REFUSED.iter().any(has) || (tensor_cores && key.is_exact_f32()) {
        return Ok(None);
    }
    let plan = Descriptor::new(Kind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?
        .with(Name::CUDNN_ATTR_EXECUTION_PLAN_HANDLE, &[handle])?
        .with(Name::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, &[configuration.raw()])?
        .finish()?;
    let workspace = plan.number(Name::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)?.max(0) as usize;
    let number = engine.number(Name::CUDNN_ATTR_ENGINE_GLOBAL_INDEX)?;
    let cores = if tensor_cores { "tensor cores" } else { "no tensor cores" };
    let name = lasting(format!("cudnn graph, engine {number}, {cores}"));
    Ok((workspace <= WORKSPACE).then_some((plan, workspace, name)))
}

impl ExecutionPlanKey {
    /// Whether tensor cores would round what is read.
    fn is_exact_f32(&self) -> bool {
        self.dtypes[0] == DType::F32 && !self.convolution.tf32
    }

    /// The graph of the pass. Its parts go into `parts`.
    fn graph(
        &self,
        handle: sys::cudnnHandle_t,
        parts: &mut Vec<Descriptor>,
    ) -> Result<Answer<Descriptor>> {
        let Self { convolution, pass, dtypes: [read, written], bias, .. } = *self;
        let single = sys::cudnnDataType_t::CUDNN_DATA_FLOAT;
        let [read, written] = [data_type(read)?, data_type(written)?];
        let bias = bias.map(data_type).transpose()?;
        let Convolution { input, weight, output, padding, stride, dilation, .. } = convolution;
        let of = |is_result: bool| if is_result { written } else { read };
        let mut keep = |descriptor: Descriptor| -> Raw {
            let raw = descriptor.raw();
            parts.push(descriptor);
            raw
        };
        Ok((|| {
            let x = keep(self.tensor(INPUT, input, of(pass == PassKind::Dgrad), false)?);
            let w = keep(self.tensor(WEIGHT, weight, of(pass == PassKind::Wgrad), false)?);
            let y = keep(self.tensor(OUTPUT, output, of(pass == PassKind::Forward), false)?);
            let result_dims = if pass == PassKind::Dgrad { input } else { output };
            let sum = match bias {
                Some(_) => Some(keep(self.tensor(SUM, result_dims, single, true)?)),
                None => None,
            };
            let padding = padding.map(|padding| padding as i64);
            let how = keep(
                Descriptor::new(Kind::CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR)?
                    .with(Name::CUDNN_ATTR_CONVOLUTION_COMP_TYPE, &[single])?
                    .with(
                        Name::CUDNN_ATTR_CONVOLUTION_CONV_MODE,
                        &[sys::cudnnConvolutionMode_t::CUDNN_CROSS_CORRELATION],
                    )?
                    .with(Name::CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, &[2i64])?
                    .with(Name::CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, &padding)?
                    .with(Name::CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, &padding)?
                    .with(Name::CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, &[stride as i64; 2])?
                    .with(Name::CUDNN_ATTR_CONVOLUTION_DILATIONS, &[dilation as i64; 2])?
                    .finish()?,
            );
            // What the sums go to.
            let [x, w, y, result] = match pass {
                PassKind::Forward => [x, w, sum.unwrap_or(y), y],
                PassKind::Dgrad => [sum.unwrap_or(x), w, y, x],
                PassKind::Wgrad => [x, w, y, w],
            };
            let operation = Operation::of(pass);
            let mut operations = vec![keep(
                Descriptor::new(operation.kind)?
                    .with(operation.input, &[x])?
                    .with(operation.weight, &[w])?
                    .with(operation.output, &[y])?
                    .with(operation.convolution, &[how])?
                    .with(operation.alpha, &[1f32])?
                    .with(operation.beta, &[0f32])?
                    .finish()?,
            )];
            if let (Some(bias), Some(sum)) = (bias, sum) {
                let bias = keep(self.tensor(BIAS, [1, result_dims[1], 1, 1], bias, false)?);
                let add = keep(
                    Descriptor::new(Kind::CUDNN_BACKEND_POINTWISE_DESCRIPTOR)?
                        .with(
                            Name::CUDNN_ATTR_POINTWISE_MODE,
                            &[sys::cudnnPointwiseMode_t::CUDNN_POINTWISE_ADD],
                        )?
                        .with(Name::CUDNN_ATTR_POINTWISE_MATH_PREC, &[single])?
                        .finish()?,
                );
                operations.push(keep(
                    Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR)?
                        .with(Name::CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, &[add])?
                        .with(Name::CUDNN_ATTR_OPERATION_POINTWISE_XDESC, &[sum])?
                        .with(Name::CUDNN_ATTR_OPERATION_POINTWISE_BDESC, &[bias])?
                        .with(Name::CUDNN_ATTR_OPERATION_POINTWISE_YDESC, &[result])?
                        .finish()?,
                ));
            }
            Descriptor::new(Kind::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?
                .with(Name::CUDNN_ATTR_OPERATIONGRAPH_HANDLE, &[handle])?
                .with(Name::CUDNN_ATTR_OPERATIONGRAPH_OPS, &operations)?
                .finish()
        })())
    }

    /// A tensor of sizes `[n, c, h, w]`, in the convolution's format. A virtual one is never in memory.
    fn tensor(
        &self,
        id: i64,
        sizes: [usize; 4],
        dtype: sys::cudnnDataType_t,
        is_virtual: bool,
    ) -> Answer<Descriptor> {
        let [n, c, h, w] = sizes.map(|size| size as i64);
        let strides = match self.convolution.format {
            Format::ChannelsFirst => [c * h * w, h * w, w, 1],
            Format::ChannelsLast => [h * w * c, 1, w * c, c],
        };
        Descriptor::new(Kind::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?
            .with(Name::CUDNN_ATTR_TENSOR_UNIQUE_ID, &[id])?
            .with(Name::CUDNN_ATTR_TENSOR_DATA_TYPE, &[dtype])?
            .with(Name::CUDNN_ATTR_TENSOR_DIMENSIONS, &[n, c, h, w])?
            .with(Name::CUDNN_ATTR_TENSOR_STRIDES, &strides)?
            .with(Name::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, &[self.alignment as i64])?
            .with(Name::CUDNN_ATTR_TENSOR_IS_VIRTUAL, &[is_virtual])?
            .finish()
    }
}

/// A pass, in cuDNN's words.
struct Operation {
    kind: Kind,
    input: Name,
    weight: Name,
    output: Name,
    convolution: Name,
    alpha: Name,
    beta: Name,
}

impl Operation {
    fn of(pass: PassKind) -> Self {
        match pass {
            PassKind::Forward => Self {
                kind: Kind::CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
                input: Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
                weight: Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
                output: Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
                convolution: Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
                alpha: Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
                beta: Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA,
            },
            PassKind::Dgrad => Self {
                kind: Kind::CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
                input: Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
                weight: Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
                output: Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
                convolution: Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
                alpha: Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
                beta: Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA,
            },
            PassKind::Wgrad => Self {
                kind: Kind::CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
                input: Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
                weight: Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
                output: Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
                convolution: Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
                alpha: Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
                beta: Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA,
            },
        }
    }
}
