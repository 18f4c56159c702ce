//! Winograd's F(2×2, 2×2).
//!
//! Of three pixels `d` and two weights `g`, two sums are `(d0 - d1) g0 + s` and `s + (d2 - d1) g1`, where
//! `s = d1 (g0 + g1)`: three products for four. Of the matrices in [`super::super::transform`], G and A are one here, so that
//! weights and gradients are transformed alike.
#![allow(unsafe_code)]

use crate::kernels::cpu::vector::Vector;

/// `Bᵀ d B`
///
/// # Safety
/// The features of `V`.
#[inline(always)]
pub(super) unsafe fn pixels<V: Vector>(d: [[V; 3]; 3]) -> [[V; 3]; 3] {
    // SAFETY: the caller's.
    unsafe {
        let mut rows = d;
        for [a, b, c] in &mut rows {
            (*a, *c) = (V::sub(*a, *b), V::sub(*c, *b));
        }
        let mut v = rows;
        for j in 0..3 {
            v[0][j] = V::sub(rows[0][j], rows[1][j]);
            v[2][j] = V::sub(rows[2][j], rows[1][j]);
        }
        v
    }
}

/// `G g Gᵀ` of weights, and `A y Aᵀ`: the gradient of [`fold`].
///
/// # Safety
/// The features of `V`.
#[inline(always)]
pub(super) unsafe fn spread<V: Vector>([top, bottom]: [[V; 2]; 2]) -> [[V; 3]; 3] {
    // SAFETY: the caller's.
    unsafe {
        let middle = [V::add(top[0], bottom[0]), V::add(top[1], bottom[1])];
        let mut u = [[top[0]; 3]; 3];
        for (u, [a, b]) in u.iter_mut().zip([top, middle, bottom]) {
            *u = [a, V::add(a, b), b];
        }
        u
    }
}

/// `Aᵀ m A` of sums, and `Gᵀ m G`: the gradient of [`spread`].
///
/// # Safety
/// The features of `V`.
#[inline(always)]
pub(super) unsafe fn fold<V: Vector>(m: [[V; 3]; 3]) -> [[V; 2]; 2] {
    // SAFETY: the caller's.
    unsafe {
        let mut y = [[m[0][0]; 2]; 2];
        for (i, y) in y.iter_mut().enumerate() {
            let mut row = m[i];
            for (sum, other) in row.iter_mut().zip(m[i + 1]) {
                *sum = V::add(*sum, other);
            }
            *y = [V::add(row[0], row[1]), V::add(row[1], row[2])];
        }
        y
    }
}
