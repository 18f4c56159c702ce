//! Helpers that the tests of kernels share: random tensors, comparison, numeric gradients.

use candle_core::{DType, Device, Result, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::kernels::testing::devices::gpus;

pub(crate) const DTYPES: [DType; 4] = [DType::F16, DType::BF16, DType::F32, DType::F64];

/// The step between 1 and the next number.
pub(crate) fn epsilon(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => half::f16::EPSILON.to_f64(),
        DType::BF16 => half::bf16::EPSILON.to_f64(),
        DType::F32 => f32::EPSILON.into(),
        DType::F64 => f64::EPSILON,
        other => panic!("{other:?} is not a float"),
    }
}

/// Uniform in (-2, 2): seeded, and rounded to `dtype`.
pub(crate) fn random(shape: &[usize], dtype: DType, seed: u64) -> Tensor {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let len = shape.iter().product();
    let data: Vec<f64> = (0..len).map(|_| rng.random_range(-2.0..2.0)).collect();
    of(data, shape, dtype)
}

/// The same as [`random`], but the first two dimensions are stored in the other order.
pub(crate) fn strided(shape: &[usize], dtype: DType, seed: u64) -> Tensor {
    let mut stored = shape.to_vec();
    stored.swap(0, 1);
    stored[0] += 1; // so that the view is also narrowed
    let tensor = random(&stored, dtype, seed).narrow(0, 1, shape[1]).unwrap();
    tensor.transpose(0, 1).unwrap()
}

pub(crate) fn of(data: Vec<f64>, shape: &[usize], dtype: DType) -> Tensor {
    Tensor::from_vec(data, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

pub(crate) fn values(tensor: &Tensor) -> Vec<f64> {
    let tensor = tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap();
    tensor.to_vec1().unwrap()
}

pub(crate) fn double(tensor: &Tensor) -> Tensor {
    tensor.to_dtype(DType::F64).unwrap()
}

/// Each value is within `count` epsilons of `dtype` of the expected one, relative to the largest
/// expected one; NaN and infinities match themselves.
#[track_caller]
pub(crate) fn assert_within(actual: &Tensor, expected: &[f64], dtype: DType, count: f64) {
    let actual = values(actual);
    assert_eq!(actual.len(), expected.len());
    let largest = expected.iter().filter(|e| e.is_finite()).fold(0.0, |m: f64, e| m.max(e.abs()));
    let tolerance = count * epsilon(dtype) * largest;
    for (i, (&a, &e)) in actual.iter().zip(expected).enumerate() {
        let same = a == e || a.is_nan() && e.is_nan();
        assert!(same || (a - e).abs() <= tolerance, "{i}: {a:e}, not {e:e} within {tolerance:e}");
    }
}

/// [`assert_within`] epsilons of the dtype of `actual`.
#[track_caller]
pub(crate) fn assert_close(actual: &Tensor, expected: &[f64], count: f64) {
    assert_within(actual, expected, actual.dtype(), count);
}

/// The gradient of `sum(f(x) * weights)` in `x`, by central differences in F64.
pub(crate) fn numeric_gradient(
    x: &Tensor,
    weights: &Tensor,
    f: impl Fn(&Tensor) -> Tensor,
) -> Vec<f64> {
    let step = f64::EPSILON.cbrt();
    let (x_values, weights) = (values(x), values(weights));
    let at = |i: usize, delta: f64| -> f64 {
        let mut moved = x_values.clone();
        moved[i] += delta;
        let y = values(&f(&of(moved, x.dims(), DType::F64)));
        y.iter().zip(&weights).map(|(y, w)| y * w).sum()
    };
    (0..x_values.len()).map(|i| (at(i, step) - at(i, -step)) / (2.0 * step)).collect()
}

/// How much less exact than a kernel a loop over `terms` values in F64 is: its own rounding counts
/// where the kernel's arithmetic is no coarser.
pub(crate) fn naive_slack(dtype: DType, terms: usize) -> f64 {
    if dtype == DType::F64 { (terms as f64).sqrt() } else { 1.0 }
}

/// Epsilons of F64 that central differences of values near `scale` are good for.
pub(crate) fn difference_tolerance(scale: f64) -> f64 {
    // Rounding of the difference over its step, and the cubic term, are both about epsilon^(2/3).
    scale * f64::EPSILON.powf(-1.0 / 3.0)
}

/// `tensor`, its strides and its offset, on `device`.
pub(crate) fn on_device(tensor: &Tensor, device: &Device) -> Tensor {
    if tensor.elem_count() > 0 {
        return tensor.to_device(device).unwrap();
    }
    // A device has no memory of no bytes.
    let one = Tensor::zeros(1, tensor.dtype(), device).unwrap();
    one.narrow(0, 0, 0).unwrap().reshape(tensor.dims()).unwrap()
}

/// As [`assert_gpus_agree`], relative to 1 at least, and in epsilons of the dtype of the first input:
/// for what may cancel.
#[track_caller]
pub(crate) fn assert_gpus_near(
    inputs: &[&Tensor],
    count: f64,
    f: impl Fn(&[Tensor]) -> Result<Vec<Tensor>>,
) {
    assert_gpus_agree(inputs, count, |t| {
        let padded = |x: Tensor| {
            let one = Tensor::ones(1, DType::F32, x.device())?.to_dtype(x.dtype())?;
            Tensor::cat(&[x.flatten_all()?, one], 0)?.to_dtype(inputs[0].dtype())
        };
        f(t)?.into_iter().map(padded).collect()
    });
}

/// `f` of the same tensors on every GPU gives what it gives on the CPU. Dtypes and shapes are the
/// same, and each value is within `count` epsilons of its dtype, relative to the largest.
#[track_caller]
pub(crate) fn assert_gpus_agree(
    inputs: &[&Tensor],
    count: f64,
    f: impl Fn(&[Tensor]) -> Result<Vec<Tensor>>,
) {
    let moved = |device: &Device| -> Vec<Tensor> {
        inputs.iter().map(|input| on_device(input, device)).collect()
    };
    let gpus = gpus();
    if gpus.is_empty() {
        return;
    }
    let expected = f(&moved(&Device::Cpu)).unwrap();
    for gpu in gpus {
        let actual = f(&moved(&gpu)).unwrap();
        assert_eq!(actual.len(), expected.len());
        for (actual, expected) in actual.iter().zip(&expected) {
            assert!(actual.device().is_cuda() && actual.is_contiguous());
            assert_eq!((actual.dtype(), actual.dims()), (expected.dtype(), expected.dims()));
            let actual = actual.to_device(&Device::Cpu).unwrap();
            assert_close(&actual, &values(expected), count);
        }
    }
}
