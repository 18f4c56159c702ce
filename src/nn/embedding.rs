//! Embedding layers.

use candle_core::{Result, Tensor};
use candle_nn::{Init, Module, VarBuilder};

use crate::ops;

/// [`ops::embedding`] with its table `(rows, hidden_size)`.
///
/// # Errors
///
/// Of `forward`: those of [`ops::embedding`].
///
/// # References
///
/// `torch.nn.Embedding`, without `padding_idx` and `max_norm`.
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
///
/// # Initial values
///
/// Normal, of mean 0 and standard deviation 1, as in PyTorch and candle_nn.
///
/// # Errors
///
/// Those of the builder, such as a parameter of another shape in a file.
///
/// # Examples
///
/// On a CPU, an id that names no row is an error:
///
/// ```
/// use candle_amp::nn;
/// use candle_core::{DType, Device, Module, Tensor};
///
/// let vb = nn::var_builder(&nn::VarMap::new(), DType::F32, &Device::Cpu);
/// let layer = nn::embedding(10, 4, vb)?;
/// let ids = Tensor::new(&[[3u32, 3, 9], [0, 1, 2]], &Device::Cpu)?;
/// assert_eq!(layer.forward(&ids)?.dims(), [2, 3, 4]);
/// assert!(layer.forward(&Tensor::new(&[10u32], &Device::Cpu)?).is_err()); // on CUDA: a row of NaN
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn embedding(in_size: usize, out_size: usize, vb: VarBuilder) -> Result<Embedding> {
    let init = Init::Randn { mean: 0., stdev: 1. };
    Ok(Embedding::new(vb.get_with_hints((in_size, out_size), "weight", init)?, out_size))
}
