//! Backward from a loss, into collected gradients.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};

use super::apply::apply;
use super::gradient::Gradient;
use super::node::{GraphMode, Node};
use super::operator::{Backward, Operator};
use super::pass::{self, OnComplete, Pass};
use super::stack::with_deep_stack;
use super::{frozen, token, version};
use crate::kernels::accumulator;
use crate::{Cast, Op};

/// What a backward pass has computed.
pub(crate) struct Gradients {
    /// Of variables, in `F32` for 16-bit ones, in the order of their arrival.
    pub(crate) leaves: Vec<(Tensor, Gradient)>,
    /// Whether a gradient or a variable was in F16.
    pub(crate) saw_f16: bool,
}

/// Runs backward from `loss`. `on_complete` takes gradients of variables while the pass goes on. Those that it was not
/// given are in the result: all, where candle schedules.
///
/// Where only operators of this crate lie between the loss and its variables, nodes run latest first, without candle
/// and without recursion. Otherwise candle schedules.
pub(crate) fn backward_with(
    loss: &Tensor,
    graph: GraphMode,
    on_complete: Option<OnComplete>,
) -> crate::Result<Gradients> {
    match token::whole_node(loss) {
        Some(node) => run(loss, Some(node), graph, on_complete),
        None => with_deep_stack(|| run(loss, None, graph, None)),
    }
}

/// [`backward_with`] from the node of the loss, where candle is not needed.
fn run(
    loss: &Tensor,
    whole: Option<Arc<Node>>,
    graph: GraphMode,
    on_complete: Option<OnComplete>,
) -> crate::Result<Gradients> {
    let mut pass = Pass::collecting(graph);
    let mut f16 = false;
    let mut from_candle = Vec::new();
    match whole {
        Some(node) => {
            if let (Some(leaves), Some(on_complete)) = (&mut pass.leaves, on_complete) {
                leaves.watch(node.uses(), on_complete);
            }
            pass.send(&node.consume(), Some(Gradient::owned(loss.ones_like()?)))?;
            drop(node);
        }
        None => {
            let nodes = loss.sorted_nodes();
            version::check(&nodes, token::is_of_this_crate)?;
            f16 = nodes.iter().any(|node| node.dtype() == DType::F16);
            let mut store;
            (store, pass) = pass::walked_by_candle(pass, &nodes, || loss.backward())?;
            let variables =
                nodes.iter().filter(|node| node.is_variable() && !frozen::is_frozen(node));
            from_candle =
                variables.filter_map(|v| Some(((*v).clone(), store.remove(v)?))).collect();
        }
    }
    // All of it, or what is below candle's part.
    Node::run_pending(&mut pass)?;
    let mut leaves = pass.leaves.unwrap_or_default();
    for (variable, gradient) in from_candle {
        let gradient = Gradient::shared(gradient.detach());
        leaves.add(&variable, gradient.into_dtype(accumulator(variable.dtype()))?)?;
    }
    let leaves = leaves.into_vec();
    f16 |= pass.saw_f16 || leaves.iter().any(|(variable, _)| variable.dtype() == DType::F16);
    Ok(Gradients { leaves, saw_f16: f16 })
}

/// Runs backward from `y`, whose gradient is the given one: a pass of its own within another.
pub(crate) fn backward_from(
    y: &Tensor,
    gradient: Tensor,
    graph: GraphMode,
) -> crate::Result<Gradients> {
    /// A number whose gradient in `y` is the given one.
    struct Seed(Tensor);
    impl Operator for Seed {
        type Saved = ();
        fn op(&self) -> Op {
            Op::user("seed", Cast::Keep)
        }
        fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, ())> {
            Ok((Tensor::zeros((), DType::F32, inputs[0].device())?, ()))
        }
        fn backward(&self, _: &Backward<'_, ()>) -> Result<Vec<Option<Gradient>>> {
            Ok(vec![Some(Gradient::shared(self.0.clone()))])
        }
    }
    let seed = apply(Seed(gradient), &[y])?;
    backward_with(&seed, graph, None)
}
