use candle_core::{DType, Tensor};

use super::*;
use crate::kernels::elementwise::testing::*;

const CURVES: [Curve; 16] = [
    Curve::Gelu,
    Curve::GeluErf,
    Curve::Silu,
    Curve::Sigmoid,
    Curve::Tanh,
    Curve::Relu6,
    Curve::Relu2,
    Curve::HardSigmoid,
    Curve::HardSwish,
    Curve::Mish,
    Curve::Elu { alpha: 0.75, scale: 1.0 },
    Curve::Elu { alpha: 1.673_263_2, scale: 1.050_701 },
    Curve::LeakyRelu { slope: 0.2 },
    Curve::Softplus,
    Curve::Exp,
    Curve::Log,
];

/// Numbers of many magnitudes and both signs; positive ones for a logarithm.
fn inputs(curve: Curve, dtype: DType) -> Tensor {
    let x = (strided(&[33, 131], DType::F64, 1) * 6.0).unwrap();
    let x = match curve {
        Curve::Log => (x.abs().unwrap() + 0.01).unwrap(),
        Curve::Exp => (x / 2.0).unwrap(), // F16 ends at e to the 11
        _ => x,
    };
    x.to_dtype(dtype).unwrap()
}

#[test]
fn values_in_every_dtype_are_those_of_f64() {
    for curve in CURVES {
        for dtype in DTYPES {
            let x = inputs(curve, dtype);
            let exact = values(&portable::value(curve, &plain(&double(&x)).unwrap()).unwrap());
            let y = value(curve, &x).unwrap();
            assert_eq!((y.dtype(), y.dims()), (dtype, x.dims()));
            // erf and the exponential of F64 are good to some hundred places.
            let count = if dtype == DType::F64 { 400.0 } else { 4.0 };
            assert_close(&y, &exact, count);
            assert_close(&portable::value(curve, &plain(&x).unwrap()).unwrap(), &exact, count);
        }
    }
}

#[test]
fn slopes_in_every_dtype_are_those_of_f64() {
    for curve in CURVES {
        for dtype in DTYPES {
            let (x, grad) = (inputs(curve, dtype), strided(&[33, 131], dtype, 2));
            let (x64, grad64) = (plain(&double(&x)).unwrap(), plain(&double(&grad)).unwrap());
            let exact = values(&portable::slope(curve, &x64, &grad64).unwrap());
            let dx = slope(curve, &x, &grad).unwrap();
            assert_eq!((dx.dtype(), dx.dims()), (dtype, x.dims()));
            let count = if dtype == DType::F64 { 400.0 } else { 8.0 };
            assert_close(&dx, &exact, count);
            let (x, grad) = (plain(&x).unwrap(), plain(&grad).unwrap());
            assert_close(&portable::slope(curve, &x, &grad).unwrap(), &exact, count);
        }
    }
}

#[test]
fn a_slope_in_the_place_of_the_gradient_is_the_same() {
    // Of a few threads' tasks, and no whole number of blocks; and of what is not contiguous.
    for dtype in DTYPES {
        let x = random(&[3, 17_000], dtype, 1);
        let grad = random(&[3, 17_000], dtype, 2);
        for curve in CURVES {
            let expected = values(&slope(curve, &x, &grad).unwrap());
            let whole = grad.force_contiguous().unwrap();
            let view = whole.clone();
            assert_eq!(values(&slope_assign(curve, whole, &x).unwrap()), expected, "{curve:?}");
            assert_eq!(values(&view), expected);
        }
        let (x, grad) = (inputs(Curve::Gelu, dtype), strided(&[33, 131], dtype, 2));
        let before = values(&grad);
        let expected = values(&slope(Curve::Gelu, &x, &grad).unwrap());
        let dx = slope_assign(Curve::Gelu, grad.clone(), &x).unwrap();
        assert_eq!((values(&dx), values(&grad)), (expected, before));
    }
}

#[test]
fn slopes_are_those_of_the_values() {
    for curve in CURVES {
        let x = inputs(curve, DType::F64).narrow(1, 0, 7).unwrap().contiguous().unwrap();
        let grad = random(&[33, 7], DType::F64, 3);
        let expected = numeric_gradient(&x, &grad, |x| value(curve, x).unwrap());
        // The third derivative of 1 / x at 0.01, over a step squared.
        let scale = if curve == Curve::Log { 1e5 } else { 1e3 };
        assert_close(&slope(curve, &x, &grad).unwrap(), &expected, difference_tolerance(scale));
    }
}

#[test]
fn infinities_and_nan() {
    let inf = f64::INFINITY;
    let x = |dtype| of(vec![inf, -inf, f64::NAN], &[3], dtype);
    for dtype in DTYPES {
        let check = |curve, expected: [f64; 3]| {
            assert_close(&value(curve, &x(dtype)).unwrap(), &expected, 0.0);
        };
        check(Curve::Sigmoid, [1.0, 0.0, f64::NAN]);
        check(Curve::Tanh, [1.0, -1.0, f64::NAN]);
        check(Curve::Relu6, [6.0, 0.0, f64::NAN]);
        check(Curve::HardSigmoid, [1.0, 0.0, f64::NAN]);
        check(Curve::Elu { alpha: 1.0, scale: 1.0 }, [inf, -1.0, f64::NAN]);
        check(Curve::Softplus, [inf, 0.0, f64::NAN]);
        check(Curve::Exp, [inf, 0.0, f64::NAN]);
        check(Curve::Log, [inf, f64::NAN, f64::NAN]);
        // As PyTorch: the product of an infinity and a zero.
        check(Curve::Silu, [inf, f64::NAN, f64::NAN]);
    }
}

#[test]
fn large_inputs_stay_finite() {
    for dtype in DTYPES {
        let x = of(vec![60000.0, -60000.0, 90.0, -90.0], &[4], dtype);
        let ones = x.ones_like().unwrap();
        for curve in CURVES {
            if matches!(curve, Curve::Exp | Curve::Log | Curve::Relu2) {
                continue;
            }
            for result in [value(curve, &x).unwrap(), slope(curve, &x, &ones).unwrap()] {
                assert!(values(&result).iter().all(|y| y.is_finite()), "{curve:?}: {result}");
            }
        }
    }
}

#[test]
fn swiglu_gates_one_half_by_the_other() {
    for dtype in DTYPES {
        for shape in [[3, 2], [33, 34], [5, 4098]] {
            let x = strided(&shape, dtype, 4);
            let x64 = plain(&double(&x)).unwrap();
            let grad = strided(&[shape[0], shape[1] / 2], dtype, 5);
            let count = if dtype == DType::F64 { 16.0 } else { 4.0 };
            let exact = values(&portable::swiglu(&x64).unwrap());
            assert_close(&swiglu(&x).unwrap(), &exact, count);
            assert_close(&portable::swiglu(&plain(&x).unwrap()).unwrap(), &exact, count);
            let grad64 = plain(&double(&grad)).unwrap();
            let exact = values(&portable::swiglu_backward(&x64, &grad64).unwrap());
            assert_close(&swiglu_backward(&x, &grad).unwrap(), &exact, count);
        }
    }
    let (x, grad) = (random(&[3, 10], DType::F64, 6), random(&[3, 5], DType::F64, 7));
    let expected = numeric_gradient(&x, &grad, |x| swiglu(x).unwrap());
    let dx = swiglu_backward(&x, &grad).unwrap();
    assert_close(&dx, &expected, difference_tolerance(30.0));
}

#[test]
fn gpus_agree() {
    for dtype in DTYPES {
        // What F64 is good to on the CPU is the exponential, and erf, of its own.
        let count = if dtype == DType::F64 { 400.0 } else { 4.0 };
        for curve in CURVES {
            let (x, grad) = (inputs(curve, dtype), strided(&[33, 131], dtype, 2));
            assert_gpus_agree(&[&x, &grad], count, |t| {
                let over = slope_assign(curve, t[1].force_contiguous()?, &t[0])?;
                Ok(vec![value(curve, &t[0])?, slope(curve, &t[0], &t[1])?, over])
            });
        }
        for shape in [[3, 2], [33, 34], [5, 64], [3, 2048]] {
            let (x, grad) =
                (strided(&shape, dtype, 4), strided(&[shape[0], shape[1] / 2], dtype, 5));
            assert_gpus_agree(&[&x, &grad], 4.0, |t| {
                Ok(vec![swiglu(&t[0])?, swiglu_backward(&t[0], &t[1])?])
            });
        }
        for shape in [&[3, 5][..], &[2, 3, 8, 8], &[2, 3, 5], &[4, 16]] {
            let (x, grad) = (strided(shape, dtype, 6), strided(shape, dtype, 7));
            for count in [1, shape[1]] {
                let weight = random(&[count], DType::F32, 8);
                assert_gpus_agree(&[&x, &grad, &weight], 4.0, |t| {
                    let dx = prelu::input_gradient(&t[0], &t[2], &t[1])?;
                    let dweight = prelu::weight_gradient(&t[0], &t[1], count, dtype)?;
                    Ok(vec![prelu::prelu(&t[0], &t[2])?, dx, dweight])
                });
            }
        }
    }
}

#[test]
fn gpus_agree_on_infinities_and_large_numbers() {
    let inf = f64::INFINITY;
    let edges = vec![inf, -inf, f64::NAN, 0.0, -0.0, 60000.0, -60000.0, 90.0, -90.0, 20.5];
    for dtype in DTYPES {
        let (x, ones) = (of(edges.clone(), &[10], dtype), of(vec![1.0; 10], &[10], dtype));
        for curve in CURVES {
            assert_gpus_agree(&[&x, &ones], 4.0, |t| {
                Ok(vec![value(curve, &t[0])?, slope(curve, &t[0], &t[1])?])
            });
        }
    }
}

/// Where a factor of the slope is 0, and what it is multiplied by grows without bound.
#[test]
fn slopes_far_from_zero_are_those_of_the_asymptotes() {
    let far = [1e4, 1e20, f64::INFINITY, -1e4, -1e20, f64::NEG_INFINITY];
    for curve in [Curve::Mish, Curve::HardSwish, Curve::HardSigmoid, Curve::Relu6] {
        let above = if matches!(curve, Curve::Mish | Curve::HardSwish) { 1.0 } else { 0.0 };
        let expected: Vec<f64> =
            far.iter().map(|&x| if x > 0.0 { 3.0 * above } else { 0.0 }).collect();
        for dtype in DTYPES {
            // Long enough for vectors.
            let x = of(far.repeat(8), &[48], dtype);
            let grad = of(vec![3.0; 48], &[48], dtype);
            assert_close(&slope(curve, &x, &grad).unwrap(), &expected.repeat(8), 2.0);
            assert_close(&portable::slope(curve, &x, &grad).unwrap(), &expected.repeat(8), 2.0);
        }
    }
}
