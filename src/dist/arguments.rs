//! Checks of the arguments that all engines share: dtypes and shapes.

use candle_core::{DType, Tensor};

use crate::error::{ArgumentError, Result};

/// The dtypes that travel, each with its place in the header of a call.
pub(super) const DTYPES: [DType; 10] = [
    DType::U8,
    DType::U32,
    DType::I16,
    DType::I32,
    DType::I64,
    DType::BF16,
    DType::F16,
    DType::F32,
    DType::F64,
    DType::F8E4M3,
];

/// Checks that `x` can travel.
pub(super) fn can_travel(op: &'static str, x: &Tensor) -> Result<()> {
    check_dtype(op, x, DTYPES.contains(&x.dtype()), "a dtype of whole bytes")
}

/// Checks that elements of `x` can be combined.
pub(super) fn can_combine(op: &'static str, x: &Tensor) -> Result<()> {
    let combines = DTYPES.contains(&x.dtype()) && x.dtype() != DType::F8E4M3;
    check_dtype(op, x, combines, "F64, F32, F16, BF16 or an integer")
}

fn check_dtype(op: &'static str, x: &Tensor, fits: bool, expected: &str) -> Result<()> {
    if fits {
        return Ok(());
    }
    Err(ArgumentError::DType { op, name: "x", got: x.dtype(), expected: expected.to_owned() }
        .into())
}

/// The shape of each rank's share of `x`.
pub(super) fn share(op: &'static str, x: &Tensor, size: usize) -> Result<Vec<usize>> {
    match x.dims().split_first() {
        Some((first, rest)) if first.is_multiple_of(size) => Ok([&[first / size], rest].concat()),
        _ => Err(ArgumentError::Shape {
            op,
            name: "x",
            got: x.shape().clone(),
            expected: format!("a first dimension that {size} ranks divide: pad it"),
        }
        .into()),
    }
}

/// The shape of `x` of all ranks, joined: a number becomes a vector.
pub(super) fn joined(x: &Tensor, size: usize) -> Vec<usize> {
    match x.dims().split_first() {
        Some((first, rest)) => [&[first * size], rest].concat(),
        None => vec![size],
    }
}

/// Checks that there is a rank `root`.
pub(super) fn is_rank(root: usize, size: usize) -> Result<()> {
    if root < size {
        return Ok(());
    }
    let (name, got) = ("root", root as f64);
    Err(ArgumentError::Setting { name, got, expected: "a rank, from 0 and below the size" }.into())
}

/// The dtype in which elements are added.
pub(super) fn wide(dtype: DType) -> DType {
    match dtype {
        DType::F16 | DType::BF16 => DType::F32,
        other => other,
    }
}
