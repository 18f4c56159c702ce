//! Backward from a loss, into collected gradients.

use candle_core::{DType, Result, Tensor, backprop::GradStore};

use super::call::{Graph, Pass};
use super::sink::{self, Sink};
use super::{Backward, Gradient, Operator, token};
use crate::{Cast, Op};

/// Runs backward from `loss`. Gradients that operators of this crate have for variables are collected, in `F32` for
/// 16-bit variables; those that candle's operators have are in the store.
pub(crate) fn backward_into(loss: &Tensor, graph: Graph) -> Result<(GradStore, Sink)> {
    let outer = sink::open(graph);
    // candle's operators may fail too: what waits for the operators before them is left behind.
    let store = Pass::attempt(|| match token::backward(loss)? {
        true => Ok(GradStore::default()),
        false => {
            sink::restrict_to(loss);
            loss.backward()
        }
    })?;
    Ok((store, outer.collected()))
}

/// Back-propagates `gradient` from `y`, in a pass of its own inside of another.
pub(crate) fn backward_from(
    y: &Tensor,
    gradient: Tensor,
    graph: Graph,
) -> Result<(GradStore, Sink)> {
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
    let seed = super::apply(Seed(gradient), &[y])?;
    let _inner = Pass::inner();
    backward_into(&seed, graph)
}
