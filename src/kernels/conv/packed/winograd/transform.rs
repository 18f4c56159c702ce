//! Winograd's F(2×2, 3×3).
//!
//! Of four pixels `d` and three weights `g`, two sums are `g0 (d0 - d2) + s + t` and
//! `s - t - g2 (d1 - d3)`, where `s = (g0 + g1 + g2) / 2 (d1 + d2)` and
//! `t = (g0 - g1 + g2) / 2 (d2 - d1)`: four products for six. In matrices, `Aᵀ [(G g) ⊙ (Bᵀ d)]`; of
//! tiles, `Aᵀ [(G g Gᵀ) ⊙ (Bᵀ d B)] A`.
#![allow(unsafe_code)]

use crate::kernels::cpu::vector::Vector;

/// `Bᵀ d B`
///
/// # Safety
/// The features of `V`.
#[inline(always)]
pub(super) unsafe fn pixels<V: Vector>(d: [[V; 4]; 4]) -> [[V; 4]; 4] {
    // SAFETY: the caller's.
    unsafe {
        let mut rows = d;
        for (row, [a, b, c, d]) in rows.iter_mut().zip(d) {
            *row = [V::sub(a, c), V::add(b, c), V::sub(c, b), V::sub(b, d)];
        }
        let mut v = rows;
        for j in 0..4 {
            v[0][j] = V::sub(rows[0][j], rows[2][j]);
            v[1][j] = V::add(rows[1][j], rows[2][j]);
            v[2][j] = V::sub(rows[2][j], rows[1][j]);
            v[3][j] = V::sub(rows[1][j], rows[3][j]);
        }
        v
    }
}

/// `Aᵀ m A`
///
/// # Safety
/// The features of `V`.
#[inline(always)]
pub(super) unsafe fn sums<V: Vector>(m: [[V; 4]; 4]) -> [[V; 2]; 2] {
    // SAFETY: the caller's.
    unsafe {
        let mut rows = [[m[0][0]; 4]; 2];
        for j in 0..4 {
            let sum = V::add(m[1][j], m[2][j]);
            let difference = V::sub(m[1][j], m[2][j]);
            rows[0][j] = V::add(m[0][j], sum);
            rows[1][j] = V::sub(difference, m[3][j]);
        }
        let mut y = [[m[0][0]; 2]; 2];
        for (y, [a, b, c, d]) in y.iter_mut().zip(rows) {
            let (sum, difference) = (V::add(b, c), V::sub(b, c));
            *y = [V::add(a, sum), V::sub(difference, d)];
        }
        y
    }
}

/// `A y Aᵀ`: the gradient of [`sums`].
///
/// # Safety
/// The features of `V`.
#[inline(always)]
pub(super) unsafe fn sums_gradient<V: Vector>(y: [[V; 2]; 2]) -> [[V; 4]; 4] {
    // SAFETY: the caller's.
    unsafe {
        let zero = V::zero();
        let mut rows = [[zero; 4]; 2];
        for (row, [a, b]) in rows.iter_mut().zip(y) {
            *row = [a, V::add(a, b), V::sub(a, b), V::sub(zero, b)];
        }
        let mut m = [[zero; 4]; 4];
        for j in 0..4 {
            let (a, b) = (rows[0][j], rows[1][j]);
            m[0][j] = a;
            m[1][j] = V::add(a, b);
            m[2][j] = V::sub(a, b);
            m[3][j] = V::sub(zero, b);
        }
        m
    }
}

/// `Gᵀ u G`: the gradient of [`weights`].
///
/// # Safety
/// The features of `V`.
#[inline(always)]
pub(super) unsafe fn weights_gradient<V: Vector>(u: [[V; 4]; 4]) -> [[V; 3]; 3] {
    // SAFETY: the caller's.
    unsafe {
        let half = V::splat(0.5);
        let mut rows = [[half; 4]; 3];
        for j in 0..4 {
            let sum = V::mul(half, V::add(u[1][j], u[2][j]));
            let difference = V::sub(u[1][j], u[2][j]);
            rows[0][j] = V::add(u[0][j], sum);
            rows[1][j] = V::mul(half, difference);
            rows[2][j] = V::add(sum, u[3][j]);
        }
        let mut g = [[half; 3]; 3];
        for (g, [a, b, c, d]) in g.iter_mut().zip(rows) {
            let sum = V::mul(half, V::add(b, c));
            let difference = V::mul(half, V::sub(b, c));
            *g = [V::add(a, sum), difference, V::add(sum, d)];
        }
        g
    }
}

/// `G g Gᵀ`
///
/// # Safety
/// The features of `V`.
#[inline(always)]
pub(super) unsafe fn weights<V: Vector>(g: [[V; 3]; 3]) -> [[V; 4]; 4] {
    // SAFETY: the caller's.
    unsafe {
        let half = V::splat(0.5);
        let mut rows = [[half; 4]; 3];
        for (row, [a, b, c]) in rows.iter_mut().zip(g) {
            let sum = V::add(a, c);
            let (both, turned) = (V::add(sum, b), V::sub(sum, b));
            *row = [a, V::mul(half, both), V::mul(half, turned), c];
        }
        let mut u = [[half; 4]; 4];
        for j in 0..4 {
            let (a, b, c) = (rows[0][j], rows[1][j], rows[2][j]);
            let sum = V::add(a, c);
            u[0][j] = a;
            u[1][j] = V::mul(half, V::add(sum, b));
            u[2][j] = V::mul(half, V::sub(sum, b));
            u[3][j] = c;
        }
        u
    }
}
