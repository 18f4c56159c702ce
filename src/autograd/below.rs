//! What a part of the graph depends on.

use std::collections::HashSet;

use candle_core::{Result, Tensor};

use super::maps::Ids;
use super::node::{Consumed, Edge, Target};
use super::version::{self, Read};
use crate::error::GraphError;

/// What a graph depends on that was begun at some time.
pub(super) struct Below {
    time: u64,
    seen: HashSet<u64>,
    /// In the order they were found, so that sums over them are the same each time.
    variables: Vec<Tensor>,
    known: Ids,
    /// Nodes of an earlier graph whose outputs it reads.
    captured: Vec<Consumed>,
    /// An operator among those whose backward needs what has been freed.
    freed: Option<&'static str>,
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
            known: Ids::from_iter([input.id()]),
            captured: Vec::new(),
            freed: None,
            reads: Vec::new(),
        }
    }

    pub(super) fn variables(&self) -> &[Tensor] {
        &self.variables
    }

    /// Fails if backward through what it depends on would.
    pub(super) fn check_not_freed(&self) -> Result<()> {
        self.freed.map_or(Ok(()), |op| Err(GraphError::Freed { op }.into()))
    }

    /// The nodes of an earlier graph whose outputs it reads.
    pub(super) fn take_captured(&mut self) -> Vec<Consumed> {
        std::mem::take(&mut self.captured)
    }

    pub(super) fn add(&mut self, variable: &Tensor) {
        if self.known.insert(variable.id()) {
            self.variables.push(variable.clone());
        }
    }

    /// Adds what is below `node`, as far as it is reached without candle.
    pub(super) fn visit(&mut self, node: Consumed) {
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
            let Some(saved) = node.saved() else {
                self.freed = Some(node.name);
                continue;
            };
            if own {
                let reads = saved.dependencies.iter().map(|read| (node.number, read.read));
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
            // What checkpoints within this graph have captured, this one has too.
            rest.extend(saved.captured.iter().map(|captured| (captured.clone(), own)));
        }
    }

    /// Whether what was read has been written since.
    pub(super) fn is_modified(&self) -> bool {
        let written = |(time, read): &(u64, Read)| {
            version::written_since(*time, std::iter::once(*read)).is_some()
        };
        self.reads.iter().any(written)
    }
}
