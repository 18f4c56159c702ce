//! Errors of autocast.

use candle_core::DType;

/// Autocast cannot compute what it was asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AutocastError {
    /// Autocast to a dtype that is no compute dtype.
    #[error(
        "autocast computes in F16, BF16 or F32, not in {got:?}; to switch autocast off, use \
         `Autocast::disabled()`"
    )]
    ComputeDType {
        /// The dtype asked for.
        got: DType,
    },
    /// An operator that the policy bans in a 16-bit scope.
    #[error(
        "autocast to {dtype:?} refuses `{op}`: {reason}; or run it outside of the scope, or under a \
         policy with another rule for it"
    )]
    Banned {
        /// The operator.
        op: &'static str,
        /// Why it is refused, and what to use instead.
        reason: &'static str,
        /// The compute dtype of the scope.
        dtype: DType,
    },
}
