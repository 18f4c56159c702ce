//! Four registers of NEON.
#![allow(unsafe_code)]

use std::arch::aarch64::*;

use half::{bf16, f16};

use super::sets::Vectors;
use crate::kernels::cpu::vector::lanes::{Vector, copy_run};

/// The expression of each register's number. It calls instructions of NEON.
macro_rules! each {
    ($i:ident => $x:expr) => {
        // SAFETY: every processor of this target has NEON.
        unsafe {
            [
                {
                    let $i = 0;
                    $x
                },
                {
                    let $i = 1;
                    $x
                },
                {
                    let $i = 2;
                    $x
                },
                {
                    let $i = 3;
                    $x
                },
            ]
        }
    };
}

/// An instruction that picks lanes of two registers, of neighbours among four and then four more.
macro_rules! pick {
    ($instruction:ident, $low:expr, $high:expr) => {{
        let ([a, b, c, d], [e, f, g, h]) = ($low, $high);
        // SAFETY: every processor of this target has NEON.
        unsafe { [$instruction(a, b), $instruction(c, d), $instruction(e, f), $instruction(g, h)] }
    }};
}

/// Sixteen F32 in four registers: NEON, as every processor of this target has it.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernels) struct Neon([float32x4_t; 4]);

impl Neon {
    /// Calls `f`: its instructions are those of the whole crate.
    ///
    /// # Panics
    /// When they may not be used.
    #[inline]
    pub(in crate::kernels) fn run<R>(mut f: impl FnMut() -> R) -> R {
        assert!(Vectors::Neon.is_available(), "NEON is not allowed");
        f()
    }

    #[inline(always)]
    fn bits(self) -> [uint32x4_t; 4] {
        each!(i => vreinterpretq_u32_f32(self.0[i]))
    }

    #[inline(always)]
    fn of(bits: [uint32x4_t; 4]) -> Self {
        Self(each!(i => vreinterpretq_f32_u32(bits[i])))
    }

    /// Pairs of 16 bits.
    #[inline(always)]
    fn pairs(self) -> [uint16x8_t; 4] {
        each!(i => vreinterpretq_u16_f32(self.0[i]))
    }

    #[inline(always)]
    fn of_pairs(pairs: [uint16x8_t; 4]) -> Self {
        Self(each!(i => vreinterpretq_f32_u16(pairs[i])))
    }
}

impl Vector for Neon {
    const WIDE: bool = false;

    #[inline(always)]
    unsafe fn zero() -> Self {
        Self(each!(_i => vdupq_n_f32(0.0)))
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self(each!(_i => vdupq_n_f32(x)))
    }

    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self {
        // SAFETY: the caller's.
        unsafe {
            Self([vld1q_f32(at), vld1q_f32(at.add(4)), vld1q_f32(at.add(8)), vld1q_f32(at.add(12))])
        }
    }

    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        for (i, x) in self.0.into_iter().enumerate() {
            // SAFETY: the caller's.
            unsafe { vst1q_f32(at.add(4 * i), x) };
        }
    }

    #[inline(always)]
    unsafe fn load_masked(at: *const f32, mask: u16) -> Self {
        // SAFETY: the caller's; a vector has 16 elements.
        unsafe {
            if mask == u16::MAX {
                return Self::load(at);
            }
            let mut lanes = [0f32; 16];
            copy_run(at, lanes.as_mut_ptr(), mask);
            Self::load(lanes.as_ptr())
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(at: *const bf16, mask: u16) -> Self {
        // SAFETY: the caller's.
        unsafe {
            let [low, high] = load_halves(at.cast(), mask);
            Self::of([
                vshll_n_u16::<16>(vget_low_u16(low)),
                vshll_high_n_u16::<16>(low),
                vshll_n_u16::<16>(vget_low_u16(high)),
                vshll_high_n_u16::<16>(high),
            ])
        }
    }

    #[inline(always)]
    unsafe fn load_f16(at: *const f16, mask: u16) -> Self {
        // SAFETY: the caller's.
        unsafe {
            let [low, high] = load_halves(at.cast(), mask);
            let (low, high) = (vreinterpretq_f16_u16(low), vreinterpretq_f16_u16(high));
            Self([
                vcvt_f32_f16(vget_low_f16(low)),
                vcvt_high_f32_f16(low),
                vcvt_f32_f16(vget_low_f16(high)),
                vcvt_high_f32_f16(high),
            ])
        }
    }

    #[inline(always)]
    unsafe fn load_pairs(at: *const bf16, mask: u32) -> Self {
        // SAFETY: the caller's.
        unsafe {
            let [a, b] = load_halves(at.cast(), mask as u16);
            let [c, d] = load_halves(at.wrapping_add(16).cast(), (mask >> 16) as u16);
            Self::of_pairs([a, b, c, d])
        }
    }

    #[inline(always)]
    unsafe fn store_masked(self, at: *mut f32, mask: u16) {
        // SAFETY: the caller's; a vector has 16 elements.
        unsafe {
            if mask == u16::MAX {
                return self.store(at);
            }
            let mut lanes = [0f32; 16];
            self.store(lanes.as_mut_ptr());
            copy_run(lanes.as_ptr(), at, mask);
        }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, at: *mut bf16, mask: u16) {
        let [a, b, c, d] = self.0;
        let (a, b) = (rounded_to_bf16(a), rounded_to_bf16(b));
        let (c, d) = (rounded_to_bf16(c), rounded_to_bf16(d));
        // SAFETY: the caller's; these are the upper halves.
        unsafe { store_halves([vuzp2q_u16(a, b), vuzp2q_u16(c, d)], at.cast(), mask) }
    }

    #[inline(always)]
    unsafe fn store_pairs(self, at: *mut bf16, mask: u32) {
        let [a, b, c, d] = self.pairs();
        // SAFETY: the caller's.
        unsafe {
            store_halves([a, b], at.cast(), mask as u16);
            store_halves([c, d], at.wrapping_add(16).cast(), (mask >> 16) as u16);
        }
    }

    #[inline(always)]
    unsafe fn store_f16(self, at: *mut f16, mask: u16) {
        let [a, b, c, d] = self.0;
        // SAFETY: the caller's.
        unsafe {
            let low = vcvt_high_f16_f32(vcvt_f16_f32(a), b);
            let high = vcvt_high_f16_f32(vcvt_f16_f32(c), d);
            store_halves(
                [vreinterpretq_u16_f16(low), vreinterpretq_u16_f16(high)],
                at.cast(),
                mask,
            );
        }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        Self(each!(i => vaddq_f32(self.0[i], other.0[i])))
    }

    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        Self(each!(i => vsubq_f32(self.0[i], other.0[i])))
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        Self(each!(i => vmulq_f32(self.0[i], other.0[i])))
    }

    #[inline(always)]
    unsafe fn mul_add(self, by: Self, sum: Self) -> Self {
        Self(each!(i => vfmaq_f32(sum.0[i], self.0[i], by.0[i])))
    }

    #[inline(always)]
    unsafe fn or(self, other: Self) -> Self {
        let (a, b) = (self.bits(), other.bits());
        Self::of(each!(i => vorrq_u32(a[i], b[i])))
    }

    #[inline(always)]
    unsafe fn upper(self) -> Self {
        let bits = self.bits();
        Self::of(each!(i => vandq_u32(bits[i], vdupq_n_u32(!0xffff))))
    }

    #[inline(always)]
    unsafe fn shift_up(self) -> Self {
        let bits = self.bits();
        Self::of(each!(i => vshlq_n_u32::<16>(bits[i])))
    }

    #[inline(always)]
    unsafe fn shift_down(self) -> Self {
        let bits = self.bits();
        Self::of(each!(i => vshrq_n_u32::<16>(bits[i])))
    }

    #[inline(always)]
    unsafe fn nearest_bf16(self) -> Self {
        let bits = self.bits();
        let up = Self::of(each!(i => {
            let is_number = vceqq_f32(self.0[i], self.0[i]);
            vaddq_u32(bits[i], vandq_u32(vdupq_n_u32(0x8000), is_number))
        }));
        // SAFETY: the caller's.
        unsafe { up.upper() }
    }

    #[inline(always)]
    unsafe fn lower_halves(self, high: Self) -> Self {
        Self::of_pairs(pick!(vuzp1q_u16, self.pairs(), high.pairs()))
    }

    #[inline(always)]
    unsafe fn upper_halves(self, high: Self) -> Self {
        Self::of_pairs(pick!(vuzp2q_u16, self.pairs(), high.pairs()))
    }

    #[inline(always)]
    unsafe fn evens(self, high: Self) -> Self {
        Self(pick!(vuzp1q_f32, self.0, high.0))
    }

    #[inline(always)]
    unsafe fn odds(self, high: Self) -> Self {
        Self(pick!(vuzp2q_f32, self.0, high.0))
    }

    #[inline(always)]
    unsafe fn interleave(self, odds: Self) -> [Self; 2] {
        let ([a, b, c, d], [e, f, g, h]) = (self.0, odds.0);
        // SAFETY: the caller's.
        unsafe {
            [
                Self([vzip1q_f32(a, e), vzip2q_f32(a, e), vzip1q_f32(b, f), vzip2q_f32(b, f)]),
                Self([vzip1q_f32(c, g), vzip2q_f32(c, g), vzip1q_f32(d, h), vzip2q_f32(d, h)]),
            ]
        }
    }

    #[inline(always)]
    unsafe fn transpose(rows: [Self; 16]) -> [Self; 16] {
        let mut columns = rows;
        for across in 0..4 {
            for down in 0..4 {
                let row = 4 * down;
                let block = transposed([
                    rows[row].0[across],
                    rows[row + 1].0[across],
                    rows[row + 2].0[across],
                    rows[row + 3].0[across],
                ]);
                for (i, column) in block.into_iter().enumerate() {
                    columns[4 * across + i].0[down] = column;
                }
            }
        }
        columns
    }

    #[inline(always)]
    unsafe fn is_finite(self, mask: u16) -> bool {
        // SAFETY: the caller's; there are four numbers.
        unsafe {
            let (exponent, lanes) = (vdupq_n_u32(0x7f80_0000), vld1q_u32([1, 2, 4, 8].as_ptr()));
            let mut wrong = 0;
            for (quarter, bits) in self.bits().into_iter().enumerate() {
                let equal = vceqq_u32(vandq_u32(bits, exponent), exponent);
                wrong |= (vaddvq_u32(vandq_u32(equal, lanes)) as u16) << (4 * quarter);
            }
            wrong & mask == 0
        }
    }

    #[inline(always)]
    unsafe fn multiply<
        const ROWS: usize,
        const COUNT: usize,
        const LEFT: usize,
        const ADD: bool,
    >(
        left: (*const f32, usize),
        right: (*const f32, usize),
        depth: usize,
        out: (*mut f32, usize),
    ) {
        // Of 32 registers, sums take 24 or 16, and columns of the right matrix three or two. Of fewer rows than eight,
        // there are four of columns.
        const { assert!(ROWS.is_multiple_of(8) || ROWS <= 6 && COUNT == 1) };
        if ROWS <= 6 {
            // SAFETY: the caller's.
            return unsafe { block::<ROWS, 4, LEFT, ADD>(left, right, depth, out) };
        }
        let wide = if COUNT == 3 { 3 } else { 2 };
        for row in (0..ROWS).step_by(8) {
            for quarter in (0..4 * COUNT).step_by(wide) {
                let left = (left.0.wrapping_add(row * LEFT), left.1);
                let right = (right.0.wrapping_add(4 * quarter), right.1);
                let out = (out.0.wrapping_add(row * out.1 + 4 * quarter), out.1);
                // SAFETY: the caller's.
                unsafe {
                    match COUNT {
                        3 => block::<8, 3, LEFT, ADD>(left, right, depth, out),
                        _ => block::<8, 2, LEFT, ADD>(left, right, depth, out),
                    }
                }
            }
        }
    }
}

/// [`Vector::multiply`] of so many rows by so many registers of columns, whose sums registers hold.
///
/// # Safety
/// As there.
#[inline(always)]
unsafe fn block<const ROWS: usize, const COUNT: usize, const LEFT: usize, const ADD: bool>(
    (mut left, left_step): (*const f32, usize),
    (mut right, right_step): (*const f32, usize),
    depth: usize,
    out: (*mut f32, usize),
) {
    // SAFETY: the caller's.
    unsafe {
        let mut sums = [[vdupq_n_f32(0.0); COUNT]; ROWS];
        for _ in 0..depth {
            let mut columns = [vdupq_n_f32(0.0); COUNT];
            for (n, column) in columns.iter_mut().enumerate() {
                *column = vld1q_f32(right.wrapping_add(n * 4));
            }
            for (i, sums) in sums.iter_mut().enumerate() {
                let row = *left.wrapping_add(i * LEFT);
                for (sum, column) in sums.iter_mut().zip(columns) {
                    *sum = vfmaq_n_f32(*sum, column, row);
                }
            }
            left = left.wrapping_add(left_step);
            right = right.wrapping_add(right_step);
        }
        for (i, sums) in sums.iter().enumerate() {
            for (n, &sum) in sums.iter().enumerate() {
                let at = out.0.wrapping_add(i * out.1 + n * 4);
                let sum = if ADD { vaddq_f32(vld1q_f32(at), sum) } else { sum };
                vst1q_f32(at, sum);
            }
        }
    }
}

/// Sixteen elements of 16 bits; zeros for those that are not in the mask.
///
/// # Safety
/// The elements of the mask can be read.
#[inline(always)]
unsafe fn load_halves(at: *const u16, mask: u16) -> [uint16x8_t; 2] {
    // SAFETY: the caller's; a vector has 16 elements.
    unsafe {
        let mut elements = [0u16; 16];
        let at = match mask {
            u16::MAX => at,
            _ => {
                copy_run(at, elements.as_mut_ptr(), mask);
                elements.as_ptr()
            }
        };
        [vld1q_u16(at), vld1q_u16(at.add(8))]
    }
}

/// Writes the elements of the mask, of sixteen of 16 bits.
///
/// # Safety
/// The elements of the mask can be written.
#[inline(always)]
unsafe fn store_halves([low, high]: [uint16x8_t; 2], at: *mut u16, mask: u16) {
    // SAFETY: the caller's; a vector has 16 elements.
    unsafe {
        let mut elements = [0u16; 16];
        let to = if mask == u16::MAX { at } else { elements.as_mut_ptr() };
        vst1q_u16(to, low);
        vst1q_u16(to.add(8), high);
        if mask != u16::MAX {
            copy_run(elements.as_ptr(), at, mask);
        }
    }
}

/// To nearest even, in the upper halves.
#[inline(always)]
fn rounded_to_bf16(x: float32x4_t) -> uint16x8_t {
    // SAFETY: every processor of this target has NEON.
    unsafe {
        let bits = vreinterpretq_u32_f32(x);
        let last = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
        let up = vaddq_u32(bits, vaddq_u32(last, vdupq_n_u32(0x7fff)));
        // A NaN stays one: its sign and upper bits, and the quiet bit.
        let quiet = vorrq_u32(bits, vdupq_n_u32(0x0040_0000));
        vreinterpretq_u16_u32(vbslq_u32(vceqq_f32(x, x), up, quiet))
    }
}

/// Four rows of four, with rows and columns exchanged.
#[inline(always)]
fn transposed([a, b, c, d]: [float32x4_t; 4]) -> [float32x4_t; 4] {
    // SAFETY: every processor of this target has NEON.
    unsafe {
        // Columns 0 and 2 of two rows in turns, and columns 1 and 3.
        let even = vreinterpretq_f64_f32(vtrn1q_f32(a, b));
        let odd = vreinterpretq_f64_f32(vtrn2q_f32(a, b));
        let below_even = vreinterpretq_f64_f32(vtrn1q_f32(c, d));
        let below_odd = vreinterpretq_f64_f32(vtrn2q_f32(c, d));
        [
            vreinterpretq_f32_f64(vzip1q_f64(even, below_even)),
            vreinterpretq_f32_f64(vzip1q_f64(odd, below_odd)),
            vreinterpretq_f32_f64(vzip2q_f64(even, below_even)),
            vreinterpretq_f32_f64(vzip2q_f64(odd, below_odd)),
        ]
    }
}
