//! Tensors that are rewritten in place, and graphs that were built before.
//!
//! candle's graph holds the tensors an operator read, not copies of them. Rewritten, they give a
//! graph from before gradients of a function that was never computed. candle does not notice.

use std::collections::HashMap;
use std::hash::{Hash, Hasher};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Result, Tensor, TensorId};

use super::stepped;
use super::storage::{place, share_storage};
use crate::error::GraphError;

/// When each tensor was last rewritten, by its id.
static REWRITTEN: LazyLock<Mutex<HashMap<TensorId, Rewrite>>> = LazyLock::new(Mutex::default);

struct Rewrite {
    name: String,
    /// Tensors of a lower number were made before it.
    at: u64,
    /// Where another tensor lives that it was rewritten from, and when.
    source: Option<(usize, u64)>,
}

fn rewritten() -> MutexGuard<'static, HashMap<TensorId, Rewrite>> {
    REWRITTEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notes that `tensor` has just been written, or rewritten, from `source`; `name` is for errors.
pub(crate) fn note(tensor: &Tensor, source: &Tensor, name: &str) -> Result<()> {
    let at = number(&Tensor::zeros((), DType::U8, &Device::Cpu)?);
    let source = (!share_storage(tensor, source)).then(|| (place(source), stepped::now()));
    rewritten().insert(tensor.id(), Rewrite { name: name.to_owned(), at, source });
    Ok(())
}

/// Forgets `tensor`, which is not rewritten any more.
pub(crate) fn forget(tensor: &Tensor) {
    rewritten().remove(&tensor.id());
}

/// candle numbers tensors in the order it makes them. The number is private; hashing gives it.
pub(crate) fn number(tensor: &Tensor) -> u64 {
    #[derive(Default)]
    struct Number(u64);
    impl Hasher for Number {
        fn write(&mut self, bytes: &[u8]) {
            self.0 = bytes.iter().fold(self.0, |number, byte| (number << 8) | u64::from(*byte));
        }
        fn write_usize(&mut self, number: usize) {
            self.0 = number as u64;
        }
        fn finish(&self) -> u64 {
            self.0
        }
    }
    let mut number = Number::default();
    tensor.id().hash(&mut number);
    number.finish()
}

/// Fails where a tensor among `nodes`, those of a loss, was computed from one that has been
/// rewritten since. Views are fine: they are rewritten with it. And where one should have been rewritten, for
/// what it is a copy of has been stepped.
pub(crate) fn check(nodes: &[&Tensor]) -> crate::Result<()> {
    let rewritten = rewritten();
    let mut latest = None;
    for rewrite in nodes.iter().filter_map(|node| rewritten.get(&node.id())) {
        if rewrite.source.is_some_and(|(source, at)| stepped::is_after(at, source)) {
            return Err(GraphError::NotRefreshed { name: rewrite.name.clone() }.into());
        }
        latest = latest.max(Some(rewrite.at));
    }
    let Some(latest) = latest else { return Ok(()) };
    let computed = |node: &&&Tensor| !node.is_variable() && !rewritten.contains_key(&node.id());
    for node in nodes.iter().filter(computed) {
        let made = number(node);
        if made > latest {
            continue;
        }
        for source in node.sorted_nodes() {
            if let Some(rewrite) = rewritten.get(&source.id())
                && rewrite.at > made
                && !share_storage(node, source)
            {
                return Err(GraphError::Stale { name: rewrite.name.clone() }.into());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What all of this rests on.
    #[test]
    fn candle_numbers_tensors_in_the_order_it_makes_them() -> Result<()> {
        let mut last = 0;
        for _ in 0..3 {
            let made = Tensor::zeros(1, DType::F32, &Device::Cpu)?;
            let computed = made.affine(2.0, 0.0)?;
            assert!(last < number(&made) && number(&made) < number(&computed));
            last = number(&computed);
        }
        Ok(())
    }
}
