//! Sums and maxima of what ranks sent, as bytes.

use candle_core::DType;
use half::{bf16, f16};
use num_traits::Float;

use crate::dist::communicator::ReduceOp;

/// Combines the equal parts of `parts`, one of each rank, in the order of the ranks.
///
/// F16 and BF16 are added in F32. The result is in F32 too if it is to be `wide`, and else rounded once. `None`
/// where a sum of integers does not fit.
pub(super) fn combine(
    mut parts: Vec<u8>,
    ranks: usize,
    dtype: DType,
    reduction: ReduceOp,
    wide: bool,
) -> Option<Vec<u8>> {
    Some(match dtype {
        DType::F16 => {
            let read = |bytes| f16::from_ne_bytes(bytes).to_f32();
            sixteen_bits(&parts, ranks, reduction, wide, read, |x| f16::from_f32(x).to_ne_bytes())
        }
        DType::BF16 => {
            let read = |bytes| bf16::from_ne_bytes(bytes).to_f32();
            sixteen_bits(&parts, ranks, reduction, wide, read, |x| bf16::from_f32(x).to_ne_bytes())
        }
        DType::F32 => {
            in_place(&mut parts, ranks, reduction, f32::from_ne_bytes, f32::to_ne_bytes);
            parts
        }
        DType::F64 => {
            in_place(&mut parts, ranks, reduction, f64::from_ne_bytes, f64::to_ne_bytes);
            parts
        }
        DType::U8 => integers(&parts, ranks, reduction, u8::from_ne_bytes, u8::to_ne_bytes)?,
        DType::U32 => integers(&parts, ranks, reduction, u32::from_ne_bytes, u32::to_ne_bytes)?,
        DType::I16 => integers(&parts, ranks, reduction, i16::from_ne_bytes, i16::to_ne_bytes)?,
        DType::I32 => integers(&parts, ranks, reduction, i32::from_ne_bytes, i32::to_ne_bytes)?,
        DType::I64 => integers(&parts, ranks, reduction, i64::from_ne_bytes, i64::to_ne_bytes)?,
        // `can_combine` refuses the rest.
        _ => return None,
    })
}

/// Combines into the first part, and drops the others.
fn in_place<T: Float, const N: usize>(
    parts: &mut Vec<u8>,
    ranks: usize,
    reduction: ReduceOp,
    read: impl Fn([u8; N]) -> T,
    write: impl Fn(T) -> [u8; N],
) {
    let len = parts.len() / ranks;
    let (first, rest) = parts.split_at_mut(len);
    for part in rest.chunks_exact(len.max(1)) {
        let pairs = first.as_chunks_mut().0.iter_mut().zip(part.as_chunks().0);
        match reduction {
            ReduceOp::Sum => pairs.for_each(|(to, from)| *to = write(read(*to) + read(*from))),
            ReduceOp::Max => {
                pairs.for_each(|(to, from)| *to = write(larger(read(*to), read(*from))))
            }
        }
    }
    parts.truncate(len);
}

fn sixteen_bits(
    parts: &[u8],
    ranks: usize,
    reduction: ReduceOp,
    wide: bool,
    read: impl Fn([u8; 2]) -> f32,
    write: impl Fn(f32) -> [u8; 2],
) -> Vec<u8> {
    let results = match reduction {
        ReduceOp::Sum => fold(parts, ranks, read, |a, b| a + b),
        ReduceOp::Max => fold(parts, ranks, read, larger),
    };
    if wide { flatten(results, f32::to_ne_bytes) } else { flatten(results, write) }
}

/// The larger of two numbers, the first of equal ones; NaN where one is.
fn larger<T: Float>(a: T, b: T) -> T {
    if b > a || b.is_nan() { b } else { a }
}

fn integers<T, const N: usize>(
    parts: &[u8],
    ranks: usize,
    reduction: ReduceOp,
    read: fn([u8; N]) -> T,
    write: fn(T) -> [u8; N],
) -> Option<Vec<u8>>
where
    T: Into<i128> + TryFrom<i128>,
{
    let read = |bytes| read(bytes).into();
    let results = match reduction {
        ReduceOp::Sum => fold(parts, ranks, read, |a: i128, b| a + b),
        ReduceOp::Max => fold(parts, ranks, read, i128::max),
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
