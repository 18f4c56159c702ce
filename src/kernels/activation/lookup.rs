//! Pointwise functions of 16-bit numbers by a table of what the function gives for each of them.
//!
//! A load takes a third of the time of an error function's arithmetic. Tables are made by that arithmetic, in F32, so
//! results have the same bits with and without them.

use std::sync::OnceLock;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::functions::{derivatives, values};
use super::math::Math;
use super::pointwise::Pointwise;
use crate::kernels::cpu::lane::Lane;

/// How many numbers 16 bits are.
const COUNT: usize = 1 << 16;
/// Elements of a tensor from which on a table is used: it takes as long to make as so many results.
const WORTH: usize = COUNT;

/// Functions that take longer than a load, of those without parameters.
const SLOW: [Pointwise; 3] = [Pointwise::GeluErf {}, Pointwise::GeluTanh {}, Pointwise::Mish {}];

/// What of a function is computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Of {
    Value,
    Derivative,
}

/// A dtype, and the tables there are for it.
pub(super) trait Tables: Lane<Acc: Math> {
    /// Results by the bits of a number, for a tensor of `len` elements, where loading them is faster.
    fn table(_: Pointwise, _: Of, _len: usize) -> Option<&'static [Self::Acc; COUNT]> {
        None
    }

    /// The bits of numbers of 16 bits.
    fn bits(_: &[Self]) -> Option<&[u16]> {
        None
    }
}

impl Tables for f32 {}
impl Tables for f64 {}

macro_rules! tables {
    ($ty:ty) => {
        impl Tables for $ty {
            fn table(function: Pointwise, of: Of, len: usize) -> Option<&'static [f32; COUNT]> {
                static TABLES: [[OnceLock<Box<[f32; COUNT]>>; 2]; SLOW.len()] =
                    [const { [const { OnceLock::new() }; 2] }; SLOW.len()];
                let slow = SLOW.iter().position(|slow| *slow == function && len >= WORTH)?;
                let widen = |bits| <$ty>::from_bits(bits).widened();
                Some(TABLES[slow][of as usize].get_or_init(|| made(function, of, widen)))
            }

            fn bits(data: &[Self]) -> Option<&[u16]> {
                Some(data.reinterpret_cast())
            }
        }
    };
}
tables!(bf16);
tables!(f16);

fn made(function: Pointwise, of: Of, widen: impl Fn(u16) -> f32) -> Box<[f32; COUNT]> {
    // Not an array first, which has no room on a small stack.
    let mut results: Box<[f32]> = (0..=u16::MAX).map(widen).collect();
    compute(function, of, &mut results);
    match results.try_into() {
        Ok(results) => results,
        Err(_) => unreachable!("as many results as numbers of 16 bits"),
    }
}

fn compute<A: Math>(function: Pointwise, of: Of, wide: &mut [A]) {
    match of {
        Of::Value => values(function, wide),
        Of::Derivative => derivatives(function, wide),
    }
}

/// Computes a function of a tensor, block by block.
#[derive(Clone, Copy)]
pub(super) struct Computed<T: Tables> {
    function: Pointwise,
    of: Of,
    table: Option<&'static [T::Acc; COUNT]>,
}

impl<T: Tables> Computed<T> {
    /// For a tensor of `len` elements.
    pub(super) fn new(function: Pointwise, of: Of, len: usize) -> Self {
        Self { function, of, table: T::table(function, of, len) }
    }

    /// Writes results of `x` to `wide`, of the same length.
    #[inline(always)]
    pub(super) fn write(&self, x: &[T], wide: &mut [T::Acc]) {
        if let Some((table, bits)) = self.table.zip(T::bits(x)) {
            return look_up(table, bits, wide);
        }
        for (wide, x) in wide.iter_mut().zip(x) {
            *wide = x.widened();
        }
        compute(self.function, self.of, wide);
    }
}

/// One load after the other. Inlined where there are wider vectors, it would become gathers, which take longer.
#[inline(never)]
fn look_up<A: Copy>(table: &[A; COUNT], bits: &[u16], results: &mut [A]) {
    for (result, &bits) in results.iter_mut().zip(bits) {
        *result = table[usize::from(bits)];
    }
}
