//! Conversions an element at a time, in loops that vectorise.
//!
//! A loop that widens, computes and rounds in registers touches memory once. Conversions of the
//! `half` crate do not vectorise inside such a loop: they look up the processor's features, or
//! branch. These are the same functions in plain integer arithmetic.

use half::{bf16, f16};

use crate::kernels::element::Element;

/// An element that converts without branches.
pub(crate) trait Lane: Element {
    /// The same value in the type of the arithmetic.
    fn raise(self) -> Self::Acc;
    /// `value`, rounded to nearest even.
    fn lower(value: Self::Acc) -> Self;
}

impl Lane for f32 {
    #[inline(always)]
    fn raise(self) -> f32 {
        self
    }
    #[inline(always)]
    fn lower(value: f32) -> f32 {
        value
    }
}

impl Lane for f64 {
    #[inline(always)]
    fn raise(self) -> f64 {
        self
    }
    #[inline(always)]
    fn lower(value: f64) -> f64 {
        value
    }
}

impl Lane for bf16 {
    #[inline(always)]
    fn raise(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn lower(value: f32) -> bf16 {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let quiet_nan = (bits >> 16) | 0x40;
        bf16::from_bits(if value.is_nan() { quiet_nan } else { rounded } as u16)
    }
}

/// Bits of an `f32`: its sign aside, an infinity, and one times two to the `exponent`.
const INFINITY: u32 = 0x7f80_0000;
const fn power_of_two(exponent: i32) -> u32 {
    ((exponent + 127) as u32) << 23
}

impl Lane for f16 {
    #[inline(always)]
    fn raise(self) -> f32 {
        let bits = u32::from(self.to_bits());
        // In place, but with an exponent that is too small by the difference of the biases.
        let magnitude = (bits & 0x7fff) << 13;
        let finite = f32::from_bits(magnitude) * f32::from_bits(power_of_two(127 - 15));
        let special = f32::from_bits(magnitude | INFINITY);
        let value = if bits & 0x7c00 == 0x7c00 { special } else { finite };
        f32::from_bits(value.to_bits() | ((bits & 0x8000) << 16))
    }

    #[inline(always)]
    fn lower(value: f32) -> f16 {
        let bits = value.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        let odd = (magnitude >> 13) & 1;
        let rebiased = magnitude.wrapping_sub((127 - 15) << 23);
        let normal = rebiased.wrapping_add(0xfff + odd) >> 13;
        // The sum has its last place where subnormals have theirs: the addition rounds.
        let half = power_of_two(-1);
        let sum = f32::from_bits(magnitude) + f32::from_bits(half);
        let subnormal = sum.to_bits().wrapping_sub(half);
        let small = if magnitude < power_of_two(-14) { subnormal } else { normal };
        let finite = if magnitude >= power_of_two(16) { 0x7c00 } else { small };
        let quiet_nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
        let rounded = if magnitude > INFINITY { quiet_nan } else { finite };
        f16::from_bits((rounded | ((bits >> 16) & 0x8000)) as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_is_raised_exactly() {
        for bits in 0..=u16::MAX {
            let (a, b) = (f16::from_bits(bits).raise(), f16::from_bits(bits).to_f32());
            assert!(a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(), "{bits:#x}");
            let (a, b) = (bf16::from_bits(bits).raise(), bf16::from_bits(bits).to_f32());
            assert!(a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(), "{bits:#x}");
        }
    }

    #[test]
    fn floats_are_lowered_as_the_half_crate_does() {
        // Every sign and exponent, and the low bits around the ties of both formats.
        for high in 0..=u16::MAX {
            for low in [0u32, 1, 0xfff, 0x1000, 0x1001, 0x1fff, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let value = f32::from_bits(u32::from(high) << 16 | low);
                let (a, b) = (f16::lower(value), f16::from_f32_const(value));
                assert!(a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(), "{value:e}");
                let (a, b) = (bf16::lower(value), bf16::from_f32(value));
                assert!(a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(), "{value:e}");
            }
        }
    }
}
