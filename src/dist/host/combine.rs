//! Sums and maxima of what ranks sent, as bytes.

use candle_core::DType;
use half::{bf16, f16};
use num_traits::Float;

use crate::dist::communicator::Reduction;

/// Combines the equal parts of `parts`, one of each rank, in the order of the ranks.
///
/// F16 and BF16 are added in F32. The result is in F32 too if it is to be `wide`, and else rounded once. `None`
/// where a sum of integers does not fit.
pub(super) fn combine(
    parts: &[u8],
    ranks: usize,
    dtype: DType,
    reduction: Reduction,
    wide: bool,
) -> Option<Vec<u8>> {
    let float = |read: fn([u8; 2]) -> f32| match reduction {
        Reduction::Sum => fold(parts, ranks, read, |a, b| a + b),
        Reduction::Max => fold(parts, ranks, read, larger),
    };
    Some(match dtype {
        DType::F16 | DType::BF16 => {
            let is_f16 = dtype == DType::F16;
            let sums = float(if is_f16 {
                |bytes| f16::from_ne_bytes(bytes).to_f32()
            } else {
                |bytes| bf16::from_ne_bytes(bytes).to_f32()
            });
            match (wide, is_f16) {
                (true, _) => flatten(sums, f32::to_ne_bytes),
                (false, true) => flatten(sums, |sum| f16::from_f32(sum).to_ne_bytes()),
                (false, false) => flatten(sums, |sum| bf16::from_f32(sum).to_ne_bytes()),
            }
        }
        DType::F32 => match reduction {
            Reduction::Sum => {
                flatten(fold(parts, ranks, f32::from_ne_bytes, |a, b| a + b), f32::to_ne_bytes)
            }
            Reduction::Max => {
                flatten(fold(parts, ranks, f32::from_ne_bytes, larger), f32::to_ne_bytes)
            }
        },
        DType::F64 => match reduction {
            Reduction::Sum => {
                flatten(fold(parts, ranks, f64::from_ne_bytes, |a, b| a + b), f64::to_ne_bytes)
            }
            Reduction::Max => {
                flatten(fold(parts, ranks, f64::from_ne_bytes, larger), f64::to_ne_bytes)
            }
        },
        DType::U8 => integers(parts, ranks, reduction, u8::from_ne_bytes, u8::to_ne_bytes)?,
        DType::U32 => integers(parts, ranks, reduction, u32::from_ne_bytes, u32::to_ne_bytes)?,
        DType::I16 => integers(parts, ranks, reduction, i16::from_ne_bytes, i16::to_ne_bytes)?,
        DType::I32 => integers(parts, ranks, reduction, i32::from_ne_bytes, i32::to_ne_bytes)?,
        DType::I64 => integers(parts, ranks, reduction, i64::from_ne_bytes, i64::to_ne_bytes)?,
        // `can_combine` refuses the rest.
        _ => return None,
    })
}

/// The larger of two numbers, the first of equal ones; NaN where one is.
fn larger<T: Float>(a: T, b: T) -> T {
    if b > a || b.is_nan() { b } else { a }
}

fn integers<T, const N: usize>(
    parts: &[u8],
    ranks: usize,
    reduction: Reduction,
    read: fn([u8; N]) -> T,
    write: fn(T) -> [u8; N],
) -> Option<Vec<u8>>
where
    T: Into<i128> + TryFrom<i128>,
{
    let read = |bytes| read(bytes).into();
    let results = match reduction {
        Reduction::Sum => fold(parts, ranks, read, |a: i128, b| a + b),
        Reduction::Max => fold(parts, ranks, read, i128::max),
    };
    let fitting = results.into_iter().map(|result| T::try_from(result).ok());
    Some(flatten(fitting.collect::<Option<Vec<T>>>()?, write))
}

fn fold<A: Copy, const N: usize>(
    parts: &[u8],
    ranks: usize,
    read: impl Fn([u8; N]) -> A,
    join: impl Fn(A, A) -> A,
) -> Vec<A> {
    let (first, rest) = parts.split_at(parts.len() / ranks);
    let mut results: Vec<A> = first.as_chunks().0.iter().map(|bytes| read(*bytes)).collect();
    for part in rest.chunks_exact(first.len().max(1)) {
        for (result, bytes) in results.iter_mut().zip(part.as_chunks().0) {
            *result = join(*result, read(*bytes));
        }
    }
    results
}

fn flatten<A, const N: usize>(results: Vec<A>, write: impl Fn(A) -> [u8; N]) -> Vec<u8> {
    let mut bytes = vec![0; results.len() * N];
    for (to, result) in bytes.as_chunks_mut().0.iter_mut().zip(results) {
        *to = write(result);
    }
    bytes
}
