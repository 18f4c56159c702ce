//! Products of matrices by AVX2.
#![allow(unsafe_code)]

use std::arch::asm;
use std::arch::x86_64::*;

/// `sums[i][v] += left[i * across] * right[at[v]..][..8]`, so many times, with `left` and `right` further by a step each
/// time; `at[0]` is 0.
///
/// In assembly, as twelve sums, three registers of columns and an element take all sixteen registers. The compiler would
/// keep one of the sums in memory, and every step would wait for it: that takes twice the time.
///
/// # Safety
/// All elements that are named can be read.
#[target_feature(enable = "avx2,fma")]
pub(in crate::kernels) unsafe fn add_products(
    sums: &mut [[__m256; 3]; 4],
    (mut left, across, left_step): (*const f32, usize, usize),
    (mut right, [second, third], right_step): (*const f32, [usize; 2], usize),
    times: usize,
) {
    if cfg!(miri) {
        for _ in 0..times {
            for (i, sums) in sums.iter_mut().enumerate() {
                for (sum, at) in sums.iter_mut().zip([0, second, third]) {
                    // SAFETY: the caller's.
                    *sum = unsafe {
                        let row = _mm256_broadcast_ss(&*left.wrapping_add(i * across));
                        _mm256_fmadd_ps(row, _mm256_loadu_ps(right.wrapping_add(at)), *sum)
                    };
                }
            }
            (left, right) = (left.wrapping_add(left_step), right.wrapping_add(right_step));
        }
        return;
    }
    if times == 0 {
        return;
    }
    const SIZE: usize = size_of::<f32>();
    let [a, b, c, d] = sums;
    // SAFETY: it reads what the caller says can be read, and writes registers that it names.
    unsafe {
        asm!(
            "2:",
            "vmovups {x}, [{right}]",
            "vmovups {y}, [{right} + {second}]",
            "vmovups {z}, [{right} + {third}]",
            "vbroadcastss {row}, [{left}]",
            "vfmadd231ps {a0}, {row}, {x}",
            "vfmadd231ps {a1}, {row}, {y}",
            "vfmadd231ps {a2}, {row}, {z}",
            "vbroadcastss {row}, [{left} + {across}]",
            "vfmadd231ps {b0}, {row}, {x}",
            "vfmadd231ps {b1}, {row}, {y}",
            "vfmadd231ps {b2}, {row}, {z}",
            "vbroadcastss {row}, [{left} + 2 * {across}]",
            "vfmadd231ps {c0}, {row}, {x}",
            "vfmadd231ps {c1}, {row}, {y}",
            "vfmadd231ps {c2}, {row}, {z}",
            "vbroadcastss {row}, [{left} + {across_3}]",
            "vfmadd231ps {d0}, {row}, {x}",
            "vfmadd231ps {d1}, {row}, {y}",
            "vfmadd231ps {d2}, {row}, {z}",
            "add {left}, {left_step}",
            "add {right}, {right_step}",
            "dec {times}",
            "jnz 2b",
            a0 = inout(ymm_reg) a[0],
            a1 = inout(ymm_reg) a[1],
            a2 = inout(ymm_reg) a[2],
            b0 = inout(ymm_reg) b[0],
            b1 = inout(ymm_reg) b[1],
            b2 = inout(ymm_reg) b[2],
            c0 = inout(ymm_reg) c[0],
            c1 = inout(ymm_reg) c[1],
            c2 = inout(ymm_reg) c[2],
            d0 = inout(ymm_reg) d[0],
            d1 = inout(ymm_reg) d[1],
            d2 = inout(ymm_reg) d[2],
            x = out(ymm_reg) _,
            y = out(ymm_reg) _,
            z = out(ymm_reg) _,
            row = out(ymm_reg) _,
            left = inout(reg) left => _,
            right = inout(reg) right => _,
            times = inout(reg) times => _,
            second = in(reg) second * SIZE,
            third = in(reg) third * SIZE,
            across = in(reg) across * SIZE,
            across_3 = in(reg) 3 * across * SIZE,
            left_step = in(reg) left_step * SIZE,
            right_step = in(reg) right_step * SIZE,
            options(nostack, readonly),
        );
    }
}

/// [`Vector::multiply`](crate::kernels::cpu::vector::Vector::multiply) of so many rows by so many registers of columns,
/// whose sums registers hold: with three registers of columns there are four rows.
///
/// # Safety
/// As there.
#[inline(always)]
pub(super) unsafe fn block<
    const ROWS: usize,
    const COUNT: usize,
    const LEFT: usize,
    const ADD: bool,
>(
    (mut left, left_step): (*const f32, usize),
    (mut right, right_step): (*const f32, usize),
    depth: usize,
    out: (*mut f32, usize),
) {
    // SAFETY: the caller's.
    unsafe {
        const { assert!(COUNT < 3 || ROWS == 4) };
        let mut sums = [[_mm256_setzero_ps(); COUNT]; ROWS];
        let steps = if COUNT == 3 { 0 } else { depth };
        if COUNT == 3 {
            let mut all = [[_mm256_setzero_ps(); 3]; 4];
            add_products(&mut all, (left, LEFT, left_step), (right, [8, 16], right_step), depth);
            for (sums, all) in sums.iter_mut().zip(all) {
                sums.copy_from_slice(&all[..COUNT]);
            }
        }
        for _ in 0..steps {
            let mut columns = [_mm256_setzero_ps(); COUNT];
            for (n, column) in columns.iter_mut().enumerate() {
                *column = _mm256_loadu_ps(right.wrapping_add(n * 8));
            }
            for (i, sums) in sums.iter_mut().enumerate() {
                let row = _mm256_broadcast_ss(&*left.wrapping_add(i * LEFT));
                for (sum, column) in sums.iter_mut().zip(columns) {
                    *sum = _mm256_fmadd_ps(row, column, *sum);
                }
            }
            left = left.wrapping_add(left_step);
            right = right.wrapping_add(right_step);
        }
        for (i, sums) in sums.iter().enumerate() {
            for (n, &sum) in sums.iter().enumerate() {
                let at = out.0.wrapping_add(i * out.1 + n * 8);
                let sum = if ADD { _mm256_add_ps(_mm256_loadu_ps(at), sum) } else { sum };
                _mm256_storeu_ps(at, sum);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::{Rng, SeedableRng};

    use super::*;

    type Sums = [[[f32; 8]; 3]; 4];

    /// # Safety
    /// That of [`add_products`].
    #[target_feature(enable = "avx2,fma")]
    unsafe fn added(
        mut sums: Sums,
        left: (*const f32, usize, usize),
        right: (*const f32, [usize; 2], usize),
        times: usize,
    ) -> Sums {
        // SAFETY: a place has 8 elements; the rest is the caller's.
        unsafe {
            let mut all = sums.map(|row| row.map(|place| _mm256_loadu_ps(place.as_ptr())));
            add_products(&mut all, left, right, times);
            for (place, sum) in sums.iter_mut().flatten().zip(all.iter().flatten()) {
                _mm256_storeu_ps(place.as_mut_ptr(), *sum);
            }
        }
        sums
    }

    /// Of whole numbers, whose sums are exact.
    #[test]
    fn twelve_sums_agree_with_loops() {
        if !(is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")) {
            return;
        }
        let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(22);
        let mut whole = || f32::from(rng.random_range(-9i8..=9));
        for (times, [across, left_step], [second, third], right_step) in [
            (0, [1, 4], [8, 16], 24),
            (1, [1, 4], [8, 16], 24),
            (7, [13, 1], [8, 40], 16),
            (33, [5, 21], [48, 8], 9),
            (64, [64, 1], [100, 200], 8),
        ] {
            let mut numbers = |len: usize| (0..len).map(|_| whole()).collect::<Vec<f32>>();
            let left = numbers(times * left_step + 3 * across + 1);
            let right = numbers(times * right_step + second.max(third) + 8);
            let before: Sums = std::array::from_fn(|_| {
                std::array::from_fn(|_| numbers(8).try_into().expect("8 numbers"))
            });
            let mut expected = before;
            for step in 0..times {
                for (i, row) in expected.iter_mut().enumerate() {
                    for (sums, at) in row.iter_mut().zip([0, second, third]) {
                        let columns = &right[step * right_step + at..];
                        for (sum, column) in sums.iter_mut().zip(columns) {
                            *sum += left[step * left_step + i * across] * column;
                        }
                    }
                }
            }
            // SAFETY: the features are there, and both slices reach beyond the last element that is named.
            let actual = unsafe {
                added(
                    before,
                    (left.as_ptr(), across, left_step),
                    (right.as_ptr(), [second, third], right_step),
                    times,
                )
            };
            assert_eq!(actual, expected, "{times} times, {across} across");
        }
    }
}
