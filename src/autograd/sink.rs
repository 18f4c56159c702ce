//! Where the gradients of variables go when the scaler asks for them: past candle's store, which
//! would zero, add and round each to the variable's dtype.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};

use candle_core::{DType, Result, Tensor, TensorId};

use super::{Gradient, Graph};

/// Gradients by variable.
pub(crate) type Sink = HashMap<TensorId, Gradient>;

/// What a backward pass collects.
struct Collection {
    gradients: Sink,
    graph: Graph,
    /// The graph of the loss, where candle walks it: whatever else it calls is a pass of somebody else's.
    nodes: Option<HashSet<TensorId>>,
}

thread_local! {
    static COLLECTION: RefCell<Option<Collection>> = const { RefCell::new(None) };
}

/// Collects the gradients of variables until the guard is dropped, in `F32` for 16-bit variables.
pub(super) fn open(graph: Graph) -> Outer {
    let collection = Collection { gradients: Sink::new(), graph, nodes: None };
    Outer(COLLECTION.replace(Some(collection)))
}

/// Collects nothing until the guard is dropped.
pub(super) fn close() -> Outer {
    Outer(COLLECTION.take())
}

/// The collection of an outer pass, which goes on when this is dropped, on error and panic too.
pub(super) struct Outer(Option<Collection>);

impl Outer {
    /// What was collected meanwhile.
    pub(super) fn collected(self) -> Sink {
        COLLECTION.take().map(|inner| inner.gradients).unwrap_or_default()
    }
}

impl Drop for Outer {
    fn drop(&mut self) {
        COLLECTION.set(self.0.take());
    }
}

/// Collects from the graph of `loss` alone, which candle is about to walk.
pub(super) fn restrict_to(loss: &Tensor) {
    let nodes = loss.sorted_nodes().into_iter().map(Tensor::id).collect();
    COLLECTION.with_borrow_mut(|collection| {
        if let Some(collection) = collection {
            collection.nodes = Some(nodes);
        }
    });
}

/// Whether `output` belongs to the graph that gradients are collected from.
pub(super) fn covers(output: &Tensor) -> bool {
    COLLECTION.with_borrow(|collection| {
        let nodes = collection.as_ref().and_then(|collection| collection.nodes.as_ref());
        nodes.is_none_or(|nodes| nodes.contains(&output.id()))
    })
}

/// What is to become of the graph: candle's own backward, which collects nothing, keeps it.
pub(super) fn graph() -> Graph {
    COLLECTION.with_borrow(|collection| collection.as_ref().map_or(Graph::Kept, |all| all.graph))
}

/// Whether a variable's gradient should be given to [`add`].
pub(super) fn is_open() -> bool {
    COLLECTION.with_borrow(Option::is_some)
}

/// The dtype that the gradient of a variable is collected in.
pub(super) fn dtype(variable: DType) -> DType {
    if variable == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Adds to the gradient of `variable`.
pub(super) fn add(variable: &Tensor, gradient: Gradient) -> Result<()> {
    let id = variable.id();
    let before =
        COLLECTION.with_borrow_mut(|collection| collection.as_mut()?.gradients.remove(&id));
    let sum = match before {
        None => gradient,
        Some(before) => before.add(gradient)?,
    };
    COLLECTION.with_borrow_mut(|all| all.as_mut().map(|all| all.gradients.insert(id, sum)));
    Ok(())
}
