//! Layers on this crate's operators, with candle_nn's names, constructors and parameter names. Import them from here
//! instead of `candle_nn` to move a model; a checkpoint of one loads in the other. Optimizers stay in `candle_nn`, or are in
//! [`optim`](crate::optim). Between layers, call [`ops`](crate::ops): candle's tensor methods ignore an autocast scope.

mod activation;
mod adaptive_pool;
mod attention;
mod batch_norm;
mod builder;
mod conv;
mod dropout;
mod embedding;
mod group_norm;
mod instance_norm;
mod layer_norm;
mod linear;
pub mod loss;
pub mod ops;
mod padding;
mod pool;
pub mod rnn;
pub mod rotary_emb;
mod sequential;
mod transformer;
mod weight_norm;

pub use activation::{Activation, PReLU, prelu};
pub use adaptive_pool::{AdaptiveAvgPool2d, AdaptiveMaxPool2d};
pub use attention::{MultiheadAttention, multihead_attention, multihead_attention_no_bias};
pub(crate) use batch_norm::OverRanks;
pub use batch_norm::{BatchNorm, batch_norm};
pub use builder::var_builder;
pub use conv::{
    Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d, Convolution, GroupedConvTranspose2d,
    GroupedConvTranspose2dConfig, conv_transpose1d, conv_transpose1d_no_bias, conv_transpose2d,
    conv_transpose2d_no_bias, conv1d, conv1d_no_bias, conv2d, conv2d_no_bias,
    grouped_conv_transpose2d, grouped_conv_transpose2d_no_bias,
};
pub use dropout::Dropout;
pub use embedding::{Embedding, embedding};
pub use group_norm::{GroupNorm, group_norm};
pub use instance_norm::{InstanceNorm, InstanceNormConfig, instance_norm};
pub use layer_norm::{LayerNorm, RmsNorm, layer_norm, layer_norm_no_bias, rms_norm};
pub use linear::{Linear, linear, linear_b, linear_no_bias};
pub use loss::{
    BceLoss, BceWithLogitsLoss, CosineEmbeddingLoss, CrossEntropyLoss, HuberLoss, KlDivLoss,
    L1Loss, MseLoss, NllLoss, Reduction, SmoothL1Loss, TripletMarginLoss,
};
pub use pool::{AvgPool2d, Flatten, GlobalAvgPool2d, MaxPool2d, Pool2d};
pub use rnn::{GRU, GRUConfig, GRUState, LSTM, LSTMConfig, LSTMState, RNN, gru, lstm};
pub use sequential::{SequentialT, seq_t};
pub use transformer::{
    TransformerConfig, TransformerDecoder, TransformerDecoderLayer, TransformerEncoder,
    TransformerEncoderLayer, TransformerStack, transformer_decoder, transformer_decoder_layer,
    transformer_encoder, transformer_encoder_layer,
};
pub use weight_norm::{WeightNorm, Weighted, weight_norm};

/// candle_nn's own, which need nothing from this crate.
pub use candle_nn::{
    BatchNormConfig, Conv1dConfig, Conv2dConfig, ConvTranspose1dConfig, ConvTranspose2dConfig,
    Func, FuncT, Init, LayerNormConfig, Module, ModuleT, Sequential, VarBuilder, VarMap, encoding,
    func, func_t, init, kv_cache, seq,
};
