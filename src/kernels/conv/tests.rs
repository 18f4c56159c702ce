use candle_core::{DType, Device, Result, Tensor};

use super::super::gemm::tests::{Sum, check, doubles, generator, random};
use super::shape::Shape;
use super::{Geometry, dgrad, forward, portable, wgrad};
use crate::kernels::tensors::format::{Format, to_nchw, to_nhwc};

mod depthwise;
mod every_set;
mod gpus;
mod in_place;
mod lanes;
mod names;
mod packed;
mod product;
mod split;
mod winograd;

const DTYPES: [DType; 4] = [DType::F16, DType::BF16, DType::F32, DType::F64];

fn geometry(stride: usize, padding: usize, dilation: usize, groups: usize) -> Geometry {
    Geometry {
        stride,
        padding: (padding, padding),
        dilation,
        groups,
        format: Format::ChannelsFirst,
    }
}

/// [`Geometry`] with channels last.
fn turned(geometry: Geometry) -> Geometry {
    Geometry { format: Format::ChannelsLast, ..geometry }
}

/// [`forward`] with channels last, of images and to images with channels first.
fn forward_last(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    geometry: Geometry,
    out: DType,
) -> Result<Tensor> {
    to_nchw(&forward(&to_nhwc(x)?, weight, bias, turned(geometry), out)?)
}

/// [`dgrad`] with channels last.
fn input_gradient_last(
    grad: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    input_dims: &[usize],
    geometry: Geometry,
    out: DType,
) -> Result<Tensor> {
    let &[b, c, h, w] = input_dims else { unreachable!() };
    let (dims, geometry) = ([b, h, w, c], turned(geometry));
    to_nchw(&dgrad(&to_nhwc(grad)?, weight, bias, &dims, geometry, out)?)
}

/// [`wgrad`] with channels last.
fn weight_gradient_last(
    x: &Tensor,
    grad: &Tensor,
    weight_dims: &[usize],
    geometry: Geometry,
    out: DType,
) -> Result<Tensor> {
    wgrad(&to_nhwc(x)?, &to_nhwc(grad)?, weight_dims, turned(geometry), out)
}

/// The sums of a convolution of `x` by `weight` without bias, and of its gradients by both.
fn plain_loops(shape: &Shape, [xs, ws, gs]: [&[f64]; 3]) -> [Vec<Sum>; 3] {
    let [mut y, mut dx, mut dw] = [gs, xs, ws].map(|values| vec![Sum::default(); values.len()]);
    for_each_product(shape, |xi, wi, yi| {
        y[yi].add(xs[xi] * ws[wi]);
        dx[xi].add(gs[yi] * ws[wi]);
        dw[wi].add(gs[yi] * xs[xi]);
    });
    [y, dx, dw]
}

/// Calls `f(x, weight, y)` with the indices of every product of a convolution.
fn for_each_product(shape: &Shape, mut f: impl FnMut(usize, usize, usize)) {
    let Geometry { stride, padding, dilation, .. } = shape.geometry;
    for b in 0..shape.batch {
        for o in 0..shape.c_out {
            for (oy, ox) in pairs(shape.out_height, shape.out_width) {
                let y = ((b * shape.c_out + o) * shape.out_height + oy) * shape.out_width + ox;
                for i in 0..shape.group_in() {
                    let channel = o / shape.group_out() * shape.group_in() + i;
                    for (ky, kx) in pairs(shape.kernel_height, shape.kernel_width) {
                        let (py, px) = (oy * stride + ky * dilation, ox * stride + kx * dilation);
                        let inside = (padding.0..padding.0 + shape.height).contains(&py)
                            && (padding.1..padding.1 + shape.width).contains(&px);
                        if !inside {
                            continue;
                        }
                        let row = (b * shape.c_in + channel) * shape.height + py - padding.0;
                        let kernel = (o * shape.group_in() + i) * shape.kernel_height + ky;
                        f(row * shape.width + px - padding.1, kernel * shape.kernel_width + kx, y);
                    }
                }
            }
        }
    }
}

fn pairs(rows: usize, cols: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).flat_map(move |row| (0..cols).map(move |col| (row, col)))
}

/// Sums whose tolerance is that of the CPU's F32 kernels.
fn tolerant(sums: [&[Sum]; 3], operands: [&[f64]; 3], shape: &Shape) -> [Vec<Sum>; 3] {
    winograd::tolerant(sums, operands, shape)
}

/// All three passes against plain loops, and the portable version against the same.
fn compare(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    grad_dtype: DType,
    geometry: Geometry,
    out: DType,
) {
    let shape = Shape::new(x.dims(), weight.dims(), geometry).unwrap();
    let out_dims = shape.out_dims();
    let grad = random(&mut generator(0), &out_dims, grad_dtype);
    let what = format!("{x:?} by {weight:?}, {geometry:?}, to {out:?}");
    let (xs, ws, gs) = (doubles(x), doubles(weight), doubles(&grad));

    let [mut y, mut dx, dw] = plain_loops(&shape, [&xs, &ws, &gs]);
    if let Some(bias) = bias.map(doubles) {
        let pixels = shape.pixels().max(1);
        y.iter_mut().enumerate().for_each(|(i, y)| y.add(bias[i / pixels % shape.c_out]));
    }

    let mut inputs = vec![x.dtype(), weight.dtype()];
    inputs.extend(bias.map(Tensor::dtype));
    let sums = [&y[..], &dx, &dw];
    let last = Shape { geometry: turned(geometry), ..shape };
    let [by_tiles, dx_by_tiles, dw_by_tiles] = tolerant(sums, [&xs, &ws, &gs], &shape);
    let [y_last, dx_last, dw_last] = tolerant(sums, [&xs, &ws, &gs], &last);
    for (name, actual, y) in [
        ("forward", forward(x, weight, bias, geometry, out).unwrap(), &by_tiles),
        ("portable forward", portable::forward(x, weight, bias, &shape, out).unwrap(), &y),
        ("channels last", forward_last(x, weight, bias, geometry, out).unwrap(), &y_last),
    ] {
        assert_eq!((actual.dims(), actual.dtype()), (&out_dims[..], out), "{name} {what}");
        check(&actual, y, &inputs, &format!("{name} {what}"));
    }
    let inputs = [grad_dtype, weight.dtype()];
    for (name, actual, dx) in [
        ("input", dgrad(&grad, weight, None, x.dims(), geometry, out).unwrap(), &dx_by_tiles),
        ("portable input", portable::dgrad(&grad, weight, None, &shape, out).unwrap(), &dx),
        (
            "channels last, input",
            input_gradient_last(&grad, weight, None, x.dims(), geometry, out).unwrap(),
            &dx_last,
        ),
    ] {
        assert_eq!((actual.dims(), actual.dtype()), (x.dims(), out), "{name} {what}");
        check(&actual, dx, &inputs, &format!("{name} {what}"));
    }
    if shape.pixels() > 0 {
        // As a transposed convolution.
        let bias = random(&mut generator(7), &[shape.c_in], out);
        let (biases, pixels) = (doubles(&bias), shape.height * shape.width);
        dx.iter_mut().enumerate().for_each(|(i, x)| x.add(biases[i / pixels % shape.c_in]));
        let sums = [&y[..], &dx, &dw];
        let [_, dx_by_tiles, _] = tolerant(sums, [&xs, &ws, &gs], &shape);
        let [_, dx_last, _] = tolerant(sums, [&xs, &ws, &gs], &last);
        let inputs = [grad_dtype, weight.dtype(), out];
        let (dims, bias) = (x.dims(), Some(&bias));
        for (name, actual, dx) in [
            ("transposed", dgrad(&grad, weight, bias, dims, geometry, out).unwrap(), &dx_by_tiles),
            ("portable", portable::dgrad(&grad, weight, bias, &shape, out).unwrap(), &dx),
            (
                "transposed, channels last",
                input_gradient_last(&grad, weight, bias, dims, geometry, out).unwrap(),
                &dx_last,
            ),
        ] {
            check(&actual, dx, &inputs, &format!("{name}, with a bias, {what}"));
        }
    }
    let inputs = [grad_dtype, x.dtype()];
    for (name, actual, dw) in [
        ("weight", wgrad(x, &grad, weight.dims(), geometry, out).unwrap(), &dw_by_tiles),
        ("portable weight", portable::wgrad(x, &grad, &shape, out).unwrap(), &dw),
        (
            "channels last, weight",
            weight_gradient_last(x, &grad, weight.dims(), geometry, out).unwrap(),
            &dw_last,
        ),
    ] {
        assert_eq!((actual.dims(), actual.dtype()), (weight.dims(), out), "{name} {what}");
        check(&actual, dw, &inputs, &format!("{name} {what}"));
    }
}

#[test]
fn every_combination_of_dtypes() {
    let mut rng = generator(1);
    for left in DTYPES {
        for right in DTYPES {
            for out in DTYPES {
                let x = random(&mut rng, &[2, 4, 5, 7], left);
                let weight = random(&mut rng, &[6, 2, 3, 3], right);
                let bias = random(&mut rng, &[6], out);
                compare(&x, &weight, Some(&bias), left, geometry(1, 1, 1, 2), out);
                compare(&x, &weight, None, right, geometry(2, 1, 1, 2), out);
            }
        }
    }
}

#[test]
fn every_geometry() {
    let mut rng = generator(2);
    for (height, width, kernel) in [(1, 3, 1), (7, 7, 3), (17, 8, 3), (3, 16, 2), (2, 2, 5)] {
        for (stride, dilation) in [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1)] {
            for padding in 0..=3 {
                for (c_in, c_out, groups) in [(3, 5, 1), (4, 6, 2), (3, 3, 3), (3, 6, 3)] {
                    let x = random(&mut rng, &[2, c_in, height, width], DType::F32);
                    let dims = [c_out, c_in / groups, kernel, kernel];
                    let weight = random(&mut rng, &dims, DType::BF16);
                    let geometry = geometry(stride, padding, dilation, groups);
                    compare(&x, &weight, None, DType::F16, geometry, DType::F32);
                }
            }
        }
    }
}

#[test]
fn batches_tiles_and_kernels_that_are_not_square() {
    let mut rng = generator(3);
    for (dims, c_out, kernel) in [
        ([0, 3, 5, 5], 4, [3, 3]),
        ([1, 3, 33, 33], 7, [3, 3]), // tiles of a few rows
        ([5, 3, 33, 32], 7, [3, 3]),
        ([5, 4, 32, 32], 2, [1, 1]),  // the image as it is
        ([5, 4, 3, 7], 6, [1, 1]),    // moved to channels last
        ([5, 8, 8, 8], 32, [1, 1]),   // wgrad without copies, of several images
        ([2, 8, 48, 32], 16, [1, 1]), // the same, an image in parts
        ([2, 140, 5, 5], 6, [3, 3]),  // weights of several blocks together
        ([40, 3, 8, 8], 3, [3, 3]),   // tiles of several images, and fewer in the last
        ([35, 2, 1, 1], 3, [3, 3]),
        ([5, 2, 9, 6], 3, [1, 3]),
        ([5, 2, 9, 6], 3, [4, 1]),
    ] {
        for stride in [1, 2] {
            for dtype in [DType::BF16, DType::F32] {
                let x = random(&mut rng, &dims, dtype);
                let weight = random(&mut rng, &[c_out, dims[1], kernel[0], kernel[1]], dtype);
                let bias = random(&mut rng, &[c_out], DType::F32);
                let padding = kernel[0] / 2;
                let geometry = geometry(stride, padding, 1, 1);
                compare(&x, &weight, Some(&bias), dtype, geometry, dtype);
            }
        }
    }
}

/// Columns of the output meet one tap or two, so that 32 images of the former are as much as 16 of the latter.
#[test]
fn phases_take_images_in_blocks_of_their_own() {
    let mut rng = generator(14);
    let x = random(&mut rng, &[40, 2, 6, 6], DType::F32);
    let weight = random(&mut rng, &[300, 2, 3, 3], DType::F32);
    // With more threads, each has fewer images.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    pool.install(|| compare(&x, &weight, None, DType::F32, geometry(2, 1, 1, 1), DType::F32));
}

/// Images of one row.
#[test]
fn sequences() {
    let mut rng = generator(8);
    for (dims, c_out, kernel) in [
        ([2, 3, 1, 5403], 4, 7), // parts of a row at every stride, and fewer columns in the last
        ([1, 1100, 1, 200], 2, 9),
        ([1, 3, 1, 700], 5, 1),
        ([40, 2, 1, 9], 3, 3),
        ([1, 1, 1, 1], 1, 1),
        ([2, 1, 1, 2], 1, 5), // longer than the sequence without its padding
        ([0, 2, 1, 9], 3, 3),
    ] {
        for stride in [1, 2, 5] {
            for (padding, dilation) in [(0, 1), (2, 1), (9, 1), (2, 2)] {
                let x = random(&mut rng, &dims, DType::F32);
                let weight = random(&mut rng, &[c_out, dims[1], 1, kernel], DType::BF16);
                let bias = random(&mut rng, &[c_out], DType::F32);
                let geometry =
                    Geometry { stride, padding: (0, padding), ..geometry(stride, 0, dilation, 1) };
                compare(&x, &weight, Some(&bias), DType::F16, geometry, DType::F32);
            }
        }
    }
}

/// Most pixels of the input meet no tap, or there are fewer of them than the stride has remainders.
#[test]
fn strides_beyond_the_image() {
    let mut rng = generator(12);
    for (dims, c_out, kernel) in [
        ([2, 3, 5, 7], 4, [3, 3]),
        ([1, 33, 4, 9], 18, [2, 3]),
        ([3, 2, 1, 40], 3, [1, 9]),
        ([2, 2, 1, 3], 2, [1, 2]),
    ] {
        for (stride, dilation) in
            [(2, 2), (2, 4), (4, 2), (6, 4), (50, 1), (100_000, 1), (99_999, 2)]
        {
            for padding in [(0, 0), (1, 3), (0, 8)] {
                let x = random(&mut rng, &dims, DType::F32);
                let weight = random(&mut rng, &[c_out, dims[1], kernel[0], kernel[1]], DType::F32);
                let bias = random(&mut rng, &[c_out], DType::F32);
                let geometry = Geometry { padding, ..geometry(stride, 0, dilation, 1) };
                let size = geometry.out_size((dims[2], dims[3]), (kernel[0], kernel[1]));
                if size.0 * size.1 > 0 {
                    compare(&x, &weight, Some(&bias), DType::F32, geometry, DType::F32);
                }
            }
        }
    }
}

/// As many taps as PyTorch's longest filters have, or more: no more work than pixels and taps.
#[test]
fn many_taps_at_a_large_stride() -> Result<()> {
    let mut rng = generator(13);
    let weight = random(&mut rng, &[2, 2, 1, 1024], DType::F32);
    let grad = random(&mut rng, &[1, 2, 1, 5], DType::F32);
    let geometry = Geometry { padding: (0, 0), ..geometry(256, 0, 1, 1) };
    let dims = [1, 2, 1, 4 * 256 + 1024];
    let shape = Shape::new(&dims, weight.dims(), geometry)?;
    let x = random(&mut rng, &dims, DType::F32);
    let operands = [&x, &weight, &grad].map(doubles);
    let [_, dx, _] = plain_loops(&shape, operands.each_ref().map(Vec::as_slice));
    for dx_of in [dgrad, input_gradient_last] {
        let actual = dx_of(&grad, &weight, None, &dims, geometry, DType::F32)?;
        check(&actual, &dx, &[DType::F32], "1024 taps");
    }
    Ok(())
}

#[test]
fn sizes_beyond_memory_are_errors() {
    for (padding, stride) in [(i32::MAX as usize, 1), (usize::MAX / 2, 1), (1 << 62, 1 << 62)] {
        let geometry = geometry(stride, padding, 1, 1);
        let shape = Shape::new(&[1, 1, 4, 4], &[1, 1, 3, 3], geometry);
        let error = shape.unwrap_err().to_string();
        assert!(error.contains("more elements than memory has addresses"), "{error}");
    }
    let far = Geometry { dilation: usize::MAX, ..geometry(1, 1, 1, 1) };
    assert_eq!(far.out_size((4, 4), (3, 3)), (0, 0));
}

#[test]
fn padding_that_differs_and_one_channel() {
    let mut rng = generator(9);
    for padding in [(0, 2), (3, 1), (2, 0)] {
        for stride in [1, 2] {
            for (channels, dims) in [(1, [3, 1, 5, 6]), (2, [2, 2, 2, 9]), (4, [1, 4, 1, 3])] {
                let x = random(&mut rng, &dims, DType::F32);
                let weight = random(&mut rng, &[channels, 1, 3, 4], DType::F32);
                let geometry = Geometry { padding, ..geometry(stride, 0, 1, channels) };
                compare(&x, &weight, None, DType::F32, geometry, DType::F32);
            }
        }
    }
}

#[test]
fn strided_operands() -> Result<()> {
    let mut rng = generator(4);
    for dtype in DTYPES {
        let x = random(&mut rng, &[2, 7, 6, 4], dtype).permute((0, 3, 1, 2))?;
        let weight = random(&mut rng, &[4, 5, 3, 3], dtype).transpose(0, 1)?;
        compare(&x, &weight, None, dtype, geometry(1, 1, 1, 1), dtype);
        compare(&x, &weight, None, dtype, geometry(2, 1, 1, 1), dtype);
        let x = random(&mut rng, &[3, 9, 7, 6], dtype).narrow(1, 2, 4)?.narrow(2, 1, 5)?;
        compare(&x, &weight, None, dtype, geometry(1, 0, 1, 1), dtype);
        let shape = Shape::new(x.dims(), weight.dims(), geometry(1, 1, 1, 1))?;
        let grad = random(&mut rng, &[3, 5, 6, 5], dtype).t()?;
        let dx = dgrad(&grad, &weight, None, x.dims(), shape.geometry, dtype)?;
        let grad = grad.contiguous()?;
        let dense = dgrad(&grad, &weight, None, x.dims(), shape.geometry, dtype)?;
        assert_eq!(doubles(&dx), doubles(&dense));
    }
    Ok(())
}

#[test]
fn long_sums_of_halves_do_not_saturate() -> Result<()> {
    let geometry = geometry(1, 0, 1, 1);
    let ones = |dims: &[usize]| Tensor::ones(dims, DType::F16, &Device::Cpu);
    let (x, weight) = (ones(&[2, 1024, 2, 2])?, ones(&[3, 1024, 2, 2])?);
    assert_eq!(doubles(&forward(&x, &weight, None, geometry, DType::F16)?), [4096.; 6]);
    let (grad, weight) = (ones(&[1, 1024, 1, 1])?, ones(&[1024, 1, 2, 2])?);
    let dx = dgrad(&grad, &weight, None, &[1, 1, 2, 2], geometry, DType::F16)?;
    assert_eq!(doubles(&dx), [1024.; 4]);
    let (x, grad) = (ones(&[64, 1, 8, 8])?, ones(&[64, 1, 8, 8])?);
    let dw = wgrad(&x, &grad, &[1, 1, 1, 1], geometry, DType::F16)?;
    assert_eq!(doubles(&dw), [4096.]);
    Ok(())
}

/// `len` doubles far from zero, with `poison` at `place`.
fn poisoned(dims: [usize; 4], place: usize, poison: f64, dtype: DType) -> Tensor {
    let len: usize = dims.iter().product();
    let values = doubles(&random(&mut generator(5), &[len], DType::F64));
    let mut values: Vec<f64> = values.iter().map(|v| 2. + v).collect();
    values[place] = poison;
    Tensor::from_vec(values, &dims, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

#[test]
fn nan_and_infinity_reach_what_they_enter_alone() -> Result<()> {
    for poison in [f64::NAN, f64::INFINITY] {
        for geometry in [(1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 2, 2), (1, 1, 1, 4), (2, 0, 2, 4)] {
            let geometry = self::geometry(geometry.0, geometry.1, geometry.2, geometry.3);
            // First layers by strips: rows of 13 pixels with channels first, and 16 output channels with channels last.
            let sizes = [(8, 8), (13, 8), (13, 16)];
            for (dtype, (width, outs)) in
                DTYPES.into_iter().flat_map(|dtype| sizes.map(|size| (dtype, size)))
            {
                let (x_dims, w_dims) = ([3, 4, 8, width], [outs, 4 / geometry.groups, 3, 3]);
                let shape = Shape::new(&x_dims, &w_dims, geometry)?;
                let x_place = 2 * shape.image() + 9 * width - 1;
                let y_place = shape.out_image() + shape.pixels() + 1;
                let x = poisoned(x_dims, x_place, poison, dtype);
                let grad = poisoned(shape.out_dims(), y_place, poison, dtype);
                let plain = poisoned(shape.out_dims(), 0, 1., dtype);
                let weight = poisoned(w_dims, 0, 1., dtype);
                let [mut y, mut dw] =
                    [vec![false; plain.elem_count()], vec![false; weight.elem_count()]];
                let mut dx = vec![false; x.elem_count()];
                for_each_product(&shape, |xi, wi, yi| {
                    y[yi] |= xi == x_place;
                    dw[wi] |= xi == x_place;
                    dx[xi] |= yi == y_place;
                });
                let dx_last = input_gradient_last(&grad, &weight, None, &x_dims, geometry, dtype)?;
                for (name, actual, hit) in [
                    ("y", forward(&x, &weight, None, geometry, dtype)?, &y),
                    ("y last", forward_last(&x, &weight, None, geometry, dtype)?, &y),
                    ("dw", wgrad(&x, &plain, &w_dims, geometry, dtype)?, &dw),
                    ("dw last", weight_gradient_last(&x, &plain, &w_dims, geometry, dtype)?, &dw),
                    ("dx", dgrad(&grad, &weight, None, &x_dims, geometry, dtype)?, &dx),
                    ("dx last", dx_last, &dx),
                ] {
                    for (index, (value, &hit)) in doubles(&actual).into_iter().zip(hit).enumerate()
                    {
                        let same = value == poison || value.is_nan() && poison.is_nan();
                        let right = if hit { same } else { value.is_finite() };
                        assert!(right, "{name} {index} {value} {hit} {geometry:?} {dtype:?}");
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn one_result_for_any_number_of_threads() -> Result<()> {
    let mut rng = generator(6);
    let dims = [50, 5, 9, 8];
    let (x, grad) = (random(&mut rng, &dims, DType::F32), random(&mut rng, &dims, DType::BF16));
    let weights = [5, 1].map(|ins| random(&mut rng, &[5, ins, 3, 3], DType::F32));
    let results = [1, 2, 3].map(|threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let of = |weight: &Tensor| {
            let geometry = geometry(1, 1, 1, 5 / weight.dims()[1]);
            [
                wgrad(&x, &grad, weight.dims(), geometry, DType::F32).unwrap(),
                forward(&x, weight, None, geometry, DType::F32).unwrap(),
                dgrad(&grad, weight, None, &dims, geometry, DType::F32).unwrap(),
                weight_gradient_last(&x, &grad, weight.dims(), geometry, DType::F32).unwrap(),
                forward_last(&x, weight, None, geometry, DType::F32).unwrap(),
            ]
            .map(|tensor| doubles(&tensor))
        };
        pool.install(|| weights.each_ref().map(of))
    });
    assert_eq!(results[0], results[1]);
    assert_eq!(results[0], results[2]);
    Ok(())
}
