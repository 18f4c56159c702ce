use candle_core::{DType, Device, Tensor};

use super::{SamplingGrid, backward, forward, portable};
use crate::kernels::elementwise::testing::{
    DTYPES, assert_close, assert_gpus_agree, difference_tolerance, double, epsilon,
    numeric_gradient, of, random, strided, values,
};

const SIZES: [((usize, usize), (usize, usize)); 8] = [
    ((1, 1), (1, 1)),
    ((1, 1), (3, 4)),
    ((4, 5), (8, 10)),
    ((4, 5), (12, 15)),
    ((5, 3), (7, 8)), // no whole ratio
    ((9, 7), (4, 3)), // and down
    ((1, 1100), (1, 1700)),
    ((33, 40), (66, 41)),
];

fn grids(from: (usize, usize), to: (usize, usize)) -> Vec<SamplingGrid> {
    let scale = |from: usize, to: usize| (to as f64 + 0.3) / from as f64;
    let scales = (scale(from.0, to.0), scale(from.1, to.1));
    vec![
        SamplingGrid::nearest(from, to),
        SamplingGrid::linear(from, to, false, None),
        SamplingGrid::linear(from, to, true, None),
        SamplingGrid::linear(from, to, false, Some(scales)),
    ]
}

#[test]
fn results_are_candles() {
    for (from, to) in SIZES {
        let x = random(&[2, 3, from.0, from.1], DType::F64, 1);
        for (align_corners, grid) in [(false, 1), (true, 2)] {
            let expected = x.upsample_bilinear2d(to.0, to.1, align_corners).unwrap();
            assert_close(&forward(&x, &grids(from, to)[grid]).unwrap(), &values(&expected), 8.0);
        }
        let expected = x.upsample_nearest2d(to.0, to.1).unwrap();
        assert_close(
            &forward(&x, &SamplingGrid::nearest(from, to)).unwrap(),
            &values(&expected),
            0.0,
        );
    }
}

#[test]
fn every_dtype_and_the_portable_version_agree_with_f64() {
    for dtype in DTYPES {
        for (from, to) in SIZES {
            let x = random(&[2, 3, from.0, from.1], dtype, 2);
            let grad = random(&[2, 3, to.0, to.1], dtype, 3);
            let dims = x.dims4().unwrap();
            for grid in grids(from, to) {
                let expected = values(&forward(&double(&x), &grid).unwrap());
                let y = forward(&x, &grid).unwrap();
                assert_eq!((y.dims(), y.dtype()), (&[2, 3, to.0, to.1][..], dtype));
                assert_close(&y, &expected, 8.0);
                assert_close(&portable::forward(&x, &grid).unwrap(), &expected, 8.0);
                for out in DTYPES {
                    let expected = backward(&double(&grad), dims, &grid, DType::F64).unwrap();
                    let coarsest = epsilon(dtype).max(epsilon(out));
                    let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
                    let count = 16.0 * epsilon(wide).max(epsilon(out)) / epsilon(out);
                    assert!(count * epsilon(out) <= 16.0 * coarsest);
                    for dx in [
                        backward(&grad, dims, &grid, out).unwrap(),
                        portable::backward(&grad, dims, &grid, out).unwrap(),
                    ] {
                        assert_eq!((dx.dims(), dx.dtype()), (x.dims(), out));
                        assert_close(&dx, &values(&expected), count);
                    }
                }
            }
        }
    }
}

#[test]
fn strided_tensors() {
    for grid in grids((5, 3), (7, 8)) {
        let x = strided(&[2, 3, 5, 3], DType::BF16, 6);
        let y = forward(&x, &grid).unwrap();
        assert_eq!(values(&y), values(&forward(&x.contiguous().unwrap(), &grid).unwrap()));
        let grad = strided(&[2, 3, 7, 8], DType::BF16, 7);
        let dx = |grad: &Tensor| values(&backward(grad, (2, 3, 5, 3), &grid, DType::F32).unwrap());
        assert_eq!(dx(&grad), dx(&grad.contiguous().unwrap()));
    }
}

#[test]
fn gradients_are_slopes() {
    for (from, to) in SIZES.into_iter().take(6) {
        let x = random(&[1, 2, from.0, from.1], DType::F64, 4);
        let grad = random(&[1, 2, to.0, to.1], DType::F64, 5);
        for grid in grids(from, to) {
            let numeric = numeric_gradient(&x, &grad, |x| forward(x, &grid).unwrap());
            let dx = backward(&grad, x.dims4().unwrap(), &grid, DType::F64).unwrap();
            assert_close(&dx, &numeric, difference_tolerance(grad.elem_count() as f64));
        }
    }
}

#[test]
fn many_pixels_of_one_do_not_saturate() {
    for dtype in DTYPES {
        let ones = Tensor::ones((1, 1, 64, 64), dtype, &Device::Cpu).unwrap();
        for grid in grids((1, 1), (64, 64)) {
            let dx = backward(&ones, (1, 1, 1, 1), &grid, dtype).unwrap();
            // In F32, as many roundings as a walk of 4,096 steps is wide.
            assert_close(&dx, &[4096.0], if epsilon(dtype) > 1e-6 { 1.0 } else { 64.0 });
        }
    }
}

#[test]
fn nearest_moves_infinities_and_nan() {
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    for dtype in DTYPES {
        let x = of(vec![1.0, inf, nan, -inf], &[1, 1, 2, 2], dtype);
        let grid = SamplingGrid::nearest((2, 2), (2, 4));
        let expected = [1.0, 1.0, inf, inf, nan, nan, -inf, -inf];
        assert_close(&forward(&x, &grid).unwrap(), &expected, 0.0);
        assert_close(&portable::forward(&x, &grid).unwrap(), &expected, 0.0);
    }
}

#[test]
fn gpus_agree() {
    for dtype in DTYPES {
        for (from, to) in SIZES {
            let x = strided(&[2, 3, from.0, from.1], dtype, 2);
            let grad = strided(&[2, 3, to.0, to.1], dtype, 3);
            let dims = x.dims4().unwrap();
            for grid in grids(from, to) {
                assert_gpus_agree(&[&x], 0.0, |t| Ok(vec![forward(&t[0], &grid)?]));
                for out in DTYPES {
                    // candle's cast of F64 to a 16-bit dtype on the CPU looks at the upper bits alone.
                    let count = if dtype == DType::F64 { 1.0 } else { 0.0 };
                    assert_gpus_agree(&[&grad], count, |t| {
                        Ok(vec![backward(&t[0], dims, &grid, out)?])
                    });
                }
            }
        }
    }
}

/// A rounded step takes the pixel before for these.
#[test]
fn nearest_pixels_are_exact() {
    for (from, to) in [(30, 44), (26, 46), (58, 100), (2, 98), (49, 47), (3, 300)] {
        let expected: Vec<f64> = (0..to).map(|i| (i * from / to) as f64).collect();
        let pixels: Vec<f64> = (0..from).map(|i| i as f64).collect();
        let mut counts = vec![0.0; from];
        (0..to).for_each(|i| counts[i * from / to] += 1.0);
        for ((h, w), (oh, ow)) in [((1, from), (1, to)), ((from, 1), (to, 1))] {
            let grid = SamplingGrid::nearest((h, w), (oh, ow));
            let x = of(pixels.clone(), &[1, 1, h, w], DType::F32);
            assert_eq!(values(&forward(&x, &grid).unwrap()), expected, "{from} to {to}");
            let ones = Tensor::ones((1, 1, oh, ow), DType::F32, &Device::Cpu).unwrap();
            let dx = backward(&ones, (1, 1, h, w), &grid, DType::F32).unwrap();
            assert_eq!(values(&dx), counts, "{from} to {to}");
            assert_gpus_agree(&[&x], 0.0, |t| Ok(vec![forward(&t[0], &grid)?]));
            assert_gpus_agree(&[&ones], 0.0, |t| {
                Ok(vec![backward(&t[0], (1, 1, h, w), &grid, DType::F32)?])
            });
        }
    }
}
