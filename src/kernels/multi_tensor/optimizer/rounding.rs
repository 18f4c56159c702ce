//! How the F32 results of a step are stored in 16 bits: with an exact remainder, or by stochastic rounding.
//!
//! Rounded to nearest, a BF16 weight would lose every update that is less than half of its last bit. Two ways keep
//! such updates:
//!
//! - [`split`]: the weight in BF16 and an I16 remainder, together the exact F32. That is 4 bytes per weight, where a
//!   BF16 weight with an F32 master has 6.
//! - [`Stochastic`]: F16 or BF16, rounded up or down at random, so that the mean is the F32. That is 2 bytes.
//!
//! The random bits are a hash of the seed, the tensor and the element's number, not the state of a generator. So
//! nothing is stored, and neither the number of threads nor the device changes a bit: `optimizer.cu` has the same
//! functions. They have conditionals on bits and no branches, so that loops over elements vectorise.

use half::{bf16, f16};

use crate::kernels::cpu::lane::Lane;

/// The bits of an `F32` as a `BF16`, its nearest, and what is left over, so that [`rebuild`] gives
/// the same bits again.
///
/// A tie goes away from zero, and must. If ties went to even, 65,537 `F32` numbers would round to
/// an even `BF16`: one more than 16 bits can tell apart. That is another `BF16` than rounding to
/// even gives in one of 2¹⁷ numbers. NaN stays NaN; a payload in the low 16 bits alone comes back
/// with the quiet bit set.
#[inline(always)]
pub(crate) fn split(value: f32) -> (bf16, i16) {
    let bits = value.to_bits();
    let low = bits as u16;
    // Low 16 bits of 0x8000 or more are negative as an i16: they are taken off the number above.
    let nearest = (bits.wrapping_add(0x8000) >> 16) as u16;
    let high = (bits >> 16) as u16;
    let quiet = if high & 0x7f == 0 { high | 0x40 } else { high };
    (bf16::from_bits(if value.is_nan() { quiet } else { nearest }), low as i16)
}

/// The `F32` that [`split`] was given.
#[inline(always)]
pub(crate) fn rebuild(rounded: bf16, rest: i16) -> f32 {
    let high = u32::from(rounded.to_bits()) << 16;
    let joined = high | u32::from(rest as u16);
    let sum = high.wrapping_add(i32::from(rest) as u32);
    f32::from_bits(if rounded.is_nan() { joined } else { sum })
}

/// Where the random bits of a tensor come from: a hash of the key and the element's number, so that
/// they do not depend on the number of threads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Key(u32, u32);

impl Key {
    /// The key of the `number`th tensor of those that share a `seed`.
    pub(crate) fn new(seed: u64, number: usize) -> Self {
        // SplitMix64.
        let mut z = seed.wrapping_add((number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        Self(z as u32, (z >> 32) as u32)
    }

    /// The key of a part of the tensor that starts at element `start`.
    #[inline(always)]
    fn at(self, start: usize) -> Self {
        // Elements are numbered by 32 bits; what is above makes another key.
        match start as u64 >> 32 {
            0 => self,
            high => Self::new(u64::from(self.0) << 32 | u64::from(self.1), high as usize),
        }
    }

    /// 32 random bits: a hash with two multiplications ("lowbias32", Wellons 2018), keyed twice.
    #[inline(always)]
    fn bits(self, number: u32) -> u32 {
        let mut x = number ^ self.0;
        x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
        x = (x ^ (x >> 15)).wrapping_add(self.1).wrapping_mul(0x846c_a68b);
        x ^ (x >> 16)
    }
}

/// A 16-bit type with stochastic rounding: up as often as the number is close to the upper neighbour, so that the mean
/// is the number.
pub(crate) trait Stochastic: Lane<Acc = f32> {
    /// `value` rounded with 32 random `bits`. What fits stays as it is, NaN and infinities too. Where up would be infinity,
    /// it is rounded to nearest: no draw makes a finite weight infinite for good.
    fn stochastic(value: f32, bits: u32) -> Self;

    /// Rounds `src`, whose first element is the `start`th of its tensor, to `dst`.
    #[inline(always)]
    fn round_all(src: &[f32], dst: &mut [Self], key: Key, start: usize) {
        let (key, start) = (key.at(start), start as u32);
        for (i, (d, s)) in dst.iter_mut().zip(src).enumerate() {
            *d = Self::stochastic(*s, key.bits(start.wrapping_add(i as u32)));
        }
    }
}

const INFINITY: u32 = 0x7f80_0000;
/// 65,536, the first power of two that `F16` does not have.
const BEYOND_F16: u32 = (127 + 16) << 23;

impl Stochastic for bf16 {
    #[inline(always)]
    fn stochastic(value: f32, random: u32) -> Self {
        let bits = value.to_bits();
        let rounded = (bits.wrapping_add(random >> 16) >> 16) as u16;
        let finite = u32::from(rounded & 0x7fff) << 16 < INFINITY && bits & 0x7fff_ffff < INFINITY;
        // A conditional on bits, so that the loop vectorises.
        let nearest = bf16::narrowed(value).to_bits();
        bf16::from_bits(if finite { rounded } else { nearest })
    }
}

impl Stochastic for f16 {
    #[inline(always)]
    fn stochastic(value: f32, random: u32) -> Self {
        let bits = value.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        // Normal: the last 13 bits are dropped.
        let normal = (magnitude.wrapping_add(random >> 19)) & !0x1fff;
        let normal = f32::from_bits(if normal < BEYOND_F16 { normal } else { magnitude });
        // Subnormal: whole numbers of 2^-24, and the rest is the chance of one more.
        let unit = 1.0 / 16_777_216.0;
        let count = f32::from_bits(magnitude) * 16_777_216.0;
        let whole = (count as i32) as f32;
        let up = f32::from(u8::from(((random >> 8) as f32 * unit) < count - whole));
        let subnormal = (whole + up) * unit;
        let small = magnitude < (127 - 14) << 23;
        let rounded = if small { subnormal } else { normal };
        let rounded = if magnitude < INFINITY { rounded.to_bits() } else { magnitude };
        f16::narrowed(f32::from_bits(rounded | (bits & 0x8000_0000)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn survives(bits: u32) {
        let value = f32::from_bits(bits);
        let (high, low) = split(value);
        let back = rebuild(high, low);
        if value.is_nan() {
            assert!(back.is_nan() && high.is_nan(), "{bits:#x}");
            let payload = bits & 0x007f_0000 == 0;
            assert!(payload || back.to_bits() == bits, "{bits:#x}: {:#x}", back.to_bits());
            return;
        }
        assert_eq!(back.to_bits(), bits, "{bits:#x}");
        // The nearest, and away from zero from half way between two.
        let tie = bits & 0xffff == 0x8000;
        let even = bf16::narrowed(value).to_bits();
        let expected = if tie { (bits >> 16) as u16 + 1 } else { even };
        assert_eq!(high.to_bits(), expected, "{bits:#x}");
    }

    #[test]
    fn a_number_survives_being_split() {
        for high in 0..=u16::MAX {
            for low in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff, u32::from(high) ^ 0x5a5a] {
                survives(u32::from(high) << 16 | low);
            }
        }
    }

    #[test]
    #[ignore = "half a minute: all 2^32 numbers"]
    fn every_number_survives_being_split() {
        (0..=u32::MAX).for_each(survives);
    }

    fn mean_of_rounded<T: Stochastic>(value: f32) -> f64 {
        const DRAWS: usize = 1 << 16;
        let mut rounded = vec![T::default(); DRAWS];
        T::round_all(&[value; DRAWS], &mut rounded, Key::new(7, 3), 5);
        rounded.iter().map(|x| f64::from(x.widened())).sum::<f64>() / DRAWS as f64
    }

    fn is_unbiased<T: Stochastic>(value: f32, gap: f64) {
        let mean = mean_of_rounded::<T>(value);
        // A draw deviates by half a gap at most: the mean of n by that over sqrt(n); five of it.
        let tolerance = 5.0 * gap / 2.0 / 256.0;
        assert!((mean - f64::from(value)).abs() <= tolerance, "{value:e}: {mean:e}");
    }

    #[test]
    fn rounding_at_random_is_right_on_average() {
        for share in [0.0, 0.01, 0.25, 0.5, 0.77, 0.99] {
            for sign in [1.0, -1.0] {
                let (bf, half) = (2f64.powi(-7), 2f64.powi(-10));
                is_unbiased::<bf16>((sign * (1.0 + bf * share)) as f32, bf);
                is_unbiased::<f16>((sign * (1.0 + half * share)) as f32, half);
                let tiny = 2f64.powi(-24);
                is_unbiased::<f16>((sign * tiny * (3.0 + share)) as f32, tiny);
                is_unbiased::<f16>((sign * tiny * share) as f32, tiny);
                let last = 2f64.powi(-133);
                is_unbiased::<bf16>((sign * last * share) as f32, last);
            }
        }
    }

    fn keeps_what_fits<T: Stochastic>(all: impl Iterator<Item = T>) {
        for x in all {
            for random in [0, 1, 0x1234_5678, u32::MAX] {
                let (a, b) = (T::stochastic(x.widened(), random).widened(), x.widened());
                assert!(a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(), "{b:e}");
            }
        }
    }

    #[test]
    fn rounding_at_random_keeps_what_fits() {
        keeps_what_fits((0..=u16::MAX).map(bf16::from_bits));
        keeps_what_fits((0..=u16::MAX).map(f16::from_bits));
        let beyond = f16::stochastic(1e6, 1);
        assert_eq!(beyond, f16::INFINITY);
    }

    /// Between the largest number and what rounds to infinity, all give that number: nothing above it is finite.
    #[test]
    fn rounding_at_random_makes_nothing_finite_infinite() {
        let largest = bf16::MAX.to_f32();
        let above = f32::from_bits(largest.to_bits() + 0x7fff);
        for sign in [1.0, -1.0] {
            for random in [0, 1 << 19, 0x8000_0000, u32::MAX] {
                for value in [65_505.0, 65_512.0, 65_519.0] {
                    assert_eq!(f16::stochastic(sign * value, random).to_f32(), sign * 65_504.0);
                }
                assert_eq!(bf16::stochastic(sign * above, random).to_f32(), sign * largest);
            }
            assert_eq!(f16::stochastic(sign * 65_521.0, u32::MAX).to_f32(), sign * f32::INFINITY);
            assert_eq!(bf16::stochastic(sign * f32::MAX, u32::MAX).to_f32(), sign * f32::INFINITY);
        }
    }

    #[test]
    fn elements_tensors_and_seeds_draw_each_their_own() {
        let count = |key: Key, start: usize| {
            let mut rounded = vec![bf16::ZERO; 4096];
            bf16::round_all(&[1.0 + 2f32.powi(-8); 4096], &mut rounded, key, start);
            rounded.iter().map(|x| x.to_f32() > 1.0).collect::<Vec<_>>()
        };
        let first = count(Key::new(1, 0), 0);
        let others = [
            count(Key::new(2, 0), 0),
            count(Key::new(1, 1), 0),
            count(Key::new(1, 0), 4096),
            count(Key::new(1, 0), 1 << 33),
        ];
        assert_eq!(first, count(Key::new(1, 0), 0));
        for other in others {
            let same = first.iter().zip(&other).filter(|(a, b)| a == b).count();
            // Half of them by chance, 32 more or less being one standard deviation.
            assert!((1888..=2208).contains(&same), "{same} of 4096 alike");
        }
    }
}
