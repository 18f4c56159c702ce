//! Values that both sides know.

use candle_core::{Device, Result, Shape, Tensor};

/// Values of a parameter, the `seed`th by name, of the size they have in a network: those of norms and
/// biases are positive.
pub(super) fn known_values(dims: &[usize], seed: usize, device: &Device) -> Result<Tensor> {
    let values = noise(dims, seed, device)?;
    match dims {
        [_] => values.affine(0.5, 0.5),
        [outputs, ..] => {
            values.affine(((3 * outputs) as f64 / values.elem_count() as f64).sqrt(), 0.0)
        }
        [] => Ok(values),
    }
}

/// Values between -1 and 1, those of `noise` in `zoo.py`.
///
/// # Errors
///
/// What copying them to `device` meets.
pub fn noise(shape: impl Into<Shape>, seed: usize, device: &Device) -> Result<Tensor> {
    let shape = shape.into();
    let value = |i| (f64::from(scrambled(i, seed)) / f64::from(1u32 << 31) - 1.0) as f32;
    Tensor::from_iter((0..shape.elem_count()).map(value), device)?.reshape(shape)
}

/// Tokens below `vocabulary`, those of `tokens` in `zoo.py`.
///
/// # Errors
///
/// What copying them to `device` meets.
pub fn tokens(
    vocabulary: usize,
    shape: impl Into<Shape>,
    seed: usize,
    device: &Device,
) -> Result<Tensor> {
    let shape = shape.into();
    let token = |i| scrambled(i, seed) % vocabulary as u32;
    Tensor::from_iter((0..shape.elem_count()).map(token), device)?.reshape(shape)
}

/// A number that is the same in both languages, and for which no matrix of such has a small rank.
fn scrambled(i: usize, seed: usize) -> u32 {
    let mut x = (i as u32).wrapping_mul(2_654_435_761).wrapping_add((seed as u32 + 1) * 40_503);
    for (shift, factor) in [(15, 2_246_822_519), (13, 3_266_489_917)] {
        x = (x ^ (x >> shift)).wrapping_mul(factor);
    }
    x ^ (x >> 16)
}
