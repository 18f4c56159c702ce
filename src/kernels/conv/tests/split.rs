//! Convolutions of F32 and F16 as sums of BF16.

use candle_core::{DType, Device, Result, Tensor};
use half::{bf16, f16};

use super::every_set::edges;
use super::packed::{dgrad, forward, wgrad};
use super::{Shape, geometry, plain_loops, to_nchw, to_nhwc, turned};
use crate::kernels::gemm::micro::InstructionSet;
use crate::kernels::gemm::tests::{check, doubles, every_exponent, generator, mixed, random};

/// Numbers that need all terms, on both sides.
#[test]
fn planes_agree_with_plain_loops() -> Result<()> {
    if !InstructionSet::AmxBf16x3.is_runnable() {
        return Ok(());
    }
    let mut rng = generator(62);
    for (dims, c_out, kernel, geometry) in edges() {
        for dtypes in [[DType::F32; 2], [DType::F16; 2], [DType::F32, DType::BF16]] {
            let weight_dims = [c_out, dims[1] / geometry.groups, kernel, kernel];
            let shape = Shape::new(&dims, &weight_dims, geometry)?;
            let x = mixed(&mut rng, &dims, dtypes[0]);
            let weight = mixed(&mut rng, &weight_dims, dtypes[1]);
            let grad = mixed(&mut rng, &shape.out_dims(), dtypes[0]);
            let (xs, ws, gs) = (doubles(&x), doubles(&weight), doubles(&grad));
            // A term is off by what its operands lose, 2^-126 each, and its own flush to zero.
            let lost = 4.0 * f64::from(f32::MIN_POSITIVE / f32::EPSILON);
            let [y, dx, dw] = plain_loops(&shape, [&xs, &ws, &gs]).map(|sums| {
                sums.iter().map(|sum| sum.with_error_of(lost, 0.0)).collect::<Vec<_>>()
            });
            let what = format!("{dtypes:?} {shape:?}");
            let [x, grad] = [to_nhwc(&x)?, to_nhwc(&grad)?];
            let shape = Shape::new(x.dims(), &weight_dims, turned(geometry))?;
            let single = forward::<f32>(&x, &weight, None, &shape, InstructionSet::AmxBf16x3)?;
            check(&to_nchw(&single)?, &y, &dtypes, &what);
            let back = dgrad::<f32>(&grad, &weight, None, &shape, InstructionSet::AmxBf16x3)?;
            check(&to_nchw(&back)?, &dx, &dtypes, &what);
            check(&wgrad(&x, &grad, &shape, InstructionSet::AmxBf16x3)?, &dw, &dtypes, &what);
        }
    }
    Ok(())
}

/// Ones where row and column agree, in a matrix of 32 rows: what picks elements of the other operand.
fn unit(dims: &[usize], dtype: DType) -> Result<Tensor> {
    let data: Vec<f32> =
        (0..dims.iter().product()).map(|at| f32::from(at / 32 % 32 == at % 32)).collect();
    Tensor::from_vec(data, dims, &Device::Cpu)?.to_dtype(dtype)
}

/// An operand, its numbers, and what they became.
type Picked = (&'static str, Vec<f64>, Vec<f64>);

/// Each operand of each pass is `numbers`, of which there are a multiple of 32; the other operand picks each once.
fn picked(numbers: &Tensor) -> Result<Vec<Picked>> {
    let (isa, dtype, rows) =
        (InstructionSet::AmxBf16x3, numbers.dtype(), numbers.elem_count() / 32);
    let geometry = turned(geometry(1, 0, 1, 1));
    // Pixels by channels, and channels by channels.
    let shape = Shape::new(&[1, 1, rows, 32], &[32, 32, 1, 1], geometry)?;
    let (image, unit_weight) = (numbers.reshape((1, 1, rows, 32))?, unit(&[32, 32, 1, 1], dtype)?);
    let mut all = vec![
        ("x", &image, forward::<f32>(&image, &unit_weight, None, &shape, isa)?),
        ("grad of dgrad", &image, dgrad::<f32>(&image, &unit_weight, None, &shape, isa)?),
    ];
    // 32 pixels with a one each, in and out.
    let unit_image = unit(&[1, 1, 32, 32], dtype)?;
    let (tall, wide) = (numbers.reshape((rows, 32, 1, 1))?, numbers.reshape((32, rows, 1, 1))?);
    let (tall_image, wide_image) =
        (tall.reshape((1, 1, rows, 32))?, wide.reshape((1, 1, 32, rows))?);
    let from_few = Shape::new(&[1, 1, 32, 32], tall.dims(), geometry)?;
    let to_few = Shape::new(wide_image.dims(), wide.dims(), geometry)?;
    let turned_tall =
        forward::<f32>(&unit_image, &tall, None, &from_few, isa)?.reshape((32, rows))?.t()?;
    all.push(("weight", &tall_image, turned_tall));
    all.push((
        "weight of dgrad",
        &wide_image,
        dgrad::<f32>(&unit_image, &wide, None, &to_few, isa)?,
    ));
    all.push(("x of wgrad", &wide_image, wgrad(&wide_image, &unit_image, &to_few, isa)?));
    let turned_wide = wgrad(&unit_image, &wide_image, &from_few, isa)?.reshape((rows, 32))?.t()?;
    all.push(("grad of wgrad", &wide_image, turned_wide));
    Ok(all.into_iter().map(|(what, of, results)| (what, doubles(of), doubles(&results))).collect())
}

/// Beside every other number, so that bits of one in another's terms show.
#[test]
fn planes_keep_numbers_of_every_exponent() -> Result<()> {
    if !InstructionSet::AmxBf16x3.is_runnable() {
        return Ok(());
    }
    // What BF16 rounds to infinity is summed without terms, and everything beside it too.
    let whole = |x: &f32| bf16::from_f32(*x).is_finite();
    let single: Vec<f32> = every_exponent().into_iter().filter(whole).collect();
    let half = (0..=u16::MAX).map(f16::from_bits).filter(|x| x.is_finite()).collect::<Vec<_>>();
    let vector = |data: Tensor| data.narrow(0, 0, data.elem_count() / 32 * 32);
    let single = vector(Tensor::new(single, &Device::Cpu)?)?;
    let half = vector(Tensor::new(half, &Device::Cpu)?)?;
    // What terms of F32 lose, and what a processor takes for zero.
    for (numbers, lost) in [(single, 2.0 * f64::from(f32::MIN_POSITIVE)), (half, 0.0)] {
        for (what, numbers, results) in picked(&numbers)? {
            assert_eq!(numbers.len(), results.len(), "{what}");
            for (at, (x, y)) in numbers.iter().zip(results).enumerate() {
                assert!((x - y).abs() <= lost, "{what}, {at}: {y:e}, not {x:e}");
            }
        }
    }
    Ok(())
}

/// Each alone, in every operand. Zeros times what is not finite are NaN, in one row or column.
#[test]
fn numbers_without_terms_are_summed_without() -> Result<()> {
    if !InstructionSet::AmxBf16x3.is_runnable() {
        return Ok(());
    }
    let mut odd: Vec<u32> = every_exponent().into_iter().map(f32::to_bits).collect();
    odd.retain(|x| !bf16::from_f32(f32::from_bits(*x)).is_finite());
    odd.sort_unstable();
    odd.dedup();
    assert!(odd.len() > 20, "{}", odd.len());
    for (n, bits) in odd.into_iter().enumerate() {
        let mut numbers = vec![1f32; 32 * 32];
        let odd = f32::from_bits(bits);
        numbers[31 * n] = odd;
        for (what, numbers, results) in picked(&Tensor::new(numbers, &Device::Cpu)?)? {
            let mut nans = 0;
            for (at, (x, y)) in numbers.iter().zip(results).enumerate() {
                nans += usize::from(y.is_nan());
                let right = *x == y || y.is_nan() && !odd.is_finite();
                assert!(right, "{what}, {at}: {y:e}, not {x:e}, {bits:x}");
            }
            assert!(nans <= 32, "{what}: {nans} of 1024 are NaN, {bits:x}");
        }
    }
    Ok(())
}

/// What terms cannot sum is summed without: infinity, NaN, and what BF16 rounds to infinity.
#[test]
fn what_is_not_finite_in_planes_is_taken_again() -> Result<()> {
    if !InstructionSet::AmxBf16x3.is_runnable() {
        return Ok(());
    }
    let mut rng = generator(61);
    let geometry = turned(geometry(1, 1, 1, 1));
    let (dims, weight_dims) = ([5, 6, 7, 32], [32, 32, 3, 3]);
    let shape = Shape::new(&dims, &weight_dims, geometry)?;
    for (what, odd) in
        [("infinity", f32::INFINITY), ("NaN", f32::NAN), ("the largest", f32::MAX), ("none", 1.0)]
    {
        let mut images = |dims: &[usize], scale: f64| {
            (random(&mut rng, dims, DType::F32) * scale)?.flatten_all()?.to_vec1::<f32>()
        };
        let (mut x, mut grad) = (images(&dims, 1e-3)?, images(&shape.out_dims(), 1e-3)?);
        let weight = Tensor::from_vec(images(&weight_dims, 1e-3)?, &weight_dims, &Device::Cpu)?;
        (x[1501], grad[777]) = (odd, odd);
        let x = Tensor::from_vec(x, &dims, &Device::Cpu)?;
        let grad = Tensor::from_vec(grad, &shape.out_dims(), &Device::Cpu)?;
        let of = |isa: InstructionSet| -> Result<[Tensor; 3]> {
            Ok([
                forward::<f32>(&x, &weight, None, &shape, isa)?,
                dgrad::<f32>(&grad, &weight, None, &shape, isa)?,
                wgrad(&x, &grad, &shape, isa)?,
            ])
        };
        let isa = InstructionSet::AmxBf16x3;
        for (bf16x3, plain) in of(isa)?.iter().zip(of(isa.without_terms())?) {
            let (bf16x3, plain) = (doubles(bf16x3), doubles(&plain));
            let same = |(a, b): (&f64, &f64)| a == b || a.is_nan() && b.is_nan();
            let same = bf16x3.iter().zip(&plain).all(same);
            // Else there are sums as BF16x3, in another order.
            assert_eq!(same, what != "none", "{what}");
        }
    }
    Ok(())
}

/// NaNs of F16 whose rounding to BF16 carries, and some others, in each operand.
#[test]
fn nans_of_f16_reach_what_planes_sum() -> Result<()> {
    if !InstructionSet::AmxBf16x3.is_runnable() {
        return Ok(());
    }
    let mut rng = generator(63);
    let (dims, weight_dims) = ([1, 3, 3, 32], [32, 32, 1, 1]);
    let shape = Shape::new(&dims, &weight_dims, turned(geometry(1, 0, 1, 1)))?;
    let [x, weight, grad] = [&dims[..], &weight_dims[..], &shape.out_dims()[..]]
        .map(|dims| random(&mut rng, dims, DType::F16));
    let any_nan = |y: &Tensor| doubles(y).iter().any(|y| y.is_nan());
    for bits in [0x7c01, 0x7dff, 0x7e00, 0x7ffb, 0x7ffc, 0x7ffd, 0x7ffe, 0x7fff] {
        for bits in [bits, bits | 0x8000] {
            let spoil = |tensor: &Tensor| -> Result<Tensor> {
                let mut data = tensor.flatten_all()?.to_vec1::<f16>()?;
                let at = data.len() / 2 + usize::from(bits % 32);
                data[at] = f16::from_bits(bits);
                Tensor::from_vec(data, tensor.dims(), &Device::Cpu)
            };
            let (isa, y) = (InstructionSet::AmxBf16x3, spoil(&x)?);
            assert!(any_nan(&forward::<f32>(&y, &weight, None, &shape, isa)?), "{bits:x}");
            assert!(any_nan(&wgrad(&y, &grad, &shape, isa)?), "{bits:x}");
            let y = spoil(&weight)?;
            assert!(any_nan(&forward::<f32>(&x, &y, None, &shape, isa)?), "{bits:x}");
            assert!(any_nan(&dgrad::<f32>(&grad, &y, None, &shape, isa)?), "{bits:x}");
            let y = spoil(&grad)?;
            assert!(any_nan(&dgrad::<f32>(&y, &weight, None, &shape, isa)?), "{bits:x}");
            assert!(any_nan(&wgrad(&x, &y, &shape, isa)?), "{bits:x}");
        }
    }
    Ok(())
}
