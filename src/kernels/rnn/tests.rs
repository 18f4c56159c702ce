use candle_core::{DType, Device, Tensor};

use super::sequence::Dims;
use super::{Gradients, Sequence, Wants, gru, gru_backward, lstm, lstm_backward, portable};
use crate::kernels::elementwise::testing::{
    DTYPES, double, epsilon, numeric_gradient, of, on_device, random, strided, values,
};
use crate::kernels::testing::devices::devices;

/// `(b, t, in, n)`: of one, odd, long, of several blocks of units, without a batch, without steps.
const SIZES: [[usize; 4]; 6] =
    [[1, 1, 1, 1], [3, 5, 4, 7], [2, 40, 3, 5], [70, 2, 9, 67], [0, 3, 2, 4], [2, 0, 2, 4]];

/// A sequence, a cell state, and the gradient of `outputs` states a step.
fn sequence(
    [b, t, inputs, n]: [usize; 4],
    gates: usize,
    dtype: DType,
    reverse: bool,
) -> (Sequence, Tensor, Tensor) {
    // Weights small enough that states do not saturate.
    let weight = |dims: &[usize], seed| (random(dims, dtype, seed) * 0.25).unwrap();
    let sequence = Sequence {
        x: strided(&[b, t, inputs], dtype, 1),
        h0: strided(&[b, n], dtype, 2),
        w_ih: weight(&[gates * n, inputs], 3),
        w_hh: weight(&[n, gates * n], 4).t().unwrap(),
        b_ih: Some(random(&[gates * n], DType::F32, 5)),
        b_hh: if gates == 3 || reverse { Some(random(&[gates * n], dtype, 6)) } else { None },
        reverse,
    };
    let dims = if gates == 4 { vec![2, b, t, n] } else { vec![b, t, n] };
    (sequence, random(&[b, n], dtype, 7), random(&dims, dtype, 8))
}

/// The same in F64.
fn doubled(of: &Sequence) -> Sequence {
    let [x, h0, w_ih, w_hh] = [&of.x, &of.h0, &of.w_ih, &of.w_hh].map(double);
    let [b_ih, b_hh] = [&of.b_ih, &of.b_hh].map(|bias| bias.as_ref().map(double));
    Sequence { x, h0, w_ih, w_hh, b_ih, b_hh, reverse: of.reverse }
}

/// The same on that device.
fn moved(of: &Sequence, device: &Device) -> Sequence {
    let [x, h0, w_ih, w_hh] = [&of.x, &of.h0, &of.w_ih, &of.w_hh].map(|t| on_device(t, device));
    let [b_ih, b_hh] = [&of.b_ih, &of.b_hh].map(|b| b.as_ref().map(|b| on_device(b, device)));
    Sequence { x, h0, w_ih, w_hh, b_ih, b_hh, reverse: of.reverse }
}

fn all(dtype: DType) -> Wants {
    let want = Some(dtype);
    Wants { x: want, h0: want, w_ih: want, w_hh: want, b_ih: want, b_hh: want }
}

fn list(gradients: Gradients) -> Vec<Tensor> {
    let Gradients { x, h0, w_ih, w_hh, b_ih, b_hh } = gradients;
    [x, h0, w_ih, w_hh, b_ih, b_hh].into_iter().flatten().collect()
}

/// Output, then gradients, of an LSTM; by the portable version where `portable`.
fn run_lstm(of: &Sequence, c0: &Tensor, grad: &Tensor, out: DType, by_candle: bool) -> Vec<Tensor> {
    let (y, gate_gradients, dc0) = if by_candle {
        let Dims { batch, steps, hidden, .. } = of.dims().unwrap();
        let bias = of.b_hh.as_ref().map(|bias| {
            let [a, b] = [of.b_ih.as_ref().unwrap(), bias].map(|b| b.to_dtype(of.wide()).unwrap());
            (a + b).unwrap()
        });
        let gates = of.project(bias.as_ref().or(of.b_ih.as_ref())).unwrap();
        let gates = gates.reshape((batch, steps, 4 * hidden)).unwrap();
        let (y, gates) = portable::lstm(of, c0, &gates).unwrap();
        let (gate_gradients, dc0) = portable::lstm_backward(of, c0, &gates, &y, grad).unwrap();
        (y, gate_gradients, dc0)
    } else {
        let (y, gates) = lstm(of, c0).unwrap();
        assert_eq!(gates.dtype(), of.x.dtype());
        let (gate_gradients, dc0) = lstm_backward(of, c0, &gates, &y, grad).unwrap();
        (y, gate_gradients, dc0)
    };
    let gradients = gate_gradients.gradients(of, &y.get(0).unwrap(), all(out)).unwrap();
    [y, dc0.to_dtype(out).unwrap()].into_iter().chain(list(gradients)).collect()
}

fn run_gru(of: &Sequence, grad: &Tensor, out: DType, by_candle: bool) -> Vec<Tensor> {
    let (y, gate_gradients) = if by_candle {
        let Dims { batch, steps, hidden, .. } = of.dims().unwrap();
        let gates = of.project(of.b_ih.as_ref()).unwrap();
        let gates = gates.reshape((batch, steps, 3 * hidden)).unwrap();
        let (y, saved) = portable::gru(of, &gates).unwrap();
        let gate_gradients = portable::gru_backward(of, &saved, &y, grad).unwrap();
        (y, gate_gradients)
    } else {
        let (y, saved) = gru(of).unwrap();
        let gate_gradients = gru_backward(of, &saved, &y, grad).unwrap();
        (y, gate_gradients)
    };
    let gradients = gate_gradients.gradients(of, &y, all(out)).unwrap();
    [y].into_iter().chain(list(gradients)).collect()
}

#[test]
fn every_dtype_device_and_the_portable_version_agree_with_f64() {
    let devices = devices();
    for dtype in DTYPES {
        for size in SIZES {
            for (gates, reverse) in [(3, false), (3, true), (4, false), (4, true)] {
                let (of, c0, grad) = sequence(size, gates, dtype, reverse);
                let run = |of: &Sequence, c0: &Tensor, grad: &Tensor, out, by_candle| match gates {
                    4 => run_lstm(of, c0, grad, out, by_candle),
                    _ => run_gru(of, grad, out, by_candle),
                };
                let (c0_64, grad_64) = (double(&c0), double(&grad));
                let expected = run(&doubled(&of), &c0_64, &grad_64, DType::F64, false);
                let out = if dtype == DType::F64 { dtype } else { DType::F32 };
                let ours = devices.iter().map(|device| (device, false));
                for (device, by_candle) in ours.chain([(&Device::Cpu, true)]) {
                    let (of, [c0, grad]) =
                        (moved(&of, device), [&c0, &grad].map(|t| on_device(t, device)));
                    let actual = run(&of, &c0, &grad, out, by_candle);
                    assert_eq!(actual.len(), expected.len());
                    for (i, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
                        assert_eq!(actual.dims(), expected.dims());
                        assert_eq!(actual.dtype(), if i == 0 { dtype } else { out });
                        if actual.elem_count() == 0 {
                            continue; // candle reads nothing from a GPU by an error
                        }
                        // Each step's roundings, of what is saved, reach all before it; and
                        // those of a gate, which is a part of 1, a derivative near 0.
                        let expected = values(expected);
                        let largest = expected.iter().fold(1.0, |m: f64, e| m.max(e.abs()));
                        let tolerance = (8.0 + size[1] as f64) * epsilon(dtype) * largest;
                        for (actual, expected) in values(actual).iter().zip(&expected) {
                            let error = (actual - expected).abs();
                            assert!(error <= tolerance, "{i}: {actual}, not {expected}, {dtype:?}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn gradients_are_slopes() {
    for size in [[1, 1, 1, 1], [2, 4, 3, 2]] {
        for (gates, reverse) in [(3, false), (3, true), (4, false), (4, true)] {
            let (of, c0, grad) = sequence(size, gates, DType::F64, reverse);
            let output = |of: &Sequence, c0: &Tensor| match gates {
                4 => lstm(of, c0).unwrap().0,
                _ => gru(of).unwrap().0,
            };
            let actual = match gates {
                4 => run_lstm(&of, &c0, &grad, DType::F64, false),
                _ => run_gru(&of, &grad, DType::F64, false),
            };
            type Put = fn(&Sequence, Tensor) -> Sequence;
            let puts: [(&Tensor, Put); 4] = [
                (&of.x, |of, x| Sequence { x, ..of.clone() }),
                (&of.h0, |of, h0| Sequence { h0, ..of.clone() }),
                (&of.w_ih, |of, w_ih| Sequence { w_ih, ..of.clone() }),
                (&of.w_hh, |of, w_hh| Sequence { w_hh, ..of.clone() }),
            ];
            // Of a difference of sums of that many numbers.
            let tolerance = 2.0 * grad.elem_count() as f64 * f64::EPSILON.powf(2.0 / 3.0);
            let assert_close = |actual: &Tensor, numeric: &[f64]| {
                for (actual, numeric) in values(actual).iter().zip(numeric) {
                    assert!((actual - numeric).abs() <= tolerance, "{actual}, not {numeric}");
                }
            };
            let at = if gates == 4 { 2 } else { 1 };
            for (i, (input, put)) in puts.into_iter().enumerate() {
                let numeric = numeric_gradient(input, &grad, |x| output(&put(&of, x.clone()), &c0));
                assert_close(&actual[at + i], &numeric);
            }
            if gates == 4 {
                let numeric = numeric_gradient(&c0, &grad, |c0| output(&of, c0));
                assert_close(&actual[1], &numeric);
            }
        }
    }
}

/// A gate of 1 in half precision still has a derivative.
#[test]
fn gates_near_one_keep_their_slope() {
    for dtype in [DType::F16, DType::BF16] {
        let (zero, eight) = (of(vec![0.0], &[1, 1], dtype), of(vec![8.0; 4], &[4], dtype));
        let one = of(vec![1.0], &[1, 1], dtype);
        let weight = of(vec![0.0; 4], &[4, 1], dtype);
        let sequence = Sequence {
            x: of(vec![1.0], &[1, 1, 1], dtype),
            h0: zero,
            w_ih: weight.clone(),
            w_hh: weight,
            b_ih: Some(eight),
            b_hh: None,
            reverse: false,
        };
        let grad = of(vec![0.0, 1.0], &[2, 1, 1, 1], dtype);
        let derivative = |of: &Sequence, c0: &Tensor, grad: &Tensor, out| {
            values(&run_lstm(of, c0, grad, out, false)[6])[1] // of the forget gate's bias
        };
        let exact = derivative(&doubled(&sequence), &double(&one), &double(&grad), DType::F64);
        for device in devices() {
            let [one, grad] = [&one, &grad].map(|t| on_device(t, &device));
            let half = derivative(&moved(&sequence, &device), &one, &grad, DType::F32);
            assert!(exact > 1e-4 && (half - exact).abs() < 4.0 * epsilon(dtype) * exact, "{half}");
        }
    }
}

#[test]
fn one_result_for_any_number_of_threads() {
    // Up to 512 units each thread takes some rows through all steps; of an F32 batch of few rows, some columns of each.
    for (size, dtype) in [
        ([70, 3, 9, 67], DType::F32),
        ([5, 2, 5, 512], DType::F32),
        ([70, 3, 9, 67], DType::BF16),
        ([37, 2, 5, 512], DType::BF16),
        ([5, 2, 5, 513], DType::BF16),
    ] {
        let (of, c0, grad) = sequence(size, 4, dtype, false);
        let results = [1, 2, 3].map(|threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let results = pool.install(|| run_lstm(&of, &c0, &grad, DType::F32, false));
            results.iter().map(values).collect::<Vec<_>>()
        });
        assert!(results[0] == results[1] && results[0] == results[2], "{size:?} {dtype:?}");
    }
}

#[test]
fn nan_stays_in_its_row_of_the_batch() {
    for (gates, dtype) in [(3, DType::F16), (4, DType::F16), (3, DType::BF16), (4, DType::BF16)] {
        let (mut of, c0, _) = sequence([3, 4, 2, 5], gates, dtype, false);
        let mut x = values(&of.x);
        x[2 * 4 + 1] = f64::NAN; // the second row's first step
        of.x = self::of(x, &[3, 4, 2], dtype);
        for device in devices() {
            let (of, c0) = (moved(&of, &device), on_device(&c0, &device));
            let y = match gates {
                4 => lstm(&of, &c0).unwrap().0.get(0).unwrap(),
                _ => gru(&of).unwrap().0,
            };
            for (i, y) in values(&y).into_iter().enumerate() {
                assert_eq!(y.is_nan(), i / 20 == 1, "{gates} gates, {i}");
            }
        }
    }
}
