use candle_core::{DType, Device, Tensor};

use super::*;
use crate::kernels::accumulator;
use crate::kernels::elementwise::testing::*;

fn numbers(count: usize, rows: usize) -> Vec<u32> {
    (0..count).map(|i| (i * i * 7 + i / 3) as u32 % rows as u32).collect()
}

fn ids(numbers: &[u32]) -> Tensor {
    Tensor::new(numbers, &Device::Cpu).unwrap()
}

/// Numbers, rows and columns: of one, past a block, past a task.
const SIZES: [[usize; 3]; 5] =
    [[1, 1, 1], [7, 5, 3], [300, 4, 33], [1025, 1030, 17], [9, 40, 1025]];

#[test]
fn gather_selects_exactly() {
    for dtype in DTYPES {
        for [count, rows, d] in SIZES {
            let (table, numbers) = (strided(&[rows, d], dtype, 1), numbers(count, rows));
            let y = gather(&ids(&numbers), &table).unwrap();
            let table = values(&table);
            let row = |&id: &u32| table[id as usize * d..][..d].to_vec();
            assert_eq!((y.dtype(), y.dims()), (dtype, &[count, d][..]));
            assert_eq!(values(&y), numbers.iter().flat_map(row).collect::<Vec<_>>());
        }
    }
}

#[test]
fn scatter_add_matches_a_loop() {
    for dtype in DTYPES {
        for [count, rows, d] in SIZES {
            let (grad, numbers) = (strided(&[count + 1, d], dtype, 2), numbers(count + 1, rows));
            let mut expected = vec![0.0; rows * d];
            for (grad, &id) in values(&grad).chunks(d).zip(&numbers) {
                for (sum, grad) in expected[id as usize * d..].iter_mut().zip(grad) {
                    *sum += grad;
                }
            }
            for out in [dtype, DType::F32] {
                let sums = scatter_add(&ids(&numbers), &grad, rows, out).unwrap();
                assert_eq!((sums.dtype(), sums.dims()), (out, &[rows, d][..]));
                assert_close(&sums, &expected, 4.0);
                let oracle = portable::scatter_add(&ids(&numbers), &grad, rows, out).unwrap();
                assert_close(&oracle, &expected, 16.0);
            }
        }
    }
}

#[test]
fn a_row_named_four_thousand_times_is_exact() {
    for dtype in DTYPES {
        let ones = Tensor::ones((4096, 3), dtype, &Device::Cpu).unwrap();
        let ids = ids(&vec![1; 4096]);
        let expected = [[0.0; 3], [4096.0; 3], [0.0; 3]].concat();
        assert_eq!(values(&scatter_add(&ids, &ones, 3, dtype).unwrap()), expected);
        assert_eq!(values(&portable::scatter_add(&ids, &ones, 3, dtype).unwrap()), expected);
    }
}

#[test]
fn nothing_in_gives_nothing_out() {
    let (none, table) = (ids(&[]), random(&[4, 3], DType::BF16, 1));
    assert_eq!(gather(&none, &table).unwrap().dims(), [0, 3]);
    let grad = random(&[0, 3], DType::BF16, 1);
    assert_eq!(values(&scatter_add(&none, &grad, 4, DType::F32).unwrap()), [0.0; 12]);
}

#[test]
fn nan_reaches_its_row_alone() {
    let grad = of(vec![1.0, f64::NAN, 2.0], &[3, 1], DType::F16);
    let sums = values(&scatter_add(&ids(&[0, 2, 0]), &grad, 3, DType::F16).unwrap());
    assert!(sums[0] == 3.0 && sums[1] == 0.0 && sums[2].is_nan());
}

#[test]
fn one_thread_and_many_agree() {
    let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let many = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    let (grad, numbers) = (random(&[3000, 33], DType::F32, 3), numbers(3000, 700));
    let run = || values(&scatter_add(&ids(&numbers), &grad, 700, DType::F32).unwrap());
    assert_eq!(one.install(run), many.install(run));
}

#[test]
fn gpus_agree() {
    for dtype in DTYPES {
        for [count, rows, d] in SIZES.into_iter().chain([[700, 3, 64], [513, 300, 8]]) {
            let (table, numbers) = (strided(&[rows, d], dtype, 1), numbers(count + 1, rows));
            let (ids, grad) = (ids(&numbers), strided(&[count + 1, d], dtype, 2));
            assert_gpus_agree(&[&ids, &table], 0.0, |t| Ok(vec![gather(&t[0], &t[1])?]));
            for out in [dtype, DType::F32] {
                assert_gpus_agree(&[&ids, &grad], 4.0, |t| {
                    Ok(vec![scatter_add(&t[0], &t[1], rows, out)?])
                });
            }
        }
        let ones = Tensor::ones((4096, 3), dtype, &Device::Cpu).unwrap();
        assert_gpus_agree(&[&ids(&vec![1; 4096]), &ones], 0.0, |t| {
            Ok(vec![scatter_add(&t[0], &t[1], 3, dtype)?])
        });
        let (none, empty) = (ids(&[]), random(&[0, 3], dtype, 1));
        assert_gpus_agree(&[&none, &empty], 0.0, |t| {
            Ok(vec![scatter_add(&t[0], &t[1], 4, DType::F32)?, gather(&t[0], &t[1])?])
        });
    }
}

/// A warp adds up 64 places on a GPU: runs of one number begin and end at, before and after those borders.
#[test]
fn gpus_agree_where_one_number_comes_often() {
    let runs = |lengths: &[usize]| -> Vec<u32> {
        let run = |(number, &length): (usize, &usize)| std::iter::repeat_n(number as u32, length);
        lengths.iter().enumerate().flat_map(run).collect()
    };
    for numbers in [
        runs(&[0, 8192]),
        runs(&[64, 64, 128, 0, 64]),
        runs(&[63, 2, 127, 1, 700]),
        runs(&[1, 64, 65, 129, 1]),
        runs(&[65, 600, 3]),
    ] {
        for (dtype, d) in [(DType::F32, 3), (DType::BF16, 72), (DType::F16, 5), (DType::F64, 33)] {
            let mixed = numbers.iter().enumerate().map(|(i, &n)| if i % 7 == 0 { 9 } else { n });
            for numbers in [numbers.clone(), mixed.collect()] {
                let (ids, grad) = (ids(&numbers), random(&[numbers.len(), d], dtype, 5));
                assert_gpus_agree(&[&ids, &grad], 32.0, |t| {
                    Ok(vec![
                        scatter_add(&t[0], &t[1], 10, dtype)?,
                        scatter_add(&t[0], &t[1], 10, accumulator(dtype))?,
                    ])
                });
            }
        }
    }
}

#[test]
fn numbers_of_no_row_read_nan_on_gpus() {
    for gpu in crate::kernels::testing::devices::gpus() {
        let wrong = Tensor::new(&[-1i64, 1, 4, 1 << 32], &gpu).unwrap();
        let numbers = super::numbers(&wrong).unwrap();
        assert_eq!(numbers.to_vec1::<u32>().unwrap(), [u32::MAX, 1, 4, u32::MAX]);
        let table = random(&[4, 3], DType::F16, 1).to_device(&gpu).unwrap();
        let y = gather(&numbers, &table).unwrap().to_device(&Device::Cpu).unwrap();
        let nan: Vec<bool> = values(&y).iter().map(|y| y.is_nan()).collect();
        assert_eq!(nan, [[true; 3], [false; 3], [true; 3], [true; 3]].concat());
        let grad = Tensor::ones((4, 3), DType::F32, &gpu).unwrap();
        let sums = scatter_add(&numbers, &grad, 4, DType::F32).unwrap();
        let sums = values(&sums.to_device(&Device::Cpu).unwrap());
        assert_eq!(sums, [[0.0; 3], [1.0; 3], [0.0; 3], [0.0; 3]].concat());
    }
}

#[test]
fn gpus_add_up_more_numbers_than_are_sorted_at_a_time() {
    let (numbers, ones) = (numbers(17_000, 5), Tensor::ones((17_000, 2), DType::F16, &Device::Cpu));
    assert_gpus_agree(&[&ids(&numbers), &ones.unwrap()], 0.0, |t| {
        Ok(vec![
            scatter_add(&t[0], &t[1], 5, DType::F32)?,
            scatter_add(&t[0], &t[1], 5, DType::F16)?,
        ])
    });
}
