use candle_core::{DType, Device, Tensor};

use super::*;
use crate::kernels::elementwise::testing::*;
use crate::kernels::testing::devices::devices;

/// Shapes and a dimension: of one, past a block, past a task, and past what a team or a block of threads has at a time.
const SIZES: [(&[usize], usize); 11] = [
    (&[1], 0),
    (&[7], 0),
    (&[5, 3], 0),
    (&[3, 5], 1),
    (&[2, 33, 7], 1),
    (&[3, 4099], 1),
    (&[4099, 17], 0),
    (&[6, 130], 1),
    (&[2, 9001], 1),
    (&[40, 700], 1),
    (&[30, 9, 100], 1),
];

/// Term by term, in F64.
fn expected(x: &Tensor, dim: usize, from_end: bool) -> Vec<f64> {
    let (mut sums, count) = (values(x), x.dims()[dim]);
    let inner: usize = x.dims()[dim + 1..].iter().product();
    for block in sums.chunks_mut(count * inner) {
        for at in inner..count * inner {
            match from_end {
                false => block[at] += block[at - inner],
                true => block[count * inner - 1 - at] += block[count * inner - 1 - at + inner],
            }
        }
    }
    sums
}

#[test]
fn cumsum_matches_a_loop() {
    for dtype in DTYPES {
        for (dims, dim) in SIZES {
            for from_end in [false, true] {
                let x = match dims.len() {
                    1 => random(dims, dtype, 1),
                    _ => strided(dims, dtype, 1),
                };
                let sums = expected(&x, dim, from_end);
                for out in [dtype, DType::F32] {
                    let y = cumsum(&x, dim, from_end, out).unwrap();
                    assert_eq!((y.dtype(), y.dims()), (out, dims));
                    assert!(y.is_contiguous());
                    assert_close(&y, &sums, 1.0);
                    let oracle = portable::cumsum(&x, dim, from_end, out).unwrap();
                    // In F64 what is expected has rounded 4,098 sums itself.
                    assert_close(&oracle, &sums, if dtype == DType::F64 { 128.0 } else { 16.0 });
                }
            }
        }
    }
}

#[test]
fn ones_are_counted_past_what_16_bits_hold() {
    for (dtype, most) in [(DType::F16, 4096), (DType::BF16, 4096)] {
        let ones = Tensor::ones(most, dtype, &Device::Cpu).unwrap();
        for from_end in [false, true] {
            let y = values(&cumsum(&ones, 0, from_end, dtype).unwrap());
            let last = if from_end { y[0] } else { y[most - 1] };
            assert_eq!(last, 4096.0);
        }
    }
}

#[test]
fn an_infinity_reaches_what_is_behind_it_alone() {
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    for dtype in DTYPES {
        let x = of(vec![1.0, 2.0, inf, 1.0, -inf, 1.0], &[6], dtype);
        for (from_end, sums) in
            [(false, [1.0, 3.0, inf, inf, nan, nan]), (true, [nan, nan, nan, -inf, -inf, 1.0])]
        {
            for device in devices() {
                let x = on_device(&x, &device);
                assert_close(&cumsum(&x, 0, from_end, dtype).unwrap(), &sums, 0.0);
                assert_close(&portable::cumsum(&x, 0, from_end, dtype).unwrap(), &sums, 0.0);
            }
        }
    }
}

/// In the middle of a long row, which threads share, and of a line beside others.
#[test]
fn an_infinity_reaches_what_is_behind_it_in_a_long_line() {
    for device in devices() {
        for (dims, dim) in [([2, 4100], 1), ([2, 9001], 1), ([9001, 2], 0)] {
            let (count, at) = (dims[dim], dims[dim] / 2 + 1);
            let place =
                |line: usize, i: usize| if dim == 1 { line * count + i } else { i * 2 + line };
            let mut x = vec![1.0; 2 * count];
            x[place(1, at)] = f64::INFINITY;
            let x = on_device(&of(x, &dims, DType::F32), &device);
            for from_end in [false, true] {
                let y = values(&cumsum(&x, dim, from_end, DType::F32).unwrap());
                for i in 0..count {
                    let terms = (if from_end { count - i } else { i + 1 }) as f64;
                    let behind = if from_end { i <= at } else { i >= at };
                    assert_eq!(y[place(0, i)], terms);
                    assert_eq!(y[place(1, i)], if behind { f64::INFINITY } else { terms });
                }
            }
        }
    }
}

#[test]
fn nothing_in_gives_nothing_out() {
    for (dims, dim) in [([0, 3], 0), ([3, 0], 0), ([3, 0], 1)] {
        let x = random(&dims, DType::BF16, 1);
        let y = cumsum(&x, dim, false, DType::F32).unwrap();
        assert_eq!((y.dims(), y.dtype()), (&dims[..], DType::F32));
    }
}

#[test]
fn gpus_agree() {
    for dtype in DTYPES {
        for (dims, dim) in SIZES {
            let x = random(dims, dtype, 1);
            // F64 sums, in another order.
            let roundings = if dtype == DType::F64 { 128.0 } else { 1.0 };
            assert_gpus_agree(&[&x], roundings, |t| {
                Ok(vec![cumsum(&t[0], dim, false, dtype)?, cumsum(&t[0], dim, true, DType::F32)?])
            });
        }
    }
}
