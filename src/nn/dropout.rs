//! Dropout layers.

use candle_core::{Result, Tensor};
use candle_nn::ModuleT;

use crate::ops;

/// [`ops::dropout`] in training, nothing in evaluation.
///
/// # Examples
///
/// What is kept is divided by the probability to keep it. A probability outside 0 to 1 is an error of `forward`, not of `new`:
///
/// ```
/// use candle_amp::nn::Dropout;
/// use candle_core::{DType, Device, Tensor};
///
/// let x = Tensor::ones(64, DType::F32, &Device::Cpu)?;
/// let y = Dropout::new(0.5).forward(&x, true)?.to_vec1::<f32>()?;
/// assert!(y.iter().all(|y| [0.0, 2.0].contains(y)));
/// assert_eq!(Dropout::new(0.5).forward(&x, false)?.to_vec1::<f32>()?, [1.0; 64]);
/// assert_eq!(Dropout::new(1.0).forward(&x, true)?.to_vec1::<f32>()?, [0.0; 64]);
/// assert!(Dropout::new(1.5).forward(&x, true).is_err());
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.nn.Dropout`.
#[derive(Clone, Debug)]
pub struct Dropout {
    drop_p: f32,
}

impl Dropout {
    /// Drops each element with probability `drop_p`.
    pub fn new(drop_p: f32) -> Self {
        Self { drop_p }
    }

    /// As [`ops::dropout`] where `train` is set, else `x` itself.
    ///
    /// # Errors
    ///
    /// A probability below 0 or above 1.
    pub fn forward(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        if train { ops::dropout(x, self.drop_p) } else { Ok(x.clone()) }
    }
}

impl ModuleT for Dropout {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        self.forward(x, train)
    }
}
