use candle_core::{DType, Device, Tensor};

use super::*;
use crate::kernels::accumulator;
use crate::kernels::elementwise::testing::*;

/// Sums over every dimension but `dim`.
fn naive(x: &Tensor, dim: usize) -> Vec<f64> {
    let (dims, data) = (x.dims(), values(x));
    let inner: usize = dims[dim + 1..].iter().product();
    let mut terms = vec![Vec::new(); dims[dim]];
    for (i, x) in data.iter().enumerate() {
        terms[i / inner % dims[dim]].push(*x);
    }
    terms.iter().map(|terms| compensated_sum(terms)).collect()
}

#[test]
fn sums_match_a_loop() {
    let shapes: [&[usize]; 9] = [
        &[1, 1],
        &[3, 17],
        &[4099, 3],
        &[65, 1025],
        &[3, 5, 7],
        &[129, 3, 3, 3],
        &[67, 2, 8, 8],
        &[3, 2, 33, 33],
        &[2, 3, 65, 67],
    ];
    for dtype in DTYPES {
        for shape in shapes {
            let x = strided(shape, dtype, 1);
            for dim in 0..shape.len() {
                // Rounding errors are relative to what is added up, not to the sum.
                let expected = naive(&x, dim);
                let (wide, count) = (accumulator(dtype), x.elem_count() as f64);
                let sums = sum_to_channel(&x, dim, wide).unwrap();
                assert_eq!((sums.dtype(), sums.dims()), (wide, &shape[dim..=dim]));
                let terms = count / shape[dim] as f64;
                for (a, e) in values(&sums).iter().zip(&expected) {
                    assert!((a - e).abs() <= terms.sqrt() * 32.0 * epsilon(wide), "{a}, not {e}");
                }
                let oracle = portable::sum_to_channel(&x, dim, wide).unwrap();
                for (a, e) in values(&oracle).iter().zip(&expected) {
                    assert!((a - e).abs() <= terms * 2.0 * epsilon(wide), "{a}, not {e}");
                }
            }
            let (sum, exact) = (sum_all(&x, DType::F64).unwrap(), compensated_sum(&values(&x)));
            let sum = values(&sum)[0];
            let wide = accumulator(dtype);
            let tolerance = (x.elem_count() as f64).sqrt() * 8.0 * epsilon(wide);
            assert!((sum - exact).abs() <= tolerance, "{sum}, not {exact}");
        }
    }
}

/// Neumaier's sum, whose error does not grow with the number of terms.
fn compensated_sum(values: &[f64]) -> f64 {
    let (mut sum, mut lost) = (0.0f64, 0.0);
    for &x in values {
        let next = sum + x;
        lost += if sum.abs() >= x.abs() { (sum - next) + x } else { (x - next) + sum };
        sum = next;
    }
    sum + lost
}

#[test]
fn what_was_broadcast_is_summed_back() {
    for (dims, wide) in [
        (&[7][..], &[5, 3, 7][..]),
        (&[3, 1], &[5, 3, 7]),
        (&[1, 3, 1], &[5, 3, 7]),
        (&[5, 1, 7], &[5, 3, 7]),
        (&[], &[5, 3]),
        (&[1, 1], &[5, 3]),
        (&[5, 3], &[5, 3]),
        (&[1], &[1]),
        (&[3, 1], &[0, 3, 4]),
        // Past a block, past a chunk, and past a task.
        (&[2, 5, 1], &[2, 5, 1100]),
        (&[11, 1, 33, 33], &[11, 3, 33, 33]),
        (&[7], &[4099, 7]),
    ] {
        for dtype in DTYPES {
            let x = random(wide, dtype, 9);
            let sums = sum_to(&x, dims, accumulator(dtype)).unwrap();
            assert_eq!(sums.dims(), dims);
            // The derivative of the sum of what is broadcast is the number of repeats: by linearity the
            // two agree on weights that differ everywhere.
            let weights = random(dims, DType::F64, 10);
            let spread = weights.broadcast_as(wide).unwrap();
            let dot = |a: &Tensor, b: &Tensor| -> f64 {
                values(a).iter().zip(values(b)).map(|(a, b)| a * b).sum()
            };
            let (ours, exact) = (dot(&sums, &weights), dot(&x, &spread));
            let tolerance = 64.0 * epsilon(accumulator(dtype)) * x.elem_count() as f64;
            assert!((ours - exact).abs() <= tolerance, "{dims:?} of {wide:?}: {ours}, not {exact}");
        }
    }
}

#[test]
fn results_have_the_dtype_asked_for() {
    for dtype in DTYPES {
        for out in DTYPES {
            let x = random(&[33, 3], dtype, 2);
            let sums = sum_to_channel(&x, 1, out).unwrap();
            assert_eq!(sums.dtype(), out);
            assert_close(
                &sums,
                &naive(&x, 1),
                (33.0 * epsilon(DType::F32) / epsilon(out)).max(1.0),
            );
            assert_eq!(sum_all(&x, out).unwrap().dtype(), out);
        }
    }
}

#[test]
fn four_thousand_ones_are_not_two_thousand() {
    for dtype in DTYPES {
        for shape in [vec![4096, 3], vec![4096, 3, 1, 1], vec![1, 3, 64, 64]] {
            let ones = Tensor::ones(shape, dtype, &Device::Cpu).unwrap();
            assert_eq!(values(&sum_to_channel(&ones, 1, dtype).unwrap()), [4096.0; 3]);
            let all = sum_all(&ones, DType::F32).unwrap();
            assert_eq!((all.rank(), values(&all)), (0, vec![3.0 * 4096.0]));
        }
    }
}

#[test]
fn f32_sums_go_past_two_to_the_24() {
    let count = (1 << 24) + 3;
    let ones = Tensor::ones(count, DType::F32, &Device::Cpu).unwrap();
    assert_eq!(values(&sum_all(&ones, DType::F64).unwrap()), [count as f64]);
    let columns = ones.reshape((count, 1)).unwrap();
    assert_eq!(values(&sum_to_channel(&columns, 1, DType::F64).unwrap()), [count as f64]);
}

#[test]
fn nan_and_infinity_reach_the_sum() {
    let x = of(vec![1.0, f64::INFINITY, f64::NAN, 2.0, 3.0, 4.0], &[2, 3], DType::F16);
    let sums = values(&sum_to_channel(&x, 1, DType::F32).unwrap());
    assert!(sums[0] == 3.0 && sums[1] == f64::INFINITY && sums[2].is_nan());
    assert!(values(&sum_all(&x, DType::F32).unwrap())[0].is_nan());
    // Of a length that is not whole vectors, the last elements are read twice, and count once.
    for at in 940..1000 {
        let x: Vec<f64> = (0..1000).map(|i| if i == at { f64::INFINITY } else { -1.0 }).collect();
        let x = of(x, &[1000], DType::F32);
        assert_eq!(values(&sum_all(&x, DType::F32).unwrap()), [f64::INFINITY], "{at}");
    }
}

#[test]
fn one_thread_and_many_agree() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let many = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    for shape in [vec![1025, 130], vec![67, 3, 33, 33]] {
        let x = random(&shape, DType::F32, 4);
        let sums = || values(&sum_to_channel(&x, 1, DType::F64).unwrap());
        let all = || values(&sum_all(&x, DType::F64).unwrap());
        let mut without = shape.clone();
        without[shape.len() / 2 - 1] = 1;
        let lines = || values(&sum_to(&x, &without, DType::F64).unwrap());
        assert_eq!(pool.install(lines), many.install(lines));
        assert_eq!(pool.install(sums), many.install(sums));
        assert_eq!(pool.install(all), many.install(all));
    }
}

#[test]
fn gpus_agree() {
    let shapes: [&[usize]; 9] = [
        &[1, 1],
        &[3, 17],
        &[4099, 3],
        &[65, 1025],
        &[129, 3, 3, 3],
        &[67, 2, 8, 8],
        &[2, 3, 65, 67],
        &[700, 768],
        &[1, 2, 9000],
    ];
    for dtype in DTYPES {
        for shape in shapes {
            // Positive, so that sums are no smaller than what is added up.
            let x = (strided(shape, dtype, 1) + 2.0).unwrap();
            for dim in 0..shape.len() {
                for out in [dtype, DType::F32] {
                    assert_gpus_agree(&[&x], 8.0, |t| {
                        Ok(vec![sum_to_channel(&t[0], dim, out)?, sum_all(&t[0], out)?])
                    });
                }
            }
        }
        let empty = random(&[0, 3], dtype, 1);
        assert_gpus_agree(&[&empty], 0.0, |t| {
            Ok(vec![sum_to_channel(&t[0], 1, dtype)?, sum_all(&t[0], dtype)?])
        });
        let odd = random(&[3, 8], dtype, 1);
        assert_gpus_agree(&[&odd], 8.0, |t| {
            let view = t[0].flatten_all()?.narrow(0, 1, 16)?.reshape((2, 8))?;
            Ok(vec![sum_to_channel(&view, 1, dtype)?, sum_all(&view, dtype)?])
        });
    }
}

#[test]
fn sums_on_gpus_do_not_saturate() {
    for dtype in DTYPES {
        let ones = Tensor::ones((4096, 3), dtype, &Device::Cpu).unwrap();
        assert_gpus_agree(&[&ones], 0.0, |t| {
            Ok(vec![sum_to_channel(&t[0], 1, dtype)?, sum_all(&t[0], DType::F32)?])
        });
    }
}

#[test]
fn sums_over_any_dimensions_are_those_of_f64() {
    let shape = [3, 35, 2, 67];
    for dtype in DTYPES {
        let x = strided(&shape, dtype, 12);
        let wide = double(&x);
        for subset in 0..1 << shape.len() {
            let summed: Vec<usize> =
                (0..shape.len()).filter(|dim| subset >> dim & 1 == 1).collect();
            let mut to = shape;
            summed.iter().for_each(|&dim| to[dim] = 1);
            let exact = wide.sum_keepdim(summed.as_slice()).unwrap();
            let sums = sum_to(&x, &to, dtype).unwrap();
            assert_eq!((sums.dims(), sums.dtype()), (&to[..], dtype));
            let terms = (x.elem_count() / sums.elem_count()) as f64;
            let count = if dtype == accumulator(dtype) { 16.0 + terms } else { 2.0 };
            assert_close(&sums, &values(&exact), count);
            assert_gpus_agree(&[&x], count, |x| Ok(vec![sum_to(&x[0], &to, dtype)?]));
        }
    }
}
