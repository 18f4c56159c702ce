//! Weight norm.

use candle_core::{DType, Result, Tensor, Var};
use candle_nn::{Init, Module, VarBuilder};

use super::{Convolution, Linear};
use crate::autograd::version;
use crate::error::{ArgumentError, bail};
use crate::{Autocast, no_grad, ops};

/// A layer whose weight can be another tensor: [`Linear`] and every [`Convolution`].
pub trait Weighted: Module + Sized + sealed::Sealed {
    /// The weight.
    fn weight(&self) -> &Tensor;

    /// The layer with this weight.
    fn with_weight(&self, weight: Tensor) -> Self;
}

mod sealed {
    pub trait Sealed {}

    impl Sealed for super::Linear {}

    impl<C> Sealed for super::Convolution<C> {}
}

impl Weighted for Linear {
    fn weight(&self) -> &Tensor {
        self.weight()
    }

    fn with_weight(&self, weight: Tensor) -> Self {
        Self::new(weight, self.bias().cloned())
    }
}

impl<C: Clone> Weighted for Convolution<C>
where
    Self: Module,
{
    fn weight(&self) -> &Tensor {
        self.weight()
    }

    fn with_weight(&self, weight: Tensor) -> Self {
        self.replace_weight(weight)
    }
}

/// A layer whose weight is `weight_g · weight_v / ‖weight_v‖`, of the length `weight_g` along its first dimension.
///
/// The parameters have the names of `torch.nn.utils.weight_norm`: `weight_g (out, 1, …)` and `weight_v (out, …)`. Those
/// of `torch.nn.utils.parametrizations.weight_norm` are the same under `parametrizations.weight.original0` and
/// `original1`; rename them to load them.
///
/// # Precision
///
/// The weight is computed in `F32` in every forward pass, within any scope, from 16-bit parameters too, and rounded to
/// their dtype. The layer's operator casts it as its policy says. Gradients of both parameters are those of `F32`
/// operators. A row of zeros has no direction, and gives NaN, as in PyTorch.
///
/// # Examples
///
/// ```
/// use candle_amp::nn::{self, Module};
/// use candle_core::{DType, Device, Tensor};
///
/// let vb = nn::var_builder(&nn::VarMap::new(), DType::F32, &Device::Cpu);
/// let layer = nn::weight_norm(vb, |vb| nn::linear(4, 3, vb))?;
/// let x = Tensor::rand(0f32, 1., (2, 4), &Device::Cpu)?;
/// assert_eq!(layer.forward(&x)?.dims(), [2, 3]);
/// assert_eq!(layer.weight_g().dims(), [3, 1]);
/// // At first the weight is `weight_v`.
/// let difference = (layer.weight()? - layer.weight_v())?.abs()?.max_all()?;
/// assert!(difference.to_scalar::<f32>()? < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// Salimans and Kingma, [Weight Normalization](https://arxiv.org/abs/1602.07868); `torch.nn.utils.weight_norm` with
/// `dim=0`.
#[derive(Clone, Debug)]
pub struct WeightNorm<L> {
    /// With `weight_v` as its weight.
    layer: L,
    weight_g: Tensor,
}

impl<L: Weighted> WeightNorm<L> {
    /// `layer` with a weight of the length `weight_g (out, 1, …)` and the direction of the weight that it has.
    ///
    /// # Errors
    ///
    /// A shape of `weight_g` that does not fit.
    pub fn new(layer: L, weight_g: Tensor) -> Result<Self> {
        let dims = lengths(layer.weight().dims());
        if weight_g.dims() != dims {
            let (got, expected) = (weight_g.shape().clone(), format!("{dims:?}"));
            let (op, name) = ("weight_norm", "weight_g");
            return Err(ArgumentError::Shape { op, name, got, expected }.into());
        }
        Ok(Self { layer, weight_g })
    }

    /// The lengths, `(out, 1, …)`.
    pub fn weight_g(&self) -> &Tensor {
        &self.weight_g
    }

    /// The directions, `(out, …)`.
    pub fn weight_v(&self) -> &Tensor {
        self.layer.weight()
    }

    /// The weight, in the dtype of `weight_v`.
    ///
    /// # Errors
    ///
    /// Those of the device.
    pub fn weight(&self) -> Result<Tensor> {
        let (v, g) = (self.weight_v(), &self.weight_g);
        let weight = Autocast::new(DType::F32).scope(|| ops::mul(&ops::div(g, &norm(v)?)?, v))?;
        weight.to_dtype(v.dtype())
    }
}

impl<L: Weighted> Module for WeightNorm<L> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.layer.with_weight(self.weight()?).forward(x)
    }
}

/// The shape of the lengths of a weight's rows.
fn lengths(dims: &[usize]) -> Vec<usize> {
    dims.iter().enumerate().map(|(dim, &size)| if dim == 0 { size } else { 1 }).collect()
}

/// The length of each row, `(out, 1, …)`, under a scope of `F32`.
fn norm(v: &Tensor) -> Result<Tensor> {
    let dims: Vec<usize> = (1..v.rank()).collect();
    ops::sqrt(&ops::sum_keepdim(&ops::square(v)?, dims)?)
}

/// The layer that `layer` builds, with weight norm: its `weight` is called `weight_v`, and `weight_g` is its length
/// where the builder has none yet.
///
/// # Errors
///
/// Those of the builders. A builder that has no `weight_g`, and hands out no variable that could be set.
pub fn weight_norm<L: Weighted>(
    vb: VarBuilder,
    layer: impl FnOnce(VarBuilder) -> Result<L>,
) -> Result<WeightNorm<L>> {
    // From the root: candle's renamed builder asks the one within by the whole path.
    let renamed = vb.root().rename_f(|path| match path.strip_suffix("weight") {
        Some(start) if start.is_empty() || start.ends_with('.') => format!("{start}weight_v"),
        _ => path.to_owned(),
    });
    let prefix = vb.prefix();
    let layer = layer(if prefix.is_empty() { renamed } else { renamed.pp(prefix) })?;
    let exists = vb.contains_tensor("weight_g");
    let dims = lengths(layer.weight().dims());
    let weight_g = vb.get_with_hints(dims, "weight_g", Init::Const(1.0))?;
    if !exists {
        if !weight_g.is_variable() {
            bail!(
                "weight_norm: the builder has no `weight_g`, and gave no variable to set: load it with one"
            )
        }
        let v = layer.weight();
        let length = no_grad(|| Autocast::new(DType::F32).scope(|| norm(v)))?;
        let set = Var::from_tensor(&weight_g)?.set(&length.to_dtype(weight_g.dtype())?);
        version::written([&weight_g]);
        set?;
    }
    WeightNorm::new(layer, weight_g)
}
