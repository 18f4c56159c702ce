//! Convolutions by tiles at stride 2.

use super::super::super::packed::{Order, winograd::suits_strided};
use super::super::{packed, *};
use super::{both, loosened, same_bits_by_any_threads};
use crate::kernels::cpu::dtype::with_single;
use crate::kernels::gemm::micro::InstructionSet;

/// The magnitudes of a transformed tile: of the pixels `f(i, j)`, of weights or of gradients, and of sums.
fn pixels(f: impl Fn(usize, usize) -> f64) -> [[f64; 3]; 3] {
    both(f, |[a, b, c]| [a + b, b, b + c])
}

fn spread(f: impl Fn(usize, usize) -> f64) -> [[f64; 3]; 3] {
    both(f, |[a, b]| [a, a + b, b])
}

fn fold(m: [[f64; 3]; 3]) -> [[f64; 2]; 2] {
    both(|i, j| m[i][j], |[a, b, c]| [a + b, b + c])
}

/// The magnitude of a pixel of a plane, by what comes before it: none in the padding.
fn pixel(plane: &[f64], at: (usize, usize), before: (usize, usize), size: (usize, usize)) -> f64 {
    let inside = |at: usize, before, size| at.checked_sub(before).filter(|&at| at < size);
    match (inside(at.0, before.0, size.0), inside(at.1, before.1, size.1)) {
        (Some(y), Some(x)) => plane[y * size.1 + x].abs(),
        _ => 0.,
    }
}

fn plane(data: &[f64], number: usize, (height, width): (usize, usize)) -> &[f64] {
    &data[number * height * width..][..height * width]
}

/// A kernel's magnitude at a tap; none beyond its last.
fn tap(weight: &[f64], kernel: usize, at: (usize, usize), shape: &Shape) -> f64 {
    let (height, width) = (shape.kernel_height, shape.kernel_width);
    let inside = at.0 < height && at.1 < width;
    if inside { weight[(kernel * height + at.0) * width + at.1].abs() } else { 0. }
}

/// Calls `f(image, row, column, phase)` with every tile of a grid, four phases each.
fn for_each_phase(
    shape: &Shape,
    (rows, columns): (usize, usize),
    mut f: impl FnMut(usize, (usize, usize), (usize, usize)),
) {
    for image in 0..shape.batch {
        for tile in pairs(rows, columns) {
            pairs(2, 2).for_each(|phase| f(image, tile, phase));
        }
    }
}

/// What bounds the errors of the results of the three passes.
fn magnitudes(shape: &Shape, [x, weight, grad]: [&[f64]; 3]) -> [Vec<f64>; 3] {
    let (size, out_size) = ((shape.height, shape.width), (shape.out_height, shape.out_width));
    let (ins, outs) = (shape.c_in, shape.c_out);
    let [mut y, mut dx, mut dw] = [grad, x, weight].map(|values| vec![0.; values.len()]);
    let tiles = (out_size.0.div_ceil(2), out_size.1.div_ceil(2));
    let mut sums = vec![[[[0.; 3]; 3]; 4]; ins * outs];
    for_each_phase(shape, tiles, |image, (row, column), (a, b)| {
        let v: Vec<_> = (0..ins)
            .map(|c| {
                let plane = plane(x, image * ins + c, size);
                let at = |i, j| (4 * row + 2 * i + a, 4 * column + 2 * j + b);
                pixels(|i, j| pixel(plane, at(i, j), shape.geometry.padding, size))
            })
            .collect();
        for out in 0..outs {
            let number = image * outs + out;
            let mut m = [[0.; 3]; 3];
            let gradient = plane(grad, number, out_size);
            let at = |i, j| (2 * row + i, 2 * column + j);
            let g = spread(|i, j| pixel(gradient, at(i, j), (0, 0), out_size));
            for (c, v) in v.iter().enumerate() {
                let kernel = out * ins + c;
                let u = spread(|i, j| tap(weight, kernel, (2 * i + a, 2 * j + b), shape));
                for (i, j) in pairs(3, 3) {
                    m[i][j] += v[i][j] * u[i][j];
                    sums[kernel][2 * a + b][i][j] += v[i][j] * g[i][j];
                }
            }
            let folded = fold(m);
            for (i, j) in pairs(2, 2) {
                let (row, column) = at(i, j);
                if row < out_size.0 && column < out_size.1 {
                    y[(number * out_size.0 + row) * out_size.1 + column] += folded[i][j];
                }
            }
        }
    });
    for (kernel, sums) in sums.iter().enumerate() {
        for ((a, b), sums) in pairs(2, 2).zip(sums) {
            let folded = fold(*sums);
            for (i, j) in pairs(2, 2) {
                let (row, column) = (2 * i + a, 2 * j + b);
                if row < shape.kernel_height && column < shape.kernel_width {
                    let row = kernel * shape.kernel_height + row;
                    dw[row * shape.kernel_width + column] = folded[i][j];
                }
            }
        }
    }
    let tiles = (size.0.div_ceil(4), size.1.div_ceil(4));
    for_each_phase(shape, tiles, |image, (row, column), (a, b)| {
        let (pad_y, pad_x) = shape.geometry.padding;
        let first = |phase, padding: usize| (padding + 1 - phase) / 2;
        let (top, left) = (2 * row + first(a, pad_y), 2 * column + first(b, pad_x));
        let v: Vec<_> = (0..outs)
            .map(|c| {
                let plane = plane(grad, image * outs + c, out_size);
                pixels(|i, j| pixel(plane, (top + i, left + j), (1, 1), out_size))
            })
            .collect();
        for c in 0..ins {
            let mut m = [[0.; 3]; 3];
            for (out, v) in v.iter().enumerate() {
                let at = |i, j| (2 * (1 - i) + a, 2 * (1 - j) + b);
                let u = spread(|i, j| tap(weight, out * ins + c, at(i, j), shape));
                pairs(3, 3).for_each(|(i, j)| m[i][j] += v[i][j] * u[i][j]);
            }
            let folded = fold(m);
            for (i, j) in pairs(2, 2) {
                let at = (2 * (top + i) + a, 2 * (left + j) + b);
                let at = (at.0.checked_sub(pad_y), at.1.checked_sub(pad_x));
                let (Some(row), Some(column)) = at else { continue };
                if row < size.0 && column < size.1 {
                    dx[((image * ins + c) * size.0 + row) * size.1 + column] = folded[i][j];
                }
            }
        }
    });
    [y, dx, dw]
}

/// [`super::tolerant`], of these tiles.
pub(super) fn tolerant(sums: [Vec<Sum>; 3], operands: [&[f64]; 3], shape: &Shape) -> [Vec<Sum>; 3] {
    let forward = suits_strided(shape, Order::Forward);
    let suits = [forward, suits_strided(shape, Order::Backward), forward];
    if suits == [false; 3] {
        return sums;
    }
    let phases = 4;
    let tiles = shape.batch * shape.out_height.div_ceil(2) * shape.out_width.div_ceil(2);
    let terms = [phases * shape.c_in, shape.c_out, tiles];
    let mut result = sums;
    for (i, magnitudes) in magnitudes(shape, operands).iter().enumerate() {
        if suits[i] {
            result[i] = loosened(&result[i], magnitudes, terms[i] + 14);
        }
    }
    result
}

fn shape(
    dims: [usize; 4],
    c_out: usize,
    kernel: [usize; 2],
    padding: (usize, usize),
    format: Format,
) -> Shape {
    let geometry = Geometry { padding, ..geometry(2, 0, 1, 1) };
    let mut shape = Shape::new(&dims, &[c_out, dims[1], kernel[0], kernel[1]], geometry).unwrap();
    shape.geometry.format = format;
    shape
}

/// Whether a pass is computed by these tiles.
fn suits(shape: &Shape) -> bool {
    suits_strided(shape, Order::Forward) && suits_strided(shape, Order::Backward)
}

#[test]
fn tiles_are_chosen_by_shape() {
    let first = Format::ChannelsFirst;
    let of_dcgan = shape([64, 64, 16, 16], 128, [4, 4], (1, 1), first);
    assert!(suits(&of_dcgan) && suits(&shape([64, 128, 8, 8], 256, [4, 4], (1, 1), first)));
    assert!(suits(&shape([32, 64, 32, 32], 128, [3, 3], (1, 1), Format::ChannelsLast)));
    for geometry in [geometry(1, 1, 1, 1), geometry(2, 1, 2, 1), geometry(2, 1, 1, 2)] {
        let shape = Shape { geometry, ..of_dcgan };
        assert!(!suits_strided(&shape, Order::Forward) && !suits_strided(&shape, Order::Backward));
    }
    for kernel in [[2, 4], [4, 5], [1, 1]] {
        assert!(!suits_strided(
            &shape([64, 64, 16, 16], 64, kernel, (1, 1), first),
            Order::Forward
        ));
    }
    // Few channels, few tiles, and tiles that are mostly beyond the image.
    assert!(!suits(&shape([64, 3, 32, 32], 64, [4, 4], (1, 1), first)));
    assert!(!suits(&shape([1, 64, 8, 8], 64, [4, 4], (1, 1), first)));
    assert!(!suits(&shape([64, 64, 5, 5], 64, [3, 3], (1, 1), first)));
}

#[test]
fn strided_tiles_agree_with_plain_loops() -> Result<()> {
    // Threads share the tiles of a pass: of one, blocks are as large as they get.
    let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    one.install(|| InstructionSet::of_f32().try_for_each(tiles_agree))
}

#[test]
fn threads_change_no_bit() -> Result<()> {
    let shape = shape([7, 33, 20, 12], 40, [4, 3], (1, 1), Format::ChannelsFirst);
    assert!(suits(&shape), "{shape:?}");
    InstructionSet::of_f32().try_for_each(|isa| same_bits_by_any_threads(&shape, DType::F32, isa))
}

fn tiles_agree(isa: InstructionSet) -> Result<()> {
    let mut rng = generator(41);
    let shapes = [
        ([9, 16, 16, 16], 16, [4, 4], (1, 1)),
        ([5, 33, 24, 23], 17, [4, 3], (1, 1)), // more channels than a chunk of the forward pass
        ([6, 17, 15, 32], 50, [3, 4], (0, 2)), // two products of columns
        ([16, 20, 12, 12], 130, [3, 3], (1, 1)), // more channels than a chunk of dgrad
        ([5, 16, 22, 24], 65, [3, 3], (2, 1)), // more output channels than a task of wgrad has
        ([2, 18, 12, 290], 19, [4, 4], (3, 1)), // more tiles a row than a block
        ([24, 16, 8, 8], 16, [4, 4], (4, 5)),  // whole tiles of padding
        ([64, 16, 4, 4], 16, [4, 4], (1, 1)),  // one tile an image in dgrad
        ([8, 16, 8, 8], 592, [3, 3], (1, 1)), // five vectors of output channels in the last task of wgrad
        ([8, 16, 8, 8], 624, [3, 4], (1, 1)), // seven
    ];
    for (index, (dims, c_out, kernel, padding)) in shapes.into_iter().enumerate() {
        let dtype = [DType::F32, DType::F16, DType::BF16][index % 3];
        for format in [Format::ChannelsFirst, Format::ChannelsLast] {
            let shape = shape(dims, c_out, kernel, padding, format);
            assert!(suits(&shape), "{shape:?}");
            let first = Shape { geometry: Geometry { padding, ..geometry(2, 0, 1, 1) }, ..shape };
            let x = random(&mut rng, &dims, dtype);
            let weight = random(&mut rng, &shape.weight_dims(), dtype);
            let grad = random(&mut rng, &first.out_dims(), dtype);
            let bias = [c_out, dims[1]].map(|size| random(&mut rng, &[size], DType::F32));
            let (xs, ws, gs) = (doubles(&x), doubles(&weight), doubles(&grad));
            let [mut y, mut dx, dw] = plain_loops(&shape, [&xs, &ws, &gs]);
            let biases = bias.each_ref().map(doubles);
            let each = [shape.pixels(), shape.height * shape.width];
            for ((sums, bias), each) in [&mut y, &mut dx].into_iter().zip(&biases).zip(each) {
                let sums = sums.iter_mut().enumerate();
                sums.for_each(|(i, sum)| sum.add(bias[i / each % bias.len()]));
            }
            let [y, dx, dw] = super::tolerant([&y, &dx, &dw], [&xs, &ws, &gs], &shape);
            let what = format!("{isa:?} {dtype:?} {shape:?}");
            let inputs = [dtype];
            let last = format == Format::ChannelsLast;
            let moved = |images: &Tensor| if last { to_nhwc(images) } else { Ok(images.clone()) };
            let back = |images: &Tensor| if last { to_nchw(images) } else { Ok(images.clone()) };
            let (x, grad) = (moved(&x)?, moved(&grad)?);
            let single = packed::forward::<f32>(&x, &weight, Some(&bias[0]), &shape, isa)?;
            packed::none_gave_up();
            check(&back(&single)?, &y, &inputs, &what);
            let half = with_single!(dtype, O => {
                packed::forward::<O>(&x, &weight, Some(&bias[0]), &shape, isa)?
            });
            packed::none_gave_up();
            check(&back(&half)?, &y, &inputs, &what);
            let single = packed::dgrad::<f32>(&grad, &weight, Some(&bias[1]), &shape, isa)?;
            packed::none_gave_up();
            check(&back(&single)?, &dx, &inputs, &what);
            let half = with_single!(dtype, O => {
                packed::dgrad::<O>(&grad, &weight, Some(&bias[1]), &shape, isa)?
            });
            packed::none_gave_up();
            check(&back(&half)?, &dx, &inputs, &what);
            let dweight = packed::wgrad(&x, &grad, &shape, isa)?;
            packed::none_gave_up();
            check(&dweight, &dw, &inputs, &what);
        }
    }
    Ok(())
}

/// Of ones, results are numbers of taps and pixels, which are exact.
#[test]
fn ones_are_counted() -> Result<()> {
    let formats = [Format::ChannelsFirst, Format::ChannelsLast];
    for (isa, format) in InstructionSet::of_f32().flat_map(|isa| formats.map(|f| (isa, f))) {
        let (batch, channels, size) = (16, 16, 8);
        let shape = shape([batch, channels, size, size], channels, [4, 4], (1, 1), format);
        assert!(suits(&shape));
        let ones = |dims: &[usize]| Tensor::ones(dims, DType::F32, &Device::Cpu);
        let (x, weight) = (ones(&shape.input_dims())?, ones(&shape.weight_dims())?);
        let grad = ones(&shape.out_dims())?;
        let in_order = |images: Tensor| match format {
            Format::ChannelsFirst => Ok(images),
            Format::ChannelsLast => to_nchw(&images),
        };
        let of_each = |sides: &dyn Fn(usize) -> usize, size: usize, all: usize, by: usize| {
            let of_one = pairs(size, size).map(|(y, x)| (by * sides(y) * sides(x)) as f64);
            of_one.collect::<Vec<_>>().repeat(all)
        };
        let taps = |at: usize| if at == 0 || at == size / 2 - 1 { 3 } else { 4 };
        let y = in_order(packed::forward::<f32>(&x, &weight, None, &shape, isa)?)?;
        assert_eq!(doubles(&y), of_each(&taps, size / 2, batch * channels, channels));
        let taps = |at: usize| if at == 0 || at == size - 1 { 1 } else { 2 };
        let dx = in_order(packed::dgrad::<f32>(&grad, &weight, None, &shape, isa)?)?;
        assert_eq!(doubles(&dx), of_each(&taps, size, batch * channels, channels));
        let pixels = |tap: usize| if tap == 0 || tap == 3 { size / 2 - 1 } else { size / 2 };
        let dw = packed::wgrad(&x, &grad, &shape, isa)?;
        assert_eq!(doubles(&dw), of_each(&pixels, 4, channels * channels, batch));
    }
    Ok(())
}

/// Nothing pads the images, as zeros times an infinite weight are NaN.
#[test]
fn nan_and_infinity_reach_what_they_enter_alone() -> Result<()> {
    let formats = [Format::ChannelsFirst, Format::ChannelsLast];
    let kernels = [[4, 4], [3, 3], [3, 4]];
    for (poison, format) in
        [f64::NAN, f64::NEG_INFINITY].into_iter().flat_map(|p| formats.map(|f| (p, f)))
    {
        for (kernel, place) in kernels.into_iter().flat_map(|k| [0, 1, 2].map(|place| (k, place))) {
            let dims = [8, 16, 24, 24];
            let shape = shape(dims, 18, kernel, (0, 0), format);
            assert!(suits(&shape), "{shape:?}");
            let first = self::shape(dims, 18, kernel, (0, 0), Format::ChannelsFirst);
            // One of an image, of the weights or of a gradient.
            let places = [
                shape.image() + 70,
                5 * shape.taps() + 2 * shape.kernel_height * shape.kernel_width + 1,
                shape.out_image() + shape.pixels() + 1,
            ];
            let [x, weight, grad] = [first.input_dims(), first.weight_dims(), first.out_dims()];
            let number = |index: usize, dims| {
                let number = if index == place { poison } else { 1. };
                poisoned(dims, places[index], number, DType::F32)
            };
            let (x, weight, grad) = (number(0, x), number(1, weight), number(2, grad));
            let [mut y, mut dx, mut dw] =
                [&grad, &x, &weight].map(|tensor| vec![false; tensor.elem_count()]);
            for_each_product(&first, |xi, wi, yi| {
                let hit = [xi, wi, yi][place] == places[place];
                y[yi] |= hit && place != 2;
                dx[xi] |= hit && place != 0;
                dw[wi] |= hit && place != 1;
            });
            let last = format == Format::ChannelsLast;
            let moved = |images: &Tensor| if last { to_nhwc(images) } else { Ok(images.clone()) };
            let back = |images: &Tensor| if last { to_nchw(images) } else { Ok(images.clone()) };
            let (geometry, out) = (shape.geometry, DType::F32);
            let (x, grad) = (moved(&x)?, moved(&grad)?);
            for (name, actual, hit) in [
                ("y", back(&forward(&x, &weight, None, geometry, out)?)?, y),
                ("dx", back(&dgrad(&grad, &weight, None, x.dims(), geometry, out)?)?, dx),
                ("dw", wgrad(&x, &grad, weight.dims(), geometry, out)?, dw),
            ] {
                for (index, (value, hit)) in doubles(&actual).into_iter().zip(hit).enumerate() {
                    let same = value == poison || value.is_nan() && poison.is_nan();
                    let right = if hit { same } else { value.is_finite() };
                    assert!(right, "{name} {index} {value} {hit} {place} {poison} {shape:?}");
                }
            }
        }
    }
    Ok(())
}

/// Sums of pixels that overflow where the convolution does not.
#[test]
fn overflow_in_a_tile_does_not_show() -> Result<()> {
    let shape = shape([8, 16, 8, 8], 16, [4, 4], (1, 1), Format::ChannelsFirst);
    assert!(suits(&shape));
    let mut rng = generator(43);
    let scaled =
        |rng: &mut _, dims: &[usize], by: f64| random(rng, dims, DType::F32).affine(by, 0.);
    let weight = scaled(&mut rng, &shape.weight_dims(), 1e-3)?;
    let [large, small] = [3.4e38, 1e-4];
    let (geometry, f32) = (shape.geometry, DType::F32);
    for (x_scale, grad_scale) in [(large, small), (small, large)] {
        let x = scaled(&mut rng, &shape.input_dims(), x_scale)?;
        let grad = scaled(&mut rng, &shape.out_dims(), grad_scale)?;
        let operands = [doubles(&x), doubles(&weight), doubles(&grad)];
        let [y, dx, dw] = plain_loops(&shape, operands.each_ref().map(Vec::as_slice));
        check(&forward(&x, &weight, None, geometry, f32)?, &y, &[f32], "y");
        check(&dgrad(&grad, &weight, None, x.dims(), geometry, f32)?, &dx, &[f32], "dx");
        check(&wgrad(&x, &grad, weight.dims(), geometry, f32)?, &dw, &[f32], "dw");
    }
    Ok(())
}
