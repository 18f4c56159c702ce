use candle_core::{DType, Device, Tensor};

use super::*;
use crate::kernels::elementwise::testing::*;
use crate::kernels::tensors::format::{self, Format};
use crate::kernels::testing::devices::devices;

const fn window(kernel: usize, stride: usize, padding: usize) -> Window {
    let (kernel, stride, padding) = ((kernel, kernel), (stride, stride), (padding, padding));
    Window { kernel, stride, padding, format: Format::ChannelsFirst }
}

/// Whole, overlapping, gapped, padded and lopsided windows; rows past a strip of 64 windows, gaps past one of 8, and a window
/// wider than the image.
const CASES: [([usize; 4], Window); 12] = [
    ([1, 1, 1, 1], window(1, 1, 0)),
    ([2, 3, 8, 8], window(2, 2, 0)),
    ([1, 2, 17, 13], window(3, 2, 1)),
    ([2, 2, 7, 9], window(2, 3, 0)),
    ([1, 3, 33, 33], window(3, 1, 1)),
    ([2, 3, 5, 5], window(5, 1, 2)),
    ([1, 2, 9, 11], Window { kernel: (2, 5), stride: (3, 1), padding: (1, 2), ..window(1, 1, 0) }),
    ([3, 9, 65, 67], window(3, 2, 1)),
    ([1, 2, 3, 140], window(3, 1, 1)),
    ([1, 1, 4, 300], window(3, 2, 1)),
    ([1, 2, 5, 40], window(2, 3, 1)),
    ([1, 1, 3, 5], window(9, 1, 4)),
];

/// Every window's elements, as `(index in the plane, value)`.
fn windows(x: &Tensor, window: Window) -> Vec<Vec<(usize, f64)>> {
    let (n, c, h, w) = x.dims4().unwrap();
    let (data, (oh, ow)) = (values(x), window.out_size((h, w)));
    let mut all = Vec::new();
    for plane in 0..n * c {
        for (oy, ox) in (0..oh * ow).map(|o| (o / ow, o % ow)) {
            let mut elements = Vec::new();
            for (ky, kx) in (0..window.area()).map(|k| (k / window.kernel.1, k % window.kernel.1)) {
                let y = (oy * window.stride.0 + ky).checked_sub(window.padding.0);
                let x = (ox * window.stride.1 + kx).checked_sub(window.padding.1);
                if let (Some(y), Some(x)) = (y.filter(|&y| y < h), x.filter(|&x| x < w)) {
                    elements.push((y * w + x, data[plane * h * w + y * w + x]));
                }
            }
            all.push(elements);
        }
    }
    all
}

fn dims(shape: [usize; 4]) -> (usize, usize, usize, usize) {
    (shape[0], shape[1], shape[2], shape[3])
}

#[test]
fn maxima_and_their_places() {
    for dtype in DTYPES {
        for (shape, window) in CASES {
            // Few distinct values, so that there are ties.
            let x = (strided(&shape, DType::F32, 1) * 3.0).unwrap().round().unwrap();
            let x = x.to_dtype(dtype).unwrap();
            let (y, index) = max_forward(&x, window).unwrap();
            let (oh, ow) = window.out_size((shape[2], shape[3]));
            assert_eq!(y.dims(), [shape[0], shape[1], oh, ow]);
            assert_eq!((y.dtype(), index.dtype()), (dtype, DType::U32));
            let (max, at) = (values(&y), values(&index));
            for (i, elements) in windows(&x, window).iter().enumerate() {
                let first =
                    |best: (usize, f64), &e: &(usize, f64)| if best.1 >= e.1 { best } else { e };
                let expected = elements.iter().fold(elements[0], first);
                assert_eq!((at[i], max[i]), (expected.0 as f64, expected.1));
            }
            let oracle = portable::max_forward(&x, window).unwrap();
            assert_eq!(values(&y), values(&oracle.0));
            assert_eq!(values(&index), values(&oracle.1));
        }
    }
}

#[test]
fn averages_count_padding_as_zeros() {
    for dtype in DTYPES {
        for (shape, window) in CASES {
            let x = strided(&shape, dtype, 2);
            let y = avg_forward(&x, window).unwrap();
            let sum = |e: &Vec<(usize, f64)>| e.iter().map(|e| e.1).sum::<f64>();
            let expected: Vec<f64> =
                windows(&x, window).iter().map(|e| sum(e) / window.area() as f64).collect();
            let count = if dtype == DType::F32 || dtype == DType::F64 { 8.0 } else { 1.0 };
            assert_eq!(y.dtype(), dtype);
            assert_close(&y, &expected, count);
            assert_close(&portable::avg_forward(&x, window).unwrap(), &expected, count);
        }
    }
}

#[test]
fn gradients_are_slopes() {
    for (shape, window) in CASES.into_iter().take(7).filter(|(shape, _)| shape[3] < 33) {
        let x = random(&shape, DType::F64, 3);
        let (y, index) = max_forward(&x, window).unwrap();
        let grad = random(y.dims(), DType::F64, 4);
        let tolerance = difference_tolerance(y.elem_count() as f64);
        let dx = max_backward(&grad, &index, dims(shape), window, DType::F64).unwrap();
        let derivative = numeric_gradient(&x, &grad, |x| max_forward(x, window).unwrap().0);
        assert_close(&dx, &derivative, tolerance);
        let dx = avg_backward(&grad, dims(shape), window, DType::F64).unwrap();
        let derivative = numeric_gradient(&x, &grad, |x| avg_forward(x, window).unwrap());
        assert_close(&dx, &derivative, tolerance);
    }
}

#[test]
fn gradients_in_every_dtype_are_those_of_f64() {
    for dtype in DTYPES {
        for out in [dtype, DType::F32, DType::F64] {
            for (shape, window) in CASES {
                let x = random(&shape, dtype, 5);
                let (y, index) = max_forward(&x, window).unwrap();
                let grad = strided(y.dims(), dtype, 6);
                let dims = dims(shape);
                let exact = max_backward(&double(&grad), &index, dims, window, DType::F64).unwrap();
                let count = window.area() as f64 * (epsilon(DType::F32) / epsilon(out)).max(1.0);
                let ours = max_backward(&grad, &index, dims, window, out).unwrap();
                assert_eq!(ours.dtype(), out);
                assert_close(&ours, &values(&exact), count);
                if out == dtype {
                    let oracle = portable::max_backward(&grad, &index, dims, out).unwrap();
                    assert_close(&oracle, &values(&exact), count);
                }
                let exact = avg_backward(&double(&grad), dims, window, DType::F64).unwrap();
                let ours = avg_backward(&grad, dims, window, out).unwrap();
                assert_close(&ours, &values(&exact), count);
                if out == dtype {
                    let oracle = portable::avg_backward(&grad, dims, window, out).unwrap();
                    assert_close(&oracle, &values(&exact), count);
                }
            }
        }
    }
}

#[test]
fn nan_wins_and_infinities_compare() {
    for dtype in DTYPES {
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        let data = vec![-inf, -inf, 1.0, nan, -inf, -inf, inf, 2.0];
        let x = of(data, &[1, 1, 2, 4], dtype);
        let on = |device| max_forward(&x.to_device(device).unwrap(), window(2, 2, 0)).unwrap();
        let mut results: Vec<_> = devices().iter().map(on).collect();
        results.push(portable::max_forward(&x, window(2, 2, 0)).unwrap());
        for (y, index) in results {
            assert_close(&y, &[-inf, nan], 0.0);
            assert_eq!(values(&index), [0.0, 3.0]);
        }
    }
}

#[test]
fn a_window_of_negative_infinities_beside_padding() {
    let x = of(vec![f64::NEG_INFINITY; 9], &[1, 1, 3, 3], DType::F32);
    let expected = [0.0, 1.0, 3.0, 4.0];
    for device in devices() {
        let x = x.to_device(&device).unwrap();
        assert_eq!(values(&max_forward(&x, window(3, 2, 1)).unwrap().1), expected);
    }
    assert_eq!(values(&portable::max_forward(&x, window(3, 2, 1)).unwrap().1), expected);
}

#[test]
fn global_average_of_ones_is_one() {
    for dtype in DTYPES {
        let ones = Tensor::ones((2, 3, 64, 64), dtype, &Device::Cpu).unwrap();
        let y = global_avg_forward(&ones, Format::ChannelsFirst).unwrap();
        assert_eq!((y.dims(), y.dtype()), (&[2, 3][..], dtype));
        assert_eq!(values(&y), [1.0; 6]);
        assert_eq!(values(&avg_forward(&ones, window(64, 64, 0)).unwrap()), [1.0; 6]);
    }
}

#[test]
fn global_average_and_its_gradient() {
    for dtype in DTYPES {
        for shape in [[1, 1, 1, 1], [3, 17, 3, 5], [2, 3, 33, 35], [65, 9, 7, 7]] {
            let x = strided(&shape, dtype, 7);
            let area = shape[2] * shape[3];
            let mean = |plane: &[f64]| plane.iter().sum::<f64>() / area as f64;
            let expected: Vec<f64> = values(&x).chunks(area).map(mean).collect();
            let y = global_avg_forward(&x, Format::ChannelsFirst).unwrap();
            assert_close(&y, &expected, 8.0);
            assert_close(&portable::global_avg_forward(&x).unwrap(), &values(&y), 8.0);
            for out in DTYPES {
                let grad = strided(&[shape[0], shape[1]], dtype, 8);
                let repeat = |g| std::iter::repeat_n(g / area as f64, area);
                let expected: Vec<f64> = values(&grad).into_iter().flat_map(repeat).collect();
                let dx =
                    global_avg_backward(&grad, dims(shape), Format::ChannelsFirst, out).unwrap();
                let oracle = portable::global_avg_backward(&grad, dims(shape), out).unwrap();
                assert_eq!((dx.dims(), dx.dtype()), (&shape[..], out));
                let count = (epsilon(DType::F32) / epsilon(out)).max(1.0);
                assert_close(&dx, &expected, count);
                assert_close(&oracle, &expected, count);
            }
        }
    }
}

#[test]
fn gpus_agree() {
    for dtype in DTYPES {
        for (shape, window) in CASES {
            let ties = (strided(&shape, DType::F32, 1) * 3.0).unwrap().round().unwrap();
            let (ties, x) = (ties.to_dtype(dtype).unwrap(), strided(&shape, dtype, 2));
            assert_gpus_agree(&[&ties, &x], 0.0, |t| {
                let (y, index) = max_forward(&t[0], window)?;
                Ok(vec![y, index.to_dtype(DType::F32)?, avg_forward(&t[1], window)?])
            });
            assert_gpus_agree(&[&x], 8.0, |t| {
                Ok(vec![global_avg_forward(&t[0], Format::ChannelsFirst)?])
            });
            let index = max_forward(&x, window).unwrap().1;
            let (grad, plane) =
                (strided(index.dims(), dtype, 6), strided(&[shape[0], shape[1]], dtype, 8));
            for out in DTYPES {
                let dims = dims(shape);
                // candle's cast of F64 to a 16-bit dtype on the CPU looks at the upper bits alone.
                let count = if dtype == DType::F64 { 1.0 } else { 0.0 };
                assert_gpus_agree(&[&grad, &index, &plane], count, |t| {
                    Ok(vec![
                        max_backward(&t[0], &t[1], dims, window, out)?,
                        avg_backward(&t[0], dims, window, out)?,
                        global_avg_backward(&t[2], dims, Format::ChannelsFirst, out)?,
                    ])
                });
            }
        }
        for (h, w) in [(1, 7), (8, 8), (31, 33), (64, 1040)] {
            let x = strided(&[3, 2, h, w], dtype, 9);
            assert_gpus_agree(&[&x], 8.0, |t| {
                Ok(vec![global_avg_forward(&t[0], Format::ChannelsFirst)?])
            });
            let grad = random(&[3, 2], dtype, 10);
            assert_gpus_agree(&[&grad], 0.0, |t| {
                Ok(vec![global_avg_backward(&t[0], (3, 2, h, w), Format::ChannelsFirst, dtype)?])
            });
        }
    }
}

#[test]
fn channels_last_is_channels_first_turned() {
    let close = |a: &Tensor, b: &Tensor, count| {
        assert_eq!((a.dims(), a.dtype()), (b.dims(), b.dtype()));
        assert_close(&a.to_device(&Device::Cpu).unwrap(), &values(b), count);
    };
    for (device, dtype) in
        devices().into_iter().flat_map(|d| DTYPES.map(|dtype| (d.clone(), dtype)))
    {
        let turn = |x: &Tensor| format::to_nhwc(x).unwrap().to_device(&device).unwrap();
        // And of whole packs of channels.
        let packs = [([2, 16, 5, 7], window(3, 2, 1)), ([1, 272, 3, 4], window(2, 1, 0))];
        for (shape, window) in CASES.into_iter().chain(packs) {
            let turned = Window { format: Format::ChannelsLast, ..window };
            let (n, c, h, w) = dims(shape);
            // Few distinct values, so that there are ties; and a NaN.
            let x = (strided(&shape, DType::F32, 1) * 3.0).unwrap().round().unwrap();
            let mut data: Vec<f32> = x.flatten_all().unwrap().to_vec1().unwrap();
            let middle = data.len() / 2;
            data[middle] = f32::NAN;
            let x = Tensor::from_vec(data, &shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            let first = max_forward(&x, window).unwrap();
            let last = max_forward(&turn(&x), turned).unwrap();
            close(&last.0, &format::to_nhwc(&first.0).unwrap(), 0.0);
            assert_eq!(values(&last.1), values(&format::to_nhwc(&first.1).unwrap()));
            let x = strided(&shape, dtype, 2);
            let y = avg_forward(&x, window).unwrap();
            close(&avg_forward(&turn(&x), turned).unwrap(), &format::to_nhwc(&y).unwrap(), 8.0);
            let mean = global_avg_forward(&x, Format::ChannelsFirst).unwrap();
            close(&global_avg_forward(&turn(&x), Format::ChannelsLast).unwrap(), &mean, 8.0);
            let (grad, plane) = (strided(y.dims(), dtype, 6), strided(mean.dims(), dtype, 8));
            let plane_there = plane.to_device(&device).unwrap();
            for out in DTYPES {
                let (before, after) = ((n, c, h, w), (n, h, w, c));
                let count = 8.0 * (epsilon(DType::F32) / epsilon(out)).max(1.0);
                let first = max_backward(&grad, &first.1, before, window, out).unwrap();
                let dx = max_backward(&turn(&grad), &last.1, after, turned, out).unwrap();
                close(&dx, &format::to_nhwc(&first).unwrap(), count);
                let first = avg_backward(&grad, before, window, out).unwrap();
                let dx = avg_backward(&turn(&grad), after, turned, out).unwrap();
                close(&dx, &format::to_nhwc(&first).unwrap(), count);
                let first =
                    global_avg_backward(&plane, before, Format::ChannelsFirst, out).unwrap();
                let last = Format::ChannelsLast;
                let dx = global_avg_backward(&plane_there, after, last, out).unwrap();
                close(&dx, &format::to_nhwc(&first).unwrap(), count);
            }
        }
    }
}
