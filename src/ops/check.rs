//! Whether arguments fit, and the errors where they do not.

use candle_core::{DType, Result, Tensor};

use crate::Op;
use crate::error::ArgumentError;

pub(super) fn shape_error<T>(
    op: Op,
    name: &'static str,
    got: &Tensor,
    expected: String,
) -> Result<T> {
    let got = got.shape().clone();
    Err(ArgumentError::Shape { op: op.name(), name, got, expected }.into())
}

/// `got` is floating point, on the device of `first` and, where `same_dtype`, of its dtype.
pub(super) fn check_operand(
    op: Op,
    first: &Tensor,
    name: &'static str,
    got: &Tensor,
    same_dtype: bool,
) -> Result<()> {
    let op = op.name();
    if !matches!(got.dtype(), DType::F16 | DType::BF16 | DType::F32 | DType::F64) {
        let expected = "F16, BF16, F32 or F64".to_string();
        return Err(ArgumentError::DType { op, name, got: got.dtype(), expected }.into());
    }
    if same_dtype && got.dtype() != first.dtype() {
        let cure = match (got.dtype(), first.dtype()) {
            (DType::F64, _) | (_, DType::F64) => "cast one, for no scope casts F64",
            _ => "run it in an `Autocast` scope, which casts, or cast one",
        };
        let expected = format!("{:?} as the first argument: {cure}", first.dtype());
        return Err(ArgumentError::DType { op, name, got: got.dtype(), expected }.into());
    }
    let (got, expected) = (got.device().location(), first.device().location());
    if got != expected {
        return Err(ArgumentError::Device { op, name, got, expected }.into());
    }
    Ok(())
}

/// `got` has exactly the dimensions `expected`.
pub(super) fn check_dims(
    op: Op,
    name: &'static str,
    got: &Tensor,
    expected: &[usize],
) -> Result<()> {
    if got.dims() == expected {
        return Ok(());
    }
    shape_error(op, name, got, format!("{expected:?}"))
}

/// `eps`, which is added to a variance, is finite and not below zero.
pub(super) fn check_eps(eps: f64) -> Result<()> {
    if eps >= 0.0 && eps.is_finite() {
        return Ok(());
    }
    let expected = "a finite number, not below zero";
    Err(ArgumentError::Setting { name: "eps", got: eps, expected }.into())
}
