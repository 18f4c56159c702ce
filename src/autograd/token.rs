//! How an operator sits in candle's graph without paying for candle's edges.
//!
//! candle's `backward` fills zeros, adds and allocates for every edge, in the size of the tensor. So an operator is two
//! of candle's nodes. Its *token*, of one element, is a custom op over the tokens of its inputs. Its *output* is a custom
//! op over the token. Operators of this crate link token to token; candle's use the output. A full-size gradient is
//! pending in the pass, for the node whose output it belongs to. The token's backward, which candle schedules after every
//! consumer, takes it. candle's edges carry one element each.
//!
//! ```text
//!   x ──▶ token ──────────▶ token          backward:  pending ◀─── pending ◀─── output
//!           │                 │
//!           ▼                 ▼
//!        output            output ──▶ an operator of candle's
//! ```
//!
//! A view of an output that has all of its elements, as candle's `reshape` and `transpose` make it, is taken for the output.
//!
//! candle walks a graph by recursion. A chain of more than [`MAX_DEPTH`] tokens is therefore cut: candle sees a token
//! there that depends on nothing else. A scaler's backward goes on below it by itself; candle's own is an error.

use std::sync::{Arc, LazyLock, Mutex, OnceLock, Weak};

use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, DType, Layout, MetalStorage, Result,
    Shape, Storage, Tensor, TensorId, Var,
};

use super::applied::{AnyOperator, GradFn};
use super::below::Below;
use super::gradient::Gradient;
use super::maps::ByPlace;
use super::marker::{TOKEN_SHAPE, one_element_op};
use super::node::{Consumed, Edge, LEAF, Node, Saved, Target};
use super::pass;
use super::reclaim::drop_later;
use super::storage::{into_storage, place};
use super::version::{self, Dependency, Read};
use super::view::View;
use crate::error::GraphError;
use crate::error::bail;
use crate::error::lock::lock;

/// Tokens above one another that candle walks. Its recursion takes some 200 bytes of stack for each, 600 unoptimised; a
/// thread has 2 MiB or more.
pub(super) const MAX_DEPTH: usize = 3000;

/// The outputs that are alive, by where their storage is: no other has that place meanwhile.
static OUTPUTS: LazyLock<Mutex<ByPlace<Weak<Output>>>> = LazyLock::new(Mutex::default);

/// What an output keeps alive, and consumers find.
struct Output {
    token: Tensor,
    node: Arc<Node>,
    /// Set once the tensor exists.
    made: OnceLock<Made>,
}

struct Made {
    id: TensorId,
    /// Keeps the storage, and so its place, as long as the output is found there.
    detached: Tensor,
}

impl Output {
    /// The output that `tensor` is, or that it is a view of, and how; `None` for a variable.
    fn of(tensor: &Tensor) -> Option<(Arc<Self>, Option<View>)> {
        if tensor.is_variable() {
            return None;
        }
        let place = place(tensor);
        let output = lock(&OUTPUTS).get(&place).and_then(Weak::upgrade)?;
        let Made { id, detached } = output.made.get()?;
        if *id == tensor.id() {
            return Some((output, None));
        }
        let view = View::of(tensor, detached.shape())?;
        Some((output, Some(view)))
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if let Some(Made { detached, .. }) = self.made.get() {
            let place = place(detached);
            lock(&OUTPUTS).remove(&place);
        }
    }
}

/// Whether an operator of this crate has made `tensor`, or what it is a view of.
pub(crate) fn is_output(tensor: &Tensor) -> bool {
    Output::of(tensor).is_some()
}

/// Whether a tensor in candle's graph is an output or a token.
pub(super) fn is_of_this_crate(tensor: &Tensor) -> bool {
    tensor.dims() == TOKEN_SHAPE || is_output(tensor)
}

/// The node of `loss`, where only operators of this crate lie between it and its variables.
pub(super) fn whole_node(loss: &Tensor) -> Option<Arc<Node>> {
    match Output::of(loss) {
        Some((output, None)) if output.node.is_whole => Some(output.node.clone()),
        _ => None,
    }
}

/// What `y` depends on, and whether it has the storage of a tensor from before: `y` was computed since `time`, and since
/// candle had numbered `newest`, from `input`.
pub(super) fn below(y: &Tensor, input: &Tensor, time: u64, newest: u64) -> Result<(Below, bool)> {
    let mut below = Below::since(time, input);
    if let Some((output, _)) = Output::of(y)
        && output.node.is_whole
    {
        below.visit(output.node.consume());
        return Ok((below, output.node.number < time));
    }
    let nodes = y.sorted_nodes();
    let is_token = |node: &&Tensor| node.is_variable() && node.dims() == TOKEN_SHAPE;
    if nodes.iter().any(|node| node.id() != input.id() && is_token(node)) {
        return Err(GraphError::TooDeep { op: "checkpoint" }.into());
    }
    let place_of_y = place(y);
    let old = nodes.iter().any(|node| version::number(node) < newest && place(node) == place_of_y);
    for node in nodes {
        if node.is_variable() {
            below.add(node);
        } else if let Some((output, None)) = Output::of(node) {
            below.visit(output.node.consume());
        }
    }
    Ok((below, old))
}

/// An input of an operator.
pub(super) struct Input<'a> {
    pub(super) tensor: &'a Tensor,
    /// Whether it is to get a gradient.
    pub(super) wanted: bool,
    /// Whether backward reads it where it is.
    pub(super) read: bool,
}

/// What [`apply`](super::apply::apply) may assume only about the crate's own operators.
pub(super) struct Trust {
    /// The nodes that its backward goes through in a pass of its own.
    pub(super) captured: Vec<Consumed>,
    /// Whether nobody else holds the gradients that it calls owned.
    pub(super) owned: bool,
}

/// Links `output` into the graph as the result of `operator` on `inputs`, at least one of which is
/// to get a gradient. `output` owns its storage, which moves.
pub(super) fn link(
    operator: Box<dyn AnyOperator>,
    number: u64,
    inputs: &[Input<'_>],
    Trust { captured, owned }: Trust,
    output: Tensor,
) -> Result<Tensor> {
    let mut dependencies = Vec::new();
    for in_backward in [false, true] {
        dependencies.extend(operator.captured(in_backward).iter().enumerate().map(
            |(at, tensor)| {
                let (read, shape) = (Read::of(tensor), Some(tensor.shape().clone()));
                Dependency { read, input: inputs.len() + at, shape, in_backward }
            },
        ));
    }
    let kept = operator.keeps_output().then(|| Arc::new(OnceLock::<Tensor>::new()));
    let name = operator.op().name();
    let grad_fn = GradFn::Operator { operator, output: kept.clone(), owned };
    let made = join(name, number, grad_fn, inputs, dependencies, captured)?;
    let output = make_output(made, output)?;
    if let Some(kept) = kept {
        kept.get_or_init(|| output.detach());
    }
    Ok(output)
}

/// The node of an operator over `inputs`, and over other `dependencies`, which has `captured` other nodes; and its token.
fn join(
    name: &'static str,
    number: u64,
    grad_fn: GradFn,
    inputs: &[Input<'_>],
    mut dependencies: Vec<Dependency>,
    captured: Vec<Consumed>,
) -> Result<Output> {
    // candle's custom ops have at most three arguments. With more, inputs without a token get one,
    // and tokens, which carry no gradient of their own, are joined.
    let crowded = inputs.iter().filter(|input| input.wanted).count() > 3;
    let mut args: Vec<Tensor> = Vec::new();
    let mut edges = Vec::with_capacity(inputs.len());
    for (number, &Input { tensor: input, wanted, read: in_backward }) in inputs.iter().enumerate() {
        let (dtype, shape) = (input.dtype(), input.shape().clone());
        let output = if wanted { Output::of(input) } else { None };
        if output.is_none() {
            dependencies.push(Dependency {
                read: Read::of(input),
                input: number,
                shape: None,
                in_backward,
            });
        }
        if !wanted {
            edges.push(Edge { dtype, shape, target: Target::Nowhere });
            continue;
        }
        let made_by = match output {
            None if crowded => {
                let Output { token, node, .. } = &leaf(input)?;
                Some((token.clone(), node.consume(), None))
            }
            None => None,
            Some((output, view)) => Some((output.token.clone(), output.node.consume(), view)),
        };
        let target = match made_by {
            Some((token, node, view)) => {
                args.push(token);
                Target::Node(node, view)
            }
            None => {
                args.push(input.clone());
                Target::Argument(input.clone(), args.len() - 1)
            }
        };
        edges.push(Edge { dtype, shape, target });
    }
    let saved = Saved { edges, dependencies, captured, grad_fn };
    let node = Node::new(name, number, saved, MAX_DEPTH);
    if node.is_cut {
        args = match args.first() {
            Some(arg) => vec![Var::zeros(&TOKEN_SHAPE, DType::F32, arg.device())?.into_inner()],
            None => args,
        };
    }
    // A tree, not a chain: candle walks it by recursion.
    while args.len() > 3 {
        let join = |some: &[Tensor]| match some {
            [one] => Ok(one.clone()),
            several => token_over(several, None),
        };
        args = args.chunks(3).map(join).collect::<Result<_>>()?;
    }
    let token = token_over(&args, Some(node.clone()))?;
    Ok(Output { token, node, made: OnceLock::new() })
}

/// A token of `node` over one to three tokens or inputs; without a node one that hands nothing on.
fn token_over(args: &[Tensor], node: Option<Arc<Node>>) -> Result<Tensor> {
    let token = Token { node, args: args.to_vec() };
    match args {
        [a] => a.apply_op1(token),
        [a, b] => a.apply_op2(b, token),
        [a, b, c] => a.apply_op3(b, c, token),
        _ => bail!("an operator has no tracked input to link to"),
    }
}

/// A node that hands its gradient to `input`.
fn leaf(input: &Tensor) -> Result<Output> {
    let input = Input { tensor: input, wanted: true, read: false };
    join(LEAF, version::tick(), GradFn::Leaf, &[input], Vec::new(), Vec::new())
}

/// The tensor that users get.
fn make_output(output: Output, tensor: Tensor) -> Result<Tensor> {
    let shape = tensor.shape().clone();
    let storage = Mutex::new(Some(into_storage(tensor)?));
    let output = Arc::new(output);
    let tensor = output.token.apply_op1(OutputOp { output: output.clone(), storage, shape })?;
    let detached = tensor.detach();
    let place = place(&detached);
    lock(&OUTPUTS).insert(place, Arc::downgrade(&output));
    output.made.get_or_init(|| Made { id: tensor.id(), detached });
    Ok(tensor)
}

/// The custom op of a token.
struct Token {
    /// `None` for one that joins others.
    node: Option<Arc<Node>>,
    /// What candle's op holds as well, so that it is freed [without recursion](super::reclaim).
    args: Vec<Tensor>,
}

impl Drop for Token {
    fn drop(&mut self) {
        drop_later(std::mem::take(&mut self.args));
    }
}

impl Token {
    fn name(&self) -> &'static str {
        self.node.as_ref().map_or("join", |node| node.name)
    }

    fn backward(&self, args: &[&Tensor]) -> Result<Vec<Option<Tensor>>> {
        pass::within(|pass| match &self.node {
            Some(node) => node.backward_for_candle(pass, args),
            None => args.iter().map(|token| pass.token_gradient(token)).collect(),
        })
    }
}

one_element_op!(Token, CustomOp1, (s1 l1), Option<Tensor>);
one_element_op!(Token, CustomOp2, (s1 l1, s2 l2), (Option<Tensor>, Option<Tensor>));
one_element_op!(Token, CustomOp3, (s1 l1, s2 l2, s3 l3), (Option<Tensor>, Option<Tensor>, Option<Tensor>));

/// The custom op from a token to the operator's output.
struct OutputOp {
    output: Arc<Output>,
    storage: Mutex<Option<Storage>>,
    shape: Shape,
}

impl OutputOp {
    fn take(&self) -> Result<Storage> {
        let storage = lock(&self.storage).take();
        storage.ok_or_else(|| candle_core::Error::Msg("an operator's output was made twice".into()))
    }
}

macro_rules! output_on {
    ($fwd:ident, $storage:ty, $variant:ident) => {
        fn $fwd(&self, _: &$storage, _: &Layout) -> Result<($storage, Shape)> {
            match self.take()? {
                Storage::$variant(storage) => Ok((storage, self.shape.clone())),
                _ => bail!("an operator's output is not on its inputs' device"),
            }
        }
    };
}

impl CustomOp1 for OutputOp {
    fn name(&self) -> &'static str {
        self.output.node.name
    }
    output_on!(cpu_fwd, CpuStorage, Cpu);
    output_on!(cuda_fwd, CudaStorage, Cuda);
    output_on!(metal_fwd, MetalStorage, Metal);

    fn bwd(&self, token: &Tensor, output: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        pass::within(|pass| {
            let node = &self.output.node;
            if !pass.covers(output) {
                if pass.leaves.is_some() {
                    return Err(GraphError::Nested { op: node.name }.into());
                }
                // The loss of a pass of candle's own, or the first of this crate's outputs below it.
                let nodes = output.sorted_nodes();
                version::check(&nodes, is_of_this_crate)?;
                pass.cover(&nodes);
            }
            pass.send(&node.consume(), Some(Gradient::shared(gradient.clone())))?;
            pass.token_gradient(token)
        })
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;
    use crate::ops;

    #[test]
    fn a_loss_of_this_crates_operators_runs_backward_without_candle() -> Result<()> {
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
            ("a transpose", ops::relu(&output.t()?)?, true),
            ("a copy", ops::relu(&copied)?, false),
            ("candle's operator", output.relu()?, false),
        ] {
            let loss = ops::sum(&y)?;
            assert_eq!(whole_node(&loss).is_some(), alone, "{what}");
            assert!(is_output(&loss));
        }
        assert!(
            !is_output(&copied) && !is_output(&x) && is_output(&flat) && is_output(&output.t()?)
        );
        Ok(())
    }

    #[test]
    fn every_operator_of_a_graph_is_registered_until_it_is_dropped() -> Result<()> {
        let v = Var::randn(0f32, 1.0, 5, &Device::Cpu)?;
        let all: Vec<Tensor> = (0..40).map(|_| ops::tanh(&v)).collect::<Result<_>>()?;
        let outputs: Vec<Weak<Output>> =
            all.iter().map(|y| lock(&OUTPUTS)[&place(y)].clone()).collect();
        let nodes: Vec<Weak<Node>> = outputs
            .iter()
            .map(|output| Arc::downgrade(&output.upgrade().expect("alive").node))
            .collect();
        let alive = || nodes.iter().filter(|node| node.strong_count() > 0).count();
        let places: Vec<usize> = all.iter().map(place).collect();
        let loss = all.iter().try_fold(ops::tanh(&v)?, |sum, y| ops::add(&sum, y))?;
        drop(all);
        assert!(outputs.iter().all(|output| output.strong_count() == 0), "nobody has them");
        assert_eq!(alive(), 40, "while a loss needs them");
        drop(loss);
        assert_eq!(alive(), 0, "once nothing does");
        for (place, output) in places.iter().zip(&outputs) {
            // Another thread's tensor may have the place by now.
            let there = lock(&OUTPUTS).get(place).cloned();
            assert!(!there.is_some_and(|there| there.ptr_eq(output)), "left in the table");
        }
        Ok(())
    }
}
