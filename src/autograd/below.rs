//! What a part of the graph depends on.

use std::collections::HashSet;

use candle_core::{Result, Tensor, TensorId};

use super::node::{Consumed, Edge, Target};
use super::version::{self, Read};

/// What a graph depends on that was begun at some time.
pub(super) struct Below {
    time: u64,
    seen: HashSet<u64>,
    /// In the order they were found, so that sums over them are the same each time.
    variables: Vec<Tensor>,
    known: HashSet<TensorId>,
    /// Nodes of an earlier graph whose outputs it reads. They count as consumed as long as this lives.
    captured: Vec<Consumed>,
    /// The storages that recomputing reads, and the time of the node that read them.
    reads: Vec<(u64, Read)>,
}

impl Below {
    /// `input` is not counted among the variables.
    pub(super) fn since(time: u64, input: &Tensor) -> Self {
        Self {
            time,
            seen: HashSet::new(),
            variables: Vec::new(),
            known: HashSet::from([input.id()]),
            captured: Vec::new(),
            reads: Vec::new(),
        }
    }

    pub(super) fn variables(&self) -> &[Tensor] {
        &self.variables
    }

    pub(super) fn add(&mut self, variable: &Tensor) {
        if self.known.insert(variable.id()) {
            self.variables.push(variable.clone());
        }
    }

    /// Adds what is below `node`, as far as it is reached without candle.
    pub(super) fn visit(&mut self, node: Consumed) -> Result<()> {
        let mut rest = vec![(node, true)];
        while let Some((consumed, from_own)) = rest.pop() {
            let node = consumed.node.clone();
            if !self.seen.insert(node.number) {
                continue;
            }
            let own = node.number >= self.time;
            if from_own && !own {
                self.captured.push(consumed);
            }
            let saved = node.saved()?;
            if own {
                let reads = saved.sources.iter().map(|source| (node.number, source.read));
                self.reads.extend(reads);
            }
            for Edge { target, .. } in &saved.edges {
                match target {
                    Target::Node(input, _) => rest.push((input.clone(), own)),
                    Target::Argument(input, _) if input.is_variable() => {
                        self.add(input);
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Whether what was read has been written since.
    pub(super) fn is_modified(&self) -> bool {
        let written = |(time, read): &(u64, Read)| {
            version::written_since(*time, std::iter::once(*read)).is_some()
        };
        self.reads.iter().any(written)
    }
}
