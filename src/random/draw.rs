//! Tensors of random numbers.

use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::Init;
use candle_nn::init::NormalOrUniform;
use rand::Rng;
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;

use super::tape::next_stream;
use crate::error::{ArgumentError, bail};
use crate::kernels;

/// A tensor of normally distributed numbers with the given mean and standard deviation, from the seeded generator.
///
/// Drawn on the CPU in `F64`, rounded to `F32` and then to `dtype`, unless that is `F64`, and copied to `device`: the same
/// on every device. Numbers too large for `dtype` become infinities. Within a [`GraphedStep`](crate::optim::GraphedStep) on
/// a GPU this is an upload, and the capture is refused: pass the tensor as an input.
///
/// # Errors
///
/// `dtype` is none of `F16`, `BF16`, `F32` and `F64`; the mean or the deviation is not finite; the deviation is below 0; the
/// elements are more than can be counted. The generator has not moved then.
///
/// # Examples
///
/// ```standalone_crate
/// use candle_amp::random;
/// use candle_core::{DType, Device};
///
/// random::manual_seed(7);
/// let x = random::randn(0.0, 1.0, (4, 8), DType::F32, &Device::Cpu)?;
/// random::manual_seed(7);
/// let again = random::randn(0.0, 1.0, (4, 8), DType::F32, &Device::Cpu)?;
/// assert_eq!(x.to_vec2::<f32>()?, again.to_vec2::<f32>()?);
/// // Integers have no such numbers.
/// assert!(random::randn(0.0, 1.0, 8, DType::U32, &Device::Cpu).is_err());
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.randn`, `torch.normal`.
pub fn randn(
    mean: f64,
    std: f64,
    shape: impl Into<Shape>,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    check_dtype("randn", dtype)?;
    check("mean", mean, mean.is_finite(), "a finite number")?;
    check("std", std, std.is_finite() && std >= 0.0, "a finite number of at least 0")?;
    init(Init::Randn { mean, stdev: std }, &shape.into(), dtype, device)
}

/// A tensor of numbers spread evenly from `low` up to `high`, from the seeded generator.
///
/// Drawn as by [`randn`]. Rounding may give `high` itself and, if `dtype` cannot represent a bound, the nearest number beyond
/// it. If `low` equals `high`, all elements are that number.
///
/// # Errors
///
/// `dtype` is none of `F16`, `BF16`, `F32` and `F64`; `low`, `high` or their difference is not finite; `low` is above
/// `high`; the elements are more than can be counted. The generator has not moved then.
///
/// # Examples
///
/// ```
/// use candle_amp::random;
/// use candle_core::{DType, Device};
///
/// let x = random::rand(-1.0, 1.0, 1000, DType::BF16, &Device::Cpu)?.to_dtype(DType::F32)?;
/// assert!(x.abs()?.max(0)?.to_scalar::<f32>()? <= 1.0);
/// assert!(random::rand(1.0, -1.0, 8, DType::F32, &Device::Cpu).is_err());
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.rand`, `torch.Tensor.uniform_`.
pub fn rand(
    low: f64,
    high: f64,
    shape: impl Into<Shape>,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    check_dtype("rand", dtype)?;
    check("low", low, low.is_finite(), "a finite number")?;
    check(
        "high",
        high,
        (high - low).is_finite(),
        "a finite number, at a finite distance from `low`",
    )?;
    if low > high {
        let (low_name, high_name) = ("low", "high");
        return Err(ArgumentError::Order { low_name, low, high_name, high }.into());
    }
    let shape = shape.into();
    if low == high {
        count(&shape)?;
        next_stream(); // as for any other bounds
    }
    init(Init::Uniform { lo: low, up: high }, &shape, dtype, device)
}

fn check(name: &'static str, got: f64, holds: bool, expected: &'static str) -> Result<()> {
    if holds {
        return Ok(());
    }
    Err(ArgumentError::Setting { name, got, expected }.into())
}

fn check_dtype(op: &'static str, got: DType) -> Result<()> {
    if matches!(got, DType::F16 | DType::BF16 | DType::F32 | DType::F64) {
        return Ok(());
    }
    let expected = "F16, BF16, F32 or F64".to_owned();
    Err(ArgumentError::DType { op, name: "dtype", got, expected }.into())
}

/// A tensor drawn as `init` says: in `F64`, rounded to `F32` and from there to `dtype`.
pub(crate) fn init(init: Init, shape: &Shape, dtype: DType, device: &Device) -> Result<Tensor> {
    let uniform = |lo: f64, up: f64| draw(shape, move |rng| rng.random_range(lo..up));
    let normal =
        |mean, std: f64| draw(shape, move |rng| mean + std * rng.sample::<f64, _>(StandardNormal));
    let values = match init {
        Init::Const(value) => Tensor::full(value, shape, &Device::Cpu)?,
        Init::Uniform { lo, up } if lo >= up => Tensor::full(lo, shape, &Device::Cpu)?,
        Init::Uniform { lo, up } => uniform(lo, up)?,
        Init::Randn { mean, stdev } => normal(mean, stdev)?,
        Init::Kaiming { dist, fan, non_linearity } => {
            let std = non_linearity.gain() / (fan.for_shape(shape).max(1) as f64).sqrt();
            match dist {
                NormalOrUniform::Uniform => uniform(-3f64.sqrt() * std, 3f64.sqrt() * std)?,
                NormalOrUniform::Normal => normal(0.0, std)?,
            }
        }
    };
    kernels::cast(&values, dtype)?.to_device(device)
}

fn draw(shape: &Shape, mut value: impl FnMut(&mut ChaCha8Rng) -> f64) -> Result<Tensor> {
    let count = count(shape)?;
    let mut rng = next_stream();
    let values: Vec<f64> = (0..count).map(|_| value(&mut rng)).collect();
    Tensor::from_vec(values, shape, &Device::Cpu)
}

/// The elements of `shape`. candle's own count overflows.
fn count(shape: &Shape) -> Result<usize> {
    let count = shape.dims().iter().try_fold(1usize, |count, &dim| count.checked_mul(dim));
    match count {
        Some(count) if count <= isize::MAX as usize / size_of::<f64>() => Ok(count),
        _ => bail!("random numbers of shape {shape:?}: more than can be counted"),
    }
}

/// Which of the elements of `shape` to keep, each with probability `keep`: a `U8` tensor of 0 and 1.
pub(crate) fn keep_mask(shape: &Shape, keep: f64, device: &Device) -> Result<Tensor> {
    // 32 bits of threshold: the probability is exact to 2^-32.
    let threshold = (keep * 4294967296.0).round() as u64;
    kernels::elementwise::keep_mask(next_stream(), threshold, shape, device)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::{fork_rng_guard, manual_seed, state};

    const CPU: Device = Device::Cpu;

    fn moments(x: &Tensor) -> Result<(f64, f64)> {
        let x = x.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
        let mean = x.iter().sum::<f64>() / x.len() as f64;
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / x.len() as f64;
        Ok((mean, variance.sqrt()))
    }

    #[test]
    fn numbers_follow_the_seed_the_place_and_the_spread() -> Result<()> {
        let _fork = fork_rng_guard();
        for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
            let draw = |seed| -> Result<_> {
                manual_seed(seed);
                Ok((
                    randn(3.0, 0.5, (40, 250), dtype, &CPU)?,
                    rand(-1.0, 3.0, 10_000, dtype, &CPU)?,
                ))
            };
            let ((normal, even), (again, _), (other, _)) = (draw(5)?, draw(5)?, draw(6)?);
            assert_eq!(
                (normal.dims(), normal.dtype(), even.dims()),
                (&[40, 250][..], dtype, &[10_000][..])
            );
            let different = |a: &Tensor, b: &Tensor| {
                a.ne(b)?.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()
            };
            assert_eq!(different(&normal, &again)?, 0.0);
            assert!(different(&normal, &other)? > 5_000.0);
            // Six standard errors: of the mean std / sqrt(n), of a normal deviation std / sqrt(2 n).
            let ((mean, std), (middle, width)) = (moments(&normal)?, moments(&even)?);
            assert!(
                (mean - 3.0).abs() < 6.0 * 0.5 / 100.0 && (std - 0.5).abs() < 6.0 * 0.5 / 141.0
            );
            let wide = 4.0 / 12f64.sqrt();
            assert!(
                (middle - 1.0).abs() < 6.0 * wide / 100.0
                    && (width - wide).abs() < 6.0 * wide / 100.0
            );
            let even = even.to_dtype(DType::F64)?.to_vec1::<f64>()?;
            assert!(even.iter().all(|x| (-1.0..=3.0).contains(x)));
        }
        // An interval of one number.
        let before = state();
        assert_eq!(rand(0.5, 0.5, 3, DType::F32, &CPU)?.to_vec1::<f32>()?, [0.5; 3]);
        assert_eq!(randn(0.5, 0.0, 3, DType::F32, &CPU)?.to_vec1::<f32>()?, [0.5; 3]);
        assert_eq!(state().draws, before.draws + 2);
        // Its rounding reaches `high`, and never passes it.
        let (low, high) = (1e15, 1e15 + 1.0);
        let even = rand(low, high, 1000, DType::F64, &CPU)?.to_vec1::<f64>()?;
        assert!(even.iter().all(|x| (low..=high).contains(x)));
        let large = randn(1e6, 1.0, 3, DType::F16, &CPU)?.to_dtype(DType::F32)?;
        assert_eq!(large.to_vec1::<f32>()?, [f32::INFINITY; 3]);
        assert_eq!(randn(0.0, 1.0, (3, 0), DType::F32, &CPU)?.dims(), [3, 0]);
        Ok(())
    }

    #[test]
    fn what_cannot_be_drawn_is_an_error_and_moves_nothing() {
        let _fork = fork_rng_guard();
        let before = state();
        let f32 = DType::F32;
        for (result, says) in [
            (randn(0.0, 1.0, 3, DType::U8, &CPU), "randn: dtype is U8"),
            (randn(f64::NAN, 1.0, 3, f32, &CPU), "mean is NaN"),
            (randn(0.0, -0.5, 3, f32, &CPU), "std is -0.5"),
            (randn(0.0, f64::INFINITY, 3, f32, &CPU), "std is inf"),
            (rand(0.0, 1.0, 3, DType::I64, &CPU), "rand: dtype is I64"),
            (rand(f64::NAN, 1.0, 3, f32, &CPU), "low is NaN"),
            (rand(-f64::MAX, f64::MAX, 3, f32, &CPU), "high is 1797"),
            (rand(2.0, 1.0, 3, f32, &CPU), "low 2 is above high 1"),
            (randn(0.0, 1.0, (1 << 33, 1 << 31), f32, &CPU), "more than can be counted"),
            (rand(1.0, 1.0, (1 << 33, 1 << 31), f32, &CPU), "more than can be counted"),
        ] {
            let message = result.expect_err(says).to_string();
            assert!(message.contains(says), "{message}");
        }
        assert_eq!(state(), before);
    }
}
