//! Convolutions of 16-bit operands by tiles of four by four.

use std::f64::consts::PI;

use half::bf16;
use rand::Rng;

use super::super::super::algorithm::Algorithm;
use super::super::{packed, *};
use super::{Tiles, same_bits_by_any_threads};
use crate::kernels::cpu::dtype::with_single;
use crate::kernels::cuda::PassKind;
use crate::kernels::gemm::micro::InstructionSet;

const PASSES: [PassKind; 3] = [PassKind::Forward, PassKind::Dgrad, PassKind::Wgrad];

const LARGE: Tiles<6, 4> = Tiles {
    pixels: |[a, b, c, d, e, f]| {
        let (one, two) = (4. * (b + c) + d + e, 2. * (b + d) + c + e);
        [4. * a + 5. * c + e, one, one, two, two, 4. * b + 5. * d + f]
    },
    weights: |[a, b, c]| {
        let (one, two) = ((a + b + c) / 6., a / 24. + b / 12. + c / 6.);
        [a / 4., one, one, two, two, c]
    },
    sums: |[a, b, c, d, e, f]| {
        let (one, two) = (b + c, d + e);
        [a + one + two, one + 2. * two, one + 4. * two, one + 8. * two + f]
    },
    gradient: |[a, b, c, d]| {
        let (one, two) = (a + b + c + d, a + 2. * b + 4. * c + 8. * d);
        [a, one, one, two, two, d]
    },
    back: |[a, b, c, d, e, f]| {
        let (one, two) = ((b + c) / 6., d + e);
        [a / 4. + one + two / 24., one + two / 12., one + two / 6. + f]
    },
    roundings: 16,
};

/// Whether a pass over 16-bit operands is computed by these tiles.
fn is_large(pass: PassKind, shape: &Shape, isa: InstructionSet) -> bool {
    matches!(Algorithm::packed(pass, shape, isa, true), Algorithm::LargeTiles(_))
}

/// Instruction sets of this processor whose passes these tiles compute.
fn sets() -> impl Iterator<Item = InstructionSet> {
    let of_bf16 = Some(InstructionSet::Avx512Bf16).filter(|isa| isa.is_runnable());
    InstructionSet::of_f32().chain(of_bf16)
}

/// [`super::tolerant`], of these tiles and the passes that they compute.
pub(in super::super) fn tolerant(
    mut sums: [Vec<Sum>; 3],
    operands: [&[f64]; 3],
    shape: &Shape,
    isa: InstructionSet,
) -> [Vec<Sum>; 3] {
    let [y, dx, dw] = &mut sums;
    let [forward, dgrad, wgrad] = PASSES.map(|pass| is_large(pass, shape, isa));
    if forward {
        *y = LARGE.forward(y, operands, shape);
    }
    if let Some(back) = shape.transposed().filter(|_| dgrad) {
        *dx = LARGE.dgrad(dx, operands, shape, &back);
    }
    if wgrad {
        *dw = LARGE.wgrad(dw, operands, shape);
    }
    sums
}

fn shape(dims: [usize; 4], c_out: usize, padding: (usize, usize), format: Format) -> Shape {
    let geometry = Geometry { padding, format, ..geometry(1, 0, 1, 1) };
    let of = |[b, c, h, w]: [usize; 4]| match format {
        Format::ChannelsFirst => [b, c, h, w],
        Format::ChannelsLast => [b, h, w, c],
    };
    Shape::new(&of(dims), &[c_out, dims[1], 3, 3], geometry).unwrap()
}

fn in_order(format: Format, images: &Tensor) -> Result<Tensor> {
    match format {
        Format::ChannelsFirst => Ok(images.clone()),
        Format::ChannelsLast => to_nhwc(images),
    }
}

fn back(format: Format, images: &Tensor) -> Result<Tensor> {
    match format {
        Format::ChannelsFirst => Ok(images.clone()),
        Format::ChannelsLast => to_nchw(images),
    }
}

#[test]
fn large_tiles_are_chosen_by_shape_and_dtype() {
    let (first, last) = (Format::ChannelsFirst, Format::ChannelsLast);
    for isa in sets() {
        let all = |shape: &Shape| PASSES.map(|pass| is_large(pass, shape, isa));
        for (dims, c_out) in
            [([128, 64, 8, 8], 64), ([64, 64, 32, 32], 64), ([16, 256, 16, 16], 256)]
        {
            let of = shape(dims, c_out, (1, 1), first);
            assert_eq!(all(&of), [true; 3], "{isa:?} {of:?}");
            assert_eq!(all(&shape(dims, c_out, (1, 1), last)), [true; 3]);
            for pass in PASSES {
                let single = Algorithm::packed(pass, &of, isa, false);
                assert!(!matches!(single, Algorithm::LargeTiles(_)));
            }
        }
        let wide = shape([64, 64, 32, 32], 64, (1, 1), first);
        for geometry in [geometry(2, 1, 1, 1), geometry(1, 1, 2, 1), geometry(1, 1, 1, 2)] {
            assert_eq!(all(&Shape { geometry, ..wide }), [false; 3]);
        }
        // More padding than the gradient has taps, few channels, many, few tiles, and tiles that are mostly beyond the image.
        assert!(!is_large(PassKind::Dgrad, &shape([64, 64, 32, 32], 64, (3, 1), last), isa));
        assert_eq!(all(&shape([64, 8, 32, 32], 64, (1, 1), last)), [false; 3]);
        assert_eq!(all(&shape([64, 512, 16, 16], 512, (1, 1), last)), [false; 3]);
        assert_eq!(all(&shape([4, 64, 8, 8], 64, (1, 1), last)), [false; 3]);
        assert_eq!(all(&shape([64, 64, 5, 5], 64, (1, 1), last)), [false; 3]);
    }
}

#[test]
fn large_tiles_agree_with_plain_loops() -> Result<()> {
    // Threads share the tiles of a pass: of one, blocks are as large as they get.
    let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    one.install(large_tiles_agree)
}

fn large_tiles_agree() -> Result<()> {
    let mut rng = generator(51);
    let shapes = [
        ([4, 16, 32, 32], 16, (1, 1)),
        ([3, 32, 23, 37], 33, (1, 1)), // rows and columns beyond the image
        ([5, 33, 24, 20], 50, (0, 2)), // two products of columns
        ([6, 70, 16, 16], 32, (2, 1)), // more channels than a chunk
        ([13, 20, 12, 12], 130, (1, 1)), // more output channels than a task of wgrad has
        ([2, 32, 12, 290], 34, (1, 1)), // more tiles a row than a block
        ([40, 33, 7, 8], 36, (1, 1)),  // several images a block
        ([64, 32, 4, 4], 32, (1, 1)),  // one tile an image
        ([1, 32, 60, 44], 32, (2, 1)), // one image
        ([16, 16, 8, 8], 592, (1, 1)), // five vectors of output channels in the last task of wgrad
        ([16, 16, 8, 8], 624, (1, 1)), // seven
    ];
    for (index, (dims, c_out, padding)) in shapes.into_iter().enumerate() {
        let dtype = [DType::BF16, DType::F16][index % 2];
        let first = shape(dims, c_out, padding, Format::ChannelsFirst);
        let x = random(&mut rng, &dims, dtype);
        let weight = random(&mut rng, &first.weight_dims(), dtype);
        let grad = random(&mut rng, &first.out_dims(), dtype);
        let bias = [c_out, dims[1]].map(|size| random(&mut rng, &[size], DType::F32));
        let operands = [doubles(&x), doubles(&weight), doubles(&grad)];
        let operands = operands.each_ref().map(Vec::as_slice);
        let [mut y, mut dx, dw] = plain_loops(&first, operands);
        let biases = bias.each_ref().map(doubles);
        let each = [first.pixels(), first.height * first.width];
        for ((sums, bias), each) in [&mut y, &mut dx].into_iter().zip(&biases).zip(each) {
            let sums = sums.iter_mut().enumerate();
            sums.for_each(|(i, sum)| sum.add(bias[i / each % bias.len()]));
        }
        let back_shape = first.transposed().unwrap();
        let y = LARGE.forward(&y, operands, &first);
        let dx = LARGE.dgrad(&dx, operands, &first, &back_shape);
        let dw = LARGE.wgrad(&dw, operands, &first);
        let formats = [Format::ChannelsFirst, Format::ChannelsLast];
        // Pairs of words are BF16.
        let sets = sets().filter(|isa| isa.is_f32() || dtype == DType::BF16);
        for (isa, format) in sets.flat_map(|isa| formats.map(|format| (isa, format))) {
            let shape = shape(dims, c_out, padding, format);
            let what = format!("{isa:?} {dtype:?} {shape:?}");
            assert_eq!(PASSES.map(|pass| is_large(pass, &shape, isa)), [true; 3], "{what}");
            let inputs = [dtype];
            let (x, grad) = (in_order(format, &x)?, in_order(format, &grad)?);
            let single = packed::forward::<f32>(&x, &weight, Some(&bias[0]), &shape, isa)?;
            packed::none_gave_up();
            near(&back(format, &single)?, &y, &inputs, &what);
            let half = with_single!(dtype, O => {
                packed::forward::<O>(&x, &weight, Some(&bias[0]), &shape, isa)?
            });
            packed::none_gave_up();
            near(&back(format, &half)?, &y, &inputs, &what);
            let single = packed::dgrad::<f32>(&grad, &weight, Some(&bias[1]), &shape, isa)?;
            packed::none_gave_up();
            near(&back(format, &single)?, &dx, &inputs, &what);
            let half = with_single!(dtype, O => {
                packed::dgrad::<O>(&grad, &weight, Some(&bias[1]), &shape, isa)?
            });
            packed::none_gave_up();
            near(&back(format, &half)?, &dx, &inputs, &what);
            let dweight = packed::wgrad(&x, &grad, &shape, isa)?;
            packed::none_gave_up();
            near(&dweight, &dw, &inputs, &what);
        }
    }
    Ok(())
}

/// [`check`], and that results in F32 are as near as those of [`errors_are_a_few_parts_in_a_million`].
fn near(actual: &Tensor, expected: &[Sum], inputs: &[DType], what: &str) {
    check(actual, expected, inputs, what);
    if actual.dtype() == DType::F32 {
        let error = of_largest(&doubles(actual), expected);
        assert!(error < 8e-6, "{what}: {error:e}");
    }
}

/// What the documentation says of normally distributed numbers, where the bound allows more.
#[test]
fn errors_are_a_few_parts_in_a_million() -> Result<()> {
    let shape = shape([8, 64, 24, 24], 64, (1, 1), Format::ChannelsLast);
    let mut rng = generator(54);
    let mut normal = |dims: &[usize]| {
        let mut draw = || {
            let [u, v] = [(); 2].map(|()| rng.random::<f64>());
            ((-2. * (1. - u).ln()).sqrt() * (2. * PI * v).cos()) as f32
        };
        let numbers: Vec<f32> = (0..dims.iter().product()).map(|_| draw()).collect();
        Tensor::from_vec(numbers, dims, &Device::Cpu)?.to_dtype(DType::BF16)
    };
    let (x, weight) = (normal(&shape.input_dims())?, normal(&shape.weight_dims())?);
    let grad = normal(&shape.out_dims())?;
    let first = |images: &Tensor| Ok::<_, candle_core::Error>(doubles(&to_nchw(images)?));
    let (xs, ws, gs) = (first(&x)?, doubles(&weight), first(&grad)?);
    let expected = plain_loops(&shape, [&xs, &ws, &gs]);
    for isa in sets() {
        assert_eq!(PASSES.map(|pass| is_large(pass, &shape, isa)), [true; 3]);
        let actual = [
            first(&packed::forward::<f32>(&x, &weight, None, &shape, isa)?)?,
            first(&packed::dgrad::<f32>(&grad, &weight, None, &shape, isa)?)?,
            doubles(&packed::wgrad(&x, &grad, &shape, isa)?),
        ];
        for ((pass, most), (actual, expected)) in
            PASSES.iter().zip([8e-6, 8e-6, 3e-6]).zip(actual.iter().zip(&expected))
        {
            let error = of_largest(actual, expected);
            assert!(error < most, "{isa:?} {}: {error:e}", pass.name());
        }
    }
    Ok(())
}

/// The largest error, of the largest result.
fn of_largest(actual: &[f64], expected: &[Sum]) -> f64 {
    let largest = expected.iter().fold(0., |max: f64, sum| max.max(sum.value.abs()));
    let errors = actual.iter().zip(expected).map(|(actual, sum)| (actual - sum.value).abs());
    errors.fold(0., f64::max) / largest
}

/// Of weights that are mostly subnormal.
#[test]
fn small_weights_keep_their_digits() -> Result<()> {
    let shape = shape([8, 32, 24, 24], 32, (1, 1), Format::ChannelsLast);
    let mut rng = generator(55);
    let mut scaled = |dims: &[usize], by: f64| {
        random(&mut rng, dims, DType::F32).affine(by, 0.)?.to_dtype(DType::BF16)
    };
    let x = scaled(&shape.input_dims(), 2f64.powi(90))?;
    let weight = scaled(&shape.weight_dims(), 2f64.powi(-128))?;
    let xs = doubles(&to_nchw(&x)?);
    let [y, ..] =
        plain_loops(&shape, [&xs, &doubles(&weight), &vec![0.; shape.batch * shape.out_image()]]);
    for isa in sets() {
        let actual = packed::forward::<f32>(&x, &weight, None, &shape, isa)?;
        packed::none_gave_up();
        let error = of_largest(&doubles(&to_nchw(&actual)?), &y);
        assert!(error < 8e-6, "{isa:?}: {error:e}");
    }
    Ok(())
}

#[test]
fn threads_change_no_bit() -> Result<()> {
    let shape = shape([7, 33, 20, 16], 40, (1, 1), Format::ChannelsFirst);
    for isa in sets() {
        assert_eq!(PASSES.map(|pass| is_large(pass, &shape, isa)), [true; 3]);
        same_bits_by_any_threads(&shape, DType::BF16, isa)?;
    }
    Ok(())
}

/// Nothing pads the images, as zeros times an infinite weight are NaN. In dgrad there are zeros around the gradient: pixels of
/// the weight's channel may be NaN there.
#[test]
fn nan_and_infinity_reach_what_they_enter_alone() -> Result<()> {
    let dims = [4, 32, 26, 26];
    let first = shape(dims, 33, (0, 0), Format::ChannelsFirst);
    // One of an image, of the weights or of a gradient.
    let places =
        [first.image() + 70, 5 * first.taps() + 2 * 9 + 1, first.out_image() + first.pixels() + 1];
    let formats = [Format::ChannelsFirst, Format::ChannelsLast];
    for place in 0..3 {
        let sizes = [first.out_dims(), dims, first.weight_dims()];
        let [mut y, mut dx, mut dw] = sizes.map(|dims| vec![false; dims.iter().product()]);
        for_each_product(&first, |xi, wi, yi| {
            let hit = [xi, wi, yi][place] == places[place];
            y[yi] |= hit && place != 2;
            dx[xi] |= hit && place != 0;
            dw[wi] |= hit && place != 1;
        });
        for (poison, format) in
            [f64::NAN, f64::NEG_INFINITY].into_iter().flat_map(|p| formats.map(|f| (p, f)))
        {
            let number = |index: usize, dims| {
                let number = if index == place { poison } else { 1. };
                poisoned(dims, places[index], number, DType::BF16)
            };
            let (x, weight) = (number(0, dims), number(1, first.weight_dims()));
            let grad = number(2, first.out_dims());
            let (x, grad) = (in_order(format, &x)?, in_order(format, &grad)?);
            let shape = shape(dims, 33, (0, 0), format);
            for isa in sets() {
                assert_eq!(PASSES.map(|pass| is_large(pass, &shape, isa)), [true; 3]);
                let actual_y = packed::forward::<f32>(&x, &weight, None, &shape, isa)?;
                let actual_dx = packed::dgrad::<bf16>(&grad, &weight, None, &shape, isa)?;
                for (name, actual, hit) in [
                    ("y", back(format, &actual_y)?, &y),
                    ("dx", back(format, &actual_dx)?, &dx),
                    ("dw", packed::wgrad(&x, &grad, &shape, isa)?, &dw),
                ] {
                    for (index, (value, &hit)) in doubles(&actual).into_iter().zip(hit).enumerate()
                    {
                        let same = value == poison || value.is_nan() && poison.is_nan();
                        let padded = name == "dx" && place == 1 && index / (26 * 26) % 32 == 2;
                        let right =
                            if hit { same } else { value.is_finite() || padded && value.is_nan() };
                        assert!(right, "{name} {index} {value} {hit} {place} {poison} {shape:?}");
                    }
                }
            }
        }
    }
    Ok(())
}

/// Sums of pixels that overflow where the convolution does not.
#[test]
fn overflow_in_a_tile_does_not_show() -> Result<()> {
    let shape = shape([16, 32, 8, 8], 32, (1, 1), Format::ChannelsFirst);
    let mut rng = generator(53);
    let mut scaled = |dims: &[usize], by: f64| random(&mut rng, dims, DType::BF16).affine(by, 0.);
    let weight = scaled(&shape.weight_dims(), 1e-3)?;
    let [large, small] = [3e38, 1e-4];
    for (x_scale, grad_scale) in [(large, small), (small, large)] {
        let x = scaled(&shape.input_dims(), x_scale)?;
        let grad = scaled(&shape.out_dims(), grad_scale)?;
        let operands = [doubles(&x), doubles(&weight), doubles(&grad)];
        let operands = operands.each_ref().map(Vec::as_slice);
        let [mut y, mut dx, dw] = plain_loops(&shape, operands);
        // Of what does not overflow.
        if x_scale == small {
            y = LARGE.forward(&y, operands, &shape);
        } else {
            dx = LARGE.dgrad(&dx, operands, &shape, &shape.transposed().unwrap());
        }
        let inputs = [DType::BF16];
        for isa in sets() {
            assert_eq!(PASSES.map(|pass| is_large(pass, &shape, isa)), [true; 3]);
            let actual = packed::forward::<f32>(&x, &weight, None, &shape, isa)?;
            assert_eq!(packed::gave_up(), x_scale == large, "{isa:?}");
            check(&actual, &y, &inputs, "y");
            let actual = packed::dgrad::<f32>(&grad, &weight, None, &shape, isa)?;
            assert_eq!(packed::gave_up(), x_scale == small, "{isa:?}");
            check(&actual, &dx, &inputs, "dx");
            let actual = packed::wgrad(&x, &grad, &shape, isa)?;
            assert!(packed::gave_up(), "{isa:?}");
            check(&actual, &dw, &inputs, "dw");
        }
    }
    Ok(())
}
