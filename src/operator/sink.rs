//! Where the gradients of variables go when the scaler asks for them: past candle's store, which
//! would zero, add and round each to the variable's dtype.

use std::cell::RefCell;
use std::collections::HashMap;

use candle_core::{DType, Result, Tensor, TensorId, backprop::GradStore};

use super::{Gradient, Graph, token};

/// Gradients by variable.
pub(crate) type Sink = HashMap<TensorId, Gradient>;

thread_local! {
    static SINK: RefCell<Option<(Sink, Graph)>> = const { RefCell::new(None) };
}

/// Back-propagates `loss`. Gradients that operators of this crate have for variables arrive in the
/// returned sink, in `F32` for half variables; what candle's operators have, in the store.
pub(crate) fn backward_into(loss: &Tensor, graph: Graph) -> Result<(GradStore, Sink)> {
    /// Takes the sink away again, on error and panic too.
    struct Open(Option<(Sink, Graph)>);
    impl Drop for Open {
        fn drop(&mut self) {
            SINK.set(self.0.take());
        }
    }
    let _outer = Open(SINK.replace(Some((Sink::new(), graph))));
    let store = match token::backward(loss)? {
        true => GradStore::default(),
        false => loss.backward()?,
    };
    Ok((store, SINK.take().map(|(sink, _)| sink).unwrap_or_default()))
}

/// What is to become of the graph: candle's own backward, which has no sink, keeps it.
pub(super) fn graph() -> Graph {
    SINK.with_borrow(|sink| sink.as_ref().map_or(Graph::Kept, |(_, graph)| *graph))
}

/// Whether a variable's gradient should be given to [`add`].
pub(super) fn is_open() -> bool {
    SINK.with_borrow(Option::is_some)
}

/// The dtype the sink keeps the gradient of a variable in.
pub(super) fn dtype(variable: DType) -> DType {
    if variable == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Adds to the gradient of `variable`.
pub(super) fn add(variable: &Tensor, gradient: Gradient) -> Result<()> {
    let id = variable.id();
    let before = SINK.with_borrow_mut(|sink| sink.as_mut().and_then(|(sink, _)| sink.remove(&id)));
    let sum = match before {
        None => gradient,
        Some(before) => before.add(gradient)?,
    };
    SINK.with_borrow_mut(|sink| sink.as_mut().map(|(sink, _)| sink.insert(id, sum)));
    Ok(())
}
