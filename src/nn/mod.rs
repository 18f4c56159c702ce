//! Layers on this crate's operators, with candle_nn's names, constructors and parameter names: a
//! model moves over by changing `use candle_nn::` to `use candle_amp::nn::`, and a checkpoint made
//! with one loads in the other.

mod activation;
mod batch_norm;
mod builder;
mod conv;
mod dropout;
mod embedding;
mod layer_norm;
mod linear;
pub mod loss;
pub mod ops;

pub use activation::{Activation, PReLU, prelu};
pub use batch_norm::{BatchNorm, batch_norm};
pub use builder::var_builder;
pub use conv::{Conv2d, conv2d, conv2d_no_bias};
pub use dropout::Dropout;
pub use embedding::{Embedding, embedding};
pub use layer_norm::{LayerNorm, RmsNorm, layer_norm, layer_norm_no_bias, rms_norm};
pub use linear::{Linear, linear, linear_b, linear_no_bias};

/// candle_nn's own, which need nothing from this crate.
pub use candle_nn::{
    BatchNormConfig, Conv2dConfig, Func, FuncT, Init, LayerNormConfig, Module, ModuleT, Sequential,
    VarBuilder, VarMap, func, func_t, seq,
};
