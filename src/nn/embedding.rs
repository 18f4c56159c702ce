//! Embedding layers.

use candle_core::{Result, Tensor};
use candle_nn::{Init, Module, VarBuilder};

use crate::ops;

/// [`ops::embedding`] with its table `(rows, hidden_size)`.
#[derive(Clone, Debug)]
pub struct Embedding {
    embeddings: Tensor,
    hidden_size: usize,
}

impl Embedding {
    /// A layer of a given table.
    pub fn new(embeddings: Tensor, hidden_size: usize) -> Self {
        Self { embeddings, hidden_size }
    }

    /// The table, `(rows, hidden_size)`.
    pub fn embeddings(&self) -> &Tensor {
        &self.embeddings
    }

    /// The size of a row.
    pub fn hidden_size(&self) -> usize {
        self.hidden_size
    }
}

impl Module for Embedding {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        ops::embedding(ids, &self.embeddings)
    }
}

/// A table of `in_size` rows of `out_size`; parameter `weight`.
pub fn embedding(in_size: usize, out_size: usize, vb: VarBuilder) -> Result<Embedding> {
    let init = Init::Randn { mean: 0., stdev: 1. };
    Ok(Embedding::new(vb.get_with_hints((in_size, out_size), "weight", init)?, out_size))
}
