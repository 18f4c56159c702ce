//! Adaptive pooling.

use candle_amp::nn::{self, Module};
use candle_amp::ops::{self, channels_last};
use candle_amp::{Autocast, GradScaler};
use candle_core::{DType, Device, Result, Tensor, Var};

use super::Case;
use crate::util::{FLOATS, assert_same, random, to_vec};

#[test]
fn adaptive_pools_are_pytorchs() -> candle_amp::Result<()> {
    for size in [(3, 4), (7, 5), (1, 1), (9, 2)] {
        let (height, width) = size;
        // A pixel in several windows has the sum of their gradients.
        Case::load(&format!("adaptive.avg.{height}x{width}"))
            .check(8.0, |_, input| nn::AdaptiveAvgPool2d::new(size).forward(&input("x")))?;
        Case::load(&format!("adaptive.max.{height}x{width}"))
            .check(8.0, |_, input| nn::AdaptiveMaxPool2d::new(size).forward(&input("x")))?;
    }
    Ok(())
}

#[test]
fn channels_last_is_channels_first_turned() -> Result<()> {
    let x = random(1, (2, 3, 7, 8), DType::BF16);
    let turned = x.permute((0, 2, 3, 1))?;
    let (avg, max) = (nn::AdaptiveAvgPool2d::new, nn::AdaptiveMaxPool2d::new);
    for size in [(3, 5), (7, 4), (1, 1)] {
        let back = |y: Tensor| y.permute((0, 3, 1, 2))?.contiguous();
        let (a, b) = (avg(size).forward(&x)?, avg(size).channels_last().forward(&turned)?);
        assert_same("avg", &back(b)?, &a);
        let (a, b) = (max(size).forward(&x)?, max(size).channels_last().forward(&turned)?);
        assert_same("max", &back(b)?, &a);
    }
    Ok(())
}

/// Infinities and NaN stay in their windows; equal maxima give the first their gradient; in every dtype.
#[test]
fn windows_see_their_own_pixels_alone() -> candle_amp::Result<()> {
    let (h, w, (rows, columns)) = (5, 7, (3, 4));
    let window = |i: usize, n: usize, m: usize| (i * n / m, ((i + 1) * n).div_ceil(m));
    let mut values: Vec<f64> = (0..h * w).map(|i| ((i * 5) % 4) as f64).collect();
    (values[0], values[9], values[h * w - 1]) = (f64::NAN, f64::INFINITY, f64::NEG_INFINITY);
    for dtype in FLOATS {
        let x = Tensor::from_vec(values.clone(), (1, 1, h, w), &Device::Cpu)?.to_dtype(dtype)?;
        let x = Var::from_tensor(&x)?;
        let avg = to_vec(&ops::adaptive_avg_pool2d(&x, (rows, columns))?);
        let y = ops::adaptive_max_pool2d(&x, (rows, columns))?;
        let mut scaler = GradScaler::disabled();
        let weigh: Vec<f64> = (1..=rows * columns).map(|i| i as f64).collect();
        let of_y = Tensor::from_vec(weigh.clone(), y.shape(), &Device::Cpu)?.to_dtype(dtype)?;
        // The sum of products would be NaN, and its gradient is `of_y` all the same.
        scaler.scale(&ops::sum(&ops::mul(&y, &of_y)?)?)?.backward()?;
        let (max, gradient) = (to_vec(&y), to_vec(&scaler.grad(&x)?.expect("a gradient")));
        let mut expected = vec![0.0; h * w];
        for i in 0..rows * columns {
            let ((top, bottom), (left, right)) =
                (window(i / columns, h, rows), window(i % columns, w, columns));
            let pixels = (top..bottom).flat_map(|r| (left..right).map(move |c| r * w + c));
            let pixels: Vec<usize> = pixels.collect();
            let mean = pixels.iter().map(|p| values[*p]).sum::<f64>() / pixels.len() as f64;
            let off = (avg[i] - mean).abs() <= 0.01 || avg[i] == mean;
            assert!(off || avg[i].is_nan() && mean.is_nan(), "{dtype:?}: {} {mean}", avg[i]);
            let best = pixels.iter().copied().reduce(|best, p| {
                let better = values[p] > values[best] || values[p].is_nan();
                if better && !values[best].is_nan() { p } else { best }
            });
            let best = best.expect("a window has pixels");
            assert!(max[i] == values[best] || max[i].is_nan() && values[best].is_nan());
            expected[best] += weigh[i];
        }
        assert_eq!(gradient, expected, "{dtype:?}");
    }
    Ok(())
}

#[test]
fn what_does_not_fit_is_said() -> Result<()> {
    let says = |result: Result<Tensor>, part: &str| {
        let message = result.expect_err(part).to_string();
        assert!(message.contains(part), "{message}");
    };
    let x = random(1, (2, 3, 7, 8), DType::F32);
    says(ops::adaptive_avg_pool2d(&x, (3, 0)), "output is 0, expected at least 1");
    says(ops::adaptive_max_pool2d(&x.get(0)?, 3), "x has shape [3, 7, 8], expected (b, c, h, w)");
    says(channels_last::adaptive_avg_pool2d(&x.narrow(1, 0, 0)?, 3), "expected (b, h, w, c) of 1");
    says(ops::adaptive_avg_pool2d(&x.to_dtype(DType::U8)?, 3), "x is U8");
    // Sums of F16 are F32: 65504 nine times.
    let large = Tensor::full(65504f32, (1, 1, 4, 4), &Device::Cpu)?.to_dtype(DType::F16)?;
    let y = Autocast::new(DType::F16).scope(|| ops::adaptive_avg_pool2d(&large, 3))?;
    assert_eq!(to_vec(&y), [65504.0; 9]);
    Ok(())
}
