//! Conversions an element at a time, in loops that vectorise.
//!
//! A loop that widens, computes and rounds in registers touches memory once.

use half::{bf16, f16};

use super::convert::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use crate::kernels::cpu::dtype::Element;

/// An element that converts without branches.
pub(crate) trait Lane: Element {
    /// The same value in the type of the arithmetic.
    fn widened(self) -> Self::Acc;
    /// `value`, rounded to nearest even.
    fn narrowed(value: Self::Acc) -> Self;
}

impl Lane for f32 {
    #[inline(always)]
    fn widened(self) -> f32 {
        self
    }
    #[inline(always)]
    fn narrowed(value: f32) -> f32 {
        value
    }
}

impl Lane for f64 {
    #[inline(always)]
    fn widened(self) -> f64 {
        self
    }
    #[inline(always)]
    fn narrowed(value: f64) -> f64 {
        value
    }
}

impl Lane for bf16 {
    #[inline(always)]
    fn widened(self) -> f32 {
        bf16_to_f32(self)
    }
    #[inline(always)]
    fn narrowed(value: f32) -> bf16 {
        f32_to_bf16(value)
    }
}

impl Lane for f16 {
    #[inline(always)]
    fn widened(self) -> f32 {
        f16_to_f32(self)
    }
    #[inline(always)]
    fn narrowed(value: f32) -> f16 {
        f32_to_f16(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_is_raised_exactly() {
        for bits in 0..=u16::MAX {
            let (a, b) = (f16::from_bits(bits).widened(), f16::from_bits(bits).to_f32());
            assert!(a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(), "{bits:#x}");
            let (a, b) = (bf16::from_bits(bits).widened(), bf16::from_bits(bits).to_f32());
            assert!(a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(), "{bits:#x}");
        }
    }

    #[test]
    fn floats_are_lowered_as_the_half_crate_does() {
        // Every sign and exponent, and the low bits around the ties of both formats.
        for high in 0..=u16::MAX {
            for low in [0u32, 1, 0xfff, 0x1000, 0x1001, 0x1fff, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let value = f32::from_bits(u32::from(high) << 16 | low);
                let (a, b) = (f16::narrowed(value), f16::from_f32_const(value));
                assert!(a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(), "{value:e}");
                let (a, b) = (bf16::narrowed(value), bf16::from_f32(value));
                assert!(a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(), "{value:e}");
            }
        }
    }
}
