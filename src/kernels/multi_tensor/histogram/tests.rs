use candle_core::{DType, Device, Result, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::counts::BINS;
use super::*;

/// Values of every exponent of `F32`, subnormals, zeros, infinities and NaN among them.
fn wild(len: usize) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    (0..len).map(|_| f32::from_bits(rng.random())).map(|x| if x > 1e30 { 0.0 } else { x }).collect()
}

#[test]
fn counts_are_those_of_a_plain_loop() -> Result<()> {
    for len in [0, 1, 15, 17, 65_536, 200_003] {
        let mut values = wild(len);
        let edges = [1.0, 2.0 - 2f32.powi(-11), 2.0 - 2f32.powi(-11) - 2f32.powi(-23), -0.0];
        values.iter_mut().zip(edges).for_each(|(value, edge)| *value = edge);
        let mut expected = Counts::default();
        for &x in &values {
            let size = f64::from(x).abs();
            if x.is_nan() {
                expected.nan += 1;
            } else if x.is_infinite() {
                expected.infinite += 1;
            } else if x == 0.0 {
                expected.zero += 1;
            } else {
                let exponent = (-149..=127).rev().find(|&e| size >= 2f64.powi(e)).unwrap();
                let fraction = size / 2f64.powi(exponent);
                let third = match fraction {
                    1.0 => 0,
                    f if f < 2.0 - 2f64.powi(-11) => 1,
                    _ => 2,
                };
                expected.bins[(exponent - LOWEST) as usize][third] += 1;
            }
        }
        let single = Tensor::new(values, &Device::Cpu)?;
        assert_eq!(exponents(&single, 1.0)?, expected, "{len} of F32");
        assert_eq!(exponents(&single.to_dtype(DType::F64)?, 1.0)?, expected, "{len} of F64");
        let wanted = [expected.infinite as usize, expected.nan as usize];
        assert_eq!(non_finite(&single)?, wanted);
        assert_eq!(non_finite(&single.to_dtype(DType::F64)?)?, wanted);
        if len > 0 {
            assert_eq!(portable_non_finite(&single)?, wanted);
        }
    }
    Ok(())
}

#[test]
fn a_factor_that_is_a_power_of_two_moves_the_counts() -> Result<()> {
    let values: Vec<f32> =
        (0..1000).map(|i| (1.0 + i as f32 / 1000.0) * 2f32.powi(i % 20)).collect();
    let tensor = Tensor::new(values, &Device::Cpu)?;
    let (plain, moved) = (exponents(&tensor, 1.0)?, exponents(&tensor, 2f32.powi(-7))?);
    assert_eq!(plain.bins[7..], moved.bins[..BINS - 7]);
    Ok(())
}

#[test]
fn f64_beyond_the_counted_exponents_counts_as_the_last() -> Result<()> {
    let tensor = Tensor::new(&[1e-320f64, 1e-200, 1e200], &Device::Cpu)?;
    let counts = exponents(&tensor, 1.0)?;
    assert_eq!(counts.bins[0].iter().sum::<u64>(), 2);
    assert_eq!(counts.bins[BINS - 1].iter().sum::<u64>(), 1);
    Ok(())
}

#[test]
fn gpus_count_as_the_cpu_does() -> Result<()> {
    for gpu in crate::kernels::testing::devices::gpus() {
        for len in [0, 1, 33, 20_003] {
            for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
                let x = Tensor::new(wild(len), &Device::Cpu)?.to_dtype(dtype)?;
                let there = crate::kernels::elementwise::testing::on_device(&x, &gpu);
                for factor in [1.0, 0.25, 3.0] {
                    assert_eq!(exponents(&there, factor)?, exponents(&x, factor)?);
                }
                if dtype == DType::F32 || dtype == DType::F64 {
                    assert_eq!(non_finite(&there)?, non_finite(&x)?);
                }
            }
        }
    }
    Ok(())
}
