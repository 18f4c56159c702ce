//! Winograd's F(2×2, 2×2) and F(2×2, 3×3), and F(4×4, 3×3) as Lavin and Gray have it, at the points 0, ±1, ±2 and infinity.
//!
//! Of pixels `d` and weights `g`, the sums are `Aᵀ [(G g) ⊙ (Bᵀ d)]`; of squares, `Aᵀ [(G g Gᵀ) ⊙ (Bᵀ d B)] A`. Of three
//! pixels and two weights, two sums are `(d0 - d1) g0 + s` and `s + (d2 - d1) g1`, where `s = d1 (g0 + g1)`: three products
//! for four. Of four pixels and three weights, two sums take four products instead of six; of six, four sums take six instead of
//! twelve.
#![allow(unsafe_code)]

use crate::kernels::cpu::vector::Vector;

/// What results of tiles of so many pixels a side are multiplied by: for six, [`Weights`] are 24 times `G`, whose
/// elements would not be exact otherwise, and too small for small weights.
pub(super) const fn scale(side: usize) -> f32 {
    if side == 6 { 1. / (24. * 24.) } else { 1. }
}

/// A matrix of [`self`], times a line of a square.
pub(super) trait Line {
    /// # Safety
    /// The features of `V`.
    unsafe fn of<V: Vector, const FROM: usize, const TO: usize>(line: [V; FROM]) -> [V; TO];
}

/// `Bᵀ`, of three, four or six pixels.
pub(super) struct Pixels;

impl Line for Pixels {
    #[inline(always)]
    unsafe fn of<V: Vector, const FROM: usize, const TO: usize>(d: [V; FROM]) -> [V; TO] {
        const { assert!(FROM == TO && matches!(FROM, 3 | 4 | 6)) };
        // SAFETY: the caller's.
        unsafe {
            let mut v = [V::zero(); TO];
            if FROM == 3 {
                v[0] = V::sub(d[0], d[1]);
                v[1] = d[1];
                v[2] = V::sub(d[2], d[1]);
                return v;
            }
            if FROM == 4 {
                v[0] = V::sub(d[0], d[2]);
                v[1] = V::add(d[1], d[2]);
                v[2] = V::sub(d[2], d[1]);
                v[3] = V::sub(d[1], d[3]);
                return v;
            }
            let (two, four) = (V::splat(2.0), V::splat(4.0));
            let (less_four, less_five) = (V::splat(-4.0), V::splat(-5.0));
            // `d4 - 4 d2` and `d3 - 4 d1`, of the points ±1; `d4 - d2` and `2 (d3 - d1)`, of ±2.
            let (even, odd) = (less_four.mul_add(d[2], d[4]), less_four.mul_add(d[1], d[3]));
            let (even_2, odd_2) = (V::sub(d[4], d[2]), V::sub(d[3], d[1]));
            v[0] = less_five.mul_add(d[2], four.mul_add(d[0], d[4]));
            v[1] = V::add(even, odd);
            v[2] = V::sub(even, odd);
            v[3] = two.mul_add(odd_2, even_2);
            v[4] = V::splat(-2.0).mul_add(odd_2, even_2);
            v[5] = less_five.mul_add(d[3], four.mul_add(d[1], d[5]));
            v
        }
    }
}

/// `Aᵀ`, of what products of three, four or six places sum to.
pub(super) struct Sums;

impl Line for Sums {
    #[inline(always)]
    unsafe fn of<V: Vector, const FROM: usize, const TO: usize>(m: [V; FROM]) -> [V; TO] {
        const { assert!(matches!((FROM, TO), (3, 2) | (4, 2) | (6, 4))) };
        // SAFETY: the caller's.
        unsafe {
            let mut y = [V::zero(); TO];
            if FROM == 3 {
                y[0] = V::add(m[0], m[1]);
                y[1] = V::add(m[1], m[2]);
                return y;
            }
            let (sum, difference) = (V::add(m[1], m[2]), V::sub(m[1], m[2]));
            if FROM == 4 {
                y[0] = V::add(m[0], sum);
                y[1] = V::sub(difference, m[3]);
                return y;
            }
            let (sum_2, difference_2) = (V::add(m[3], m[4]), V::sub(m[3], m[4]));
            y[0] = V::add(V::add(m[0], sum), sum_2);
            y[1] = V::splat(2.0).mul_add(difference_2, difference);
            y[2] = V::splat(4.0).mul_add(sum_2, sum);
            y[3] = V::add(V::splat(8.0).mul_add(difference_2, difference), m[5]);
            y
        }
    }
}

/// `A`, of a gradient: the gradient of [`Sums`].
pub(super) struct SumsGradient;

impl Line for SumsGradient {
    #[inline(always)]
    unsafe fn of<V: Vector, const FROM: usize, const TO: usize>(y: [V; FROM]) -> [V; TO] {
        const { assert!(matches!((FROM, TO), (2, 3) | (2, 4) | (4, 6))) };
        // SAFETY: the caller's.
        unsafe {
            let mut m = [V::zero(); TO];
            m[0] = y[0];
            m[TO - 1] = y[FROM - 1];
            if FROM == 2 {
                m[1] = V::add(y[0], y[1]);
                if TO == 4 {
                    m[2] = V::sub(y[0], y[1]);
                    m[3] = V::sub(V::zero(), y[1]);
                }
                return m;
            }
            let (even, odd) = (V::add(y[0], y[2]), V::add(y[1], y[3]));
            let (four, two) = (V::splat(4.0), V::splat(2.0));
            let (even_2, odd_2) = (four.mul_add(y[2], y[0]), four.mul_add(y[3], y[1]));
            m[1] = V::add(even, odd);
            m[2] = V::sub(even, odd);
            m[3] = two.mul_add(odd_2, even_2);
            m[4] = V::splat(-2.0).mul_add(odd_2, even_2);
            m
        }
    }
}

/// `G` of two or three weights, for six places `24 G`: see [`scale`].
pub(super) struct Weights;

impl Line for Weights {
    #[inline(always)]
    unsafe fn of<V: Vector, const FROM: usize, const TO: usize>(g: [V; FROM]) -> [V; TO] {
        const { assert!(matches!((FROM, TO), (2, 3) | (3, 4) | (3, 6))) };
        // SAFETY: the caller's.
        unsafe {
            let mut u = [V::zero(); TO];
            if FROM == 2 {
                u[0] = g[0];
                u[1] = V::add(g[0], g[1]);
                u[2] = g[1];
                return u;
            }
            if TO == 4 {
                let (half, sum) = (V::splat(0.5), V::add(g[0], g[2]));
                u[0] = g[0];
                u[1] = V::mul(half, V::add(sum, g[1]));
                u[2] = V::mul(half, V::sub(sum, g[1]));
                u[3] = g[2];
                return u;
            }
            let four = V::splat(4.0);
            // Of the points ±1 and ±2.
            let (even, odd) = (V::mul(V::splat(-4.0), V::add(g[0], g[2])), V::mul(four, g[1]));
            let (even_2, odd_2) = (four.mul_add(g[2], g[0]), V::add(g[1], g[1]));
            u[0] = V::mul(V::splat(6.0), g[0]);
            u[1] = V::sub(even, odd);
            u[2] = V::add(even, odd);
            u[3] = V::add(even_2, odd_2);
            u[4] = V::sub(even_2, odd_2);
            u[5] = V::mul(V::splat(24.0), g[2]);
            u
        }
    }
}

/// The transposes of [`Weights`]' matrices, of sums of products: its gradient.
pub(super) struct WeightsGradient;

impl Line for WeightsGradient {
    #[inline(always)]
    unsafe fn of<V: Vector, const FROM: usize, const TO: usize>(u: [V; FROM]) -> [V; TO] {
        const { assert!(matches!((FROM, TO), (3, 2) | (4, 3) | (6, 3))) };
        // SAFETY: the caller's.
        unsafe {
            let mut g = [V::zero(); TO];
            if FROM == 3 {
                g[0] = V::add(u[0], u[1]);
                g[1] = V::add(u[1], u[2]);
                return g;
            }
            let (sum, difference) = (V::add(u[1], u[2]), V::sub(u[1], u[2]));
            if FROM == 4 {
                let half = V::splat(0.5);
                let sum = V::mul(half, sum);
                g[0] = V::add(u[0], sum);
                g[1] = V::mul(half, difference);
                g[2] = V::add(sum, u[3]);
                return g;
            }
            let (sum_2, difference_2) = (V::add(u[3], u[4]), V::sub(u[3], u[4]));
            let less_four = V::splat(-4.0);
            g[0] = V::splat(6.0).mul_add(u[0], less_four.mul_add(sum, sum_2));
            g[1] = less_four.mul_add(difference, V::add(difference_2, difference_2));
            let last = V::splat(24.0).mul_add(u[5], V::mul(V::splat(4.0), sum_2));
            g[2] = less_four.mul_add(sum, last);
            g
        }
    }
}

/// [`square`] of a tile in registers.
///
/// # Safety
/// The features of `V`.
#[inline(always)]
pub(super) unsafe fn transformed<L: Line, V: Vector, const FROM: usize, const TO: usize>(
    tile: [[V; FROM]; FROM],
) -> [[V; TO]; TO] {
    // SAFETY: the caller's.
    unsafe {
        let mut to = [[V::zero(); TO]; TO];
        square::<L, V, FROM, TO>(
            #[inline(always)]
            |i, j| tile[i][j],
            #[inline(always)]
            |i, j, v| to[i][j] = v,
        );
        to
    }
}

/// A line's matrix times a square times its transpose: `read(i, j)` gives an element, and `write(i, j, v)` takes one.
///
/// # Safety
/// The features of `V`.
#[inline(always)]
pub(super) unsafe fn square<L: Line, V: Vector, const FROM: usize, const TO: usize>(
    mut read: impl FnMut(usize, usize) -> V,
    mut write: impl FnMut(usize, usize, V),
) {
    // SAFETY: the caller's.
    unsafe {
        let zero = V::zero();
        let mut rows = [[zero; TO]; FROM];
        for (i, row) in rows.iter_mut().enumerate() {
            let mut line = [zero; FROM];
            for (j, element) in line.iter_mut().enumerate() {
                *element = read(i, j);
            }
            *row = L::of(line);
        }
        for j in 0..TO {
            let mut line = [zero; FROM];
            for (element, row) in line.iter_mut().zip(&rows) {
                *element = row[j];
            }
            let line: [V; TO] = L::of(line);
            for (i, element) in line.into_iter().enumerate() {
                write(i, j, element);
            }
        }
    }
}
