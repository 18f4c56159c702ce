//! The CPU side against the portable one, both against plain loops on doubles, and CUDA against the
//! CPU.

use candle_core::{DType, Device, Result, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{
    Clip, DeviceFoundInf, DeviceScale, FoundInf, Growth, Multiplier, Number, ScaledGradient, any,
    clip_value, multiplied, portable,
};
use crate::kernels::cuda::Gpu;
use crate::kernels::testing::devices::gpus;
use crate::{LossScale, ScaleConfig};

/// Shorter and longer than a vector, a block and a task, and none of their multiples.
const LENGTHS: [usize; 6] = [0, 1, 17, 1023, 1025, (1 << 16) + 3];

fn values(seed: u64, len: usize) -> Vec<f64> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..len).map(|_| f64::from(rng.random_range(-8f32..8.0))).collect()
}

fn tensor(values: &[f64], dtype: DType) -> Result<Tensor> {
    Tensor::new(values, &Device::Cpu)?.to_dtype(dtype)
}

fn doubles(t: &Tensor) -> Vec<f64> {
    t.to_dtype(DType::F64).and_then(|t| t.to_vec1()).unwrap()
}

fn by(inverse: f32, clip: Option<(f32, f64)>) -> Multiplier {
    let clip = clip
        .map(|(norm, max_norm)| Clip { norm: Tensor::new(norm, &Device::Cpu).unwrap(), max_norm });
    Multiplier { inverse: Number::Host(inverse), clip }
}

fn due<'a>(gradients: &'a [Tensor], by: &'a Multiplier) -> Vec<ScaledGradient<'a>> {
    gradients.iter().map(|gradient| (gradient, by)).collect()
}

fn apply_scale(gradients: Vec<Tensor>, by: &Multiplier) -> Result<Vec<Tensor>> {
    let all = vec![by; gradients.len()];
    super::apply_scale(gradients, &all)
}

/// On the CPU.
fn check(gradients: &[Tensor], by: &Multiplier) -> Result<Vec<bool>> {
    let found = super::check(&due(gradients, by))?.into_iter();
    Ok(found.map(|found| matches!(found, FoundInf::Host(true))).collect())
}

fn norm(gradients: &[Tensor], by: &Multiplier) -> Result<f32> {
    super::norm(&due(gradients, by), None)?.0.rounded.to_scalar()
}

#[test]
fn each_tensor_is_checked_and_multiplied() -> Result<()> {
    let by = by(0.375, None);
    for dtype in [DType::F32, DType::F64] {
        for len in LENGTHS {
            let clean = values(len as u64, len);
            for (at, bad) in
                [(0, f64::NAN), (len / 2, f64::INFINITY), (len.max(1) - 1, -f64::INFINITY)]
            {
                let mut dirty = clean.clone();
                if let Some(x) = dirty.get_mut(at) {
                    *x = bad;
                }
                let both = [tensor(&clean, dtype)?, tensor(&dirty, dtype)?];
                let flags = check(&both, &by)?;
                assert_eq!(flags, [false, len > 0], "{dtype:?}, {len} elements, {bad} at {at}");
                assert_eq!(flags, portable::check(&due(&both, &by))?);
                let (_, found) = super::norm(&due(&both, &by), None)?;
                let found = found.iter().map(|found| matches!(found, FoundInf::Host(true)));
                assert_eq!(flags, found.collect::<Vec<_>>());
                let portable: Vec<Tensor> =
                    due(&both, &by).into_iter().map(multiplied).collect::<Result<_>>()?;
                let got = apply_scale(both.to_vec(), &by)?;
                for (got, portable) in got.iter().zip(&portable) {
                    assert_eq!(bits(got), bits(portable));
                }
                // 3/8 of an F32 has at most two more bits: F64 holds it, F32 rounds it once.
                let expected = tensor(&clean.iter().map(|x| x * 0.375).collect::<Vec<_>>(), dtype)?;
                assert_eq!(doubles(&got[0]), doubles(&expected));
            }
        }
    }
    Ok(())
}

/// With a scale below 1 a finite number may become infinite; and an F64 may have an infinite square.
#[test]
fn what_is_found_is_of_the_product() -> Result<()> {
    let large = [tensor(&[1.0, 3e38], DType::F32)?];
    assert_eq!(check(&large, &by(16.0, None))?, [true]);
    assert_eq!(check(&large, &by(1.1, None))?, [false]);
    let square = [tensor(&[1e200], DType::F64)?];
    for (factor, expected) in [(1.5, false), (f32::INFINITY, true)] {
        let (norm, found) = super::norm(&due(&square, &by(factor, None)), None)?;
        assert!(norm.rounded.to_scalar::<f32>()?.is_infinite());
        assert_eq!(matches!(found[..], [FoundInf::Host(true)]), expected);
    }
    Ok(())
}

#[test]
fn the_norm_is_that_of_all_tensors_together() -> Result<()> {
    let tensors: Vec<Tensor> = LENGTHS
        .iter()
        .map(|&len| tensor(&values(len as u64, len), DType::F32))
        .collect::<Result<_>>()?;
    let by = by(0.375, None);
    // Rounded as the gradients are.
    let product = |x: f64| f64::from(x as f32 * 0.375);
    let squares: f64 =
        LENGTHS.iter().flat_map(|&len| values(len as u64, len)).map(|x| product(x).powi(2)).sum();
    let got = f64::from(norm(&tensors, &by)?);
    assert!((got / squares.sqrt() - 1.0).abs() <= f64::from(f32::EPSILON));
    let portable = f64::from(portable::norm(&due(&tensors[1..], &by))?.to_scalar::<f32>()?);
    // Summed in F32, in whatever order: half an epsilon per doubling, and one per square and root.
    assert!((portable / squares.sqrt() - 1.0).abs() <= 20.0 * f64::from(f32::EPSILON));
    // Squares beyond F32 are no overflow here.
    let large = [tensor(&[3e30, 4e30], DType::F32)?];
    let got = f64::from(norm(&large, &Multiplier::ONE)?);
    assert!((got / 5e30 - 1.0).abs() <= f64::from(f32::EPSILON));
    Ok(())
}

#[test]
fn clipping_scales_all_by_one_factor_or_none() -> Result<()> {
    let make = || {
        Ok::<_, candle_core::Error>(vec![
            tensor(&[3.0], DType::F32)?,
            tensor(&[0.0, -4.0], DType::F64)?,
        ])
    };
    type ApplyScale = fn(Vec<Tensor>, &Multiplier) -> Result<Vec<Tensor>>;
    let portably: ApplyScale = |all, by| due(&all, by).into_iter().map(multiplied).collect();
    for clip in [apply_scale as ApplyScale, portably] {
        let clipped = clip(make()?, &by(1.0, Some((5.0, 2.5))))?;
        let (a, b) = (doubles(&clipped[0]), doubles(&clipped[1]));
        let close =
            |got: f64, expected: f64| (got - expected).abs() <= 4.0 * f64::from(f32::EPSILON) * 2.0;
        assert!(close(a[0], 1.5) && b[0] == 0.0 && close(b[1], -2.0), "{a:?} {b:?}");
        let whole = clip(make()?, &by(1.0, Some((5.0, 7.0))))?;
        assert_eq!((doubles(&whole[0]), doubles(&whole[1])), (vec![3.0], vec![0.0, -4.0]));
        let nan = clip(make()?, &by(1.0, Some((f32::NAN, 1.0))))?;
        assert!(doubles(&nan[0])[0].is_nan());
        // Unscaled first, by twice as much as it is clipped.
        let both = clip(make()?, &by(0.25, Some((5.0, 2.5))))?;
        assert!(close(doubles(&both[0])[0], 0.375) && close(doubles(&both[1])[1], -0.5));
    }
    Ok(())
}

#[test]
fn clip_value_keeps_nan() -> Result<()> {
    let clipped =
        clip_value(vec![tensor(&[-3.0, 0.25, f64::NAN, f64::INFINITY], DType::F32)?], 0.5)?;
    let got = doubles(&clipped[0]);
    assert_eq!((got[0], got[1], got[3]), (-0.5, 0.25, 0.5));
    assert!(got[2].is_nan());
    Ok(())
}

/// Tensors of all lengths, F32 and F64 in turns, some not finite; the same on `device`.
fn gradients(device: &Device) -> Result<Vec<Tensor>> {
    // Candle has no tensor of no elements on CUDA.
    let lengths = LENGTHS[1..].iter().chain(&[(1 << 14) + 1, 3 << 14, 4]).enumerate();
    let mut all = Vec::new();
    for (number, &len) in lengths {
        let mut values = values(number as u64, len);
        if number % 3 == 2 {
            for (at, bad) in [(0, f64::NAN), (len / 2, f64::INFINITY), (len - 1, f64::NEG_INFINITY)]
            {
                values[at] = bad;
            }
        }
        let dtype = if number % 2 == 0 { DType::F32 } else { DType::F64 };
        all.push(tensor(&values, dtype)?.to_device(device)?);
    }
    // One that starts at no multiple of 16 bytes.
    all.push(tensor(&values(99, 1030), DType::F32)?.to_device(device)?.narrow(0, 1, 1029)?);
    Ok(all)
}

fn bits(t: &Tensor) -> Vec<u64> {
    let all = doubles(&t.to_device(&Device::Cpu).unwrap());
    all.into_iter().map(|x| if x.is_nan() { u64::MAX } else { x.to_bits() }).collect()
}

fn device_flags(found: Vec<FoundInf>) -> Vec<DeviceFoundInf> {
    let flag = |found| if let FoundInf::Device(flag) = found { Some(flag) } else { None };
    found.into_iter().filter_map(flag).collect()
}

fn counts(found: &[FoundInf]) -> Result<Vec<[usize; 2]>> {
    DeviceFoundInf::read(&device_flags(found.to_vec()).iter().collect::<Vec<_>>())
}

#[test]
fn cuda_multiplies_and_counts_as_the_cpu() -> Result<()> {
    for device in gpus() {
        for factor in [0.375f32, 1e-30, f32::MAX] {
            let host = by(factor, None);
            let flags = check(&gradients(&Device::Cpu)?, &host)?;
            let expected = apply_scale(gradients(&Device::Cpu)?, &host)?;
            for on in [host.clone(), host.on(&device)?] {
                let ours = gradients(&device)?;
                let found = super::check(&due(&ours, &on))?;
                let (_, again) = super::norm(&due(&ours, &on), None)?;
                assert_eq!(counts(&found)?, counts(&again)?);
                for (got, expected) in apply_scale(ours, &on)?.iter().zip(&expected) {
                    assert_eq!(bits(got), bits(expected), "{factor}");
                }
                let found = device_flags(found);
                let counts = DeviceFoundInf::read(&found.iter().collect::<Vec<_>>())?;
                for ((counts, expected), flag) in counts.iter().zip(&expected).zip(&flags) {
                    let all = doubles(expected);
                    let infinite = all.iter().filter(|x| x.is_infinite()).count();
                    assert_eq!(*counts, [infinite, all.iter().filter(|x| x.is_nan()).count()]);
                    assert_eq!(counts[0] + counts[1] > 0, *flag);
                }
                let flag = |chosen: &[&DeviceFoundInf]| {
                    any(chosen).and_then(|flag| flag.tensor().to_vec1::<u32>())
                };
                for (one, set) in found.iter().zip(&flags) {
                    assert_eq!(flag(&[one])?, [u32::from(*set)]);
                }
                // Ranges with gaps: all that are clean, then those and one that is not.
                let clean: Vec<&DeviceFoundInf> =
                    found.iter().zip(&flags).filter(|(_, set)| !**set).map(|(f, _)| f).collect();
                assert_eq!(flag(&clean)?, [0]);
                assert_eq!(flag(&[&clean[..], &[&found[2]]].concat())?, [1]);
            }
        }
    }
    Ok(())
}

#[test]
fn cuda_finds_what_f16_cannot_hold() -> Result<()> {
    for device in gpus() {
        let gpu = Gpu::of(&device).unwrap();
        let values = [65519.9f32, 65520.0, -65520.0, -1e30, f32::INFINITY, f32::NAN, 1.0];
        let x = Tensor::new(&values, &device)?;
        let flags = super::overflows_f16(gpu, &[&x, &x.narrow(0, 6, 1)?])?;
        assert_eq!(DeviceFoundInf::read(&flags.iter().collect::<Vec<_>>())?, [[3, 0], [0, 0]]);
    }
    Ok(())
}

#[test]
fn cuda_measures_and_clips_as_the_cpu() -> Result<()> {
    for device in gpus() {
        let finite = |device: &Device| -> Result<Vec<Tensor>> {
            Ok(gradients(device)?
                .into_iter()
                .enumerate()
                .filter(|(i, _)| i % 3 != 2)
                .map(|(_, g)| g)
                .collect())
        };
        let (ours, theirs) = (finite(&device)?, finite(&Device::Cpu)?);
        let host = by(1.1, None);
        let (a, b) = (norm(&ours, &host.on(&device)?)?, norm(&theirs, &host)?);
        // F64 sums in another order, rounded once.
        assert!((a / b - 1.0).abs() <= f32::EPSILON, "{a} {b}");
        for (limit, factor) in [(0.5, 1.0), (1e9, 1.0), (2.0, f32::NAN)] {
            let host = by(1.1, Some((b * factor, limit)));
            let got = apply_scale(finite(&device)?, &host.on(&device)?)?;
            for (got, expected) in got.iter().zip(&apply_scale(finite(&Device::Cpu)?, &host)?) {
                assert_eq!(bits(got), bits(expected), "{limit} {factor}");
            }
        }
        let got = clip_value(gradients(&device)?, 0.7)?;
        for (got, expected) in got.iter().zip(&clip_value(gradients(&Device::Cpu)?, 0.7)?) {
            assert_eq!(bits(got), bits(expected));
        }
    }
    Ok(())
}

/// More tensors than one launch takes.
#[test]
fn cuda_takes_any_number_of_tensors() -> Result<()> {
    for device in gpus() {
        let one = |i: usize| {
            Tensor::new(&[i as f32, if i.is_multiple_of(7) { f32::NAN } else { 1.0 }], &device)
        };
        let all = (0..2100).map(one).collect::<Result<Vec<_>>>()?;
        let flags = device_flags(super::check(&due(&all, &Multiplier::ONE))?);
        let got = apply_scale(all, &by(2.0, None))?;
        let counts = DeviceFoundInf::read(&flags.iter().collect::<Vec<_>>())?;
        for (i, (got, counts)) in got.iter().zip(counts).enumerate() {
            assert_eq!(got.narrow(0, 0, 1)?.to_vec1::<f32>()?, [2.0 * i as f32]);
            assert_eq!(counts, [0, usize::from(i.is_multiple_of(7))], "{i}");
        }
        // Every other flag: as many ranges.
        let apart: Vec<&DeviceFoundInf> = flags.iter().skip(1).step_by(2).collect();
        assert_eq!(any(&apart)?.tensor().to_vec1::<u32>()?, [1]);
        let clean: Vec<&DeviceFoundInf> = flags
            .iter()
            .enumerate()
            .filter(|(i, _)| !i.is_multiple_of(7))
            .map(|(_, f)| f)
            .collect();
        assert_eq!(any(&clean)?.tensor().to_vec1::<u32>()?, [0]);
        assert_eq!(norm(&got[1..5], &Multiplier::ONE)?, (4f32 + 16.0 + 36.0 + 64.0 + 16.0).sqrt());
    }
    Ok(())
}

/// The rule on the host is the oracle of the kernel, over every sequence of 12 flags.
#[test]
fn cuda_moves_the_scale_as_the_host() -> Result<()> {
    for device in gpus() {
        let gpu = Gpu::of(&device).unwrap();
        let flags = [0u32, 1]
            .map(|flag| Tensor::new(&[flag], &device))
            .into_iter()
            .collect::<Result<Vec<_>>>()?;
        for (growth_interval, hysteresis, backoff_factor) in [(1, 1, 0.5), (3, 2, 0.7)] {
            let config = ScaleConfig {
                init_scale: 96.0,
                growth_factor: 3.0,
                backoff_factor,
                growth_interval,
                hysteresis,
                min_scale: 5.0,
                max_scale: 4000.0,
            };
            let rule = Growth {
                growth_factor: 3.0,
                backoff_factor,
                growth_interval,
                hysteresis,
                min_scale: 5.0,
                max_scale: 4000.0,
            };
            let start = LossScale::new(config).unwrap();
            for sequence in 0..1u32 << 12 {
                let mut scale = start;
                let mut device = DeviceScale::new(gpu, scale.get(), scale.inverse(), [0, 0])?;
                for step in 0..12 {
                    let found = sequence >> step & 1;
                    scale = scale.after(found == 1);
                    device.update(&flags[found as usize], &rule)?;
                }
                let words = device.state()?.to_vec1::<f32>()?.into_iter().map(f32::to_bits);
                let expected = [
                    scale.get().to_bits(),
                    scale.inverse().to_bits(),
                    scale.growth_tracker(),
                    scale.hysteresis_tracker(),
                ];
                assert_eq!(words.collect::<Vec<_>>(), expected, "{sequence:012b}");
                let log = device.read()?;
                assert!(
                    log.iter().enumerate().all(|(i, &found)| found == (sequence >> i & 1 == 1))
                );
            }
        }
    }
    Ok(())
}

/// The log is a ring: what is read late, or across its end, is in order.
#[test]
fn the_log_of_a_scale_on_cuda_goes_round() -> Result<()> {
    for device in gpus() {
        let Some(gpu) = Gpu::of(&device) else { continue };
        let flags = [Tensor::new(&[0u32], &device)?, Tensor::new(&[1u32], &device)?];
        let (growth_factor, backoff_factor, growth_interval, hysteresis) = (2.0, 0.5, 2, 1);
        let (min_scale, max_scale) = (1.0, 1.0);
        let rule = Growth {
            growth_factor,
            backoff_factor,
            growth_interval,
            hysteresis,
            min_scale,
            max_scale,
        };
        let mut scale = DeviceScale::new(gpu, 1.0, 1.0, [0, 0])?;
        let mut number = 0usize;
        for len in [DeviceScale::LOG - 3, 7, DeviceScale::LOG] {
            let found: Vec<bool> = (number..number + len).map(|i| i * i % 7 == 2).collect();
            for &found in &found {
                scale.update(&flags[usize::from(found)], &rule)?;
            }
            assert_eq!(scale.is_full(), len == DeviceScale::LOG);
            assert_eq!(scale.read()?, found);
            number += len;
        }
    }
    Ok(())
}
