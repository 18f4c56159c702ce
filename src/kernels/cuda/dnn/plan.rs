//! Chooses a cuDNN algorithm for a convolution, dgrad or wgrad.
//!
//! cuDNN answers with a list of algorithms, fastest first: by its heuristics, or by running each
//! (`backend::set_cudnn_benchmark`). The choice is the first that is deterministic, fits the workspace, and sums the
//! products themselves rather than their Winograd or Fourier transforms. It is made once per shape and remembered.
//!
//! cuDNN has one function a pass for the heuristics, for the measurement and for the workspace's size, each with
//! enumerations of its own and with the tensors in another order. So three matches over the pass stand here;
//! `candidates!` is what they have in common. `x`, `w` and `y` are the input, the weight and the output; the
//! gradient of one has its descriptor.

use std::cell::Cell;
use std::ffi::{c_int, c_void};

use candle_core::{DType, Result};
use cudarc::cudnn::{result as cudnn, sys};

use super::descriptors::{Descriptors, math};
use super::memory::{Addresses, PLACE, WORKSPACE};
use super::names::lasting;
use super::status::supported;
use crate::kernels::cuda::{Convolution, Gpu, PassKind, address};

/// Convolution, pass, dtype, and whether the choice was by measuring.
pub(super) type PlanKey = (Convolution, PassKind, DType, bool);

/// cuDNN's name of an algorithm: each pass has an enumeration of its own.
#[derive(Clone, Copy, Debug)]
pub(super) enum Algorithm {
    Forward(sys::cudnnConvolutionFwdAlgo_t),
    Dgrad(sys::cudnnConvolutionBwdDataAlgo_t),
    Wgrad(sys::cudnnConvolutionBwdFilterAlgo_t),
}

impl Algorithm {
    fn name(self) -> String {
        let name = match self {
            Self::Forward(algorithm) => format!("{algorithm:?}"),
            Self::Dgrad(algorithm) => format!("{algorithm:?}"),
            Self::Wgrad(algorithm) => format!("{algorithm:?}"),
        };
        name.trim_start_matches("CUDNN_CONVOLUTION_").to_owned()
    }

    /// Whether it sums the products of inputs and weights themselves. Winograd and Fourier transforms round
    /// differently, and are left out.
    fn is_direct(self) -> bool {
        use sys::cudnnConvolutionBwdDataAlgo_t as Dgrad;
        use sys::cudnnConvolutionBwdFilterAlgo_t as Wgrad;
        use sys::cudnnConvolutionFwdAlgo_t as Forward;
        match self {
            Self::Forward(algorithm) => matches!(
                algorithm,
                Forward::CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM
                    | Forward::CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM
                    | Forward::CUDNN_CONVOLUTION_FWD_ALGO_GEMM
                    | Forward::CUDNN_CONVOLUTION_FWD_ALGO_DIRECT
            ),
            Self::Dgrad(algorithm) => matches!(
                algorithm,
                Dgrad::CUDNN_CONVOLUTION_BWD_DATA_ALGO_0 | Dgrad::CUDNN_CONVOLUTION_BWD_DATA_ALGO_1
            ),
            Self::Wgrad(algorithm) => matches!(
                algorithm,
                Wgrad::CUDNN_CONVOLUTION_BWD_FILTER_ALGO_0
                    | Wgrad::CUDNN_CONVOLUTION_BWD_FILTER_ALGO_1
                    | Wgrad::CUDNN_CONVOLUTION_BWD_FILTER_ALGO_3
            ),
        }
    }
}

/// A chosen algorithm, with the descriptors it runs on.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) descriptors: Descriptors,
    pub(super) algorithm: Algorithm,
    /// That and the math type, as a trace shows them: cuDNN's words, without what they begin with.
    pub(super) name: &'static str,
    /// The workspace that it needs, in bytes.
    pub(super) workspace: usize,
    /// Whether it adds to what is there: until cuDNN has said that it does not.
    pub(super) adds: Cell<bool>,
}

/// cuDNN's answer about one algorithm.
struct Candidate {
    algorithm: Algorithm,
    status: sys::cudnnStatus_t,
    memory: usize,
    determinism: sys::cudnnDeterminism_t,
    math: sys::cudnnMathType_t,
}

/// Room for answers: more than cuDNN has algorithms.
const MOST: usize = 16;

impl Plan {
    /// The fastest algorithm that is deterministic, direct and fits the workspace; `None` if there is none.
    ///
    /// With `measure`, cuDNN runs the candidates: it overwrites the tensor that the pass writes, and synchronises.
    pub(super) fn choose(
        gpu: &Gpu,
        handle: sys::cudnnHandle_t,
        (convolution, pass, dtype, measure): PlanKey,
        tensors: Addresses,
    ) -> Result<Option<Self>> {
        let Some(descriptors) = Descriptors::of(&convolution, dtype)? else { return Ok(None) };
        let found = match measure {
            true => measured(gpu, handle, pass, &descriptors, tensors)?,
            false => expected(handle, pass, &descriptors),
        };
        let Some(found) = supported(found.map_err(cudnn::CudnnError))? else { return Ok(None) };
        let fits = |candidate: &Candidate| {
            candidate.status == sys::cudnnStatus_t::CUDNN_STATUS_SUCCESS
                && candidate.determinism == sys::cudnnDeterminism_t::CUDNN_DETERMINISTIC
                && candidate.memory <= WORKSPACE
                && candidate.algorithm.is_direct()
        };
        let Some(best) = found.into_iter().find(fits) else { return Ok(None) };
        // The math type that the answer is about. F32 without TF32 keeps its own, whatever the answer says.
        let allowed = math(dtype, convolution.tf32);
        let exact = dtype == DType::F32 && !convolution.tf32;
        let math = if exact { allowed } else { best.math };
        let set = descriptors.set_math(math);
        let workspace = set.and_then(|()| workspace(handle, &descriptors, best.algorithm));
        let Some(workspace) = supported(workspace)? else { return Ok(None) };
        let algorithm = best.algorithm;
        let math = format!("{math:?}");
        let math = math.trim_start_matches("CUDNN_");
        let name = lasting(format!("cudnn, {}, {math}", algorithm.name()));
        tracing::debug!(target: "candle_amp::cudnn", ?pass, ?dtype, ?convolution, name, "cuDNN");
        Ok(Some(Self { descriptors, algorithm, name, workspace, adds: Cell::new(true) }))
    }
}

/// The workspace that `algorithm` needs, in bytes, with the math type that it will run with.
#[allow(unsafe_code)]
fn workspace(
    handle: sys::cudnnHandle_t,
    descriptors: &Descriptors,
    algorithm: Algorithm,
) -> std::result::Result<usize, cudnn::CudnnError> {
    let (x, w, y, convolution) = descriptors.raw();
    // SAFETY: the descriptors are alive.
    unsafe {
        match algorithm {
            Algorithm::Forward(algorithm) => cudnn::get_convolution_forward_workspace_size(
                handle,
                x,
                w,
                convolution,
                y,
                algorithm,
            ),
            Algorithm::Dgrad(algorithm) => cudnn::get_convolution_backward_data_workspace_size(
                handle,
                w,
                y,
                convolution,
                x,
                algorithm,
            ),
            Algorithm::Wgrad(algorithm) => cudnn::get_convolution_backward_filter_workspace_size(
                handle,
                x,
                y,
                convolution,
                w,
                algorithm,
            ),
        }
    }
}

type Found = std::result::Result<Vec<Candidate>, sys::cudnnStatus_t>;

/// Calls `ask` with room for cuDNN's answers, and turns them into candidates. The room starts as zeros, which every
/// field of an answer allows. It belongs inside `unsafe`, for `ask`.
macro_rules! candidates {
    ($performance:ty, $variant:ident, $ask:expr) => {{
        let mut count: c_int = 0;
        let mut answers: [$performance; MOST] = std::mem::zeroed();
        let status = $ask(&mut count as *mut c_int, answers.as_mut_ptr());
        let candidates = answers.iter().take(count.max(0) as usize).map(|answer| Candidate {
            algorithm: Algorithm::$variant(answer.algo),
            status: answer.status,
            memory: answer.memory,
            determinism: answer.determinism,
            math: answer.mathType,
        });
        match status {
            sys::cudnnStatus_t::CUDNN_STATUS_SUCCESS => Ok(candidates.collect()),
            status => Err(status),
        }
    }};
}

/// cuDNN's heuristics: nothing runs on the device.
#[allow(unsafe_code)]
fn expected(handle: sys::cudnnHandle_t, pass: PassKind, descriptors: &Descriptors) -> Found {
    let ((x, w, y, convolution), most) = (descriptors.raw(), MOST as c_int);
    // SAFETY: the descriptors are alive, and there is room for as many answers as are asked for, of
    // which zeros are some.
    unsafe {
        match pass {
            PassKind::Forward => {
                candidates!(sys::cudnnConvolutionFwdAlgoPerf_t, Forward, |count, answers| {
                    sys::cudnnGetConvolutionForwardAlgorithm_v7(
                        handle,
                        x,
                        w,
                        convolution,
                        y,
                        most,
                        count,
                        answers,
                    )
                })
            }
            PassKind::Dgrad => {
                candidates!(sys::cudnnConvolutionBwdDataAlgoPerf_t, Dgrad, |count, answers| {
                    sys::cudnnGetConvolutionBackwardDataAlgorithm_v7(
                        handle,
                        w,
                        y,
                        convolution,
                        x,
                        most,
                        count,
                        answers,
                    )
                })
            }
            PassKind::Wgrad => {
                candidates!(sys::cudnnConvolutionBwdFilterAlgoPerf_t, Wgrad, |count, answers| {
                    sys::cudnnGetConvolutionBackwardFilterAlgorithm_v7(
                        handle,
                        x,
                        y,
                        convolution,
                        w,
                        most,
                        count,
                        answers,
                    )
                })
            }
        }
    }
}

/// cuDNN's measurement: it runs every algorithm that fits the workspace.
#[allow(unsafe_code)]
fn measured(
    gpu: &Gpu,
    handle: sys::cudnnHandle_t,
    pass: PassKind,
    descriptors: &Descriptors,
    tensors: Addresses,
) -> Result<Found> {
    let ((x, w, y, convolution), most) = (descriptors.raw(), MOST as c_int);
    let scratch = gpu.scratch(PLACE, WORKSPACE, DType::U8)?;
    let workspace = address(&scratch)? as *mut c_void;
    let [input, weight, output] = [tensors.at(0), tensors.at(1), tensors.at(2)];
    // SAFETY: as in `expected`; the tensors are those of the convolution that comes next, of which
    // the one it writes is written, and the workspace is as large as it says.
    Ok(unsafe {
        match pass {
            PassKind::Forward => {
                candidates!(sys::cudnnConvolutionFwdAlgoPerf_t, Forward, |count, answers| {
                    sys::cudnnFindConvolutionForwardAlgorithmEx(
                        handle,
                        x,
                        input,
                        w,
                        weight,
                        convolution,
                        y,
                        output,
                        most,
                        count,
                        answers,
                        workspace,
                        WORKSPACE,
                    )
                })
            }
            PassKind::Dgrad => {
                candidates!(sys::cudnnConvolutionBwdDataAlgoPerf_t, Dgrad, |count, answers| {
                    sys::cudnnFindConvolutionBackwardDataAlgorithmEx(
                        handle,
                        w,
                        weight,
                        y,
                        output,
                        convolution,
                        x,
                        input,
                        most,
                        count,
                        answers,
                        workspace,
                        WORKSPACE,
                    )
                })
            }
            PassKind::Wgrad => {
                candidates!(sys::cudnnConvolutionBwdFilterAlgoPerf_t, Wgrad, |count, answers| {
                    sys::cudnnFindConvolutionBackwardFilterAlgorithmEx(
                        handle,
                        x,
                        input,
                        y,
                        output,
                        convolution,
                        w,
                        weight,
                        most,
                        count,
                        answers,
                        workspace,
                        WORKSPACE,
                    )
                })
            }
        }
    })
}
