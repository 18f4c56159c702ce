//! The CPU side against the portable one, and both against plain loops on doubles.

use candle_core::{DType, Device, Result, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{clip_norm, clip_value, norm, portable, unscale};

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

#[test]
fn unscale_multiplies_and_flags_each_tensor() -> Result<()> {
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
                let make = || {
                    Ok::<_, candle_core::Error>(vec![
                        tensor(&clean, dtype)?,
                        tensor(&dirty, dtype)?,
                    ])
                };
                let (got, flags) = unscale(make()?, 0.375)?;
                assert_eq!(flags, [false, len > 0], "{dtype:?}, {len} elements, {bad} at {at}");
                let (portable, portable_flags) = portable::unscale(make()?, 0.375)?;
                assert_eq!(flags, portable_flags);
                for (got, portable) in got.iter().zip(&portable) {
                    let same = |(a, b): (&f64, &f64)| a == b || a.is_nan() && b.is_nan();
                    assert!(doubles(got).iter().zip(&doubles(portable)).all(same));
                }
                // 3/8 of an F32 has at most two more bits: F64 holds it, F32 rounds it once.
                let expected = tensor(&clean.iter().map(|x| x * 0.375).collect::<Vec<_>>(), dtype)?;
                assert_eq!(doubles(&got[0]), doubles(&expected));
            }
        }
    }
    Ok(())
}

#[test]
fn an_overflow_of_the_product_is_flagged() -> Result<()> {
    let (_, flags) = unscale(vec![tensor(&[1.0, 3e38], DType::F32)?], 16.0)?;
    assert_eq!(flags, [true]);
    Ok(())
}

#[test]
fn the_norm_is_that_of_all_tensors_together() -> Result<()> {
    let tensors: Vec<Tensor> = LENGTHS
        .iter()
        .map(|&len| tensor(&values(len as u64, len), DType::F32))
        .collect::<Result<_>>()?;
    let squares: f64 = LENGTHS.iter().flat_map(|&len| values(len as u64, len)).map(|x| x * x).sum();
    let refs: Vec<&Tensor> = tensors.iter().collect();
    let got = f64::from(norm(&refs)?.to_scalar::<f32>()?);
    assert!((got / squares.sqrt() - 1.0).abs() <= f64::from(f32::EPSILON));
    let portable = f64::from(portable::norm(&refs[1..])?.to_scalar::<f32>()?);
    // Summed in F32, in whatever order: half an epsilon a doubling, and one a square and a root.
    assert!((portable / squares.sqrt() - 1.0).abs() <= 20.0 * f64::from(f32::EPSILON));
    // Squares beyond F32 are no overflow here.
    let large = tensor(&[3e30, 4e30], DType::F32)?;
    let got = f64::from(norm(&[&large])?.to_scalar::<f32>()?);
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
    let five = Tensor::new(5f32, &Device::Cpu)?;
    for clip in [clip_norm, portable::clip_norm] {
        let clipped = clip(make()?, &five, 2.5)?;
        let (a, b) = (doubles(&clipped[0]), doubles(&clipped[1]));
        let close =
            |got: f64, expected: f64| (got - expected).abs() <= 4.0 * f64::from(f32::EPSILON) * 2.0;
        assert!(close(a[0], 1.5) && b[0] == 0.0 && close(b[1], -2.0), "{a:?} {b:?}");
        let whole = clip(make()?, &five, 7.0)?;
        assert_eq!((doubles(&whole[0]), doubles(&whole[1])), (vec![3.0], vec![0.0, -4.0]));
        let nan = clip(make()?, &Tensor::new(f32::NAN, &Device::Cpu)?, 1.0)?;
        assert!(doubles(&nan[0])[0].is_nan());
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
