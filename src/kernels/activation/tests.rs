use std::f64::consts::{FRAC_2_SQRT_PI, LN_2};

use candle_core::{DType, Device, Tensor};

use super::*;
use crate::kernels::elementwise::testing::*;
use crate::kernels::testing::devices::devices;

/// What the table says of an operator, with the parameters it has in tests.
struct TableRow {
    function: Pointwise,
    /// The operator's name in `activation.cu`.
    name: &'static str,
    /// The ends of random inputs.
    inputs: [f64; 2],
    /// At -∞, 0, ∞ and NaN.
    value: [f64; 4],
    derivative: [f64; 4],
}

macro_rules! row {
    ($variant:ident { $($parameter:ident: $sample:literal),* }
        torch: $torch:literal, reference: $reference:literal,
        inputs: $low:literal, $high:literal;
        example: $x:literal, $y:literal;
        value: [$($value:expr),*];
        derivative: [$($derivative:expr),*];
    ) => {
        TableRow {
            function: Pointwise::$variant { $($parameter: $sample),* },
            name: stringify!($variant),
            inputs: [$low, $high],
            value: [$($value),*],
            derivative: [$($derivative),*],
        }
    };
}

macro_rules! rows {
    ([] $(
        $(#[$doc:meta])* $name:ident => $variant:ident (
            $($parameter:ident: $type:ty = $sample:literal),*
        ), $policy:tt, { $($facts:tt)* }, $arithmetic:tt;
    )*) => {
        const ROWS: &[TableRow] = &[$(row!($variant { $($parameter: $sample),* } $($facts)*),)*];
    };
}
super::table::pointwise!(rows []);

/// As the table writes them.
const INF: f64 = f64::INFINITY;
const NAN: f64 = f64::NAN;

const EDGES: [f64; 4] = [-INF, 0.0, INF, NAN];

/// Numbers of both signs, where the operator takes them, and of many magnitudes.
fn inputs(row: &TableRow, dtype: DType) -> Tensor {
    let [low, high] = row.inputs;
    let x = strided(&[33, 131], DType::F64, 1).affine((high - low) / 4.0, (high + low) / 2.0);
    x.unwrap().to_dtype(dtype).unwrap()
}

/// The lines of `activation.cu` are numbered by their order.
#[test]
fn the_cuda_source_has_the_rows_of_the_table_in_their_order() {
    let source = include_str!("activation.cu");
    let lines =
        source.lines().filter_map(|line| line.strip_prefix("POINTWISE(")?.split(',').next());
    let rows = ROWS.iter().map(|row| row.name);
    assert_eq!(lines.collect::<Vec<_>>(), rows.collect::<Vec<_>>());
    for (number, row) in ROWS.iter().enumerate() {
        assert_eq!(row.function.number().0, number as i32);
    }
    let selu = Pointwise::Selu { alpha: 3.0, gamma: 5.0 };
    assert_eq!(selu.number().1, [3.0, 5.0]);
}

#[test]
fn values_in_every_dtype_are_those_of_f64() {
    for row in ROWS {
        for dtype in DTYPES {
            let x = inputs(row, dtype);
            let x64 = plain(&double(&x)).unwrap();
            let exact = values(&portable::value(row.function, &x64).unwrap());
            let y = value(row.function, &x).unwrap();
            assert_eq!((y.dtype(), y.dims()), (dtype, x.dims()));
            // erf and the exponential of F64 are good to some hundred places.
            let count = if dtype == DType::F64 { 400.0 } else { 4.0 };
            assert_close(&y, &exact, count);
            let oracle = portable::value(row.function, &plain(&x).unwrap()).unwrap();
            assert_close(&oracle, &exact, count);
        }
    }
}

#[test]
fn derivatives_in_every_dtype_are_those_of_f64() {
    for row in ROWS {
        for dtype in DTYPES {
            let (x, grad) = (inputs(row, dtype), strided(&[33, 131], dtype, 2));
            let (x64, grad64) = (plain(&double(&x)).unwrap(), plain(&double(&grad)).unwrap());
            let exact = values(&portable::derivative(row.function, &x64, &grad64).unwrap());
            let dx = derivative(row.function, &x, &grad).unwrap();
            assert_eq!((dx.dtype(), dx.dims()), (dtype, x.dims()));
            let count = if dtype == DType::F64 { 400.0 } else { 8.0 };
            assert_close(&dx, &exact, count);
            let (x, grad) = (plain(&x).unwrap(), plain(&grad).unwrap());
            assert_close(&portable::derivative(row.function, &x, &grad).unwrap(), &exact, count);
        }
    }
}

#[test]
fn a_derivative_in_the_place_of_the_gradient_is_the_same() {
    // Of a few threads' tasks, and no whole number of blocks; and of what is not contiguous.
    for dtype in DTYPES {
        let x = random(&[3, 17_000], dtype, 1).abs().unwrap();
        let grad = random(&[3, 17_000], dtype, 2);
        for TableRow { function, name, .. } in ROWS {
            let bits = |x: &Tensor| values(x).iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            let expected = bits(&derivative(*function, &x, &grad).unwrap());
            let whole = grad.force_contiguous().unwrap();
            let view = whole.clone();
            assert_eq!(bits(&derivative_assign(*function, whole, &x).unwrap()), expected, "{name}");
            assert_eq!(bits(&view), expected);
        }
        let (function, x) = (Pointwise::GeluTanh {}, strided(&[33, 131], dtype, 1));
        let grad = strided(&[33, 131], dtype, 2);
        let before = values(&grad);
        let expected = values(&derivative(function, &x, &grad).unwrap());
        let dx = derivative_assign(function, grad.clone(), &x).unwrap();
        assert_eq!((values(&dx), values(&grad)), (expected, before));
    }
}

#[test]
fn derivatives_are_those_of_the_values() {
    for row in ROWS {
        let x = inputs(row, DType::F64).narrow(1, 0, 7).unwrap().contiguous().unwrap();
        let grad = random(&[33, 7], DType::F64, 3);
        let expected = numeric_gradient(&x, &grad, |x| value(row.function, x).unwrap());
        // The third derivative near a pole, over a step squared.
        let scale = if row.inputs[0] > -1.0 { 1e5 } else { 1e3 };
        let dx = derivative(row.function, &x, &grad).unwrap();
        assert_close(&dx, &expected, difference_tolerance(scale));
    }
}

/// The table's, which are PyTorch's: on the CPU in vectors and what is left of them, by candle's operators, and on
/// GPUs.
#[test]
fn values_and_derivatives_at_zero_infinities_and_nan() {
    for device in devices() {
        for dtype in DTYPES {
            let x = of(EDGES.repeat(9)[..35].into(), &[35], dtype).to_device(&device).unwrap();
            let twos = (x.ones_like().unwrap() * 2.0).unwrap();
            for row in ROWS {
                let check = |what: &str, actual: Tensor, expected: [f64; 4], factor: f64| {
                    let actual = values(&actual.to_device(&candle_core::Device::Cpu).unwrap());
                    for (i, actual) in actual.into_iter().enumerate() {
                        let (name, x, expected) =
                            (row.name, EDGES[i % 4], factor * expected[i % 4]);
                        let same = actual == expected || actual.is_nan() && expected.is_nan();
                        let near =
                            (actual - expected).abs() <= 4.0 * epsilon(dtype) * expected.abs();
                        assert!(
                            same || near,
                            "{name}, {what} at {x}: {actual}, not {expected}; {dtype:?}"
                        );
                    }
                };
                check("value", value(row.function, &x).unwrap(), row.value, 1.0);
                // candle's own operators on a GPU drop a NaN where they limit numbers.
                if device.is_cpu() {
                    check("oracle", portable::value(row.function, &x).unwrap(), row.value, 1.0);
                }
                let dx = derivative(row.function, &x, &twos).unwrap();
                check("derivative", dx, row.derivative, 2.0);
                if device.is_cpu() {
                    let dx = portable::derivative(row.function, &x, &twos).unwrap();
                    check("derivative's oracle", dx, row.derivative, 2.0);
                }
            }
        }
    }
}

/// As PyTorch: at the bounds of a clamp, with bounds that cross or are NaN, and of powers of zero and negative numbers.
#[test]
fn parameters_at_their_edges() {
    let clamp = |min, max| Pointwise::Clamp { min, max };
    let powf = |exponent| Pointwise::Powf { exponent };
    let cases = [
        (clamp(-1.0, 2.0), [-1.0, 2.0, 3.0, -2.0], [-1.0, 2.0, 2.0, -1.0], [1.0, 1.0, 0.0, 0.0]),
        (clamp(2.0, -1.0), [0.0, 1.5, 3.0, NAN], [-1.0, -1.0, -1.0, NAN], [0.0; 4]),
        (clamp(NAN, 1.0), [0.0, 1.5, -3.0, NAN], [NAN; 4], [0.0; 4]),
        (clamp(-1.0, NAN), [0.0, 1.5, -3.0, NAN], [NAN; 4], [0.0; 4]),
        (powf(2.0), [-2.0, 0.0, -0.0, INF], [4.0, 0.0, 0.0, INF], [-4.0, 0.0, 0.0, INF]),
        (powf(3.0), [-2.0, 0.0, 2.0, -INF], [-8.0, 0.0, 8.0, -INF], [12.0, 0.0, 12.0, INF]),
        (powf(1.0), [-2.0, 0.0, NAN, INF], [-2.0, 0.0, NAN, INF], [1.0, 1.0, 1.0, 1.0]),
        (powf(0.0), [-2.0, 0.0, NAN, INF], [1.0; 4], [0.0; 4]),
        (powf(0.5), [-2.0, 0.0, 4.0, INF], [NAN, 0.0, 2.0, INF], [NAN, INF, 0.25, 0.0]),
        (powf(-1.0), [-2.0, 0.0, 4.0, INF], [-0.5, INF, 0.25, 0.0], [-0.25, -INF, -0.0625, 0.0]),
    ];
    for dtype in DTYPES {
        for (function, x, y, dy) in cases {
            let x = of(x.repeat(9), &[36], dtype);
            let ones = x.ones_like().unwrap();
            assert_close(&value(function, &x).unwrap(), &y.repeat(9), 2.0);
            assert_close(&portable::value(function, &x).unwrap(), &y.repeat(9), 2.0);
            assert_close(&derivative(function, &x, &ones).unwrap(), &dy.repeat(9), 2.0);
            assert_close(&portable::derivative(function, &x, &ones).unwrap(), &dy.repeat(9), 2.0);
            assert_gpus_agree(&[&x, &ones], 4.0, |t| {
                Ok(vec![value(function, &t[0])?, derivative(function, &t[0], &t[1])?])
            });
        }
    }
}

/// Where `ln(1 + x)` would be rounded to 0, and near the ends of its series.
#[test]
fn small_logarithms_keep_their_digits() {
    let x = [1e-7, -1e-7, 3e-20, -0.49, -0.51, 0.99, 1.01, -0.9375, 1e30, -0.0];
    for dtype in [DType::BF16, DType::F32, DType::F64] {
        let x = of(x.to_vec(), &[10], dtype);
        let y = values(&value(Pointwise::Log1p {}, &x).unwrap());
        for (x, y) in values(&x).iter().zip(y) {
            let error = (y - x.ln_1p()).abs();
            assert!(error <= 4.0 * epsilon(dtype) * x.ln_1p().abs(), "{x}: {y}, not {}", x.ln_1p());
        }
    }
}

/// Of all that go through 0 there: what is small is not what is left of a difference.
#[test]
fn small_inputs_keep_their_digits() {
    let small = [0.01, -0.01, 1e-4, -1e-4, 1e-6, -1e-6];
    let x = of(small.repeat(6), &[36], DType::F32);
    let through_0 = |row: &&TableRow| row.value[1] == 0.0 && row.derivative[1].abs() > 0.0;
    let rows: Vec<&TableRow> =
        ROWS.iter().filter(through_0).filter(|row| row.derivative[1] < INF).collect();
    assert!(rows.iter().any(|row| row.name == "Log1p"));
    for device in devices() {
        for row in &rows {
            let exact = values(&portable::value(row.function, &double(&x)).unwrap());
            let y = value(row.function, &x.to_device(&device).unwrap()).unwrap();
            for (exact, y) in exact.iter().zip(values(&y.to_device(&Device::Cpu).unwrap())) {
                let error = (y - exact).abs();
                let name = row.name;
                assert!(
                    error <= 8.0 * epsilon(DType::F32) * exact.abs(),
                    "{name}: {y}, not {exact}"
                );
            }
        }
    }
}

#[test]
fn large_inputs_stay_finite() {
    for dtype in DTYPES {
        let x = of(vec![60000.0, -60000.0, 90.0, -90.0], &[4], dtype);
        let ones = x.ones_like().unwrap();
        for TableRow { function, name, inputs, .. } in ROWS {
            // What an F64 has and this dtype has too.
            let finite = |exact: Tensor, actual: Tensor| {
                let exact = values(&exact.to_dtype(dtype).unwrap());
                for (x, y) in exact.iter().zip(values(&actual)).filter(|(x, _)| x.is_finite()) {
                    // Exponentials that underflow may be 0.
                    let least = 64e3 * f64::from(f32::MIN_POSITIVE);
                    assert!(
                        (x - y).abs() <= 8.0 * epsilon(dtype) * x.abs() + least,
                        "{name} {x} {y}"
                    );
                }
                exact.iter().all(|x| x.is_finite())
            };
            let x64 = double(&x);
            let exact = portable::value(*function, &x64).unwrap();
            let all = finite(exact, value(*function, &x).unwrap());
            let exact = portable::derivative(*function, &x64, &double(&ones)).unwrap();
            let slopes = finite(exact, derivative(*function, &x, &ones).unwrap());
            // Of operators that take all numbers, and grow as fast as their input.
            let grows = matches!(*name, "Relu2" | "Square") || *inputs != [-12.0, 12.0];
            assert!(grows || all && slopes, "{name}");
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
        for row in ROWS {
            let (x, grad) = (inputs(row, dtype), strided(&[33, 131], dtype, 2));
            assert_gpus_agree(&[&x, &grad], count, |t| {
                let over = derivative_assign(row.function, t[1].force_contiguous()?, &t[0])?;
                let (y, dx) =
                    (value(row.function, &t[0])?, derivative(row.function, &t[0], &t[1])?);
                Ok(vec![y, dx, over])
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
        for TableRow { function, .. } in ROWS {
            assert_gpus_agree(&[&x, &ones], 4.0, |t| {
                Ok(vec![value(*function, &t[0])?, derivative(*function, &t[0], &t[1])?])
            });
        }
    }
}

/// Where a factor of the derivative is 0, and what it is multiplied by grows without bound.
#[test]
fn derivatives_far_from_zero_are_those_of_the_asymptotes() {
    let far = [1e4, 1e20, f64::INFINITY, -1e4, -1e20, f64::NEG_INFINITY];
    for (function, above) in [
        (Pointwise::Mish {}, 1.0),
        (Pointwise::HardSwish {}, 1.0),
        (Pointwise::HardSigmoid {}, 0.0),
        (Pointwise::Relu6 {}, 0.0),
    ] {
        let expected: Vec<f64> =
            far.iter().map(|&x| if x > 0.0 { 3.0 * above } else { 0.0 }).collect();
        for dtype in DTYPES {
            // Long enough for vectors.
            let x = of(far.repeat(8), &[48], dtype);
            let grad = of(vec![3.0; 48], &[48], dtype);
            let oracle = portable::derivative(function, &x, &grad).unwrap();
            assert_close(&oracle, &expected.repeat(8), 2.0);
            for device in devices() {
                let [x, grad] = [&x, &grad].map(|tensor| tensor.to_device(&device).unwrap());
                let dx = derivative(function, &x, &grad).unwrap();
                assert_close(&dx, &expected.repeat(8), 2.0);
            }
        }
    }
}

/// Large tensors take results from a table, small ones compute them.
#[test]
fn every_16_bit_number_has_the_same_bits_in_large_and_small_tensors() {
    let size = 1 << 16;
    let bits = |tensor: &Tensor| {
        let wide = tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
        let bits = |x: f32| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() };
        wide.to_vec1::<f32>().unwrap().into_iter().map(bits).collect::<Vec<_>>()
    };
    let all = || 0..=u16::MAX;
    let numbers = [
        Tensor::from_iter(all().map(half::bf16::from_bits), &Device::Cpu).unwrap(),
        Tensor::from_iter(all().map(half::f16::from_bits), &Device::Cpu).unwrap(),
    ];
    for x in numbers {
        let grad = random(&[size], x.dtype(), 3);
        for TableRow { function, name, .. } in ROWS {
            let run = |start, len| {
                let part = |t: &Tensor| t.narrow(0, start, len).unwrap();
                let (x, grad) = (part(&x), part(&grad));
                let dx = derivative(*function, &x, &grad).unwrap();
                let over = derivative_assign(*function, grad.force_contiguous().unwrap(), &x);
                [value(*function, &x).unwrap(), dx, over.unwrap()].map(|result| bits(&result))
            };
            let large = run(0, size);
            let mut small: [Vec<u32>; 3] = Default::default();
            for start in (0..size).step_by(size / 2) {
                let parts = run(start, size / 2);
                small.iter_mut().zip(parts).for_each(|(all, part)| all.extend(part));
            }
            assert!(large == small, "{name} {:?}", x.dtype());
        }
    }
}
