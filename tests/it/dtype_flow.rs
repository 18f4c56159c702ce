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
    matches!(
        op,
        Op::CrossEntropy
            | Op::Nll
            | Op::Mse
            | Op::Huber
            | Op::BinaryCrossEntropyWithLogit
            | Op::BinaryCrossEntropy
    )
}

/// `None` where the operator is refused.
fn expected(op: Op, cast: Cast, compute: DType, input: DType) -> Option<DType> {
    Some(match cast {
        Cast::Banned if compute != DType::F32 => return None,
        _ if input == DType::F64 => DType::F64,
        _ if is_loss(op) => DType::F32,
        Cast::Lower => compute,
        Cast::Full => DType::F32,
        _ => input,
    })
}

#[track_caller]
fn check(what: &str, got: Result<DType>, expected: Option<DType>) {
    match (got, expected) {
        (Ok(got), Some(expected)) => assert_eq!(got, expected, "{what}"),
        (Err(error), None) => assert!(error.to_string().contains("refuses"), "{what}: {error}"),
        (got, expected) => panic!("{what}: {got:?}, not {expected:?}"),
    }
}

#[test]
fn every_operator_follows_its_rule() {
    for compute in [DType::F16, DType::BF16, DType::F32] {
        for (preset, policy, rule) in [
            ("default", Policy::default(), Op::default_cast as fn(Op) -> Cast),
            ("PyTorch", Policy::pytorch(), Op::pytorch_cast),
        ] {
            let amp = Autocast::new(compute).with_policy(policy);
            for &op in Op::ALL {
                for input in FLOATS {
                    let expected = expected(op, rule(op), compute, input);
                    let what = format!("{op:?} of {input:?}, {preset}, {compute:?}");
                    check(&what, amp.scope(|| output(op, input)), expected);
                }
            }
        }
    }
}

/// What PyTorch 2.15 gives on CUDA under autocast to half, for an input in half and in `F32`.
#[test]
fn the_pytorch_preset_gives_pytorchs_dtypes() {
    for half in [DType::F16, DType::BF16] {
        let amp = Autocast::new(half).with_policy(Policy::pytorch());
        for &op in Op::ALL {
            let expected = match op {
                // lower_precision_fp
                Op::Matmul
                | Op::Linear
                | Op::Conv1d
                | Op::Conv2d
                | Op::ConvTranspose1d
                | Op::ConvTranspose2d
                | Op::Lstm
                | Op::Gru
                | Op::Prelu
                | Op::Sdpa => Some((half, half)),
                // fp32, fp32_set_opt_dtype, and what is composed of such
                Op::Softmax
                | Op::LogSoftmax
                | Op::LayerNorm
                | Op::RmsNorm
                | Op::GroupNorm
                | Op::UpsampleNearest1d
                | Op::UpsampleNearest2d
                | Op::UpsampleBilinear2d
                | Op::Softplus
                | Op::Exp
                | Op::Log
                | Op::Sum
                | Op::CrossEntropy
                | Op::Nll
                | Op::Huber
                | Op::BinaryCrossEntropyWithLogit
                | Op::Mse => Some((DType::F32, DType::F32)),
                // banned
                Op::BinaryCrossEntropy => None,
                // not listed, or promoted: of inputs of one dtype, that
                _ => Some((half, DType::F32)),
            };
            for (input, expected) in
                [(half, expected.map(|e| e.0)), (DType::F32, expected.map(|e| e.1))]
            {
                check(&format!("{op:?}"), amp.scope(|| output(op, input)), expected);
            }
        }
    }
}

#[test]
fn every_rule_can_be_given_to_every_operator() {
    for cast in [Cast::Lower, Cast::Full, Cast::FullMath, Cast::Promote, Cast::Keep, Cast::Banned] {
        for &op in Op::ALL {
            let policy = Policy::default().with(op, cast);
            let amp = Autocast::new(DType::BF16).with_policy(policy);
            for input in FLOATS {
                let expected = expected(op, cast, DType::BF16, input);
                let what = format!("{op:?} {cast:?} {input:?}");
                check(&what, amp.scope(|| output(op, input)), expected);
            }
        }
    }
}

#[test]
fn outside_a_scope_and_in_a_disabled_one_nothing_is_cast() -> Result<()> {
    for &op in Op::ALL {
        for input in FLOATS {
            let expected = expected(op, Cast::Keep, DType::F32, input);
            assert_eq!(Some(output(op, input)?), expected, "{op:?} of {input:?}");
            let disabled = Autocast::new(DType::F16)
                .scope(|| Autocast::disabled().scope(|| output(op, input)))?;
            assert_eq!(Some(disabled), expected, "{op:?} of {input:?}, disabled");
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
