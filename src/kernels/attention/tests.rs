mod flash;

use candle_core::{DType, Device, Tensor};

use super::*;
use crate::kernels::accumulator;
use crate::kernels::elementwise::testing::*;
use crate::kernels::testing::devices::devices;

const PLAIN: Settings = Settings { scale: 0.5, causal: false, softcap: None };
const CAUSAL: Settings = Settings { causal: true, ..PLAIN };
const CAPPED: Settings = Settings { softcap: Some(1.5), ..CAUSAL };

/// `b, h, h_kv, t, s, d, dv`: of one, grouped, past a block of queries, more keys than queries,
/// past a block of keys.
const SIZES: [[usize; 7]; 6] = [
    [1, 1, 1, 1, 1, 1, 1],
    [2, 3, 3, 5, 5, 4, 4],
    [2, 4, 2, 7, 9, 5, 3],
    [1, 2, 1, 67, 70, 17, 9],
    [1, 2, 1, 3, 1030, 2, 2],
    [1, 1, 1, 34, 4100, 1, 1],
];

fn inputs([b, h, h_kv, t, s, d, dv]: [usize; 7], dtype: DType) -> [Tensor; 4] {
    // Heads after positions in memory, as a model has them.
    let transposed = |dims: [usize; 4], seed| {
        let [b, h, n, d] = dims;
        random(&[b, n, h, d], dtype, seed).transpose(1, 2).unwrap()
    };
    [
        transposed([b, h, t, d], 1),
        transposed([b, h_kv, s, d], 2),
        transposed([b, h_kv, s, dv], 3),
        random(&[b, h, t, dv], dtype, 4),
    ]
}

/// Masks of every kind and way to broadcast; some of them where they are large.
fn masks(sizes: [usize; 7], dtype: DType) -> Vec<Option<Tensor>> {
    let step = if sizes[3] * sizes[4] > 1000 { 3 } else { 1 };
    masks_of_every_kind(sizes, dtype).into_iter().step_by(step).collect()
}

fn masks_of_every_kind([b, h, _, t, s, ..]: [usize; 7], dtype: DType) -> Vec<Option<Tensor>> {
    let keep = |dims: &[usize]| {
        let count: usize = dims.iter().product();
        let keep = (0..count).map(|i| u8::from(i % s == 0 || i * i % 3 != 1)).collect();
        Tensor::from_vec(keep, dims, &Device::Cpu).unwrap()
    };
    let expanded = keep(&[b, 1, 1, s]).broadcast_as((b, h, t, s)).unwrap();
    let transposed = random(&[s, t], dtype, 6).t().unwrap();
    vec![
        None,
        Some(keep(&[t, s])),
        Some(expanded),
        Some(random(&[h, 1, s], dtype, 5)),
        Some(random(&[b, 1, t, 1], dtype, 5)),
        Some(transposed),
    ]
}

/// The output, one query after another.
fn naive(q: &Tensor, k: &Tensor, v: &Tensor, mask: Option<&Tensor>, set: Settings) -> Vec<f64> {
    let (b, h, t, d) = q.dims4().unwrap();
    let (_, h_kv, s, dv) = v.dims4().unwrap();
    let (q, k, v) = (values(q), values(k), values(v));
    let bias = mask.map(|mask| {
        let wide = values(&mask.broadcast_as((b, h, t, s)).unwrap().contiguous().unwrap());
        let hide = |x: f64| if x == 0.0 { f64::NEG_INFINITY } else { 0.0 };
        let keep = mask.dtype() == DType::U8;
        wide.into_iter().map(|x| if keep { hide(x) } else { x }).collect::<Vec<_>>()
    });
    let mut out = Vec::new();
    for row in 0..b * h * t {
        let (head, i) = (row / t, row % t);
        let keys = (head / h * h_kv + head % h / (h / h_kv)) * s;
        let score = |j: usize| {
            let dot: f64 = (0..d).map(|x| q[row * d + x] * k[(keys + j) * d + x]).sum();
            let scaled = dot * set.scale;
            let capped = set.softcap.map_or(scaled, |cap| cap * (scaled / cap).tanh());
            let seen = if set.causal && j > i { f64::NEG_INFINITY } else { 0.0 };
            (capped + bias.as_ref().map_or(0.0, |bias| bias[row * s + j]) + seen).exp()
        };
        let exps: Vec<f64> = (0..s).map(score).collect();
        let sum: f64 = exps.iter().sum();
        let inverse_sum = if sum == 0.0 { 0.0 } else { 1.0 / sum };
        for x in 0..dv {
            let weigh = |(j, e): (usize, &f64)| e * v[(keys + j) * dv + x];
            out.push(exps.iter().enumerate().map(weigh).sum::<f64>() * inverse_sum);
        }
    }
    out
}

/// The logarithm of the sum of `exp(scores)`.
fn log_sum_exp(kept: &Kept) -> Tensor {
    (&kept.max - kept.inverse_sum.log().unwrap()).unwrap()
}

#[test]
fn forward_matches_a_loop() {
    for dtype in DTYPES {
        for sizes in SIZES {
            let [q, k, v, _] = inputs(sizes, dtype);
            for mask in masks(sizes, dtype) {
                for settings in [PLAIN, CAUSAL, CAPPED] {
                    let mask = mask.as_ref();
                    let expected = naive(&q, &k, &v, mask, settings);
                    let (out, kept) = forward(&q, &k, &v, mask, settings).unwrap();
                    let sum = log_sum_exp(&kept);
                    assert_eq!((out.dtype(), sum.dtype()), (dtype, accumulator(dtype)));
                    assert_eq!(
                        (out.dims(), sum.dims()),
                        (
                            &[sizes[0], sizes[1], sizes[3], sizes[6]][..],
                            &[sizes[0], sizes[1], sizes[3]][..]
                        )
                    );
                    let count = 32.0 * naive_slack(dtype, sizes[4]);
                    assert_close(&out, &expected, count);
                    let (oracle, kept) = portable::forward(&q, &k, &v, mask, settings).unwrap();
                    assert_close(&oracle, &expected, 4.0 * count);
                    let oracle = values(&log_sum_exp(&kept));
                    assert_within(&sum, &oracle, sum.dtype(), 4.0 * count);
                }
            }
        }
    }
}

/// As [`assert_close`], relative to 1 at least: where a score is the same for every key, or there is
/// one key, gradients are 0 but for rounding.
#[track_caller]
fn assert_near(actual: &Tensor, expected: &[f64], count: f64) {
    let one = of(vec![1.0], &[1], actual.dtype());
    let actual = Tensor::cat(&[actual.flatten_all().unwrap(), one], 0).unwrap();
    assert_close(&actual, &[expected, &[1.0]].concat(), count);
}

fn gradients(
    [q, k, v, grad]: &[Tensor; 4],
    mask: Option<&Tensor>,
    settings: Settings,
    out: DType,
) -> [[Option<Tensor>; 4]; 2] {
    let wants_mask = mask.filter(|mask| mask.dtype().is_float()).map(|_| out);
    let wants = [Some(out), Some(out), Some(out), wants_mask];
    let kept = &forward(q, k, v, mask, settings).unwrap().1;
    let saved = Saved { q, k, v, mask, kept, grad };
    [
        super::backward(saved, settings, wants).unwrap(),
        portable::backward(saved, settings, wants).unwrap(),
    ]
}

#[test]
fn gradients_are_slopes() {
    let sizes = [2, 4, 2, 3, 5, 4, 3];
    let tolerance = difference_tolerance(200.0);
    let all = inputs(sizes, DType::F64);
    for mask in masks(sizes, DType::F64) {
        for settings in [PLAIN, CAUSAL, CAPPED] {
            let [ours, oracle] = gradients(&all, mask.as_ref(), settings, DType::F64);
            let [q, k, v, grad] = &all;
            let y = |q: &Tensor, k: &Tensor, v: &Tensor, mask: Option<&Tensor>| {
                forward(q, k, v, mask, settings).unwrap().0
            };
            let mask = mask.as_ref();
            let mut derivatives = vec![
                numeric_gradient(q, grad, |q| y(q, k, v, mask)),
                numeric_gradient(k, grad, |k| y(q, k, v, mask)),
                numeric_gradient(v, grad, |v| y(q, k, v, mask)),
            ];
            if let Some(mask) = mask.filter(|mask| mask.dtype().is_float()) {
                derivatives.push(numeric_gradient(mask, grad, |mask| y(q, k, v, Some(mask))));
            }
            for (i, derivatives) in derivatives.iter().enumerate() {
                assert_near(ours[i].as_ref().unwrap(), derivatives, tolerance);
                assert_near(oracle[i].as_ref().unwrap(), derivatives, tolerance);
            }
        }
    }
}

#[test]
fn gradients_in_every_dtype_are_those_of_f64() {
    for dtype in DTYPES {
        for sizes in SIZES.into_iter().skip(1) {
            let all = inputs(sizes, dtype);
            for mask in masks(sizes, dtype) {
                for settings in [PLAIN, CAPPED] {
                    let wide = all.each_ref().map(double);
                    let wide_mask = mask.as_ref().map(|mask| match mask.dtype() {
                        DType::U8 => mask.clone(),
                        _ => double(mask),
                    });
                    let [exact, _] = gradients(&wide, wide_mask.as_ref(), settings, DType::F64);
                    for out in [dtype, DType::F32] {
                        let [ours, oracle] = gradients(&all, mask.as_ref(), settings, out);
                        for ((ours, oracle), exact) in ours.iter().zip(&oracle).zip(&exact) {
                            let (Some(ours), Some(oracle), Some(exact)) = (ours, oracle, exact)
                            else {
                                assert!(ours.is_none() && oracle.is_none() && exact.is_none());
                                continue;
                            };
                            assert_eq!(ours.dtype(), out);
                            let count = 32.0 * naive_slack(dtype, sizes[4]);
                            // Sums of many terms that cancel.
                            let slack = (sizes[3] * sizes[4]) as f64 * epsilon(DType::F32);
                            let count = count + slack / epsilon(out) * 4.0;
                            assert_near(ours, &values(exact), count);
                            assert_near(oracle, &values(exact), 4.0 * count);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_query_that_sees_nothing_gets_zeros_and_gives_none() {
    let sizes = [1, 2, 1, 3, 4, 5, 2];
    let hide =
        of(vec![0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0], &[3, 4], DType::F32);
    let add = hide.log().unwrap(); // 0 or negative infinity
    for dtype in DTYPES {
        let all = inputs(sizes, dtype);
        for mask in [hide.to_dtype(DType::U8).unwrap(), add.clone()] {
            for settings in [PLAIN, CAPPED] {
                let [q, k, v, _] = &all;
                let (out, _) = forward(q, k, v, Some(&mask), settings).unwrap();
                let oracle = portable::forward(q, k, v, Some(&mask), settings).unwrap().0;
                for out in [values(&out), values(&oracle)] {
                    for (row, out) in out.chunks(2).enumerate() {
                        assert!(out.iter().all(|x| x.is_finite()), "{out:?}");
                        assert_eq!(out == [0.0; 2], row % 3 != 1, "{row} {out:?}");
                    }
                }
                for all in gradients(&all, Some(&mask), settings, DType::F32) {
                    for gradient in all.iter().flatten() {
                        assert!(values(gradient).iter().all(|x| x.is_finite()));
                    }
                    let dq = values(all[0].as_ref().unwrap());
                    assert!(dq[..5].iter().chain(&dq[10..15]).all(|&x| x == 0.0), "{dq:?}");
                }
            }
        }
    }
}

#[test]
fn large_scores_do_not_overflow() {
    for dtype in DTYPES {
        let q = Tensor::full(200.0, (1, 1, 2, 4), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        let v = of(vec![1.0, 3.0], &[1, 1, 2, 1], dtype);
        let (out, _) = forward(&q, &q, &v, None, PLAIN).unwrap();
        assert_eq!(values(&out), [2.0; 2]); // scores of 80,000, which F16 does not have
    }
}

#[test]
fn four_thousand_equal_keys_share_one() {
    for dtype in DTYPES {
        let ones = Tensor::ones((1, 1, 4096, 1), dtype, &Device::Cpu).unwrap();
        let q = Tensor::ones((1, 1, 1, 1), dtype, &Device::Cpu).unwrap();
        assert_eq!(values(&forward(&q, &ones, &ones, None, PLAIN).unwrap().0), [1.0]);
        // And four thousand queries add up on one key.
        let [[_, _, dv, _], _] = gradients(&[ones.clone(), q.clone(), q, ones], None, PLAIN, dtype);
        assert_eq!(values(&dv.unwrap()), [4096.0]);
    }
}

#[test]
fn nan_reaches_its_query_alone() {
    for dtype in DTYPES {
        let [_, k, v, _] = inputs([1, 1, 1, 3, 4, 2, 2], dtype);
        let q = of(vec![1.0, 2.0, f64::NAN, 1.0, 0.5, -1.0], &[1, 1, 3, 2], dtype);
        let out = values(&forward(&q, &k, &v, None, PLAIN).unwrap().0);
        assert!(out[2].is_nan() && out[3].is_nan());
        assert!([0, 1, 4, 5].iter().all(|&i| out[i].is_finite()), "{out:?}");
    }
}

#[test]
fn nothing_in_gives_nothing_or_zeros_out() {
    for sizes in [[0, 2, 1, 3, 4, 5, 2], [2, 2, 1, 0, 4, 5, 2], [2, 2, 1, 3, 0, 5, 2]] {
        let all = inputs(sizes, DType::BF16);
        let [q, k, v, grad] = &all;
        let (out, _) = forward(q, k, v, None, PLAIN).unwrap();
        assert_eq!(out.dims(), grad.dims());
        assert!(values(&out).iter().all(|&x| x == 0.0));
        for all in gradients(&all, None, PLAIN, DType::BF16) {
            for (gradient, input) in all.iter().zip([q, k, v]) {
                let gradient = gradient.as_ref().unwrap();
                assert_eq!(gradient.dims(), input.dims());
                assert!(values(gradient).iter().all(|&x| x == 0.0));
            }
        }
    }
}

#[test]
fn one_thread_and_many_agree() {
    let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let many = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    for sizes in [[1, 2, 1, 200, 200, 33, 32], [2, 3, 3, 67, 67, 16, 16]] {
        let all = inputs(sizes, DType::BF16);
        let run = || {
            let [q, k, v, _] = &all;
            let out = values(&forward(q, k, v, None, CAUSAL).unwrap().0);
            let [ours, _] = gradients(&all, None, CAUSAL, DType::F32);
            (out, ours.map(|g| g.as_ref().map(values)))
        };
        assert_eq!(one.install(run), many.install(run));
    }
}

#[test]
fn gpus_agree() {
    for dtype in DTYPES {
        for sizes in SIZES.into_iter().chain([
            [2, 4, 2, 20, 24, 16, 16],
            [1, 2, 2, 70, 70, 64, 64],
            [1, 2, 1, 5, 130, 80, 80],
        ]) {
            let [q, k, v, grad] = inputs(sizes, dtype);
            for mask in masks(sizes, dtype) {
                for settings in [PLAIN, CAUSAL, CAPPED] {
                    let mask_or_q = mask.as_ref().unwrap_or(&q);
                    // Probabilities are rounded to the dtype of the inputs before they are averaged.
                    let count = 64.0 * naive_slack(dtype, sizes[4]);
                    assert_gpus_agree(&[&q, &k, &v, mask_or_q], count, |t| {
                        let mask = mask.as_ref().map(|_| &t[3]);
                        let (y, kept) = forward(&t[0], &t[1], &t[2], mask, settings)?;
                        Ok(vec![y, log_sum_exp(&kept)])
                    });
                    let wants_mask = mask.as_ref().filter(|m| m.dtype().is_float()).map(|_| dtype);
                    for out in [dtype, DType::F32] {
                        assert_gpus_near(&[&q, &k, &v, &grad, mask_or_q], 8.0 * count, |t| {
                            let [q, k, v, grad] = [&t[0], &t[1], &t[2], &t[3]];
                            let mask = mask.as_ref().map(|_| &t[4]);
                            let kept = &forward(q, k, v, mask, settings)?.1;
                            let saved = Saved { q, k, v, mask, kept, grad };
                            let wants = [Some(out), Some(out), Some(out), wants_mask];
                            let all = backward(saved, settings, wants)?;
                            Ok(all.into_iter().flatten().collect())
                        });
                    }
                }
            }
        }
    }
}

#[test]
fn gpus_give_zeros_to_a_query_that_sees_nothing() {
    for dtype in DTYPES {
        let [q, k, v, _] = inputs([1, 2, 1, 3, 4, 5, 2], dtype);
        let hide = of(
            vec![0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0],
            &[3, 4],
            DType::F32,
        );
        for mask in [hide.to_dtype(DType::U8).unwrap(), hide.log().unwrap()] {
            assert_gpus_agree(&[&q, &k, &v, &mask], 64.0, |t| {
                let (y, kept) = forward(&t[0], &t[1], &t[2], Some(&t[3]), PLAIN)?;
                Ok(vec![y, log_sum_exp(&kept)])
            });
        }
        let q = Tensor::full(200.0, (1, 1, 2, 4), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        let v = of(vec![1.0, 3.0], &[1, 1, 2, 1], dtype);
        let nan = of(vec![1.0, 2.0, 3.0, 4.0, 5.0, f64::NAN, 1.0, 1.0], &[1, 1, 2, 4], dtype);
        for q in [&q, &nan] {
            assert_gpus_agree(&[q, &v], 4.0, |t| {
                Ok(vec![forward(&t[0], &t[0].force_contiguous()?.abs()?, &t[1], None, PLAIN)?.0])
            });
        }
    }
    for sizes in [[0, 2, 1, 3, 4, 5, 2], [2, 2, 1, 0, 4, 5, 2], [2, 2, 1, 3, 0, 5, 2]] {
        let [q, k, v, _] = inputs(sizes, DType::F16);
        assert_gpus_agree(&[&q, &k, &v], 0.0, |t| {
            Ok(vec![forward(&t[0], &t[1], &t[2], None, PLAIN)?.0])
        });
    }
}

#[test]
fn rows_of_heads_are_those_of_every_head() {
    let [_, _, v, _] = inputs([2, 3, 3, 70, 70, 8, 16], DType::F16);
    for device in crate::kernels::testing::devices::devices() {
        let v = v.to_device(&device).unwrap();
        let (rows, kept) = forward_rows(&v, &v, &v, CAUSAL).unwrap();
        let (heads, other) = forward(&v, &v, &v, None, CAUSAL).unwrap();
        let (sums, other) = (log_sum_exp(&kept), log_sum_exp(&other));
        let there = |t: &Tensor| values(&t.to_device(&Device::Cpu).unwrap());
        assert_eq!((rows.dims(), rows.is_contiguous()), (&[2, 70, 48][..], true));
        let transposed = heads.transpose(1, 2).unwrap().contiguous().unwrap();
        assert_eq!((there(&rows), there(&sums)), (there(&transposed), there(&other)));
    }
}

/// Scores far below the cap are those without one: the tangent has its digits near 0.
#[test]
fn a_cap_far_above_the_scores_changes_nothing() {
    let sizes = [2, 4, 2, 7, 9, 5, 3];
    let capped = Settings { softcap: Some(5000.0), ..CAUSAL };
    for device in devices() {
        let [q, k, v, _] = inputs(sizes, DType::F32).map(|x| x.to_device(&device).unwrap());
        let [capped, plain] = [capped, CAUSAL].map(|set| forward(&q, &k, &v, None, set).unwrap().0);
        // A third of (score / cap)² is less than an epsilon.
        assert_close(&capped, &values(&plain), 4.0);
    }
}

/// Scores that are all moved by one number leave the probabilities as they are, in forward and backward. One logarithm of
/// the sum of their exponentials, in place of maximum and sum, would lose the digits of `score - log_sum_exp`.
#[test]
fn an_offset_of_the_scores_does_not_matter() {
    // Whole steps of 2^-4, so that products and scores are exact at every offset.
    let steps = |x: Tensor| ((x * 16.0).unwrap().round().unwrap() / 16.0).unwrap();
    for sizes in [[2, 4, 2, 7, 9, 5, 3], [1, 2, 1, 67, 70, 7, 9]] {
        let [q, k, v, grad] = inputs(sizes, DType::F32);
        let (q, k) = (steps(q), steps(k));
        let ones = q.narrow(3, 0, 1).unwrap().ones_like().unwrap();
        let q = Tensor::cat(&[&q, &ones], 3).unwrap();
        let [b, _, h_kv, _, s, ..] = sizes;
        for offset in [0f32, 100.0, 10_000.0, -10_000.0] {
            let moved = Tensor::full(2.0 * offset, (b, h_kv, s, 1), &Device::Cpu).unwrap();
            let k = Tensor::cat(&[&k, &moved], 3).unwrap();
            for settings in [PLAIN, CAUSAL] {
                let all = [q.clone(), k.clone(), v.clone(), grad.clone()];
                let [exact, _] = gradients(&all.each_ref().map(double), None, settings, DType::F64);
                let expected = naive(&q, &k, &v, None, settings);
                let mut every = Vec::new();
                for device in devices() {
                    let all = all.each_ref().map(|tensor| tensor.to_device(&device).unwrap());
                    let y = forward(&all[0], &all[1], &all[2], None, settings).unwrap().0;
                    if offset.abs() < 700.0 {
                        assert_close(&y, &expected, 32.0); // where F64 has the exponentials
                    }
                    every.extend(gradients(&all, None, settings, DType::F32));
                }
                for ours in every {
                    // The gradient of queries by what moves the scores is a sum of terms as large as the offset.
                    let dq = |dq: &Tensor| values(&dq.narrow(3, 0, sizes[5]).unwrap());
                    let [ours_dq, exact_dq] =
                        [&ours[0], &exact[0]].map(|x| dq(x.as_ref().unwrap()));
                    assert_within(
                        &of(ours_dq, &[exact_dq.len()], DType::F64),
                        &exact_dq,
                        DType::F32,
                        32.0,
                    );
                    for i in [1, 2] {
                        let (ours, exact) = (ours[i].as_ref().unwrap(), exact[i].as_ref().unwrap());
                        assert_within(ours, &values(exact), DType::F32, 32.0);
                    }
                }
            }
        }
    }
}
