//! Winograd's F(2×2, 3×3).
//!
//! Of four pixels `d` and three weights `g`, two sums are `g0 (d0 - d2) + s + t` and
//! `s - t - g2 (d1 - d3)`, where `s = (g0 + g1 + g2) / 2 (d1 + d2)` and
//! `t = (g0 - g1 + g2) / 2 (d2 - d1)`: four products for six. In matrices, `Aᵀ [(G g) ⊙ (Bᵀ d)]`; of
//! tiles, `Aᵀ [(G g Gᵀ) ⊙ (Bᵀ d B)] A`.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

/// `Bᵀ d B`
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn pixels(d: [[__m512; 4]; 4]) -> [[__m512; 4]; 4] {
    let mut rows = d;
    for (row, [a, b, c, d]) in rows.iter_mut().zip(d) {
        *row = [_mm512_sub_ps(a, c), _mm512_add_ps(b, c), _mm512_sub_ps(c, b), _mm512_sub_ps(b, d)];
    }
    let mut v = rows;
    for j in 0..4 {
        v[0][j] = _mm512_sub_ps(rows[0][j], rows[2][j]);
        v[1][j] = _mm512_add_ps(rows[1][j], rows[2][j]);
        v[2][j] = _mm512_sub_ps(rows[2][j], rows[1][j]);
        v[3][j] = _mm512_sub_ps(rows[1][j], rows[3][j]);
    }
    v
}

/// `Aᵀ m A`
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn sums(m: [[__m512; 4]; 4]) -> [[__m512; 2]; 2] {
    let mut rows = [[m[0][0]; 4]; 2];
    for j in 0..4 {
        let sum = _mm512_add_ps(m[1][j], m[2][j]);
        let difference = _mm512_sub_ps(m[1][j], m[2][j]);
        rows[0][j] = _mm512_add_ps(m[0][j], sum);
        rows[1][j] = _mm512_sub_ps(difference, m[3][j]);
    }
    let mut y = [[m[0][0]; 2]; 2];
    for (y, [a, b, c, d]) in y.iter_mut().zip(rows) {
        let (sum, difference) = (_mm512_add_ps(b, c), _mm512_sub_ps(b, c));
        *y = [_mm512_add_ps(a, sum), _mm512_sub_ps(difference, d)];
    }
    y
}

/// `A y Aᵀ`: the gradient of [`sums`].
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn sums_gradient(y: [[__m512; 2]; 2]) -> [[__m512; 4]; 4] {
    let zero = _mm512_setzero_ps();
    let mut rows = [[zero; 4]; 2];
    for (row, [a, b]) in rows.iter_mut().zip(y) {
        *row = [a, _mm512_add_ps(a, b), _mm512_sub_ps(a, b), _mm512_sub_ps(zero, b)];
    }
    let mut m = [[zero; 4]; 4];
    for j in 0..4 {
        let (a, b) = (rows[0][j], rows[1][j]);
        m[0][j] = a;
        m[1][j] = _mm512_add_ps(a, b);
        m[2][j] = _mm512_sub_ps(a, b);
        m[3][j] = _mm512_sub_ps(zero, b);
    }
    m
}

/// `Gᵀ u G`: the gradient of [`weights`].
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn weights_gradient(u: [[__m512; 4]; 4]) -> [[__m512; 3]; 3] {
    let half = _mm512_set1_ps(0.5);
    let mut rows = [[half; 4]; 3];
    for j in 0..4 {
        let sum = _mm512_mul_ps(half, _mm512_add_ps(u[1][j], u[2][j]));
        let difference = _mm512_sub_ps(u[1][j], u[2][j]);
        rows[0][j] = _mm512_add_ps(u[0][j], sum);
        rows[1][j] = _mm512_mul_ps(half, difference);
        rows[2][j] = _mm512_add_ps(sum, u[3][j]);
    }
    let mut g = [[half; 3]; 3];
    for (g, [a, b, c, d]) in g.iter_mut().zip(rows) {
        let sum = _mm512_mul_ps(half, _mm512_add_ps(b, c));
        let difference = _mm512_mul_ps(half, _mm512_sub_ps(b, c));
        *g = [_mm512_add_ps(a, sum), difference, _mm512_add_ps(sum, d)];
    }
    g
}

/// `G g Gᵀ`, of `N` weights at once.
#[inline(always)]
pub(super) fn weights<const N: usize>(g: [[f32; N]; 9]) -> [[f32; N]; 16] {
    let mut rows = [[0f32; N]; 12];
    for i in 0..3 {
        for n in 0..N {
            let (a, b, c) = (g[3 * i][n], g[3 * i + 1][n], g[3 * i + 2][n]);
            rows[4 * i][n] = a;
            rows[4 * i + 1][n] = 0.5 * (a + c + b);
            rows[4 * i + 2][n] = 0.5 * (a + c - b);
            rows[4 * i + 3][n] = c;
        }
    }
    let mut u = [[0f32; N]; 16];
    for j in 0..4 {
        for n in 0..N {
            let (a, b, c) = (rows[j][n], rows[4 + j][n], rows[8 + j][n]);
            u[j][n] = a;
            u[4 + j][n] = 0.5 * (a + c + b);
            u[8 + j][n] = 0.5 * (a + c - b);
            u[12 + j][n] = c;
        }
    }
    u
}
