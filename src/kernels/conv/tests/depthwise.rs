//! Depthwise convolutions a row of vectors at a time, by every instruction set.

use candle_core::{DType, Result, Tensor};

use super::{doubles, generator, geometry, plain_loops, random};
use crate::kernels::conv::depthwise::{self, lanes, rows};
use crate::kernels::conv::shape::Shape;
use crate::kernels::conv::{forward, wgrad};
use crate::kernels::cpu::dtype::with_single;
use crate::kernels::cpu::vector::Vectors;
use crate::kernels::gemm::tests::check;

fn for_each_set(mut f: impl FnMut(Vectors) -> Result<()>) -> Result<()> {
    Vectors::ALL.into_iter().filter(|set| set.is_available()).try_for_each(&mut f)
}

/// Batch, channels, height, width, kernel, padding.
const SIZES: [[usize; 6]; 9] = [
    [2, 3, 8, 8, 3, 1],
    [1, 4, 5, 37, 3, 1],
    [3, 2, 7, 33, 5, 2],
    [2, 2, 1, 1, 3, 1],
    [1, 2, 9, 16, 3, 0],
    [2, 3, 6, 50, 5, 1],
    [1, 2, 140, 18, 3, 2],
    [1, 2, 5, 5, 5, 0],
    [40, 2, 3, 4, 3, 1],
];

#[test]
fn rows_of_vectors_are_plain_loops() -> Result<()> {
    let mut rng = generator(95);
    for [b, c, h, w, kernel, padding] in SIZES {
        let geometry = geometry(1, padding, 1, c);
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let x = random(&mut rng, &[b, c, h, w], dtype);
            let weight = random(&mut rng, &[c, 1, kernel, kernel], dtype);
            let bias = random(&mut rng, &[c], dtype);
            let shape = Shape::new(x.dims(), weight.dims(), geometry)?;
            let grad = random(&mut rng, &shape.out_dims(), dtype);
            let [xs, ws, gs] = [&x, &weight, &grad].map(doubles);
            let [_, dx, dw] = plain_loops(&shape, [&xs, &ws, &gs]);
            let inputs = [dtype; 3];
            assert!(rows::vectors(&shape).is_none() == Vectors::widest().is_none());
            for_each_set(|set| {
                let what = format!("{set:?}, {dtype:?}, {shape:?}");
                // In the order of the taps, as by shifted planes.
                let y = rows::forward::<f32>(&x, &weight, Some(&bias), &shape, set)?;
                let shifted = depthwise::forward::<f32>(&x, &weight, Some(&bias), &shape)?;
                assert_eq!(bits(&y)?, bits(&shifted)?, "{what}");
                let y =
                    with_single!(dtype, O => rows::forward::<O>(&x, &weight, None, &shape, set)?);
                let shifted =
                    with_single!(dtype, O => depthwise::forward::<O>(&x, &weight, None, &shape)?);
                assert_eq!(bits(&y)?, bits(&shifted)?, "{what}");
                let back = rows::dgrad::<f32>(&grad, &weight, None, &shape, set)?.unwrap();
                check(&back, &dx, &inputs, &what);
                let back = with_single!(dtype, O => {
                    rows::dgrad::<O>(&grad, &weight, None, &shape, set)?.unwrap()
                });
                check(&back, &dx, &inputs, &what);
                let back = rows::wgrad(&x, &grad, &shape, set)?.unwrap();
                check(&back, &dw, &inputs, &what);
                Ok(())
            })?;
        }
    }
    Ok(())
}

/// An infinity in the image reaches what it is part of, and no sum that a zero beyond an edge meets it in.
#[test]
fn infinities_stay_where_they_belong() -> Result<()> {
    let mut rng = generator(96);
    for [b, c, h, w, kernel, padding] in SIZES {
        let shape = [b, c, h, w];
        let (x, grad_of) = (random(&mut rng, &shape, DType::F32), geometry(1, padding, 1, c));
        let weight = random(&mut rng, &[c, 1, kernel, kernel], DType::F32);
        let mut values = x.flatten_all()?.to_vec1::<f32>()?;
        values[0] = f32::INFINITY;
        let x = Tensor::from_vec(values, &shape, x.device())?;
        let shape = Shape::new(x.dims(), weight.dims(), grad_of)?;
        let grad = random(&mut rng, &shape.out_dims(), DType::F32);
        let kinds = |t: &Tensor| -> Result<Vec<(bool, bool)>> {
            let values = t.flatten_all()?.to_vec1::<f32>()?;
            Ok(values.into_iter().map(|x| (x.is_nan(), x.is_infinite())).collect())
        };
        let exact = depthwise::wgrad(&x, &grad, &shape)?;
        assert!(kinds(&exact)?.contains(&(false, true)), "{shape:?}");
        let got = wgrad(&x, &grad, weight.dims(), grad_of, DType::F32)?;
        assert_eq!(kinds(&got)?, kinds(&exact)?, "{shape:?}");
        for_each_set(|set| {
            assert!(rows::wgrad(&x, &grad, &shape, set)?.is_none(), "{set:?}, {shape:?}");
            let y = rows::forward::<f32>(&x, &weight, None, &shape, set)?;
            let shifted = depthwise::forward::<f32>(&x, &weight, None, &shape)?;
            assert_eq!(kinds(&y)?, kinds(&shifted)?, "{set:?}, {shape:?}");
            Ok(())
        })?;
    }
    Ok(())
}

/// Batch, channels, height, width, kernel height and width, stride, padding, dilation: with a channel in each lane.
const LANED: [[usize; 9]; 12] = [
    [2, 3, 8, 8, 3, 3, 1, 1, 1],
    [2, 32, 4, 4, 3, 3, 1, 1, 1],
    [3, 17, 2, 2, 5, 5, 1, 2, 1],
    [1, 5, 1, 1, 3, 3, 1, 1, 1],
    [2, 16, 9, 7, 3, 3, 2, 1, 1],
    [1, 33, 12, 17, 5, 5, 2, 2, 1],
    [2, 19, 7, 6, 3, 3, 1, 2, 2],
    [2, 2, 31, 33, 3, 2, 3, 0, 1],
    [1, 4, 5, 5, 1, 1, 2, 0, 1],
    [40, 3, 3, 4, 3, 3, 2, 1, 1],
    [3, 48, 16, 16, 3, 3, 2, 1, 1],
    [2, 4, 2, 3, 3, 3, 4, 4, 1], // most taps meet padding, and some pixels none
];

#[test]
fn lanes_of_channels_are_plain_loops() -> Result<()> {
    let mut rng = generator(97);
    for [b, c, h, w, rows, columns, stride, padding, dilation] in LANED {
        let geometry = geometry(stride, padding, dilation, c);
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let x = random(&mut rng, &[b, c, h, w], dtype);
            let weight = random(&mut rng, &[c, 1, rows, columns], dtype);
            let bias = random(&mut rng, &[c], dtype);
            let shape = Shape::new(x.dims(), weight.dims(), geometry)?;
            assert!(lanes::vectors(&shape).is_none() == Vectors::widest().is_none(), "{shape:?}");
            let grad = random(&mut rng, &shape.out_dims(), dtype);
            let [xs, ws, gs] = [&x, &weight, &grad].map(doubles);
            let [_, dx, dw] = plain_loops(&shape, [&xs, &ws, &gs]);
            for_each_set(|set| {
                let what = format!("{set:?}, {dtype:?}, {shape:?}");
                // In the order of the taps, as by shifted planes.
                for bias in [None, Some(&bias)] {
                    let y = with_single!(dtype, O => {
                        lanes::forward::<O>(&x, &weight, bias, &shape, set)?.unwrap()
                    });
                    let shifted = with_single!(dtype, O => {
                        depthwise::forward::<O>(&x, &weight, bias, &shape)?
                    });
                    assert_eq!(bits(&y)?, bits(&shifted)?, "{what}");
                }
                let inputs = [dtype; 3];
                let back = lanes::dgrad::<f32>(&grad, &weight, None, &shape, set)?.unwrap();
                check(&back, &dx, &inputs, &what);
                let back = with_single!(dtype, O => {
                    lanes::dgrad::<O>(&grad, &weight, None, &shape, set)?.unwrap()
                });
                check(&back, &dx, &inputs, &what);
                let bias = Tensor::ones(c, DType::F32, x.device())?;
                let raised = lanes::dgrad::<f32>(&grad, &weight, Some(&bias), &shape, set)?;
                let mut above = dx.clone();
                above.iter_mut().for_each(|sum| sum.add(1.0));
                check(&raised.unwrap(), &above, &inputs, &what);
                match lanes::wgrad(&x, &grad, &shape, set)? {
                    Some(sums) => check(&sums, &dw, &inputs, &what),
                    None => assert!(padding >= rows, "{what}"), // pixels of padding alone
                }
                Ok(())
            })?;
        }
    }
    Ok(())
}

/// Zeros of the padding times an infinite weight are NaN, and times an infinite gradient too: other algorithms have them.
#[test]
fn lanes_leave_infinities_to_shifted_planes() -> Result<()> {
    let mut rng = generator(98);
    for [b, c, h, w, rows, columns, stride, padding, dilation] in LANED {
        let geometry = geometry(stride, padding, dilation, c);
        let x = random(&mut rng, &[b, c, h, w], DType::F32);
        let weight = random(&mut rng, &[c, 1, rows, columns], DType::F32);
        let shape = Shape::new(x.dims(), weight.dims(), geometry)?;
        let grad = random(&mut rng, &shape.out_dims(), DType::F32);
        let with_infinity = |t: &Tensor| -> Result<Tensor> {
            let mut values = t.flatten_all()?.to_vec1::<f32>()?;
            values[0] = f32::INFINITY;
            Tensor::from_vec(values, t.dims(), t.device())
        };
        let (infinite, far) = (with_infinity(&weight)?, with_infinity(&grad)?);
        for_each_set(|set| {
            assert!(lanes::forward::<f32>(&x, &infinite, None, &shape, set)?.is_none());
            assert!(lanes::dgrad::<f32>(&grad, &infinite, None, &shape, set)?.is_none());
            Ok(())
        })?;
        let y = forward(&x, &infinite, None, geometry, DType::F32)?;
        assert_eq!(bits(&y)?, bits(&depthwise::forward::<f32>(&x, &infinite, None, &shape)?)?);
        let dw = wgrad(&x, &far, weight.dims(), geometry, DType::F32)?;
        let shifted = depthwise::wgrad(&x, &far, &shape)?;
        let kinds = |t: &Tensor| -> Result<Vec<(bool, bool)>> {
            let values = t.flatten_all()?.to_vec1::<f32>()?;
            Ok(values.into_iter().map(|x| (x.is_nan(), x.is_infinite())).collect())
        };
        assert_eq!(kinds(&dw)?, kinds(&shifted)?, "{shape:?}");
    }
    Ok(())
}

fn bits(y: &Tensor) -> Result<Vec<u32>> {
    let y = y.to_dtype(DType::F32)?.flatten_all()?;
    Ok(y.to_vec1::<f32>()?.into_iter().map(f32::to_bits).collect())
}
