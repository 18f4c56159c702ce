//! Small images in BF16, with an image in each lane.

use candle_core::{DType, Result, Tensor};
use half::bf16;

use super::{Sum, check, doubles, generator, geometry, plain_loops, random};
use crate::kernels::conv::packed::{Order, lanes};
use crate::kernels::conv::shape::Shape;
use crate::kernels::conv::{cpu, dgrad, forward, wgrad};
use crate::kernels::gemm::micro::InstructionSet;

const ISA: InstructionSet = InstructionSet::Avx512Bf16;

/// Batch, channels in and out, height, width, kernel height and width, stride, padding, dilation.
const SIZES: [[usize; 10]; 16] = [
    [16, 4, 8, 4, 4, 3, 3, 1, 1, 1],
    [17, 5, 19, 2, 2, 3, 3, 1, 1, 1],
    [33, 3, 40, 3, 5, 3, 3, 1, 1, 1],
    [50, 2, 9, 8, 8, 3, 3, 2, 1, 1],
    [20, 7, 16, 5, 4, 4, 4, 2, 1, 1],
    [16, 2, 3, 7, 7, 3, 3, 1, 2, 2],
    [3, 33, 17, 4, 4, 3, 3, 1, 1, 1],
    [18, 2, 70, 4, 3, 2, 3, 1, 0, 1],
    [1, 6, 6, 1, 1, 3, 3, 1, 1, 1],
    [34, 50, 40, 4, 4, 3, 3, 1, 1, 1], // more vectors of channels than a product has
    [18, 270, 40, 4, 4, 3, 3, 1, 1, 1], // sums longer than the micro-kernel adds up at once
    [40, 2, 5, 1, 9, 1, 3, 1, 1, 1],   // rows of padding alone
    [31, 4, 4, 6, 6, 1, 1, 2, 0, 1],
    [2, 3, 5, 6, 6, 3, 3, 4, 1, 1], // pixels that meet no tap
    [129, 2, 2, 5, 5, 3, 3, 1, 1, 1],
    [70, 3, 4, 8, 8, 3, 3, 1, 1, 1], // groups of images in wgrad
];

fn shape_of(
    [b, c_in, c_out, h, w, kh, kw, stride, padding, dilation]: [usize; 10],
) -> Result<Shape> {
    Shape::new(&[b, c_in, h, w], &[c_out, c_in, kh, kw], geometry(stride, padding, dilation, 1))
}

fn with_bias(sums: &[Sum], bias: &Tensor, pixels: usize) -> Vec<Sum> {
    let (mut sums, bias) = (sums.to_vec(), doubles(bias));
    for (i, sum) in sums.iter_mut().enumerate() {
        sum.add(bias[i / pixels % bias.len()]);
    }
    sums
}

fn not_run() -> Result<()> {
    println!("NOT RUN: this processor has no AVX512-BF16, or CANDLE_AMP_CPU hides it");
    Ok(())
}

#[test]
fn images_in_lanes_are_plain_loops() -> Result<()> {
    if !ISA.is_available() {
        return not_run();
    }
    let mut rng = generator(101);
    for size in SIZES {
        let shape = shape_of(size)?;
        let [dims, weight_dims, out_dims] =
            [shape.input_dims(), shape.weight_dims(), shape.out_dims()];
        let x = random(&mut rng, &dims, DType::BF16);
        let weight = random(&mut rng, &weight_dims, DType::BF16);
        let grad = random(&mut rng, &out_dims, DType::BF16);
        let biases = [shape.c_out, shape.c_in].map(|len| random(&mut rng, &[len], DType::F32));
        let [xs, ws, gs] = [&x, &weight, &grad].map(doubles);
        let [y, dx, dw] = plain_loops(&shape, [&xs, &ws, &gs]);
        let (inputs, what) = ([DType::BF16; 2], format!("{shape:?}"));
        let (pixels, in_pixels) = (shape.pixels(), shape.height * shape.width);

        let run = |bias| lanes::convolve::<f32>(&x, &weight, bias, &shape, Order::Forward, ISA);
        check(&run(None)?.unwrap(), &y, &inputs, &what);
        let y_bias = with_bias(&y, &biases[0], pixels);
        check(&run(Some(&biases[0]))?.unwrap(), &y_bias, &inputs, &what);
        let rounded = lanes::convolve::<bf16>(&x, &weight, None, &shape, Order::Forward, ISA)?;
        check(&rounded.unwrap(), &y, &inputs, &what);

        let run = |bias| lanes::convolve::<f32>(&grad, &weight, bias, &shape, Order::Backward, ISA);
        check(&run(None)?.unwrap(), &dx, &inputs, &what);
        let dx_bias = with_bias(&dx, &biases[1], in_pixels);
        check(&run(Some(&biases[1]))?.unwrap(), &dx_bias, &inputs, &what);

        let mut met = vec![false; pixels];
        shape.meetings(|_, _, output| met[output] = true);
        match lanes::wgrad(&x, &grad, &shape, ISA)? {
            Some(by_lanes) => check(&by_lanes, &dw, &inputs, &what),
            None => assert!(met.contains(&false), "{what}"),
        }
    }
    Ok(())
}

/// Padding times an infinite weight is NaN, and an infinite gradient times padding: im2col has them.
#[test]
fn what_is_not_finite_is_left_to_im2col() -> Result<()> {
    if !ISA.is_available() {
        return not_run();
    }
    let mut rng = generator(102);
    let shape = shape_of([16, 128, 256, 4, 4, 3, 3, 1, 1, 1])?;
    assert!(lanes::suits(&shape, Order::Forward, ISA) && lanes::wgrad_suits(&shape, ISA));
    let [dims, weight_dims, out_dims] = [shape.input_dims(), shape.weight_dims(), shape.out_dims()];
    let infinite = |finite: &Tensor| -> Result<Tensor> {
        let mut values = finite.flatten_all()?.to_vec1::<bf16>()?;
        values[7] = bf16::NEG_INFINITY;
        Tensor::from_vec(values, finite.dims(), finite.device())
    };
    let x = random(&mut rng, &dims, DType::BF16);
    let weight = infinite(&random(&mut rng, &weight_dims, DType::BF16))?;
    let grad = random(&mut rng, &out_dims, DType::BF16);
    for (order, x) in [(Order::Forward, &x), (Order::Backward, &grad)] {
        assert!(lanes::convolve::<f32>(x, &weight, None, &shape, order, ISA)?.is_none());
    }
    let kinds = |t: Tensor| -> Result<Vec<(bool, bool)>> {
        let values = t.flatten_all()?.to_vec1::<f32>()?;
        Ok(values.into_iter().map(|x| (x.is_nan(), x.is_infinite())).collect())
    };
    let y = forward(&x, &weight, None, shape.geometry, DType::F32)?;
    assert_eq!(kinds(y)?, kinds(cpu::forward::<f32>(&x, &weight, None, &shape)?)?);
    let dx = dgrad(&grad, &weight, None, &dims, shape.geometry, DType::F32)?;
    assert!(kinds(dx)?.contains(&(false, true)));
    let grad = infinite(&grad)?;
    assert!(lanes::wgrad(&x, &grad, &shape, ISA)?.is_none());
    let dw = wgrad(&x, &grad, &weight_dims, shape.geometry, DType::F32)?;
    assert_eq!(kinds(dw)?, kinds(cpu::wgrad::<f32>(&x, &grad, &shape)?)?);
    Ok(())
}

/// Many small images of many channels; not those that leave lanes empty, nor a single tap, nor another instruction set.
#[test]
fn small_images_go_to_lanes() -> Result<()> {
    let suits = |size, isa| -> Result<[bool; 3]> {
        let shape = shape_of(size)?;
        let [forward, backward] =
            [Order::Forward, Order::Backward].map(|order| lanes::suits(&shape, order, isa));
        Ok([forward, backward, lanes::wgrad_suits(&shape, isa)])
    };
    let small = [32, 256, 512, 4, 4, 3, 3, 1, 1, 1];
    assert_eq!(suits(small, ISA)?, [true; 3]);
    assert_eq!(suits([16, 256, 512, 8, 8, 3, 3, 2, 1, 1], ISA)?, [true; 3]);
    assert_eq!(suits(small, InstructionSet::AmxBf16)?, [false; 3]);
    for isa in InstructionSet::of_f32() {
        assert_eq!(suits(small, isa)?, [false; 3]);
    }
    assert_eq!(suits([8, 256, 512, 4, 4, 3, 3, 1, 1, 1], ISA)?, [false, false, true]);
    assert_eq!(suits([32, 256, 512, 16, 16, 3, 3, 1, 1, 1], ISA)?, [false; 3]);
    assert_eq!(suits([32, 64, 64, 8, 8, 3, 3, 1, 1, 1], ISA)?, [false; 3]);
    assert_eq!(suits([32, 256, 512, 8, 8, 1, 1, 1, 0, 1], ISA)?, [false; 3]);
    Ok(())
}

/// By lanes, and of images that are read where they lie.
#[test]
fn one_result_for_any_number_of_threads() -> Result<()> {
    let mut rng = generator(107);
    for (dims, outs, size) in
        [([50, 16, 4, 4], 96, 3), ([40, 16, 8, 8], 32, 1), ([9, 8, 16, 18], 16, 1)]
    {
        let [b, ins, height, width] = dims;
        let x = random(&mut rng, &dims, DType::BF16);
        let weight = random(&mut rng, &[outs, ins, size, size], DType::BF16);
        let grad = random(&mut rng, &[b, outs, height, width], DType::BF16);
        let results = [1, 2, 3].map(|threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let geometry = geometry(1, size / 2, 1, 1);
            let all = || {
                [
                    wgrad(&x, &grad, weight.dims(), geometry, DType::F32).unwrap(),
                    forward(&x, &weight, None, geometry, DType::F32).unwrap(),
                    dgrad(&grad, &weight, None, &dims, geometry, DType::F32).unwrap(),
                ]
                .map(|tensor| doubles(&tensor))
            };
            pool.install(all)
        });
        assert!(results[0] == results[1] && results[0] == results[2], "{dims:?} {outs} {size}");
    }
    Ok(())
}
