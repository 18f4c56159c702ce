//! Products whose leading dimensions broadcast, as those of PyTorch.

use candle_amp::ops;
use candle_core::{DType, Device, Result, Tensor, Var};

use crate::bad_input::assert_says;
use crate::util::{assert_absolute, epsilon, random, to_vec};

/// Shapes of both sides, and of what PyTorch 2.15 makes of them.
const SHAPES: [(&[usize], &[usize], &[usize]); 20] = [
    (&[2, 3, 4], &[4, 5], &[2, 3, 5]),
    (&[2, 1, 3, 4], &[1, 5, 4, 2], &[2, 5, 3, 2]),
    (&[4], &[4], &[]),
    (&[4], &[4, 2], &[2]),
    (&[3, 4], &[4], &[3]),
    (&[2, 3, 4], &[4], &[2, 3]),
    (&[4], &[2, 4, 3], &[2, 3]),
    (&[3], &[5, 1, 3, 2], &[5, 1, 2]),
    (&[0, 3, 4], &[4, 2], &[0, 3, 2]),
    (&[2, 0, 4], &[4, 2], &[2, 0, 2]),
    (&[3, 4], &[7, 4, 5], &[7, 3, 5]),
    (&[7, 1, 3, 4], &[7, 2, 4, 5], &[7, 2, 3, 5]),
    (&[7, 2, 3, 4], &[7, 1, 4, 5], &[7, 2, 3, 5]),
    (&[7, 2, 3, 4], &[2, 4, 5], &[7, 2, 3, 5]),
    (&[2, 3, 4], &[7, 1, 4, 5], &[7, 2, 3, 5]),
    (&[1, 3, 4], &[7, 4, 5], &[7, 3, 5]),
    (&[3, 0], &[2, 0, 4], &[2, 3, 4]),
    (&[1, 1, 4], &[4, 5], &[1, 1, 5]),
    (&[5, 67, 33], &[33, 40], &[5, 67, 40]),
    (&[2, 1, 3, 1, 5, 6], &[4, 1, 7, 6, 2], &[2, 4, 3, 7, 5, 2]),
];

/// As it lies, or transposed, or a part of something larger, or one matrix repeated.
fn views(x: &Tensor) -> Result<Vec<Tensor>> {
    let mut views = vec![x.clone()];
    if x.rank() > 1 {
        views.push(x.t()?.contiguous()?.t()?);
        views.push(x.pad_with_zeros(0, 1, 2)?.narrow(0, 1, x.dim(0)?)?);
        views.push(x.transpose(0, x.rank() - 1)?.contiguous()?.transpose(0, x.rank() - 1)?);
    }
    Ok(views)
}

/// The product in F64, element by element, and how large the terms of each sum are together.
fn product(lhs: &Tensor, rhs: &Tensor, dims: &[usize]) -> Result<[Tensor; 2]> {
    let lhs = if lhs.rank() == 1 { lhs.unsqueeze(0)? } else { lhs.clone() };
    let rhs = if rhs.rank() == 1 { rhs.unsqueeze(1)? } else { rhs.clone() };
    let (lhs, rhs) = (lhs.to_dtype(DType::F64)?, rhs.to_dtype(DType::F64)?);
    // (…, m, 1, k) times (…, 1, n, k), summed over the last.
    let of = |lhs: &Tensor, rhs: &Tensor| {
        let terms =
            lhs.unsqueeze(lhs.rank() - 1)?.broadcast_mul(&rhs.t()?.unsqueeze(rhs.rank() - 2)?)?;
        terms.sum(terms.rank() - 1)?.reshape(dims)
    };
    Ok([of(&lhs, &rhs)?, of(&lhs.abs()?, &rhs.abs()?)?])
}

/// The sum of `x` over what was repeated to get its shape from `dims`.
fn summed(x: &Tensor, dims: &[usize]) -> Result<Tensor> {
    let extra = x.rank() - dims.len();
    let mut x = x.clone();
    for dim in 0..x.rank() {
        if dim < extra || dims[dim - extra] != x.dim(dim)? {
            x = x.sum_keepdim(dim)?;
        }
    }
    x.reshape(dims)
}

#[test]
fn products_broadcast_as_pytorchs_do() -> Result<()> {
    for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
        let terms = if dtype == DType::F64 { f64::EPSILON } else { f32::EPSILON.into() };
        for (left, right, dims) in SHAPES {
            let (lhs, rhs) = (random(1, left, dtype), random(2, right, dtype));
            let weights = random(3, dims, dtype);
            let [expected, magnitude] = product(&lhs, &rhs, dims)?;
            // The gradients, of matrices with all their dimensions.
            let wide = |x: &Tensor| x.to_dtype(DType::F64);
            let (m, n) = (
                if left.len() == 1 { 1 } else { left[left.len() - 2] },
                if right.len() == 1 { 1 } else { right[right.len() - 1] },
            );
            let batch = if left.len() > 1 && right.len() > 1 {
                dims.len() - 2
            } else {
                dims.len().saturating_sub(1)
            };
            let batch = if left.len() == 1 && right.len() == 1 { 0 } else { batch };
            let grad = wide(&weights)?.reshape([&dims[..batch], &[m, n]].concat())?;
            let l = wide(&if left.len() == 1 { lhs.unsqueeze(0)? } else { lhs.clone() })?;
            let r = wide(&if right.len() == 1 { rhs.unsqueeze(1)? } else { rhs.clone() })?;
            let full = |dims: &[usize]| [&grad.dims()[..batch], dims].concat();
            let dlhs = |grad: &Tensor, r: &Tensor| -> Result<Tensor> {
                let [y, _] = product(grad, &r.t()?, &full(&[m, l.dim(l.rank() - 1)?]))?;
                summed(&y, l.dims())?.reshape(left)
            };
            let drhs = |l: &Tensor, grad: &Tensor| -> Result<Tensor> {
                let [y, _] = product(&l.t()?, grad, &full(&[l.dim(l.rank() - 1)?, n]))?;
                summed(&y, r.dims())?.reshape(right)
            };
            let exact = [dlhs(&grad, &r)?, drhs(&l, &grad)?];
            let sizes = [dlhs(&grad.abs()?, &r.abs()?)?, drhs(&l.abs()?, &grad.abs()?)?];
            let counts = [grad.elem_count() * r.elem_count(), grad.elem_count() * l.elem_count()];
            for lhs in views(&lhs)? {
                for rhs in views(&rhs)? {
                    let what = format!("{left:?} x {right:?}, {dtype:?}");
                    let (a, b) = (Var::from_tensor(&lhs)?, Var::from_tensor(&rhs)?);
                    let y = ops::matmul(&lhs, &rhs)?;
                    assert_eq!((y.dims(), y.dtype()), (dims, dtype), "{what}");
                    let k = *left.last().unwrap() as f64;
                    let largest = to_vec(&magnitude).into_iter().fold(0.0, f64::max);
                    let slack = (k * terms + epsilon(dtype)) * largest;
                    assert_absolute(&what, &y, &expected, slack);
                    // Through views, of variables as they lie.
                    let y = ops::matmul(&a, &b)?;
                    let loss = ops::sum(&ops::mul(&y, &weights)?)?;
                    let gradients = loss.backward()?;
                    for (i, var) in [&a, &b].into_iter().enumerate() {
                        let Some(gradient) = gradients.get(var) else {
                            panic!("{what}: no gradient")
                        };
                        assert_eq!(gradient.dtype(), dtype, "{what}");
                        let largest = to_vec(&sizes[i]).into_iter().fold(0.0, f64::max);
                        let count = counts[i] as f64 / exact[i].elem_count().max(1) as f64;
                        // The output's gradient is exact, the sum is F32, and the result rounded once.
                        let slack = (count * terms + epsilon(dtype)) * largest;
                        assert_absolute(&format!("{what}, {i}"), gradient, &exact[i], slack);
                    }
                }
            }
        }
    }
    Ok(())
}

/// A sum over 4,096 samples, which 16 bits cannot count to.
#[test]
fn a_shared_matrix_gets_its_gradient_in_f32() -> Result<()> {
    for dtype in [DType::F16, DType::BF16] {
        let x = Tensor::ones((4097, 1, 1), dtype, &Device::Cpu)?;
        for (left, right) in [(&[1usize, 1][..], true), (&[1, 1, 1], true), (&[1, 1], false)] {
            let w = Var::ones(left, dtype, &Device::Cpu)?;
            let mut scaler = candle_amp::GradScaler::new(candle_amp::ScaleConfig::constant(1.0))
                .map_err(candle_core::Error::wrap)?;
            let y = if right { ops::matmul(&x, &w)? } else { ops::matmul(&w, &x)? };
            let loss = ops::sum(&y)?.to_dtype(DType::F32)?;
            scaler
                .scale(&loss)
                .and_then(|loss| loss.backward())
                .map_err(candle_core::Error::wrap)?;
            let norm = scaler.clip_grad_norm(1e9).map_err(candle_core::Error::wrap)?;
            assert_eq!(norm.to_scalar::<f32>()?, 4097.0);
        }
    }
    Ok(())
}

/// Whatever it is repeated to, an operand is read where it lies.
#[test]
fn errors_name_the_cure() {
    let t = |dims: &[usize]| random(1, dims, DType::F32);
    let fail = |left: &[usize], right: &[usize], says: &[&str]| {
        assert_says(ops::matmul(&t(left), &t(right)), says);
    };
    fail(&[2, 3, 4], &[3, 4, 5], &["rhs has shape [3, 4, 5]", "[2, 3, 4]", "[2]", "unsqueeze"]);
    fail(&[3, 4], &[3, 4], &["rhs has shape [3, 4]", "(4) or (…, 4, n)", "`transpose`"]);
    fail(&[3], &[4], &["rhs has shape [4]", "(3)"]);
    fail(&[2, 3], &[4], &["rhs has shape [4]", "(3)"]);
    fail(&[], &[3], &["lhs has shape []", "`ops::mul`"]);
    fail(&[3], &[], &["rhs has shape []", "`ops::mul`"]);
}
