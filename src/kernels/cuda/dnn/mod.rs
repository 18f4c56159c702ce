//! Convolutions by cuDNN: sums in F32, in an order that is the same every time, and of the products
//! themselves: no Winograd and no Fourier transforms, whose roundings are others.
//!
//! Each choice of an algorithm is cached, by shape, dtype and pass.

mod backend;
mod descriptors;
mod graph;
mod measure;
mod memory;
mod names;
mod plan;
mod status;

use std::cell::RefCell;
use std::ffi::c_void;
use std::fmt::Debug;
use std::rc::Rc;
use std::sync::Arc;

use candle_core::cuda_backend::DeviceId;
use candle_core::cuda_backend::WrapErr;
use candle_core::{DType, Error, Result, Tensor};
use cudarc::cudnn::result::{self as cudnn, CudnnError};
use cudarc::cudnn::sys;
use cudarc::driver::CudaStream;

use super::address::address;
use super::captures;
use super::convolution::{Bias, Convolution, PassKind};
use super::gpu::Gpu;
use super::quick::Quick;
use super::streams::launched;
use crate::kernels::capture;
use crate::kernels::choice::algorithm::fell_back;
use crate::kernels::choice::cudnn::cudnn_benchmark;
use backend::Answer;
use memory::{Addresses, PLACE};
use plan::{Algorithm, Plan, PlanKey};
use status::supported;

/// A library handle on a stream, and what was chosen with it. One per thread, as the library asks.
#[derive(Debug)]
struct Library {
    handle: sys::cudnnHandle_t,
    /// Kept alive as long as the handle names it.
    stream: Arc<CudaStream>,
    /// `None` where the library has nothing that will do.
    plans: RefCell<Quick<PlanKey, Option<Rc<Plan>>>>,
    graphs: RefCell<Quick<graph::ExecutionPlanKey, Option<Rc<graph::ExecutionPlan>>>>,
}

/// What came of the graph API.
#[derive(Clone, Copy, PartialEq)]
enum ByGraph {
    /// An engine has computed it.
    Done(&'static str),
    /// No engine does.
    Refused,
    /// The older functions are for it.
    NotMeant,
}

#[allow(unsafe_code)]
impl Library {
    fn new(stream: Arc<CudaStream>) -> Result<Self> {
        stream.context().bind_to_thread().w()?;
        let handle = cudnn::create_handle().map_err(Error::wrap)?;
        let (plans, graphs) = Default::default();
        let this = Self { handle, stream: stream.clone(), plans, graphs };
        // SAFETY: the handle was made above, and the stream lives as long as it.
        unsafe { cudnn::set_stream(this.handle, stream.cu_stream().cast()) }
            .map_err(Error::wrap)?;
        Ok(this)
    }
}

#[allow(unsafe_code)]
impl Drop for Library {
    fn drop(&mut self) {
        self.graphs.borrow_mut().clear(); // their plans name the handle
        // It may wait for the device.
        let _held = captures::hold_off(self.stream.context().ordinal());
        // SAFETY: made by `new`, and destroyed here alone. At the end of a process there may be
        // nothing left to destroy, which is no error.
        let _ = unsafe { cudnn::destroy_handle(self.handle) };
    }
}

impl Gpu {
    /// Whether [`convolution`](Self::convolution) is worth asking for.
    pub(crate) fn has_convolutions(&self) -> bool {
        true
    }

    /// Computes the one of `[input, weight, output]` that `pass` says from the others, and returns the name of what did
    /// it. All are contiguous, of the shapes of `convolution`, and of F16, BF16 or F32.
    /// Nobody else has the one that is written.
    ///
    /// It is added, before the one rounding, to the bias. That may be spread over the result, once it is known how to
    /// compute it: the library may try that there.
    ///
    /// `None` where the library has no algorithm for it, and nothing was computed.
    pub(crate) fn convolution(
        &self,
        pass: PassKind,
        convolution: &Convolution,
        tensors: [&Tensor; 3],
        bias: Option<&Bias<'_>>,
    ) -> Result<Option<&'static str>> {
        let (library, measured) = (self.library()?, cudnn_benchmark());
        // Of several devices, another one may be current.
        library.stream.context().bind_to_thread().w()?;
        let dtype = tensors[0].dtype();
        let addresses = Addresses::of(tensors)?;
        let pass_of = (convolution, pass, measured);
        let by_graph = self.by_graph(&library, pass_of, tensors, addresses, bias)?;
        if let ByGraph::Done(engine) = by_graph {
            return Ok(Some(engine));
        }
        if tensors.iter().any(|tensor| tensor.dtype() != dtype) {
            return Ok(None);
        }
        let mut key = (*convolution, pass, dtype, measured);
        key.3 = by_measuring(measured, || library.plans.borrow().get(&key).is_some());
        let known = library.plans.borrow().get(&key).cloned();
        let plan = match known {
            Some(plan) => plan,
            None => {
                let plan = Plan::choose(self, library.handle, key, addresses)?.map(Rc::new);
                if plan.is_none() {
                    refused(&key, "chosen");
                }
                library.plans.borrow_mut().insert(key, plan.clone());
                plan
            }
        };
        let adds = bias.is_some();
        let Some(plan) = plan.filter(|plan| !adds || plan.adds.get()) else { return Ok(None) };
        if let Some(bias) = bias {
            (bias.spread)()?;
        }
        let scratch = self.scratch_from(PLACE, plan.workspace.max(1), DType::U8)?;
        let work = (&*plan, address(&scratch)? as *mut c_void);
        let done = supported(run(library.handle, work, addresses, adds))?.is_some();
        launched(&library.stream);
        // A heuristic may propose what the library then does not do: it is not asked for that again.
        match (done, adds) {
            (true, _) => {}
            (false, true) => plan.adds.set(false),
            (false, false) => drop(library.plans.borrow_mut().insert(key, None)),
        }
        if !done {
            refused(&key, if adds { "run with a bias" } else { "run" });
        } else if by_graph == ByGraph::Refused {
            fell_back(pass.name(), "cudnn graph", plan.name, convolution);
        }
        Ok(done.then_some(plan.name))
    }

    /// Computes it by an engine of the graph API, if that is meant for it.
    fn by_graph(
        &self,
        library: &Library,
        (convolution, pass, measured): (&Convolution, PassKind, bool),
        tensors: [&Tensor; 3],
        addresses: Addresses,
        bias: Option<&Bias<'_>>,
    ) -> Result<ByGraph> {
        let bias = bias.map(|bias| bias.values);
        let [input, weight, output] = addresses.0;
        let all = [input, weight, output, bias.map(address).transpose()?.unwrap_or(0)];
        let all = &all[..3 + usize::from(bias.is_some())];
        let Some(mut key) =
            graph::ExecutionPlanKey::of(convolution, pass, tensors, bias, all, measured)
        else {
            return Ok(ByGraph::NotMeant);
        };
        key.measured = by_measuring(measured, || library.graphs.borrow().get(&key).is_some());
        let no_engine = |why: &dyn Debug| {
            tracing::warn!(
                target: "candle_amp::cudnn",
                ?key,
                ?why,
                "no engine of cuDNN's graph API for this convolution: cuDNN's older functions, or else kernels of this crate, \
                 compute it from now on"
            );
        };
        let known = library.graphs.borrow().get(&key).cloned();
        let plan = match known {
            Some(plan) => plan,
            None => {
                // Whatever else cuDNN has against the graph, the older calls may do the same convolution.
                let chosen = supported(self.engine(library, &key, all)?);
                let plan = match chosen {
                    Ok(plan) => plan.flatten().map(Rc::new).or_else(|| {
                        no_engine(&"not supported");
                        None
                    }),
                    Err(error) => {
                        no_engine(&error);
                        None
                    }
                };
                library.graphs.borrow_mut().insert(key, plan.clone());
                plan
            }
        };
        let Some(plan) = plan else { return Ok(ByGraph::Refused) };
        let scratch = self.scratch_from(PLACE, plan.workspace.max(1), DType::U8)?;
        let run = plan.run(library.handle, all, address(&scratch)?);
        let done = supported(run)?.is_some();
        launched(&library.stream);
        if !done {
            no_engine(&"not supported, when it ran");
            library.graphs.borrow_mut().insert(key, None);
        }
        Ok(if done { ByGraph::Done(plan.name) } else { ByGraph::Refused })
    }

    /// The engine for a convolution: the heuristics' first one, or the fastest on these addresses.
    fn engine(
        &self,
        library: &Library,
        key: &graph::ExecutionPlanKey,
        addresses: &[u64],
    ) -> Result<Answer<Option<graph::ExecutionPlan>>> {
        let most = if key.measured { measure::MOST } else { 1 };
        let plans = match graph::ExecutionPlan::first(library.handle, key, most)? {
            Ok(plans) => plans,
            Err(error) => return Ok(Err(error)),
        };
        let most = plans.iter().map(|plan| plan.workspace).max().unwrap_or(0);
        // Not what is kept: the fastest may need less. Where memory is short, nothing is measured.
        let workspace = key.measured.then(|| self.empty(most.max(1), DType::U8));
        let (time, plan) = if let Some(Ok(workspace)) = workspace {
            let workspace = address(&workspace)?;
            let run = |plan: &graph::ExecutionPlan| plan.run(library.handle, addresses, workspace);
            match measure::fastest(&library.stream, plans, run)? {
                Ok(fastest) => fastest.unzip(),
                Err(error) => return Ok(Err(error)),
            }
        } else {
            (None, plans.into_iter().next())
        };
        if let Some(graph::ExecutionPlan { name, workspace, .. }) = &plan {
            tracing::debug!(target: "candle_amp::cudnn", ?key, name, workspace, ?time, "cuDNN graph");
        }
        Ok(Ok(plan))
    }

    /// This thread's handle of the device.
    fn library(&self) -> Result<Rc<Library>> {
        thread_local!(static LIBRARIES: RefCell<Quick<DeviceId, Rc<Library>>> = RefCell::default());
        LIBRARIES.with(|libraries| {
            let id = self.0.id();
            if let Some(library) = libraries.borrow().get(&id) {
                return Ok(library.clone());
            }
            let library = Rc::new(Library::new(self.0.cuda_stream())?);
            libraries.borrow_mut().insert(id, library.clone());
            Ok(library)
        })
    }
}

/// Whether a choice is by measuring, if that is `wanted`: it waits for the device, which ends a capture. There, what has
/// been measured before is used, and for all else a choice is made without, and not remembered as one that was measured.
fn by_measuring(wanted: bool, known: impl FnOnce() -> bool) -> bool {
    wanted && (!capture::is_active() || known())
}

/// Logs that cuDNN does not support a convolution: once, as it is remembered.
fn refused((convolution, pass, dtype, _): &PlanKey, step: &str) {
    tracing::warn!(
        ?pass,
        ?dtype,
        ?convolution,
        "cuDNN does not support this convolution ({step}): it is computed in another way from now on"
    );
}

/// Computes the product, or `adds` it to what is there.
#[allow(unsafe_code)]
fn run(
    handle: sys::cudnnHandle_t,
    (plan, workspace): (&Plan, *mut c_void),
    tensors: Addresses,
    adds: bool,
) -> std::result::Result<(), CudnnError> {
    let (one, before) = (1f32, if adds { 1f32 } else { 0.0 });
    let (one, before) = (std::ptr::from_ref(&one).cast(), std::ptr::from_ref(&before).cast());
    let size = plan.workspace;
    let [input, weight, output] = [tensors.at(0), tensors.at(1), tensors.at(2)];
    let (x, w, y, convolution) = plan.descriptors.raw();
    // SAFETY: the descriptors are alive and say the shapes and the dtype of the tensors, which the
    // caller gave as large; what is written is the tensor whose address was taken for that, and
    // `size` bytes of scratch. All is in the order of the handle's stream. The factors are F32,
    // as for all three dtypes, and read before the call returns.
    unsafe {
        match plan.algorithm {
            Algorithm::Forward(algorithm) => cudnn::convolution_forward(
                handle,
                one,
                x,
                input,
                w,
                weight,
                convolution,
                algorithm,
                workspace,
                size,
                before,
                y,
                output,
            ),
            Algorithm::Dgrad(algorithm) => cudnn::convolution_backward_data(
                handle,
                one,
                w,
                weight,
                y,
                output,
                convolution,
                algorithm,
                workspace,
                size,
                before,
                x,
                input,
            ),
            Algorithm::Wgrad(algorithm) => cudnn::convolution_backward_filter(
                handle,
                one,
                x,
                input,
                y,
                output,
                convolution,
                algorithm,
                workspace,
                size,
                before,
                w,
                weight,
            ),
        }
    }
}
