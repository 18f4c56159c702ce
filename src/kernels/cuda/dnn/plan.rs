//! The choice of an algorithm.

use std::ffi::{c_int, c_void};

use candle_core::{DType, Error, Result};
use cudarc::cudnn::{result as cudnn, sys};

use super::descriptors::{Descriptors, math};
use super::{Addresses, Key, PLACE, WORKSPACE};
use crate::kernels::cuda::{Gpu, Pass, address_mut};

/// Of each pass.
#[derive(Clone, Copy, Debug)]
pub(super) enum Algorithm {
    Forward(sys::cudnnConvolutionFwdAlgo_t),
    Input(sys::cudnnConvolutionBwdDataAlgo_t),
    Weight(sys::cudnnConvolutionBwdFilterAlgo_t),
}

impl Algorithm {
    /// Whether it adds up the products that a convolution is made of, and not something that is
    /// equal but for roundings.
    fn is_direct(self) -> bool {
        use sys::cudnnConvolutionBwdDataAlgo_t as Input;
        use sys::cudnnConvolutionBwdFilterAlgo_t as Weight;
        use sys::cudnnConvolutionFwdAlgo_t as Forward;
        match self {
            Self::Forward(algorithm) => matches!(
                algorithm,
                Forward::CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM
                    | Forward::CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM
                    | Forward::CUDNN_CONVOLUTION_FWD_ALGO_GEMM
                    | Forward::CUDNN_CONVOLUTION_FWD_ALGO_DIRECT
            ),
            Self::Input(algorithm) => matches!(
                algorithm,
                Input::CUDNN_CONVOLUTION_BWD_DATA_ALGO_0 | Input::CUDNN_CONVOLUTION_BWD_DATA_ALGO_1
            ),
            Self::Weight(algorithm) => matches!(
                algorithm,
                Weight::CUDNN_CONVOLUTION_BWD_FILTER_ALGO_0
                    | Weight::CUDNN_CONVOLUTION_BWD_FILTER_ALGO_1
                    | Weight::CUDNN_CONVOLUTION_BWD_FILTER_ALGO_3
            ),
        }
    }
}

/// An algorithm, and what it works on.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) descriptors: Descriptors,
    pub(super) algorithm: Algorithm,
    /// Bytes.
    pub(super) workspace: usize,
}

/// What the library says of an algorithm.
struct Candidate {
    algorithm: Algorithm,
    status: sys::cudnnStatus_t,
    memory: usize,
    determinism: sys::cudnnDeterminism_t,
    math: sys::cudnnMathType_t,
}

/// More than there are.
const MOST: usize = 16;

impl Plan {
    /// The first of the library's algorithms, fastest first, that gives the same result every time
    /// and finds room; `None` where there is none. Where the choice is by measuring, what is written
    /// is written over, and the device waited for.
    pub(super) fn choose(
        gpu: &Gpu,
        handle: sys::cudnnHandle_t,
        (convolution, pass, dtype, measure): Key,
        tensors: Addresses,
    ) -> Result<Option<Self>> {
        let Some(descriptors) = Descriptors::of(&convolution, dtype)? else { return Ok(None) };
        let found = match measure {
            true => measured(gpu, handle, pass, &descriptors, tensors)?,
            false => expected(handle, pass, &descriptors),
        };
        let found = match found {
            Err(status) if unsupported(status) => return Ok(None),
            found => found.map_err(|status| Error::wrap(cudnn::CudnnError(status)))?,
        };
        let fits = |candidate: &Candidate| {
            candidate.status == sys::cudnnStatus_t::CUDNN_STATUS_SUCCESS
                && candidate.determinism == sys::cudnnDeterminism_t::CUDNN_DETERMINISTIC
                && candidate.memory <= WORKSPACE
                && candidate.algorithm.is_direct()
        };
        let Some(best) = found.into_iter().find(fits) else { return Ok(None) };
        // What the algorithm was judged with; of F32 that stays F32, no other than that.
        let allowed = math(dtype, convolution.tf32);
        let exact = dtype == DType::F32 && !convolution.tf32;
        let math = if exact { allowed } else { best.math };
        descriptors.set_math(math).map_err(Error::wrap)?;
        let workspace = workspace(handle, &descriptors, best.algorithm).map_err(Error::wrap)?;
        Ok(Some(Self { descriptors, algorithm: best.algorithm, workspace }))
    }
}

/// Bytes that `algorithm` needs as it will be run.
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
            Algorithm::Input(algorithm) => cudnn::get_convolution_backward_data_workspace_size(
                handle,
                w,
                y,
                convolution,
                x,
                algorithm,
            ),
            Algorithm::Weight(algorithm) => cudnn::get_convolution_backward_filter_workspace_size(
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

fn unsupported(status: sys::cudnnStatus_t) -> bool {
    // With its kinds.
    (3000..4000).contains(&(status as u32))
}

type Found = std::result::Result<Vec<Candidate>, sys::cudnnStatus_t>;

/// Gives `ask` room for the library's answers, numbers and enumerations that have a zero, and reads
/// them. Within `unsafe`, for what it asks.
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

/// By the library's rules.
#[allow(unsafe_code)]
fn expected(handle: sys::cudnnHandle_t, pass: Pass, descriptors: &Descriptors) -> Found {
    let ((x, w, y, convolution), most) = (descriptors.raw(), MOST as c_int);
    // SAFETY: the descriptors are alive, and there is room for as many answers as are asked for, of
    // which zeros are some.
    unsafe {
        match pass {
            Pass::Forward => {
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
            Pass::Input => {
                candidates!(sys::cudnnConvolutionBwdDataAlgoPerf_t, Input, |count, answers| {
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
            Pass::Weight => {
                candidates!(sys::cudnnConvolutionBwdFilterAlgoPerf_t, Weight, |count, answers| {
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

/// By running them.
#[allow(unsafe_code)]
fn measured(
    gpu: &Gpu,
    handle: sys::cudnnHandle_t,
    pass: Pass,
    descriptors: &Descriptors,
    tensors: Addresses,
) -> Result<Found> {
    let ((x, w, y, convolution), most) = (descriptors.raw(), MOST as c_int);
    let scratch = gpu.scratch(PLACE, WORKSPACE, DType::U8)?;
    let workspace = address_mut(&scratch)? as *mut c_void;
    let [input, weight, output] = [tensors.at(0), tensors.at(1), tensors.at(2)];
    // SAFETY: as in `expected`; the tensors are those of the convolution that comes next, of which
    // the one it writes is written, and the workspace is as large as it says.
    Ok(unsafe {
        match pass {
            Pass::Forward => {
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
            Pass::Input => {
                candidates!(sys::cudnnConvolutionBwdDataAlgoPerf_t, Input, |count, answers| {
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
            Pass::Weight => {
                candidates!(sys::cudnnConvolutionBwdFilterAlgoPerf_t, Weight, |count, answers| {
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
