//! Which dtype comes out of every operator, for every input dtype, under every rule: exact, no
//! tolerance. With PyTorch's preset, PyTorch's answers.

use candle_amp::{Autocast, Cast, Op, Policy, ops};
use candle_core::{DType, Result};

use crate::cases;
use crate::util::{FLOATS, random};

/// Runs `op` on inputs of `dtype`; the dtype that comes out.
fn output(op: Op, dtype: DType) -> Result<DType> {
    let cases = cases::all();
    let case = cases.iter().find(|case| case.op == op);
    Ok(case.expect("every operator has a case").output(dtype)?.dtype())
}

/// Losses are `F32` whatever comes in.
fn is_loss(op: Op) -> bool {
    matches!(op, Op::CrossEntropy | Op::Mse)
}

fn expected(op: Op, cast: Cast, compute: DType, input: DType) -> DType {
    if input == DType::F64 {
        return DType::F64;
    }
    match cast {
        _ if is_loss(op) => DType::F32,
        Cast::Lower => compute,
        Cast::Full => DType::F32,
        _ => input,
    }
}

#[test]
fn every_operator_follows_its_rule() -> Result<()> {
    for compute in [DType::F16, DType::BF16, DType::F32] {
        for (preset, policy, rule) in [
            ("default", Policy::default(), Op::default_cast as fn(Op) -> Cast),
            ("PyTorch", Policy::pytorch(), Op::pytorch_cast),
        ] {
            let amp = Autocast::new(compute).with_policy(policy);
            for &op in Op::ALL {
                for input in FLOATS {
                    let got = amp.scope(|| output(op, input))?;
                    let expected = expected(op, rule(op), compute, input);
                    assert_eq!(got, expected, "{op:?} of {input:?}, {preset}, {compute:?}");
                }
            }
        }
    }
    Ok(())
}

/// What PyTorch 2.15 gives on CUDA under autocast to half, for an input in half and in `F32`.
#[test]
fn the_pytorch_preset_gives_pytorchs_dtypes() -> Result<()> {
    let same = |half, full| (half, full);
    for half in [DType::F16, DType::BF16] {
        let amp = Autocast::new(half).with_policy(Policy::pytorch());
        for &op in Op::ALL {
            let (from_half, from_full) = match op {
                Op::Matmul | Op::Linear | Op::Conv2d | Op::Sdpa => (half, half),
                Op::LayerNorm | Op::RmsNorm | Op::GroupNorm => (DType::F32, DType::F32),
                Op::Softmax | Op::LogSoftmax | Op::Sum | Op::CrossEntropy | Op::Mse => {
                    (DType::F32, DType::F32)
                }
                _ => same(half, DType::F32),
            };
            let got = amp.scope(|| {
                Ok::<_, candle_core::Error>((output(op, half)?, output(op, DType::F32)?))
            })?;
            assert_eq!(got, (from_half, from_full), "{op:?}");
        }
    }
    Ok(())
}

#[test]
fn every_rule_can_be_given_to_every_operator() -> Result<()> {
    for cast in [Cast::Lower, Cast::Full, Cast::FullMath, Cast::Promote, Cast::Keep] {
        for &op in Op::ALL {
            let policy = Policy::default().with(op, cast);
            let amp = Autocast::new(DType::BF16).with_policy(policy);
            for input in FLOATS {
                let got = amp.scope(|| output(op, input))?;
                assert_eq!(
                    got,
                    expected(op, cast, DType::BF16, input),
                    "{op:?} {cast:?} {input:?}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn outside_a_scope_and_in_a_disabled_one_nothing_is_cast() -> Result<()> {
    for &op in Op::ALL {
        for input in FLOATS {
            let expected = expected(op, Cast::Keep, DType::F32, input);
            assert_eq!(output(op, input)?, expected, "{op:?} of {input:?}");
            let disabled = Autocast::new(DType::F16)
                .scope(|| Autocast::disabled().scope(|| output(op, input)))?;
            assert_eq!(disabled, expected, "{op:?} of {input:?}, disabled");
        }
    }
    Ok(())
}

#[test]
fn add_promotes_to_the_wider_operand() -> Result<()> {
    let t = |dtype| random(1, 8, dtype);
    let sum = |a, b| Autocast::new(DType::F16).scope(|| ops::add(&t(a), &t(b))).map(|y| y.dtype());
    assert_eq!(sum(DType::F16, DType::F32)?, DType::F32);
    assert_eq!(sum(DType::F16, DType::BF16)?, DType::F32);
    assert_eq!(sum(DType::BF16, DType::BF16)?, DType::BF16);
    assert!(ops::add(&t(DType::F16), &t(DType::F32)).is_err(), "outside a scope they must agree");
    Ok(())
}
