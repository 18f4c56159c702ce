//! What the tests share: seeded inputs, and how close is close enough.

use std::path::PathBuf;
use std::sync::LazyLock;

use candle_amp::random::{ForkRngGuard, fork_rng_guard, manual_seed};
use candle_core::{DType, Device, Shape, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tracing::subscriber::NoSubscriber;
use tracing::{Dispatch, Subscriber};

pub(crate) const FLOATS: [DType; 4] = [DType::F16, DType::BF16, DType::F32, DType::F64];

/// The package's folder, where cargo says it is: it need not be where these tests were built.
pub(crate) fn package() -> PathBuf {
    let folder = std::env::var_os("CARGO_MANIFEST_DIR");
    folder.unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into()).into()
}

/// A seeded generator for this test alone, until the guard is dropped: other tests draw from the process's.
pub(crate) fn seeded(seed: u64) -> ForkRngGuard {
    let fork = fork_rng_guard();
    manual_seed(seed);
    fork
}

/// Runs `f` with a subscriber to this thread's log.
///
/// While a process has one subscriber or none, tracing asks the first thread that comes to a line of the log whether
/// anybody listens, and where nobody does there, the line is off for all threads. With the second subscriber here, it
/// asks both.
pub(crate) fn listening<R>(subscriber: impl Subscriber + Send + Sync, f: impl FnOnce() -> R) -> R {
    static SECOND: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(NoSubscriber::new()));
    LazyLock::force(&SECOND);
    tracing::subscriber::with_default(subscriber, f)
}

/// Uniform numbers from -1 to 1, the same for the same seed, rounded to `dtype`.
pub(crate) fn random(seed: u64, shape: impl Into<Shape>, dtype: DType) -> Tensor {
    let shape = shape.into();
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let values: Vec<f64> = (0..shape.elem_count()).map(|_| rng.random_range(-1.0..1.0)).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).and_then(|t| t.to_dtype(dtype)).unwrap()
}

/// The distance from 1 to the next number of `dtype`.
pub(crate) fn epsilon(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => half::f16::EPSILON.to_f64(),
        DType::BF16 => half::bf16::EPSILON.to_f64(),
        DType::F32 => f32::EPSILON.into(),
        DType::F64 => f64::EPSILON,
        other => panic!("no tolerance for {other:?}"),
    }
}

pub(crate) fn to_vec(tensor: &Tensor) -> Vec<f64> {
    tensor.flatten_all().and_then(|t| t.to_dtype(DType::F64)).and_then(|t| t.to_vec1()).unwrap()
}

/// Asserts that `actual` is `expected` to within `roundings` of `dtype`, relative to the largest
/// element of `expected`: a sum of many terms has an error relative to them, not to itself.
#[track_caller]
pub(crate) fn assert_close(
    what: &str,
    actual: &Tensor,
    expected: &Tensor,
    dtype: DType,
    roundings: f64,
) {
    assert_absolute(what, actual, expected, roundings * epsilon(dtype) * largest(expected));
}

pub(crate) fn largest(tensor: &Tensor) -> f64 {
    to_vec(tensor).iter().fold(0.0, |m: f64, x| m.max(x.abs()))
}

/// Asserts that no element of `actual` is further than `tolerance` from that of `expected`.
#[track_caller]
pub(crate) fn assert_absolute(what: &str, actual: &Tensor, expected: &Tensor, tolerance: f64) {
    assert_eq!(actual.dims(), expected.dims(), "{what}: shape");
    for (i, (a, e)) in to_vec(actual).iter().zip(to_vec(expected)).enumerate() {
        assert!((a - e).abs() <= tolerance, "{what}, element {i}: {a} is not {e} ± {tolerance:e}");
    }
}

/// Asserts equality bit for bit, dtype included.
#[track_caller]
pub(crate) fn assert_same(what: &str, actual: &Tensor, expected: &Tensor) {
    assert_eq!(actual.dtype(), expected.dtype(), "{what}: dtype");
    assert_eq!(actual.dims(), expected.dims(), "{what}: shape");
    for (i, (a, e)) in to_vec(actual).into_iter().zip(to_vec(expected)).enumerate() {
        assert!(a == e || a.is_nan() && e.is_nan(), "{what}, element {i}: {a} is not {e}");
    }
}
