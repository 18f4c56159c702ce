use candle_core::{DType, Device, Tensor};

use super::testing::*;
use super::*;
use crate::kernels::testing::devices::devices;

/// Around every block size, and past the size at which threads share the work.
const SHAPES: [[usize; 2]; 6] = [[1, 1], [3, 1], [17, 33], [25, 41], [1025, 4], [4099, 9]];

type Binary = fn(&Tensor, &Tensor) -> candle_core::Result<Tensor>;

#[track_caller]
fn check_binary(cpu: Binary, portable: Binary, exact: fn(f64, f64) -> f64) {
    for dtype in DTYPES {
        for shape in SHAPES {
            let (a, b) = (strided(&shape, dtype, 1), random(&shape, dtype, 2));
            let expected: Vec<f64> =
                values(&a).iter().zip(values(&b)).map(|(&a, b)| exact(a, b)).collect();
            let y = cpu(&a, &b).unwrap();
            assert!(y.is_contiguous() && y.dtype() == dtype && y.dims() == shape);
            assert_close(&y, &expected, 1.0);
            assert_close(&portable(&a, &b).unwrap(), &values(&y), 0.0);
        }
    }
}

#[test]
fn binary_kernels_match_the_exact_result() {
    check_binary(add, portable::add, |a, b| a + b);
    check_binary(add_relu, portable::add_relu, |a, b| (a + b).max(0.0));
    check_binary(sub, portable::sub, |a, b| a - b);
    check_binary(maximum, portable::maximum, f64::max);
    check_binary(minimum, portable::minimum, f64::min);
    check_binary(|a, b| mul(a, b, a.dtype()), |a, b| portable::mul(a, b, a.dtype()), |a, b| a * b);
    check_binary(relu_backward, portable::relu_backward, |y, g| if y > 0.0 { g } else { 0.0 });
    check_binary(|x, _| relu(x), |x, _| portable::relu(x), |x, _| x.max(0.0));
}

#[test]
fn on_every_device_16_bits_are_added_to_f32_as_its_copy_in_f32() -> Result<()> {
    for device in devices() {
        for half in [DType::F16, DType::BF16] {
            for [rows, columns] in SHAPES {
                let mut wide = values(&random(&[rows, columns + 1], DType::F32, 1));
                wide[0] = f64::NAN;
                wide[rows * columns] = f64::INFINITY;
                let wide = of(wide, &[rows, columns + 1], DType::F32).to_device(&device)?;
                let narrow = random(&[rows + 1, columns], half, 2).to_device(&device)?;
                let row = narrow.narrow(0, 0, 1)?.broadcast_as((rows, columns))?;
                // All of it, where the two begin at other addresses, and rows apart from each other.
                let flat = wide.flatten_all()?.narrow(0, 1, rows * columns)?;
                let flat = flat.reshape((rows, columns))?;
                let apart = wide.narrow(1, 0, columns)?;
                for (a, b) in [
                    (&flat, &narrow.narrow(0, 0, rows)?),
                    (&apart.contiguous()?, &narrow.narrow(0, 1, rows)?),
                    (&apart, &narrow.narrow(0, 0, rows)?),
                    (&flat, &row),
                ] {
                    let expected = add(a, &b.to_dtype(DType::F32)?)?;
                    for sum in [add(a, b)?, add(b, a)?] {
                        assert_eq!((sum.dtype(), sum.dims()), (DType::F32, a.dims()));
                        let bits = |x| values(x).iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                        assert_eq!(bits(&sum), bits(&expected), "{half:?} {rows} {columns}");
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn quotients_and_products_are_rounded_once_to_the_dtype_asked_for() {
    for dtype in DTYPES {
        for out in DTYPES {
            for shape in SHAPES {
                let a = strided(&shape, dtype, 11);
                let b = (random(&shape, dtype, 12).abs().unwrap() + 0.5).unwrap();
                let grad = random(&shape, dtype, 13);
                let pairs: Vec<_> = values(&a).into_iter().zip(values(&b)).collect();
                let count = (epsilon(crate::kernels::accumulator(dtype)) / epsilon(out)).max(1.0);
                let check = |ours: Tensor, oracle: Tensor, exact: Vec<f64>| {
                    assert_eq!((ours.dtype(), ours.dims()), (out, &shape[..]));
                    assert_close(&ours, &exact, 4.0 * count);
                    assert_close(&oracle, &exact, 4.0 * count);
                };
                let exact = pairs.iter().map(|(a, b)| a / b).collect();
                check(div(&a, &b, out).unwrap(), portable::div(&a, &b, out).unwrap(), exact);
                let exact = pairs.iter().map(|(a, b)| a * b).collect();
                check(mul(&a, &b, out).unwrap(), portable::mul(&a, &b, out).unwrap(), exact);
                let pairs = pairs.iter().zip(values(&grad));
                check(
                    divisor_gradient(&a, &b, &grad, out).unwrap(),
                    portable::divisor_gradient(&a, &b, &grad, out).unwrap(),
                    pairs.map(|((a, b), grad)| -grad * a / (b * b)).collect(),
                );
            }
        }
    }
}

#[test]
fn relu_and_its_gradient_keep_nan_and_infinities() {
    for dtype in DTYPES {
        let x = of(vec![f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0], &[4], dtype);
        let expected = [f64::NAN, f64::INFINITY, 0.0, 0.0];
        assert_close(&relu(&x).unwrap(), &expected, 0.0);
        assert_close(&portable::relu(&x).unwrap(), &expected, 0.0);
        assert_close(&add_relu(&x, &x).unwrap(), &expected, 0.0);
        // As PyTorch's threshold_backward: NaN is not at most 0. Long enough for vectors, and a rest.
        let y = of([f64::NAN, f64::INFINITY, 0.0, -0.0].repeat(9)[..35].into(), &[35], dtype);
        let grad = of(vec![3.0; 35], &[35], dtype);
        let expected = &[3.0, 3.0, 0.0, 0.0].repeat(9)[..35];
        assert_close(&relu_backward(&y, &grad).unwrap(), expected, 0.0);
        assert_close(&portable::relu_backward(&y, &grad).unwrap(), expected, 0.0);
        assert_close(&relu_backward_assign(grad, &y).unwrap(), expected, 0.0);
    }
}

/// As PyTorch's: halves at ties, the infinite among them, and all of it for both where one is NaN.
#[test]
fn a_selection_shares_its_gradient_at_ties() {
    let inf = f64::INFINITY;
    let a = [1.0, 2.0, 3.0, f64::NAN, 1.0, f64::NAN, inf, -inf, 0.0];
    let b = [2.0, 2.0, 1.0, 1.0, f64::NAN, f64::NAN, inf, inf, -0.0];
    let larger = [2.0, 2.0, 3.0, f64::NAN, f64::NAN, f64::NAN, inf, inf, 0.0];
    let smaller = [1.0, 2.0, 1.0, f64::NAN, f64::NAN, f64::NAN, inf, -inf, 0.0];
    let gradient = [0.0, 1.5, 3.0, 3.0, 3.0, 3.0, 1.5, 0.0, 1.5];
    for dtype in DTYPES {
        let [a, b] = [a, b].map(|x| of(x.repeat(7), &[63], dtype));
        let grad = of(vec![3.0; 63], &[63], dtype);
        for (actual, expected) in [
            (maximum(&a, &b), larger),
            (portable::maximum(&a, &b), larger),
            (minimum(&a, &b), smaller),
            (portable::minimum(&a, &b), smaller),
            (selection_gradient(&a, &b, &grad), gradient),
            (portable::selection_gradient(&a, &b, &grad), gradient),
        ] {
            assert_close(&actual.unwrap(), &expected.repeat(7), 0.0);
        }
        assert_gpus_agree(&[&a, &b, &grad], 0.0, |t| {
            let gradient = selection_gradient(&t[0], &t[1], &t[2])?;
            Ok(vec![maximum(&t[0], &t[1])?, minimum(&t[0], &t[1])?, gradient])
        });
    }
}

#[test]
fn the_gradient_of_relu_is_its_derivative() {
    let (x, weights) = (random(&[33], DType::F64, 3), random(&[33], DType::F64, 4));
    let dx = relu_backward(&relu(&x).unwrap(), &weights).unwrap();
    let expected = numeric_gradient(&x, &weights, |x| relu(x).unwrap());
    assert_close(&dx, &expected, difference_tolerance(33.0));
}

#[test]
fn add_assign_adds_in_place_whatever_the_dtypes() {
    for dst_dtype in DTYPES {
        for src_dtype in DTYPES {
            for shape in SHAPES {
                let (dst, src) = (random(&shape, dst_dtype, 5), strided(&shape, src_dtype, 6));
                let expected: Vec<f64> =
                    values(&dst).iter().zip(values(&src)).map(|(d, s)| d + s).collect();
                let oracle = portable::add_assign(&dst, &src).unwrap();
                assert_close(&oracle, &expected, 1.0);
                let view = dst.clone();
                let sum = add_assign(dst, &src).unwrap();
                assert_close(&sum, &values(&oracle), 0.0);
                assert_eq!(values(&view), values(&sum), "not in place");
            }
        }
    }
}

#[test]
fn on_every_device_a_result_can_take_the_place_of_an_argument() -> Result<()> {
    for device in devices() {
        for dtype in DTYPES {
            for shape in SHAPES {
                let mut numbers = values(&random(&shape, dtype, 5));
                let last = numbers.len() - 1;
                (numbers[last], numbers[last / 2]) = (f64::NAN, f64::INFINITY);
                let grad = of(numbers, &shape, dtype).to_device(&device)?;
                let y = strided(&shape, dtype, 6).to_device(&device)?;
                type Assign = fn(Tensor, &Tensor) -> Result<Tensor>;
                for (assign, expected) in [
                    (relu_backward_assign as Assign, relu_backward(&y, &grad)?),
                    (mul_assign, mul(&grad, &y, dtype)?),
                ] {
                    let into = grad.force_contiguous()?;
                    let view = into.clone();
                    let result = assign(into, &y)?;
                    assert_close(&result, &values(&expected), 0.0);
                    assert_close(&view, &values(&expected), 0.0);
                    assert_eq!((result.dtype(), result.dims()), (dtype, &shape[..]));
                }
            }
        }
    }
    Ok(())
}

#[test]
fn add_assign_keeps_to_its_part_of_a_storage() {
    let whole = random(&[3, 1025], DType::BF16, 7);
    let before = values(&whole);
    let src = random(&[1, 1025], DType::F32, 8);
    add_assign(whole.narrow(0, 1, 1).unwrap(), &src).unwrap();
    let after = values(&whole);
    assert_eq!(before[..1025], after[..1025]);
    assert_ne!(before[1025..2050], after[1025..2050]);
    assert_eq!(before[2050..], after[2050..]);
}

#[test]
fn dropout_drops_what_is_not_finite() {
    for dtype in DTYPES {
        for shape in SHAPES {
            let keep = random(&shape, DType::F32, 9).gt(0f32).unwrap();
            let x = random(&shape, dtype, 10);
            let infinite = (&x / 0.0).unwrap();
            let kept: Vec<f64> = values(&keep);
            let expected: Vec<f64> =
                values(&x).iter().zip(&kept).map(|(x, k)| x * k / 0.75).collect();
            let y = dropout(&x, &keep, 1.0 / 0.75).unwrap();
            assert_close(&y, &expected, 1.0);
            assert_close(&portable::dropout(&x, &keep, 1.0 / 0.75).unwrap(), &values(&y), 0.0);
            for (y, kept) in values(&dropout(&infinite, &keep, 2.0).unwrap()).iter().zip(kept) {
                assert!(if kept == 0.0 { *y == 0.0 } else { y.is_infinite() });
            }
        }
    }
}

#[test]
fn tensors_of_no_elements() {
    let empty = Tensor::zeros((0, 3), DType::F16, &Device::Cpu).unwrap();
    assert_eq!(relu(&empty).unwrap().dims(), [0, 3]);
    let other = Tensor::zeros((0, 3), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(add_assign(empty, &other).unwrap().dims(), [0, 3]);
}

#[test]
fn gpus_agree() {
    for dtype in DTYPES {
        for shape in SHAPES {
            let (a, b) = (strided(&shape, dtype, 1), random(&shape, dtype, 2));
            let b = (b.abs().unwrap() + 0.5).unwrap();
            let keep = random(&shape, DType::F32, 9).gt(0f32).unwrap();
            assert_gpus_agree(&[&a, &b, &keep], 0.0, |t| {
                let (a, b) = (&t[0], &t[1]);
                let pointwise = vec![
                    relu(a)?,
                    relu_backward(a, b)?,
                    add(a, b)?,
                    sub(a, b)?,
                    add_relu(a, b)?,
                    maximum(a, b)?,
                    minimum(a, b)?,
                    selection_gradient(a, b, a)?,
                    dropout(a, &t[2], 1.0 / 0.75)?,
                    dropout(&(a / 0.0)?, &t[2], 2.0)?,
                ];
                Ok(pointwise)
            });
            for out in DTYPES {
                // From F64 to a half the CPU rounds once, and kernels by way of F32.
                let count = if dtype == DType::F64 && out != dtype { 1.0 } else { 0.0 };
                assert_gpus_agree(&[&a, &b], count, |t| {
                    let (a, b) = (&t[0], &t[1]);
                    Ok(vec![mul(a, b, out)?, div(a, b, out)?, divisor_gradient(b, a, b, out)?])
                });
                let src = strided(&shape, out, 6);
                assert_gpus_agree(&[&b, &src], 0.0, |t| {
                    let dst = t[0].force_contiguous()?;
                    let view = dst.clone();
                    let sum = add_assign(dst, &t[1])?;
                    Ok(vec![sum, view])
                });
            }
        }
    }
}

#[test]
fn gpus_broadcast_without_a_copy() {
    for dtype in DTYPES {
        for inner in [1, 3, 8, 64, 65] {
            let a = random(&[3, 5, inner], dtype, 1);
            let wide = (3, 5, inner);
            let row = random(&[inner], dtype, 2);
            let channel = random(&[5, 1], dtype, 3);
            let sample = random(&[3, 1, 1], dtype, 4);
            let one = random(&[1, 1], dtype, 5);
            for b in [row, channel, sample, one] {
                let b = b.broadcast_as(wide).unwrap();
                assert_gpus_agree(&[&a, &b], 0.0, |t| {
                    let (a, b) = (&t[0], &t[1]);
                    let selected = [maximum(a, b)?, minimum(b, a)?];
                    let mut all = vec![add(a, b)?, sub(b, a)?, mul(a, b, DType::F32)?];
                    all.extend(selected);
                    Ok(all)
                });
            }
        }
    }
}

#[test]
fn gpus_keep_nan_and_infinities() {
    for dtype in DTYPES {
        let x = of(vec![f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, 1.0], &[5], dtype);
        assert_gpus_agree(&[&x], 0.0, |x| {
            let ones = Tensor::ones(5, DType::F32, x[0].device())?.to_dtype(dtype)?;
            let into = relu_backward_assign(ones.copy()?, &x[0])?;
            let backward = relu_backward(&x[0], &ones)?;
            Ok(vec![relu(&x[0])?, add_relu(&x[0], &x[0])?, backward, into])
        });
    }
}

#[test]
fn gpus_drop_what_the_cpu_drops() {
    use rand::SeedableRng;
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(7);
    rng.set_stream((1 << 40) + 3);
    for n in [1, 15, 64, 1025, 5003] {
        for threshold in [0, 1 << 30, 3 << 30, 1 << 32] {
            assert_gpus_agree(&[&random(&[1], DType::F32, 1)], 0.0, |t| {
                let mask = keep_mask(rng.clone(), threshold, &Shape::from(n), t[0].device())?;
                Ok(vec![mask.to_dtype(DType::F32)?])
            });
        }
    }
}
