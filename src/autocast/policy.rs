//! Which dtype each operator runs in: one table, no tensors.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::DType;

use crate::kernels::activation::table::pointwise;

/// What autocast does with the floating-point inputs of an operator.
///
/// Integer and `F64` inputs are never cast, and an operator given any `F64` runs as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Cast {
    /// Inputs to the compute dtype; the output has it too. For matrix products and convolutions,
    /// which are fast in 16 bits and accumulate in `F32` inside.
    Lower,
    /// Inputs to `F32`; the output is `F32`. For results whose range or cancellation outgrows 16
    /// bits: sums, logarithms, losses.
    Full,
    /// Inputs as they are, arithmetic in `F32`, the output in the first input's dtype. For norms,
    /// softmax and averages, which need `F32` inside but not between operators.
    FullMath,
    /// Inputs to the widest dtype among them; `F16` with `BF16` is `F32`. For operators whose
    /// operands only have to agree.
    Promote,
    /// Nothing. For operators without rounding of their own.
    Keep,
    /// An error, [`AutocastError::Banned`](crate::error::AutocastError::Banned), where the compute dtype has 16 bits. For
    /// operators whose inputs have already lost what counts.
    Banned,
}

impl Cast {
    /// The dtype to cast inputs to, or `None` to leave them alone.
    pub(crate) fn target(
        self,
        compute: DType,
        inputs: impl Iterator<Item = DType> + Clone,
    ) -> Option<DType> {
        if inputs.clone().any(|dtype| dtype == DType::F64) {
            return None;
        }
        match self {
            Cast::Lower => Some(compute),
            Cast::Full => Some(DType::F32),
            Cast::Promote => inputs.filter(|&dtype| is_castable(dtype)).reduce(widest),
            Cast::FullMath | Cast::Keep | Cast::Banned => None,
        }
    }
}

/// Whether autocast may change this dtype.
pub(crate) fn is_castable(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16 | DType::F32)
}

fn widest(a: DType, b: DType) -> DType {
    if a == b { a } else { DType::F32 }
}

macro_rules! ops {
    ($($(#[$doc:meta])* $op:ident $name:tt $default:ident $pytorch:ident $reason:literal;)*) => {
        /// An operator that autocast knows about: a row of the table, or a user's own.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Op {
            $($(#[$doc])* $op,)*
            /// An operator defined outside this crate; see [`Op::user`].
            User(&'static str, Cast),
        }

        impl Op {
            /// Every operator of the crate, in the order of the table.
            pub const ALL: &'static [Op] = &[$(Op::$op,)*];

            /// The operator's name: that of its function in [`ops`](crate::ops).
            pub const fn name(self) -> &'static str {
                match self { $(Op::$op => $name,)* Op::User(name, _) => name }
            }

            /// The rules of [`ALL`](Self::ALL), in tables: a training step may make an autocast of its own.
            const DEFAULT_RULES: [Cast; Self::ALL.len()] = [$(Cast::$default,)*];
            const PYTORCH_RULES: [Cast; Self::ALL.len()] = [$(Cast::$pytorch,)*];

            /// The rule of the crate's own preset.
            pub const fn default_cast(self) -> Cast {
                match self { $(Op::$op => Cast::$default,)* Op::User(_, cast) => cast }
            }

            /// The rule of PyTorch's CUDA lists (version 2.15).
            pub const fn pytorch_cast(self) -> Cast {
                match self { $(Op::$op => Cast::$pytorch,)* Op::User(_, cast) => cast }
            }

            /// Why the crate's preset has this rule.
            pub const fn reason(self) -> &'static str {
                match self { $(Op::$op => $reason,)* Op::User(..) => "chosen where it is defined" }
            }

            /// Whether it is defined outside this crate.
            pub(crate) const fn is_user(self) -> bool {
                matches!(self, Op::User(..))
            }

            const fn index(self) -> Option<usize> {
                enum RowNumber { $($op,)* }
                match self { $(Op::$op => Some(RowNumber::$op as usize),)* Op::User(..) => None }
            }
        }
    };
}

/// Names the operators given, and after them those of the table of pointwise ones.
macro_rules! with_pointwise {
    ([$($given:tt)*] $(
        $(#[$doc:meta])* $name:ident => $op:ident $parameters:tt, {
            rule: $default:ident, pytorch: $pytorch:ident, reason: $reason:literal
        }, $facts:tt, $arithmetic:tt;
    )*) => {
        ops! {
            $($given)*
            $(
                #[doc = concat!("[`ops::", stringify!($name), "`](crate::ops::", stringify!($name), ").")]
                $op (stringify!($name)) $default $pytorch $reason;
            )*
        }
    };
}

pointwise!(with_pointwise [
    /// [`ops::matmul`](crate::ops::matmul).
    Matmul "matmul" Lower Lower "tensor cores multiply 16-bit numbers and accumulate in F32";
    /// [`ops::linear`](crate::ops::linear).
    Linear "linear" Lower Lower "a matrix product; bias and its gradient are summed in F32";
    /// [`ops::conv2d`](crate::ops::conv2d).
    Conv2d "conv2d" Lower Lower "a matrix product in another layout";
    /// [`ops::conv1d`](crate::ops::conv1d).
    Conv1d "conv1d" Lower Lower "a matrix product in another layout";
    /// [`ops::conv_transpose1d`](crate::ops::conv_transpose1d).
    ConvTranspose1d "conv_transpose1d" Lower Lower "a convolution's gradient, a matrix product too";
    /// [`ops::conv_transpose2d`](crate::ops::conv_transpose2d).
    ConvTranspose2d "conv_transpose2d" Lower Lower "a convolution's gradient, a matrix product too";
    /// [`ops::lstm`](crate::ops::lstm).
    Lstm "lstm" Lower Lower "products a step; gates and cell states stay F32 inside";
    /// [`ops::gru`](crate::ops::gru).
    Gru "gru" Lower Lower "products a step; gates and states stay F32 inside";
    /// [`ops::batch_norm`](crate::ops::batch_norm).
    BatchNorm "batch_norm" FullMath Keep "statistics over a batch need F32; the result fits 16 bits";
    /// [`ops::batch_norm_relu`](crate::ops::batch_norm_relu).
    BatchNormRelu "batch_norm_relu" FullMath Keep "a batch norm, an add and a selection, rounded once";
    /// [`ops::batch_norm_relu6`](crate::ops::batch_norm_relu6).
    BatchNormRelu6 "batch_norm_relu6" FullMath Keep "a batch norm and a selection, rounded once";
    /// [`ops::layer_norm`](crate::ops::layer_norm).
    LayerNorm "layer_norm" FullMath Full "statistics over a row need F32; the result fits 16 bits";
    /// [`ops::rms_norm`](crate::ops::rms_norm).
    RmsNorm "rms_norm" FullMath Full "squares overflow F16 from 256 on; the result fits 16 bits";
    /// [`ops::group_norm`](crate::ops::group_norm).
    GroupNorm "group_norm" FullMath Full "statistics over a group need F32; the result fits 16 bits";
    /// [`ops::relu`](crate::ops::relu).
    Relu "relu" Keep Keep "selects, never rounds";
    /// [`ops::prelu`](crate::ops::prelu).
    Prelu "prelu" Lower Lower "as in PyTorch: its two inputs are cast alike; the slope's gradient is summed in F32";
    /// [`ops::swiglu`](crate::ops::swiglu).
    Swiglu "swiglu" FullMath Keep "an exponential needs F32; gated and rounded once";
    /// [`ops::dropout`](crate::ops::dropout).
    Dropout "dropout" Keep Keep "selects and scales once";
    /// [`ops::add`](crate::ops::add).
    Add "add" Promote Promote "operands must agree; candle promotes nothing";
    /// [`ops::sub`](crate::ops::sub).
    Sub "sub" Promote Promote "operands must agree; candle promotes nothing";
    /// [`ops::mul`](crate::ops::mul).
    Mul "mul" Promote Promote "operands must agree; candle promotes nothing";
    /// [`ops::div`](crate::ops::div).
    Div "div" Promote Promote "operands must agree; candle promotes nothing";
    /// [`ops::maximum`](crate::ops::maximum).
    Maximum "maximum" Promote Promote "operands must agree; selects, never rounds";
    /// [`ops::minimum`](crate::ops::minimum).
    Minimum "minimum" Promote Promote "operands must agree; selects, never rounds";
    /// [`ops::where_cond`](crate::ops::where_cond).
    WhereCond "where_cond" Promote Promote "operands must agree; selects, never rounds";
    /// [`ops::cat`](crate::ops::cat).
    Cat "cat" Promote Promote "parts must agree; candle promotes nothing";
    /// [`ops::stack`](crate::ops::stack).
    Stack "stack" Promote Promote "parts must agree; candle promotes nothing";
    /// [`ops::broadcast_as`](crate::ops::broadcast_as).
    BroadcastAs "broadcast_as" Keep Keep "repeats, never rounds; its gradient is summed in F32";
    /// [`ops::index_select`](crate::ops::index_select).
    IndexSelect "index_select" Keep Keep "selects, never rounds; its gradient is summed in F32";
    /// [`ops::gather`](crate::ops::gather).
    Gather "gather" Keep Keep "selects, never rounds; its gradient is summed in F32";
    /// [`ops::scatter_add`](crate::ops::scatter_add).
    ScatterAdd "scatter_add" Promote Promote "operands must agree; summed in F32, rounded once";
    /// [`ops::add_relu`](crate::ops::add_relu).
    AddRelu "add_relu" Promote Promote "an add and a selection, rounded once";
    /// [`ops::max_pool2d`](crate::ops::max_pool2d).
    MaxPool2d "max_pool2d" Keep Keep "selects, never rounds";
    /// [`ops::avg_pool2d`](crate::ops::avg_pool2d).
    AvgPool2d "avg_pool2d" FullMath Keep "a window's sum saturates in 16 bits; its mean fits";
    /// [`ops::global_avg_pool2d`](crate::ops::global_avg_pool2d).
    GlobalAvgPool2d "global_avg_pool2d" FullMath Keep "a plane's sum saturates in 16 bits; its mean fits";
    /// [`ops::upsample_nearest1d`](crate::ops::upsample_nearest1d).
    UpsampleNearest1d "upsample_nearest1d" Keep Full "moves, never rounds";
    /// [`ops::upsample_nearest2d`](crate::ops::upsample_nearest2d).
    UpsampleNearest2d "upsample_nearest2d" Keep Full "moves, never rounds";
    /// [`ops::upsample_bilinear2d`](crate::ops::upsample_bilinear2d).
    UpsampleBilinear2d "upsample_bilinear2d" FullMath Full "an average of four pixels; it fits 16 bits";
    /// [`ops::flatten`](crate::ops::flatten).
    Flatten "flatten" Keep Keep "moves, never rounds";
    /// [`ops::embedding`](crate::ops::embedding).
    Embedding "embedding" Keep Keep "selects, never rounds; its gradient is summed in F32";
    /// [`ops::rope`](crate::ops::rope), `rope_i` and `rope_thd`.
    Rope "rope" Keep Keep "a rotation changes no length; angles and products are F32";
    /// [`ops::sdpa`](crate::ops::sdpa).
    Sdpa "sdpa" Lower Lower "two matrix products; the softmax between them stays in F32";
    /// [`ops::softmax`](crate::ops::softmax).
    Softmax "softmax" FullMath Full "exponentials and their sum need F32; probabilities fit 16 bits";
    /// [`ops::log_softmax`](crate::ops::log_softmax).
    LogSoftmax "log_softmax" Full Full "the result feeds a loss, and 16 bits are coarse far from zero";
    /// [`ops::sum`](crate::ops::sum).
    Sum "sum" Full Full "4,096 ones sum to 2,048 in F16";
    /// [`ops::mean`](crate::ops::mean).
    Mean "mean" Full Keep "a sum; and a mean is usually the loss";
    /// [`ops::cumsum`](crate::ops::cumsum).
    Cumsum "cumsum" Full Full "sums, the last of them over all elements";
    /// [`ops::var`](crate::ops::var).
    Var "var" Full Keep "squares overflow F16 from 256 on, and a sum";
    /// [`ops::norm`](crate::ops::norm).
    Norm "norm" Full Full "squares overflow F16 from 256 on, and a sum";
    /// [`ops::log_sum_exp`](crate::ops::log_sum_exp).
    LogSumExp "log_sum_exp" Full Full "the result feeds a loss, and 16 bits are coarse far from zero";
    /// [`ops::cross_entropy`](crate::ops::cross_entropy).
    CrossEntropy "cross_entropy" Full Full "logarithms and a sum; the scaler needs an F32 loss";
    /// [`ops::linear_cross_entropy`](crate::ops::linear_cross_entropy).
    LinearCrossEntropy "linear_cross_entropy" Lower Lower "a matrix product, and a loss in F32 of its logits";
    /// [`ops::nll`](crate::ops::nll).
    Nll "nll" Full Full "a sum; the scaler needs an F32 loss";
    /// [`ops::mse`](crate::ops::mse).
    Mse "mse" Full Full "squares overflow F16 from 256 on; the scaler needs an F32 loss";
    /// [`ops::huber`](crate::ops::huber).
    Huber "huber" Full Full "squares and a sum; the scaler needs an F32 loss";
    /// [`ops::l1`](crate::ops::l1).
    L1 "l1" Full Full "a sum; the scaler needs an F32 loss";
    /// [`ops::kl_div`](crate::ops::kl_div).
    KlDiv "kl_div" Full Full "logarithms and a sum; the scaler needs an F32 loss";
    /// [`ops::binary_cross_entropy_with_logit`](crate::ops::binary_cross_entropy_with_logit).
    BinaryCrossEntropyWithLogit "binary_cross_entropy_with_logit" Full Full "logarithms and a sum; the scaler needs an F32 loss";
    /// [`ops::binary_cross_entropy`](crate::ops::binary_cross_entropy).
    BinaryCrossEntropy "binary_cross_entropy" Banned Banned "a 16-bit probability has rounded its logarithm away; give logits to binary_cross_entropy_with_logit";
]);

impl Op {
    /// An operator of the user's own, known to policies by `name`, that follows `cast` unless a
    /// policy says otherwise.
    ///
    /// ```
    /// use candle_amp::{Cast, Op, Policy};
    ///
    /// const SWIGLU: Op = Op::user("swiglu", Cast::Promote);
    /// assert_eq!(Policy::default().cast(SWIGLU), Cast::Promote);
    /// assert_eq!(Policy::default().deny(SWIGLU).cast(SWIGLU), Cast::Full);
    /// ```
    pub const fn user(name: &'static str, cast: Cast) -> Self {
        Op::User(name, cast)
    }
}

/// The cast rule of every operator: a preset, with edits.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    rules: [Cast; Op::ALL.len()],
    user: Arc<BTreeMap<&'static str, Cast>>,
}

impl Default for Policy {
    /// The crate's own preset: PyTorch's lists, with 16-bit results where only the
    /// arithmetic needs `F32`, and `F32` where a 16-bit sum would saturate.
    fn default() -> Self {
        Self::preset(Op::DEFAULT_RULES)
    }
}

impl Policy {
    /// PyTorch's CUDA lists, exactly: for comparing runs with it.
    ///
    /// ```
    /// use candle_amp::{Cast, Op, Policy};
    ///
    /// assert_eq!(Policy::pytorch().cast(Op::Softmax), Cast::Full); // F32 in and out
    /// assert_eq!(Policy::default().cast(Op::Softmax), Cast::FullMath); // F32 inside
    /// ```
    pub fn pytorch() -> Self {
        Self::preset(Op::PYTORCH_RULES)
    }

    fn preset(rules: [Cast; Op::ALL.len()]) -> Self {
        Self { rules, user: Arc::default() }
    }

    /// The rule `op` follows.
    pub fn cast(&self, op: Op) -> Cast {
        match (op.index(), op) {
            (Some(row), _) => self.rules[row],
            (None, Op::User(name, cast)) => self.user.get(name).copied().unwrap_or(cast),
            (None, _) => unreachable!("every operator but a user's has a row"),
        }
    }

    /// The same policy with `op` following `cast`.
    #[must_use]
    pub fn with(mut self, op: Op, cast: Cast) -> Self {
        match op.index() {
            Some(row) => self.rules[row] = cast,
            None => {
                Arc::make_mut(&mut self.user).insert(op.name(), cast);
            }
        }
        self
    }

    /// The same policy with `op` in the compute dtype: [`Cast::Lower`].
    #[must_use]
    pub fn allow(self, op: Op) -> Self {
        self.with(op, Cast::Lower)
    }

    /// The same policy with `op` in `F32`: [`Cast::Full`].
    #[must_use]
    pub fn deny(self, op: Op) -> Self {
        self.with(op, Cast::Full)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use DType::{BF16, F16, F32, F64, U32};

    fn target(cast: Cast, inputs: &[DType]) -> Option<DType> {
        cast.target(BF16, inputs.iter().copied())
    }

    #[test]
    fn each_rule_chooses_its_dtype() {
        assert_eq!(target(Cast::Lower, &[F32, F16]), Some(BF16));
        assert_eq!(target(Cast::Full, &[BF16]), Some(F32));
        assert_eq!(target(Cast::FullMath, &[BF16, F32]), None);
        assert_eq!(target(Cast::Keep, &[F32]), None);
        assert_eq!(target(Cast::Promote, &[BF16, BF16]), Some(BF16));
        assert_eq!(target(Cast::Promote, &[F16, BF16]), Some(F32));
        assert_eq!(target(Cast::Promote, &[F16, F32]), Some(F32));
        assert_eq!(target(Cast::Promote, &[U32, F16]), Some(F16));
        assert_eq!(target(Cast::Promote, &[U32]), None);
    }

    #[test]
    fn doubles_turn_casting_off() {
        for cast in
            [Cast::Lower, Cast::Full, Cast::FullMath, Cast::Promote, Cast::Keep, Cast::Banned]
        {
            assert_eq!(target(cast, &[F64, F32]), None, "{cast:?}");
        }
    }

    #[test]
    fn every_operator_has_its_own_row_name_and_reason() {
        let mut names: Vec<_> = Op::ALL.iter().map(|op| op.name()).collect();
        for (row, op) in Op::ALL.iter().enumerate() {
            assert_eq!(op.index(), Some(row));
            assert!(op.reason().len() > 10);
        }
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Op::ALL.len());
    }

    #[test]
    fn edits_touch_one_row() {
        let edited = Policy::default().allow(Op::Softmax).deny(Op::Conv2d);
        for &op in Op::ALL {
            let expected = match op {
                Op::Softmax => Cast::Lower,
                Op::Conv2d => Cast::Full,
                _ => op.default_cast(),
            };
            assert_eq!(edited.cast(op), expected, "{op:?}");
        }
        let op = Op::user("mine", Cast::Keep);
        let edited = edited.with(op, Cast::Promote);
        assert_eq!(edited.cast(op), Cast::Promote);
        assert_eq!(edited.cast(Op::user("yours", Cast::Keep)), Cast::Keep);
    }
}
