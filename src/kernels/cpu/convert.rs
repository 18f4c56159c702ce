//! F16 and BF16 to F32 and back, an element at a time, in loops that vectorise.
//!
//! Conversions of the `half` crate do not vectorise inside a loop: they look up the processor's features, or
//! branch. These are the same functions in plain integer arithmetic. Rounding is to nearest even.

use half::{bf16, f16};

#[inline(always)]
pub(super) fn bf16_to_f32(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

#[inline(always)]
pub(super) fn f32_to_bf16(value: f32) -> bf16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet_nan = (bits >> 16) | 0x40;
    bf16::from_bits(if value.is_nan() { quiet_nan } else { rounded } as u16)
}

/// Bits of an `f32`: its sign aside, an infinity, and one times two to the `exponent`.
const INFINITY: u32 = 0x7f80_0000;
const fn power_of_two(exponent: i32) -> u32 {
    ((exponent + 127) as u32) << 23
}

#[inline(always)]
pub(super) fn f16_to_f32(value: f16) -> f32 {
    let bits = u32::from(value.to_bits());
    // In place, but with an exponent that is too small by the difference of the biases.
    let magnitude = (bits & 0x7fff) << 13;
    let finite = f32::from_bits(magnitude) * f32::from_bits(power_of_two(127 - 15));
    let special = f32::from_bits(magnitude | INFINITY);
    let magnitude = if bits & 0x7c00 == 0x7c00 { special } else { finite };
    f32::from_bits(magnitude.to_bits() | ((bits & 0x8000) << 16))
}

#[inline(always)]
pub(super) fn f32_to_f16(value: f32) -> f16 {
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
