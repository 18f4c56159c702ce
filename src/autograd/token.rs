//! The token form: how an operator sits in candle's graph without paying for candle's edges.
//!
//! candle's `backward` fills zeros, adds and allocates for every edge, in the size of the tensor.
//! So an operator is two nodes. Its *token*, of one element, is a custom op over the tokens of its
//! inputs; its *emit* is a custom op from the token to the real output. Operators of this crate
//! link token to token; candle's use the emitted tensor. A full-size gradient waits in the cell of
//! the operator whose output it belongs to: consumers put it there, and the token's backward, which
//! candle schedules after every consumer, takes it. candle's edges carry one element each.
//!
//! ```text
//!   x ──▶ token ──────────▶ token          backward:  cell ◀─── cell ◀─── emit
//!           │ emit            │ emit
//!           ▼                 ▼
//!        output            output ──▶ an operator of candle's
//! ```
//!
//! A view of an output with the same elements in the same order, as candle's `reshape` makes it, is taken
//! for the output. And where operators of this crate and variables are all that a loss is made of, the
//! scaler goes from cell to cell without candle, whose edges are two launches each on a GPU.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError, Weak};

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, DType, InplaceOp1, Layout,
    MetalStorage, Result, Shape, Storage, Tensor, TensorId,
};

use super::call::{Asked, Call, Edge, Inner, LEAF, Pass, Run, Target};
use super::no_grad::{EnableGrad, enable_grad};
use super::storage::{lock, place};
use super::{Backward, Gradient, Operator, sink, stale, stepped};
use crate::autocast::{self, AutocastGuard};
use crate::error::GraphError;
use crate::kernels::cuda;

/// The nodes whose emitted tensor is alive, by where its storage is: no other has that place meanwhile.
static NODES: LazyLock<Mutex<HashMap<usize, Weak<Node>>>> = LazyLock::new(Mutex::default);

/// What the emitted tensor keeps alive, and consumers find.
struct Node {
    token: Tensor,
    call: Arc<Call>,
    /// Set once there is an emitted tensor.
    emitted: OnceLock<Emitted>,
}

struct Emitted {
    id: TensorId,
    /// Keeps the storage, and so its place, as long as the node is found there.
    detached: Tensor,
}

impl Node {
    /// The node whose output `tensor` is, and the output's shape where it has another; `None` for a
    /// variable.
    fn of(tensor: &Tensor) -> Option<(Arc<Node>, Option<Shape>)> {
        if tensor.is_variable() {
            return None;
        }
        let node = lock(&NODES).get(&place(tensor)).and_then(Weak::upgrade)?;
        let Emitted { id, detached } = node.emitted.get()?;
        if *id == tensor.id() {
            return Some((node, None));
        }
        // It is contiguous and as long, so that it begins where the storage does.
        let whole = tensor.elem_count() == detached.elem_count() && tensor.is_contiguous();
        let shape = detached.shape().clone();
        whole.then_some((node, Some(shape)))
    }
}

/// Whether an operator of this crate has made `tensor`, or what it is a view of.
pub(crate) fn is_output(tensor: &Tensor) -> bool {
    Node::of(tensor).is_some()
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(Emitted { detached, .. }) = self.emitted.get() {
            lock(&NODES).remove(&place(detached));
        }
    }
}

/// Back-propagates `loss` into the sink, from cell to cell; `false` where candle has to do it.
pub(super) fn backward(loss: &Tensor) -> Result<bool> {
    let Some((node, None)) = Node::of(loss).filter(|(node, _)| node.call.whole) else {
        return Ok(false);
    };
    Pass::attempt(|| node.call.send_all(Gradient::owned(loss.ones_like()?)))?;
    Ok(true)
}

/// Links `output` into the graph as the result of `operator` on `inputs`, at least one of which is
/// tracked, and some of which backward `reads` where they are. `output` owns its storage, which moves.
pub(super) fn link<O: Operator>(
    operator: O,
    saved: O::Saved,
    inputs: &[&Tensor],
    reads: &[bool],
    output: Tensor,
) -> Result<Tensor> {
    let kept = Arc::new(OnceLock::<Tensor>::new());
    let (name, is_user) = (operator.op().name(), operator.op().is_user());
    let run = Box::new({
        let kept = kept.clone();
        move |Asked { gradient, wants, last, waiting }: Asked<'_>| {
            let _alone = is_user.then(alone);
            operator.backward(&Backward {
                saved: &saved,
                output: kept.get(),
                gradient: gradient.tensor(),
                owns_gradient: gradient.is_owned(),
                last,
                wants,
                waiting,
            })
        }
    });
    let node = join(name, run, inputs, reads)?;
    let emitted = emit(node, output)?;
    if O::KEEPS_OUTPUT {
        kept.get_or_init(|| emitted.detach());
    }
    Ok(emitted)
}

/// Keeps the caller's state from a user's backward, which may build a graph and run backward through it: the
/// autocast scope, `no_grad`, the collected gradients and those that wait for the outer pass.
fn alone() -> (Option<AutocastGuard>, EnableGrad, sink::Outer, Inner) {
    (autocast::suspend(), enable_grad(), sink::close(), Pass::inner())
}

/// The node of an operator over `inputs`, some of which it `reads` in backward, where they are.
fn join(
    name: &'static str,
    run: Box<Run>,
    inputs: &[&Tensor],
    reads: &[bool],
) -> Result<Arc<Node>> {
    let tracked = |t: &Tensor| t.track_op() && t.dtype().is_float();
    // candle's custom ops have at most three arguments. With more, inputs without a token get one,
    // and tokens, which carry no gradient of their own, are joined.
    let crowded = inputs.iter().filter(|t| tracked(t)).count() > 3;
    let mut args: Vec<Tensor> = Vec::new();
    let mut edges = Vec::with_capacity(inputs.len());
    for (&input, &reads) in inputs.iter().zip(reads) {
        let (dtype, shape) = (input.dtype(), input.shape().clone());
        if !tracked(input) {
            let read = (reads && dtype.is_float()).then(|| place(input));
            let read = read.filter(|&place| stepped::is_known(place));
            edges.push(Edge { dtype, shape, read, target: Target::Nowhere });
            continue;
        }
        let node = Node::of(input);
        let read = (node.is_none() && reads).then(|| place(input));
        let node = match node {
            None if crowded => Some((leaf(input)?, None)),
            node => node,
        };
        let target = match node {
            Some((node, output)) => {
                args.push(node.token.clone());
                Target::Cell(node.call.consume(), output)
            }
            None => {
                args.push(input.clone());
                Target::Argument(input.clone(), args.len() - 1)
            }
        };
        edges.push(Edge { dtype, shape, read, target });
    }
    while args.len() > 3 {
        let rest = args.split_off(3);
        let joined = args[0].apply_op3(&args[1], &args[2], Token::join())?;
        args = rest;
        args.push(joined);
    }
    let call = Call::new(name, run, edges);
    let op = Token(call.clone());
    let token = match args.as_slice() {
        [a] => a.apply_op1(op)?,
        [a, b] => a.apply_op2(b, op)?,
        [a, b, c] => a.apply_op3(b, c, op)?,
        _ => candle_core::bail!("{name} has no tracked input to link to"),
    };
    Ok(Arc::new(Node { token, call, emitted: OnceLock::new() }))
}

/// A node that hands the gradient put into its cell to `input`.
fn leaf(input: &Tensor) -> Result<Arc<Node>> {
    let pass_on = |asked: Asked<'_>| Ok(vec![Some(asked.gradient.clone())]);
    join(LEAF, Box::new(pass_on), &[input], &[false])
}

fn emit(node: Arc<Node>, output: Tensor) -> Result<Tensor> {
    let shape = output.shape().clone();
    let output = Mutex::new(Some(into_storage(output)?));
    let emitted = node.token.apply_op1(Emit { node: node.clone(), output, shape })?;
    let detached = emitted.detach();
    lock(&NODES).insert(place(&detached), Arc::downgrade(&node));
    node.emitted.get_or_init(|| Emitted { id: emitted.id(), detached });
    Ok(emitted)
}

/// Moves the storage out of a tensor that owns it.
fn into_storage(tensor: Tensor) -> Result<Storage> {
    struct Take(Mutex<Option<Storage>>);
    impl InplaceOp1 for Take {
        fn name(&self) -> &'static str {
            "take"
        }
        fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
            let taken = std::mem::replace(storage, CpuStorage::U8(Vec::new()));
            *lock(&self.0) = Some(Storage::Cpu(taken));
            Ok(())
        }
        fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
            *lock(&self.0) = Some(Storage::Cuda(cuda::take(storage)?));
            Ok(())
        }
    }
    let whole = {
        let (storage, layout) = tensor.storage_and_layout();
        match &*storage {
            // candle takes strides of 0, which dimensions before an empty one have, for repeats,
            // and does not write to those.
            storage if layout.shape().elem_count() == 0 => return storage.try_clone(layout),
            Storage::Cpu(cpu) => {
                layout.is_contiguous() && cpu_len(cpu) == layout.shape().elem_count()
            }
            Storage::Cuda(gpu) => {
                layout.is_contiguous() && cuda::len(gpu) == layout.shape().elem_count()
            }
            Storage::Metal(_) => layout.is_contiguous() && layout.start_offset() == 0,
        }
    };
    // Not `copy`, which keeps the strides, and all of a storage that is viewed in part.
    let tensor = if whole { tensor } else { tensor.force_contiguous()? };
    if tensor.device().is_metal() {
        let (storage, layout) = tensor.storage_and_layout();
        return storage.try_clone(layout);
    }
    let take = Take(Mutex::new(None));
    tensor.inplace_op1(&take)?;
    match take.0.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(storage) => Ok(storage),
        None => candle_core::bail!("candle did not run an in-place operator"),
    }
}

fn cpu_len(storage: &CpuStorage) -> usize {
    match storage {
        CpuStorage::U8(v) => v.len(),
        CpuStorage::U32(v) => v.len(),
        CpuStorage::I16(v) => v.len(),
        CpuStorage::I32(v) => v.len(),
        CpuStorage::I64(v) => v.len(),
        CpuStorage::BF16(v) => v.len(),
        CpuStorage::F16(v) => v.len(),
        CpuStorage::F32(v) => v.len(),
        CpuStorage::F64(v) => v.len(),
        _ => usize::MAX,
    }
}

/// The custom op of a token.
struct Token(Arc<Call>);

impl Token {
    /// An op over tokens alone, which hands nothing on.
    fn join() -> Self {
        let run = Box::new(|_: Asked<'_>| Ok(Vec::new()));
        Self(Call::new("join", run, Vec::new()))
    }

    fn backward(&self, args: &[&Tensor]) -> Result<Vec<Option<Tensor>>> {
        Pass::attempt(|| self.0.backward(args))
    }

    fn cpu(&self) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(1)))
    }
}

macro_rules! custom_op {
    ($trait:ident, ($($s:ident $l:ident),*), $grads:ty) => {
        impl $trait for Token {
            fn name(&self) -> &'static str {
                self.0.name
            }
            fn cpu_fwd(&self, $($s: &CpuStorage, $l: &Layout),*) -> Result<(CpuStorage, Shape)> {
                let _ = ($($s, $l),*);
                self.cpu()
            }
            fn cuda_fwd(&self, $($s: &CudaStorage, $l: &Layout),*) -> Result<(CudaStorage, Shape)> {
                let _ = ($($l),*,);
                Ok((cuda::of_one([$($s),*][0])?, Shape::from(1)))
            }
            fn metal_fwd(&self, $($s: &MetalStorage, $l: &Layout),*) -> Result<(MetalStorage, Shape)> {
                let _ = ($($l),*,);
                let shape = Shape::from(1);
                Ok(([$($s.device()),*][0].zeros_impl(&shape, DType::F32)?, shape))
            }
            fn bwd(&self, $($s: &Tensor),*, _: &Tensor, _: &Tensor) -> Result<$grads> {
                let mut gradients = self.backward(&[$($s),*])?.into_iter();
                Ok(($({ let _ = $s; gradients.next().flatten() }),*))
            }
        }
    };
}

custom_op!(CustomOp1, (s1 l1), Option<Tensor>);
custom_op!(CustomOp2, (s1 l1, s2 l2), (Option<Tensor>, Option<Tensor>));
custom_op!(CustomOp3, (s1 l1, s2 l2, s3 l3), (Option<Tensor>, Option<Tensor>, Option<Tensor>));

/// The custom op from a token to the operator's output.
struct Emit {
    node: Arc<Node>,
    output: Mutex<Option<Storage>>,
    shape: Shape,
}

impl Emit {
    fn take(&self) -> Result<Storage> {
        let storage = lock(&self.output).take();
        storage.ok_or_else(|| candle_core::Error::msg("an operator's output was emitted twice"))
    }
}

macro_rules! emit_on {
    ($fwd:ident, $storage:ty, $variant:ident) => {
        fn $fwd(&self, _: &$storage, _: &Layout) -> Result<($storage, Shape)> {
            match self.take()? {
                Storage::$variant(storage) => Ok((storage, self.shape.clone())),
                _ => candle_core::bail!("an operator's output is not on its inputs' device"),
            }
        }
    };
}

impl CustomOp1 for Emit {
    fn name(&self) -> &'static str {
        self.node.call.name
    }
    emit_on!(cpu_fwd, CpuStorage, Cpu);
    emit_on!(cuda_fwd, CudaStorage, Cuda);
    emit_on!(metal_fwd, MetalStorage, Metal);

    fn bwd(&self, token: &Tensor, output: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        Pass::attempt(|| {
            if !sink::covers(output) {
                return Err(GraphError::Nested { op: self.node.call.name }.into());
            }
            // Most likely the loss, given to candle's `backward`. The scaler has checked its own.
            if output.elem_count() == 1 && !sink::is_open() {
                stale::check(&output.sorted_nodes())?;
            }
            self.node.call.cell.add(Gradient::shared(gradient.clone()))?;
            Ok(Some(token.detach()))
        })
    }
}

/// How many operators have a live output. For tests: nothing may be alive after drop.
pub(crate) fn live_nodes() -> usize {
    lock(&NODES).len()
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;
    use crate::ops;

    #[test]
    fn a_loss_of_this_crates_operators_goes_back_without_candle() -> Result<()> {
        let var = |shape: [usize; 2]| Var::randn(0f32, 1.0, &shape, &Device::Cpu);
        let (x, w) = (var([5, 3])?, var([4, 3])?);
        let output = ops::linear(&x, &w, None)?;
        let flat = output.reshape((2, 10))?;
        let copied = output.t()?.contiguous()?;
        let twice = ops::add(&flat, &flat)?;
        for (what, y, alone) in [
            ("a reshape", ops::relu(&flat)?, true),
            ("two consumers", ops::add(&flat, &twice)?, true),
            ("a part", ops::relu(&output.narrow(0, 1, 2)?)?, false),
            ("a transpose", ops::relu(&output.t()?)?, false),
            ("a copy", ops::relu(&copied)?, false),
            ("candle's operator", output.relu()?, false),
        ] {
            let loss = ops::sum(&y)?;
            assert_eq!(backward(&loss)?, alone, "{what}");
            assert!(is_output(&loss));
        }
        assert!(
            !is_output(&copied) && !is_output(&x) && is_output(&flat) && !is_output(&output.t()?)
        );
        Ok(())
    }
}
