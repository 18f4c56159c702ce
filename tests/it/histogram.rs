//! The histogram of gradients, against `half`'s own conversion.

use candle_amp::{
    GradScaler, Parameters, Result, ScaleConfig,
    diagnostics::{Exponents, GradientHistogram},
};
use candle_core::{DType, Device, Tensor, Var};
use half::f16;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Normal gradients around `2^center`, zeros, and the edges of `F16`.
fn gradients(seed: u64, len: usize, center: i32) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let edges = [-25, -24, -15, -14, 15, 16]
        .into_iter()
        .flat_map(|e| {
            [
                2f32.powi(e),
                2f32.powi(e) * (1.0 + f32::EPSILON),
                -2f32.powi(e) * (1.0 - f32::EPSILON),
            ]
        })
        .chain([65504.0, 65519.996, 65520.0, 0.0, -0.0, 1e-45]);
    let random = (0..len).map(|_| {
        let exponent = rng.random_range(center - 30..center + 30);
        rng.random_range(-1f32..1.0) * 2f32.powi(exponent)
    });
    edges.chain(random).collect()
}

/// What `half` makes of the elements.
fn oracle(values: &[f32], scale: f32) -> [u64; 4] {
    let mut counts = [0; 4];
    for &x in values.iter().filter(|x| **x != 0.0) {
        let scaled = x * scale;
        let half = f16::from_f32(scaled);
        let class = match () {
            () if half == f16::ZERO => 0,
            () if half.is_infinite() => 3,
            () if scaled.abs() < f16::MIN_POSITIVE.to_f32() => 1,
            () => 2,
        };
        counts[class] += 1;
    }
    counts
}

fn histogram(values: &[f32]) -> Result<Exponents> {
    let tensor = Tensor::new(values, &Device::Cpu)?;
    Ok(GradientHistogram::of([("x", &tensor)])?.all().clone())
}

#[test]
fn what_f16_loses_is_what_half_s_conversion_loses() -> Result<()> {
    for (seed, center) in [(1, 0), (2, -20), (3, 10)] {
        let values = gradients(seed, 100_003, center);
        let counts = histogram(&values)?;
        assert_eq!(counts.elements(), values.len() as u64);
        assert_eq!(counts.zeros(), 2);
        for power in -30..=30 {
            let scale = 2f32.powi(power);
            let fit = counts.in_f16(scale);
            let got = [fit.to_zero, fit.subnormal, fit.normal, fit.overflow];
            assert_eq!(got, oracle(&values, scale), "times 2^{power}");
            let share = fit.to_zero as f64 / (values.len() - 2) as f64;
            assert_eq!(fit.share_to_zero(), share);
        }
        assert_eq!(counts.in_f16(3.9), counts.in_f16(2.0), "a power of two at or below");
    }
    Ok(())
}

#[test]
fn the_suggested_scale_is_the_largest_without_an_overflow() -> Result<()> {
    for seed in 0..200 {
        let mut values = gradients(seed, 50, -40);
        values.drain(..24); // the edges
        if seed % 3 == 0 {
            values.push(65520.0 * 2f32.powi(-(seed as i32) % 20));
        }
        let counts = histogram(&values)?;
        for headroom in [0, 3, 7] {
            let scale = counts.suggested_scale(headroom).expect("not all are zero");
            let grown = scale * 2f32.powi(headroom as i32);
            assert_eq!(oracle(&values, grown)[3], 0, "seed {seed}");
            assert!(oracle(&values, 2.0 * grown)[3] > 0, "seed {seed}: {scale} is not the largest");
        }
    }
    assert_eq!(histogram(&[0.0, f32::NAN, f32::INFINITY])?.suggested_scale(3), None);
    assert_eq!(histogram(&[1e-45])?.suggested_scale(0), Some(2f32.powi(126)));
    assert_eq!(histogram(&[])?.suggested_scale(0), None);
    Ok(())
}

/// Whatever the scale and whether they are unscaled already, counted are the true gradients.
#[test]
fn a_scaler_s_histogram_is_of_the_unscaled_gradients() -> Result<()> {
    let (a, b) =
        (Var::zeros(5, DType::F32, &Device::Cpu)?, Var::zeros(2, DType::F64, &Device::Cpu)?);
    let other = Var::zeros(1, DType::F32, &Device::Cpu)?;
    let parameters = Parameters::named([("a", a.clone()), ("b", b.clone())])?;
    let of_a = Tensor::new(&[1f32, 2.0, -3.0, 0.0, 1.0 / 512.0], &Device::Cpu)?;
    let of_b = Tensor::new(&[1e-60f64, 0.75], &Device::Cpu)?;
    for scaler in [GradScaler::new(ScaleConfig::constant(1024.0))?, GradScaler::disabled()] {
        let mut scaler = scaler;
        assert!(scaler.histogram(&parameters).is_err());
        scaler.scale(&(a.as_tensor() * &of_a)?.sum_all()?)?.backward()?;
        scaler.scale(&(b.as_tensor() * &of_b)?.sum_all()?)?.backward()?;
        scaler.scale(&other.sum_all()?)?.backward()?;
        for _ in 0..2 {
            let histogram = scaler.histogram(&parameters)?;
            let pairs = |name| histogram.get(name).unwrap().iter().collect::<Vec<_>>();
            assert_eq!(pairs("a"), [(-9, 1), (0, 1), (1, 2)]);
            assert_eq!(pairs("b"), [(-200, 1), (-1, 1)]);
            assert_eq!(histogram.iter().map(|(name, _)| name).collect::<Vec<_>>(), ["a", "b"]);
            assert_eq!(histogram.all().elements(), 8, "those without a name too");
            scaler.unscale()?;
        }
    }
    Ok(())
}

#[test]
fn what_is_not_finite_is_counted_and_fits_nowhere() -> Result<()> {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let counts = histogram(&[0.0, nan, inf, 1.5, nan, -inf, nan, 0.0, 2.5, 0.0, -nan, 0.0, 0.0])?;
    assert_eq!((counts.zeros(), counts.infinite(), counts.nan()), (5, 2, 4));
    assert_eq!(counts.elements(), 13);
    assert_eq!(counts.in_f16(1.0).elements(), 2);
    Ok(())
}

#[test]
fn a_scale_that_is_not_above_zero_makes_everything_zero() -> Result<()> {
    let tensor = Tensor::new(&[2f64.powi(299), 1.5, -2f64.powi(-299)], &Device::Cpu)?;
    let counts = GradientHistogram::of([("x", &tensor)])?.all().clone();
    assert_eq!(counts.in_f16(2.0).overflow, 1);
    for scale in [0.0, -2.0, f32::NAN, f32::NEG_INFINITY] {
        let fit = counts.in_f16(scale);
        assert_eq!((fit.to_zero, fit.elements()), (3, 3), "{scale}");
    }
    Ok(())
}

#[test]
fn merging_adds_and_printing_fits_a_terminal() -> Result<()> {
    let tensors = [(1, 1000, -10), (2, 500, 3)].map(|(seed, len, center)| {
        Tensor::new(gradients(seed, len, center), &Device::Cpu).unwrap()
    });
    let mut merged = GradientHistogram::of([("first", &tensors[0])])?;
    merged.merge(&GradientHistogram::of([("first", &tensors[1]), ("second", &tensors[1])])?);
    let of = |tensor: &Tensor| {
        Ok::<_, candle_amp::Error>(GradientHistogram::of([("x", tensor)])?.all().elements())
    };
    let [first, second] = [of(&tensors[0])?, of(&tensors[1])?];
    assert_eq!(merged.get("first").unwrap().elements(), first + second);
    assert_eq!(merged.get("second").unwrap().elements(), second);
    assert_eq!(merged.all().elements(), first + 2 * second);
    let printed = merged.to_string();
    assert!(printed.lines().all(|line| line.chars().count() <= 80), "{printed}");
    assert!(printed.lines().count() < 60, "{printed}");
    for part in ["zero in F16", "subnormal in F16", "infinite in F16", "second", "at scale", "####"]
    {
        assert!(printed.contains(part), "{part} is not in\n{printed}");
    }
    let small = histogram(&[1.0, 1.5, 0.25])?;
    assert_eq!(
        small.to_string(),
        "3 elements: 0 zero, 0 infinite, 0 NaN\n\
         2^0    |########################################|  66.7 %\n\
         2^-1   |                                        |   0.0 %\n\
         2^-2   |####################                    |  33.3 %"
    );
    assert_eq!(histogram(&[])?.to_string(), "0 elements: 0 zero, 0 infinite, 0 NaN");
    Ok(())
}
