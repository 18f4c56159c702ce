//! Element-wise losses of an input and a target of one shape: their formulas and derivatives on the CPU.
//!
//! `terms` and `derivatives` overwrite a block that the caller has widened to F32 or F64 and that it then sums or
//! rounds. So each pass reads the input and the target once, and stores no widened copy of them. The loss is selected
//! outside the loop, and each loop is vectorised by itself. CUDA has the same formulas in `loss.cu`.
//!
//! Bounds are selections, not `min` or `max`, which may drop a NaN: a NaN in either argument stays one where the
//! formula reads it. They are PyTorch's: logarithms of a probability are at least -100, and `p (1 - p)` is at least
//! 1e-12. Cross entropy with logits needs neither. It is `max(a, 0) - a b + ln(1 + exp(-|a|))`, whose exponential never
//! overflows.

use crate::kernels::activation::Math;
use crate::kernels::cpu::simd::vectorise_in;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Pairwise {
    /// `(a - b)²`.
    Mse,
    /// `(a - b)² / 2` where that is less than `delta` apart, `delta (|a - b| - delta / 2)` beyond.
    Huber { delta: f64 },
    /// `-b ln(a) - (1 - b) ln(1 - a)`, logarithms not below -100.
    BinaryCrossEntropy,
    /// The same of `σ(a)`.
    BinaryCrossEntropyWithLogit,
    /// `|a - b|`.
    L1,
    /// `b (ln(b) - a)`, 0 where `b` is and `a` is finite; or, if `log_target` is set, the same with `exp(b)` for `b`.
    KlDiv { log_target: bool },
}

/// Which argument a gradient is for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum LossArgument {
    Input,
    Target,
}

/// PyTorch's bound of a logarithm.
pub(super) const LOWEST_LOG: f64 = -100.0;
/// PyTorch's bound of `p (1 - p)`.
pub(super) const LEAST_VARIANCE: f64 = 1e-12;

/// Overwrites `a` with the losses.
pub(super) fn terms<A: Math>(loss: Pairwise, a: &mut [A], b: &[A]) {
    let (one, half) = (A::one(), A::of(0.5));
    match loss {
        Pairwise::Mse => each(
            a,
            b,
            #[inline(always)]
            |a, b| (a - b) * (a - b),
        ),
        Pairwise::Huber { delta } => {
            let delta = A::of(delta);
            each(
                a,
                b,
                #[inline(always)]
                move |a, b| {
                    let d = (a - b).abs();
                    if d > delta { delta * (d - half * delta) } else { half * d * d }
                },
            );
        }
        Pairwise::BinaryCrossEntropy => each(
            a,
            b,
            #[inline(always)]
            |a, b| -(b * bounded_log(a) + (one - b) * bounded_log_of_rest(a)),
        ),
        Pairwise::BinaryCrossEntropyWithLogit => each(
            a,
            b,
            #[inline(always)]
            |a, b| {
                let above = if a < A::zero() { A::zero() } else { a };
                above - a * b + (-a.abs()).exponential().log_of_one_more()
            },
        ),
        Pairwise::L1 => each(
            a,
            b,
            #[inline(always)]
            |a, b| (a - b).abs(),
        ),
        Pairwise::KlDiv { log_target: false } => each(
            a,
            b,
            #[inline(always)]
            |a, b| {
                let entropy = if b == A::zero() { b } else { b * b.ln() };
                entropy - b * a
            },
        ),
        Pairwise::KlDiv { log_target: true } => each(
            a,
            b,
            #[inline(always)]
            |a, b| b.exponential() * (b - a),
        ),
    }
}

/// Overwrites `a` with the derivatives of the losses in one of the arguments.
pub(super) fn derivatives<A: Math>(loss: Pairwise, argument: LossArgument, a: &mut [A], b: &[A]) {
    let (one, two) = (A::one(), A::of(2.0));
    match (loss, argument) {
        (Pairwise::Mse, LossArgument::Input) => each(
            a,
            b,
            #[inline(always)]
            |a, b| two * (a - b),
        ),
        (Pairwise::Mse, LossArgument::Target) => each(
            a,
            b,
            #[inline(always)]
            |a, b| two * (b - a),
        ),
        (Pairwise::Huber { delta }, argument) => {
            let delta = A::of(delta);
            let sign = if argument == LossArgument::Input { one } else { -one };
            each(
                a,
                b,
                #[inline(always)]
                move |a, b| {
                    let d = a - b;
                    let d = if d > delta { delta } else { d };
                    sign * if d < -delta { -delta } else { d }
                },
            );
        }
        (Pairwise::BinaryCrossEntropy, LossArgument::Input) => each(
            a,
            b,
            #[inline(always)]
            |a, b| {
                let variance = a * (one - a);
                let least = A::of(LEAST_VARIANCE);
                (a - b) / if variance < least { least } else { variance }
            },
        ),
        (Pairwise::BinaryCrossEntropy, LossArgument::Target) => {
            each(
                a,
                b,
                #[inline(always)]
                |a, _| bounded_log_of_rest(a) - bounded_log(a),
            );
        }
        (Pairwise::BinaryCrossEntropyWithLogit, LossArgument::Input) => {
            each(
                a,
                b,
                #[inline(always)]
                |a, b| one / (one + (-a).exponential()) - b,
            );
        }
        (Pairwise::BinaryCrossEntropyWithLogit, LossArgument::Target) => {
            each(
                a,
                b,
                #[inline(always)]
                |a, _| -a,
            );
        }
        (Pairwise::L1, argument) => {
            let sign = if argument == LossArgument::Input { one } else { -one };
            each(
                a,
                b,
                #[inline(always)]
                move |a, b| {
                    let d = a - b;
                    // 0 where they are equal, NaN where one is.
                    let d = if d > A::zero() { one } else { d };
                    sign * if d < A::zero() { -one } else { d }
                },
            );
        }
        (Pairwise::KlDiv { log_target: false }, LossArgument::Input) => each(
            a,
            b,
            #[inline(always)]
            |_, b| -b,
        ),
        (Pairwise::KlDiv { log_target: false }, LossArgument::Target) => each(
            a,
            b,
            #[inline(always)]
            |a, b| b.ln() + one - a,
        ),
        (Pairwise::KlDiv { log_target: true }, LossArgument::Input) => each(
            a,
            b,
            #[inline(always)]
            |_, b| -b.exponential(),
        ),
        (Pairwise::KlDiv { log_target: true }, LossArgument::Target) => each(
            a,
            b,
            #[inline(always)]
            |a, b| b.exponential() * (b - a + one),
        ),
    }
}

#[inline(always)]
fn bounded_log<A: Math>(x: A) -> A {
    let log = x.ln();
    let lowest = A::of(LOWEST_LOG);
    if log < lowest { lowest } else { log }
}

/// `ln(1 - x)`, which a small `x` reaches with all its digits.
#[inline(always)]
fn bounded_log_of_rest<A: Math>(x: A) -> A {
    let near = x >= -A::one() && x <= A::of(0.5);
    let log = if near { (-x).log_of_one_more() } else { (A::one() - x).ln() };
    let lowest = A::of(LOWEST_LOG);
    if log < lowest { lowest } else { log }
}

#[inline(always)]
fn each<A: Math>(a: &mut [A], b: &[A], f: impl Fn(A, A) -> A + Copy) {
    vectorise_in::<A>(
        #[inline(always)]
        || {
            // A copy, that writes to `a` cannot change.
            let (f, a) = (f, &mut *a);
            for (a, b) in a.iter_mut().zip(b) {
                *a = f(*a, *b);
            }
        },
    );
}
