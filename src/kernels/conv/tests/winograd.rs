//! Convolutions by tiles.

mod blocks;
mod large;

use super::super::packed::few_channels;
use super::super::packed::winograd::{suits, suits_rows, suits_wgrad};
pub(super) use large::tolerant as tolerant_of_large;

use super::packed::{Choice, dgrad, forward, none_gave_up, wgrad};
use super::*;
use crate::kernels::cpu::dtype::with_single;
use crate::kernels::gemm::micro::InstructionSet;

/// The error of a tile grows with the sum of the magnitudes of what is added in its transform, which
/// can be more than that of a result's own terms.
fn loosened(sums: &[Sum], magnitudes: &[f64], roundings: usize) -> Vec<Sum> {
    let terms = roundings as f64 / 2.;
    sums.iter().zip(magnitudes).map(|(sum, &m)| sum.as_exact_as(m, terms)).collect()
}

/// `f(i, j)` of a square, transformed in both directions by `line`.
fn both<const N: usize, const M: usize>(
    f: impl Fn(usize, usize) -> f64,
    line: impl Fn([f64; N]) -> [f64; M],
) -> [[f64; M]; M] {
    let rows: [[f64; M]; N] = std::array::from_fn(|i| line(std::array::from_fn(|j| f(i, j))));
    let columns: [[f64; M]; M] = std::array::from_fn(|j| line(std::array::from_fn(|i| rows[i][j])));
    std::array::from_fn(|i| std::array::from_fn(|j| columns[j][i]))
}

/// Tiles of `READ` by `READ` pixels, of which `MADE` by `MADE` results are made: the magnitudes of what is added in a
/// line's transform of pixels, weights, sums, a gradient, and sums of products for a gradient of the weight.
struct Tiles<const READ: usize, const MADE: usize> {
    pixels: fn([f64; READ]) -> [f64; READ],
    weights: fn([f64; 3]) -> [f64; READ],
    sums: fn([f64; READ]) -> [f64; MADE],
    gradient: fn([f64; MADE]) -> [f64; READ],
    back: fn([f64; READ]) -> [f64; 3],
    /// Those of the transforms, and a few more of the products and the bias.
    roundings: usize,
}

const SMALL: Tiles<4, 2> = Tiles {
    pixels: |[a, b, c, d]| [a + c, b + c, b + c, b + d],
    weights: |[a, b, c]| [a, (a + b + c) / 2., (a + b + c) / 2., c],
    sums: |[a, b, c, d]| [a + b + c, b + c + d],
    gradient: |[a, b]| [a, a + b, a + b, b],
    back: |[a, b, c, d]| [a + (b + c) / 2., (b + c) / 2., (b + c) / 2. + d],
    roundings: 14,
};

/// Calls `f(image, y, x)` with the first pixel of every tile.
fn for_each_tile(shape: &Shape, size: usize, mut f: impl FnMut(usize, usize, usize)) {
    for image in 0..shape.batch {
        for (y, x) in pairs(shape.out_height.div_ceil(size), shape.out_width.div_ceil(size)) {
            f(image, size * y, size * x);
        }
    }
}

impl<const READ: usize, const MADE: usize> Tiles<READ, MADE> {
    /// The magnitudes of a channel's transformed tile.
    fn transformed(
        &self,
        x: &[f64],
        shape: &Shape,
        image: usize,
        channel: usize,
        at: (usize, usize),
    ) -> [[f64; READ]; READ] {
        let pixel = |i: usize, j: usize| {
            let (pad_y, pad_x) = shape.geometry.padding;
            let (y, x_) = ((at.0 + i).checked_sub(pad_y), (at.1 + j).checked_sub(pad_x));
            match (y.filter(|&y| y < shape.height), x_.filter(|&x| x < shape.width)) {
                (Some(y), Some(x_)) => {
                    x[((image * shape.c_in + channel) * shape.height + y) * shape.width + x_].abs()
                }
                _ => 0.,
            }
        };
        both(pixel, self.pixels)
    }

    /// What bounds the errors of a convolution by tiles.
    fn magnitudes(&self, x: &[f64], weight: &[f64], shape: &Shape) -> Vec<f64> {
        let (ins, outs) = (shape.c_in, shape.c_out);
        let u: Vec<_> =
            weight.chunks(9).map(|g| both(|i, j| g[3 * i + j].abs(), self.weights)).collect();
        let mut magnitudes = vec![0.; shape.batch * shape.out_image()];
        for_each_tile(shape, MADE, |image, top, left| {
            let tile = |c| self.transformed(x, shape, image, c, (top, left));
            let v: Vec<_> = (0..ins).map(tile).collect();
            for out in 0..outs {
                let m = |i: usize, j: usize| {
                    (0..ins).map(|c| v[c][i][j] * u[out * ins + c][i][j]).sum::<f64>()
                };
                let sums = both(m, self.sums);
                for (i, j) in pairs(MADE, MADE) {
                    let (y, x) = (top + i, left + j);
                    if y < shape.out_height && x < shape.out_width {
                        let pixel = (image * outs + out) * shape.out_height + y;
                        magnitudes[pixel * shape.out_width + x] = sums[i][j];
                    }
                }
            }
        });
        magnitudes
    }

    /// The same of the gradient with respect to the weight.
    fn gradient_magnitudes(&self, x: &[f64], grad: &[f64], shape: &Shape) -> Vec<f64> {
        let (ins, outs) = (shape.c_in, shape.c_out);
        let mut products = vec![[[0.; READ]; READ]; outs * ins];
        for_each_tile(shape, MADE, |image, top, left| {
            let tile = |c| self.transformed(x, shape, image, c, (top, left));
            let v: Vec<_> = (0..ins).map(tile).collect();
            for out in 0..outs {
                let pixel = |i: usize, j: usize| match (top + i, left + j) {
                    (y, x) if y < shape.out_height && x < shape.out_width => {
                        let row = (image * outs + out) * shape.out_height + y;
                        grad[row * shape.out_width + x].abs()
                    }
                    _ => 0.,
                };
                let m = both(pixel, self.gradient);
                for c in 0..ins {
                    for (i, j) in pairs(READ, READ) {
                        products[out * ins + c][i][j] += v[c][i][j] * m[i][j];
                    }
                }
            }
        });
        products.iter().flat_map(|u| both(|i, j| u[i][j], self.back).concat()).collect()
    }

    fn forward(&self, y: &[Sum], [x, weight, _]: [&[f64]; 3], shape: &Shape) -> Vec<Sum> {
        loosened(y, &self.magnitudes(x, weight, shape), shape.c_in + self.roundings)
    }

    /// Of a convolution whose gradient is one.
    fn dgrad(
        &self,
        dx: &[Sum],
        [_, weight, grad]: [&[f64]; 3],
        shape: &Shape,
        back: &Shape,
    ) -> Vec<Sum> {
        let magnitudes = self.magnitudes(grad, &turned(weight, shape), back);
        loosened(dx, &magnitudes, back.c_in + self.roundings)
    }

    fn wgrad(&self, dw: &[Sum], [x, _, grad]: [&[f64]; 3], shape: &Shape) -> Vec<Sum> {
        let tiles = shape.out_height.div_ceil(MADE) * shape.out_width.div_ceil(MADE);
        let magnitudes = self.gradient_magnitudes(x, grad, shape);
        loosened(dw, &magnitudes, shape.batch * tiles + self.roundings)
    }
}

/// Weights as the gradient with respect to the input meets them.
fn turned(weight: &[f64], shape: &Shape) -> Vec<f64> {
    let mut turned = vec![0.; weight.len()];
    for (index, &w) in weight.iter().enumerate() {
        let (out, channel, tap) = (index / 9 / shape.c_in, index / 9 % shape.c_in, index % 9);
        turned[(channel * shape.c_out + out) * 9 + 8 - tap] = w;
    }
    turned
}

/// [`Sum`]s of the three passes, with the tolerance of tiles where these are what computes them.
pub(super) fn tolerant(sums: [&[Sum]; 3], operands: [&[f64]; 3], shape: &Shape) -> [Vec<Sum>; 3] {
    let [y, dx, dw] = sums;
    let mut result = [y.to_vec(), dx.to_vec(), dw.to_vec()];
    if suits(shape) && !InstructionSet::of_f32().all(|isa| few_channels::suits(shape, isa)) {
        result[0] = SMALL.forward(y, operands, shape);
    }
    if let Some(back) = shape.transposed().filter(suits) {
        result[1] = SMALL.dgrad(dx, operands, shape, &back);
    }
    if suits_wgrad(shape) {
        result[2] = SMALL.wgrad(dw, operands, shape);
    }
    blocks::tolerant(result, operands, shape)
}

/// The three passes, with channels first, give the same bits on any number of threads.
fn same_bits_by_any_threads(shape: &Shape, dtype: DType, isa: InstructionSet) -> Result<()> {
    let mut rng = generator(42);
    let x = random(&mut rng, &shape.input_dims(), dtype);
    let weight = random(&mut rng, &shape.weight_dims(), dtype);
    let grad = random(&mut rng, &shape.out_dims(), dtype);
    let passes = || -> Result<_> {
        let y = forward::<f32>(&x, &weight, None, shape, isa)?;
        let dx = dgrad::<f32>(&grad, &weight, None, shape, isa)?;
        let dw = wgrad(&x, &grad, shape, isa)?;
        let bits = |tensor: &Tensor| doubles(tensor).iter().map(|v| v.to_bits()).collect();
        Ok([&y, &dx, &dw].map(bits))
    };
    let on = |threads| -> Result<[Vec<u64>; 3]> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(passes)
    };
    let first = on(1)?;
    for threads in [3, 8] {
        assert_eq!(on(threads)?, first, "{isa:?}");
    }
    Ok(())
}

fn shape(dims: [usize; 4], c_out: usize, padding: (usize, usize)) -> Shape {
    let geometry = Geometry { padding, ..geometry(1, 0, 1, 1) };
    Shape::new(&dims, &[c_out, dims[1], 3, 3], geometry).unwrap()
}

#[test]
fn tiles_are_chosen_by_shape() {
    for (dims, c_out) in [([128, 16, 32, 32], 16), ([128, 64, 8, 8], 64), ([64, 256, 8, 8], 256)] {
        assert!(suits(&shape(dims, c_out, (1, 1))) && suits_wgrad(&shape(dims, c_out, (1, 1))));
    }
    let wide = shape([8, 16, 20, 20], 16, (1, 1));
    assert!(suits(&wide));
    for geometry in [geometry(2, 1, 1, 1), geometry(1, 1, 2, 1), geometry(1, 1, 1, 2)] {
        assert!(!suits(&Shape { geometry, ..wide }) && !suits_wgrad(&Shape { geometry, ..wide }));
    }
    assert!(!suits(&Shape { kernel_height: 1, ..wide }));
    // One pixel of a tile's four, too few channels for lanes, and fewer tiles than transforming their sums takes.
    assert!(!suits(&shape([64, 16, 1, 1], 16, (1, 1))));
    let few = shape([64, 7, 14, 14], 16, (1, 1));
    assert!(!suits(&Shape { geometry: super::turned(few.geometry), ..few }));
    assert!(!suits_wgrad(&shape([128, 3, 32, 32], 16, (1, 1))));
    assert!(!suits_wgrad(&shape([2, 16, 4, 4], 16, (1, 1))));
}

/// A tile in each lane where tiles fill vectors and channels do not.
#[test]
fn lanes_are_chosen_by_shape() {
    for ([channels, width, c_out], rows) in [
        ([16, 32, 16], true),
        ([3, 64, 96], true),
        ([64, 28, 31], true),
        ([32, 32, 32], false),
        ([7, 14, 16], true), // seven tiles of each of two images
        ([7, 20, 40], true), // few enough, whatever lanes are empty
        ([32, 16, 64], false),
        ([16, 26, 16], false), // 13 tiles
        ([16, 40, 16], false), // 20
        ([16, 14, 16], false),
    ] {
        let shape = shape([4, channels, 12, width], c_out, (1, 1));
        let last = Shape { geometry: super::turned(shape.geometry), ..shape };
        assert!(suits(&shape) && suits_rows(&shape) == rows && !suits_rows(&last), "{shape:?}");
    }
}

#[test]
fn tiles_agree_with_plain_loops() -> Result<()> {
    // Threads share the tiles of a pass: of one, blocks are as large as they get.
    let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    one.install(|| InstructionSet::of_f32().try_for_each(tiles_agree))
}

#[test]
fn threads_change_no_bit() -> Result<()> {
    for (dims, c_out, rows) in [([5, 33, 20, 12], 40, false), ([5, 17, 9, 30], 20, true)] {
        let shape = shape(dims, c_out, (1, 1));
        assert!(suits(&shape) && suits_wgrad(&shape) && suits_rows(&shape) == rows, "{shape:?}");
        InstructionSet::of_f32()
            .try_for_each(|isa| same_bits_by_any_threads(&shape, DType::F32, isa))?;
    }
    Ok(())
}

fn tiles_agree(isa: InstructionSet) -> Result<()> {
    let by = Choice::of_single(isa);
    let mut rng = generator(31);
    let (mut gradients, mut rows) = (0, 0);
    let shapes = [
        // A tile in each lane: two whole vectors per row, a vector of one tile, empty lanes and pixels beyond the image.
        ([1, 2, 20, 64], 3, (1, 1)),
        ([3, 7, 15, 33], 17, (1, 1)),
        ([2, 9, 15, 29], 17, (1, 1)),
        ([2, 8, 11, 57], 10, (0, 2)),
        ([3, 37, 9, 30], 31, (2, 0)),
        // Two images per vector, and one in the last; four, and three in the last.
        ([9, 6, 13, 16], 33, (1, 1)),
        ([15, 5, 8, 8], 49, (1, 1)),
        ([40, 7, 7, 6], 8, (2, 2)),
        // A channel in each lane.
        ([3, 9, 15, 33], 17, (1, 1)), // 17 tiles per row
        ([2, 8, 31, 39], 10, (0, 2)), // beyond the image by two columns
        ([6, 8, 14, 14], 24, (2, 0)),
        ([9, 16, 13, 16], 33, (1, 1)),
        ([36, 8, 12, 10], 65, (1, 2)),
        ([15, 34, 8, 8], 49, (1, 1)),  // two products of columns
        ([9, 33, 7, 6], 40, (2, 2)),   // rows shorter than vectors of pixels
        ([1, 48, 3, 150], 32, (1, 1)), // blocks of part of a row
        ([8, 130, 8, 8], 17, (1, 1)),  // more channels than are summed at a time
        ([24, 8, 8, 8], 592, (1, 1)),  // in wgrad, five vectors of output channels in the last task
        ([24, 8, 8, 8], 624, (1, 1)),  // seven
    ];
    for (index, (dims, c_out, padding)) in shapes.into_iter().enumerate() {
        let shape = shape(dims, c_out, padding);
        assert!(suits(&shape) && shape.transposed().is_some_and(|back| suits(&back)), "{shape:?}");
        gradients += usize::from(suits_wgrad(&shape));
        rows += usize::from(suits_rows(&shape) && suits_rows(&shape.transposed().unwrap()));
        let dtype = [DType::F32, DType::F16, DType::BF16][index % 3];
        let x = random(&mut rng, &dims, dtype);
        let weight = random(&mut rng, &shape.weight_dims(), dtype);
        let grad = random(&mut rng, &shape.out_dims(), dtype);
        let bias = random(&mut rng, &[c_out], DType::F32);
        let (xs, ws, gs, bs) = (doubles(&x), doubles(&weight), doubles(&grad), doubles(&bias));
        let [mut y, dx, dw] = plain_loops(&shape, [&xs, &ws, &gs]);
        y.iter_mut().enumerate().for_each(|(i, y)| y.add(bs[i / shape.pixels() % c_out]));
        let [y, dx, dw] = tolerant([&y, &dx, &dw], [&xs, &ws, &gs], &shape);
        let what = format!("{isa:?} {dtype:?} {shape:?}");
        let inputs = [dtype];
        let single = forward::<f32>(&x, &weight, Some(&bias), &shape, by)?;
        none_gave_up();
        check(&single, &y, &inputs, &what);
        let half = with_single!(dtype, O => forward::<O>(&x, &weight, Some(&bias), &shape, by)?);
        none_gave_up();
        check(&half, &y, &inputs, &what);
        let back = dgrad::<f32>(&grad, &weight, None, &shape, by)?;
        none_gave_up();
        check(&back, &dx, &inputs, &what);
        let back = with_single!(dtype, O => dgrad::<O>(&grad, &weight, None, &shape, by)?);
        none_gave_up();
        check(&back, &dx, &inputs, &what);
        let dweight = wgrad(&x, &grad, &shape, by)?;
        none_gave_up();
        check(&dweight, &dw, &inputs, &what);
    }
    assert!(gradients > 4 && rows == 8, "{rows}");
    Ok(())
}

#[test]
fn tiles_of_channels_last_agree_with_plain_loops() -> Result<()> {
    let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    one.install(|| InstructionSet::of_f32().try_for_each(tiles_of_channels_last_agree))
}

fn tiles_of_channels_last_agree(isa: InstructionSet) -> Result<()> {
    let by = Choice::of_single(isa);
    let mut rng = generator(33);
    let mut gradients = 0;
    let shapes = [
        ([9, 9, 15, 33], 17, (1, 1)),
        ([4, 8, 31, 39], 10, (0, 2)), // beyond the image by two columns
        ([20, 16, 14, 14], 33, (2, 0)),
        ([30, 24, 7, 6], 49, (2, 2)),  // two products of columns
        ([1, 65, 10, 9], 8, (1, 2)),   // more channels than lie together
        ([36, 130, 8, 8], 18, (1, 1)), // more than are summed at a time
        ([1, 24, 3, 150], 32, (1, 1)), // blocks of part of a row
        ([24, 8, 8, 8], 592, (1, 1)),  // five vectors of output channels in the last task of wgrad
        ([24, 8, 8, 8], 624, (1, 1)),  // seven
    ];
    for (index, (dims, c_out, padding)) in shapes.into_iter().enumerate() {
        let first = shape(dims, c_out, padding);
        let shape = Shape { geometry: super::turned(first.geometry), ..first };
        assert!(suits(&shape) && shape.transposed().is_some_and(|back| suits(&back)), "{shape:?}");
        let dtype = [DType::F32, DType::F16, DType::BF16][index % 3];
        let x = random(&mut rng, &dims, dtype);
        let weight = random(&mut rng, &shape.weight_dims(), dtype);
        let grad = random(&mut rng, &first.out_dims(), dtype);
        let bias = [c_out, dims[1]].map(|size| random(&mut rng, &[size], DType::F32));
        let (xs, ws, gs) = (doubles(&x), doubles(&weight), doubles(&grad));
        let [mut y, mut dx, dw] = plain_loops(&shape, [&xs, &ws, &gs]);
        let biases = bias.each_ref().map(doubles);
        let each = [shape.pixels(), shape.height * shape.width];
        for ((sums, bias), each) in [&mut y, &mut dx].into_iter().zip(&biases).zip(each) {
            sums.iter_mut().enumerate().for_each(|(i, sum)| sum.add(bias[i / each % bias.len()]));
        }
        let [y, dx, dw] = tolerant([&y, &dx, &dw], [&xs, &ws, &gs], &shape);
        let what = format!("{isa:?} {dtype:?} {shape:?}");
        let inputs = [dtype];
        let [x, grad] = [to_nhwc(&x)?, to_nhwc(&grad)?];
        let single = forward::<f32>(&x, &weight, Some(&bias[0]), &shape, by)?;
        none_gave_up();
        check(&to_nchw(&single)?, &y, &inputs, &what);
        let half = with_single!(dtype, O => forward::<O>(&x, &weight, Some(&bias[0]), &shape, by)?);
        none_gave_up();
        check(&to_nchw(&half)?, &y, &inputs, &what);
        let back = dgrad::<f32>(&grad, &weight, Some(&bias[1]), &shape, by)?;
        none_gave_up();
        check(&to_nchw(&back)?, &dx, &inputs, &what);
        let back = with_single!(dtype, O => {
            dgrad::<O>(&grad, &weight, Some(&bias[1]), &shape, by)?
        });
        none_gave_up();
        check(&to_nchw(&back)?, &dx, &inputs, &what);
        let dweight = wgrad(&x, &grad, &shape, by)?;
        none_gave_up();
        check(&dweight, &dw, &inputs, &what);
        gradients += usize::from(suits_wgrad(&shape));
    }
    assert!(gradients > 3);
    Ok(())
}

/// Of ones, results are numbers of taps and pixels, which are exact.
#[test]
fn ones_are_counted() -> Result<()> {
    for isa in InstructionSet::of_f32() {
        let (batch, channels, size) = (8, 8, 8);
        let shape = shape([batch, channels, size, size], channels, (1, 1));
        assert!(suits(&shape) && suits_wgrad(&shape));
        let ones = |dims: &[usize]| Tensor::ones(dims, DType::F32, &Device::Cpu);
        let (x, weight) = (ones(&shape.input_dims())?, ones(&shape.weight_dims())?);
        let taps = |at: usize| if at == 0 || at == size - 1 { 2 } else { 3 };
        let of_channel = pairs(size, size).map(|(y, x)| (channels * taps(y) * taps(x)) as f64);
        let expected = of_channel.collect::<Vec<_>>().repeat(batch * channels);
        assert_eq!(doubles(&forward::<f32>(&x, &weight, None, &shape, isa)?), expected);
        assert_eq!(doubles(&dgrad::<f32>(&x, &weight, None, &shape, isa)?), expected);
        let pixels = |tap: usize| if tap == 1 { size } else { size - 1 };
        let of_channel = pairs(3, 3).map(|(y, x)| (batch * pixels(y) * pixels(x)) as f64);
        let expected = of_channel.collect::<Vec<_>>().repeat(channels * channels);
        assert_eq!(doubles(&wgrad(&x, &x, &shape, isa)?), expected);
    }
    Ok(())
}

/// Sums of pixels that overflow where the convolution does not, and the other way round.
#[test]
fn overflow_in_a_tile_does_not_show() -> Result<()> {
    let shape = shape([8, 8, 8, 8], 8, (1, 1));
    assert!(suits(&shape) && suits_wgrad(&shape));
    let mut rng = generator(32);
    let scaled =
        |rng: &mut _, dims: &[usize], by: f64| random(rng, dims, DType::F32).affine(by, 0.);
    let weight = scaled(&mut rng, &shape.weight_dims(), 1e-3)?;
    let grad = scaled(&mut rng, &shape.out_dims(), 1e-4)?;
    let x = scaled(&mut rng, &shape.input_dims(), 3.4e38)?;
    let (xs, ws, gs) = (doubles(&x), doubles(&weight), doubles(&grad));
    let (mut y, mut dw) = (vec![Sum::default(); gs.len()], vec![Sum::default(); ws.len()]);
    for_each_product(&shape, |xi, wi, yi| {
        y[yi].add(xs[xi] * ws[wi]);
        dw[wi].add(xs[xi] * gs[yi]);
    });
    let inputs = [DType::F32];
    let geometry = shape.geometry;
    check(&super::forward(&x, &weight, None, geometry, DType::F32)?, &y, &inputs, "y");
    let actual = super::wgrad(&x, &grad, &shape.weight_dims(), geometry, DType::F32)?;
    check(&actual, &dw, &inputs, "dw");
    let actual = super::forward(&x, &weight.affine(1e6, 0.)?, None, geometry, DType::F32)?;
    let expected: Vec<_> = y.iter().map(|y| y.value * 1e6).collect();
    for (actual, expected) in doubles(&actual).into_iter().zip(expected) {
        // Near the largest number, the order of the sum decides.
        if expected.abs() < 1e38 || expected.abs() > 1e40 {
            assert_eq!(actual.is_finite(), expected.abs() < 1e38, "{actual} {expected}");
        }
    }
    Ok(())
}

#[test]
fn nan_and_infinity_reach_what_they_enter_alone() -> Result<()> {
    for poison in [f64::NAN, f64::NEG_INFINITY] {
        for dims in [[2, 8, 12, 32], [4, 8, 9, 16], [8, 8, 8, 8]] {
            let shape = shape(dims, 9, (1, 1));
            assert!(suits(&shape) && suits_wgrad(&shape), "{shape:?}");
            let (x_place, y_place) = (shape.image() + 70, shape.out_image() + shape.pixels() + 1);
            let x = poisoned(dims, x_place, poison, DType::F32);
            let grad = poisoned(shape.out_dims(), y_place, poison, DType::F32);
            let plain = poisoned(shape.out_dims(), 0, 1., DType::F32);
            let weight = poisoned(shape.weight_dims(), 0, 1., DType::F32);
            let [mut y, mut dw] =
                [vec![false; plain.elem_count()], vec![false; weight.elem_count()]];
            let mut dx = vec![false; x.elem_count()];
            for_each_product(&shape, |xi, wi, yi| {
                y[yi] |= xi == x_place;
                dw[wi] |= xi == x_place;
                dx[xi] |= yi == y_place;
            });
            let (geometry, out) = (shape.geometry, DType::F32);
            for (name, actual, hit) in [
                ("y", super::forward(&x, &weight, None, geometry, out)?, y),
                ("dw", super::wgrad(&x, &plain, weight.dims(), geometry, out)?, dw),
                ("dx", super::dgrad(&grad, &weight, None, &dims, geometry, out)?, dx),
            ] {
                for (index, (value, hit)) in doubles(&actual).into_iter().zip(hit).enumerate() {
                    let same = value == poison || value.is_nan() && poison.is_nan();
                    let right = if hit { same } else { value.is_finite() };
                    assert!(right, "{name} {index} {value} {hit} {shape:?}");
                }
            }
        }
    }
    Ok(())
}
