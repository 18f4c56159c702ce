//! A profile says when each operator ran, forward and backward.

use std::time::Duration;

use candle_amp::autograd::checkpoint;
use candle_amp::diagnostics::{Profile, ProfileRow, profile};
use candle_amp::{Autocast, GradScaler, Parameters, ops};
use candle_core::{DType, Device, Result, Shape, Tensor, Var};

use crate::util::random;

/// The rows as `name` or `name'`, the derivative, within as many others as there are `>`.
fn names(profile: &Profile) -> Vec<String> {
    let name = |row: &ProfileRow| {
        let prime = if row.backward { "'" } else { "" };
        format!("{}{}{prime}", ">".repeat(row.depth), row.name)
    };
    profile.rows().iter().map(name).collect()
}

/// The sum of `f(x)`, and its backward, under autocast to BF16.
fn step(x: &Tensor, f: impl Fn(&Tensor) -> Result<Tensor>) -> candle_amp::Result<Profile> {
    let mut scaler = GradScaler::disabled();
    let (result, profile) = profile(&Device::Cpu, || {
        let loss = Autocast::new(DType::BF16).scope(|| ops::sum(&f(x)?))?;
        scaler.scale(&loss)?.backward()
    })?;
    result.map(|_| profile)
}

#[test]
fn a_profile_has_a_row_for_each_forward_and_backward_in_order() -> candle_amp::Result<()> {
    let (v, w) = (Var::from_tensor(&random(1, (8, 4), DType::F32))?, random(2, (5, 8), DType::F32));
    let w = Var::from_tensor(&w)?;
    Parameters::named([("w", w.clone())])?.freeze();
    let x = random(3, (3, 4), DType::F32);
    let profile = step(&x, |x| ops::linear(&ops::relu(&ops::linear(x, &v, None)?)?, &w, None))?;
    let forward = ["linear", "relu", "linear", "sum"];
    let backward = ["sum'", "linear'", "relu'", "linear'"];
    assert_eq!(names(&profile), [forward, backward].concat());

    let rows = profile.rows();
    let shapes = |row: &ProfileRow| (row.input_shapes.clone(), row.output_shape.clone());
    assert_eq!(shapes(&rows[0]), shapes(&rows[7]));
    assert_eq!(shapes(&rows[2]), (vec![Shape::from((3, 8)), Shape::from((5, 8))], (3, 5).into()));
    assert_eq!((rows[0].output, rows[7].output, rows[3].output), {
        (DType::BF16, DType::BF16, DType::F32)
    });
    assert!(rows[0].algorithm.is_some() && rows[7].algorithm.is_some());
    assert_eq!((rows[1].algorithm, rows[6].algorithm), (None, None));
    // `x` is no variable, and `w` is frozen.
    assert_eq!((&rows[7].wanted, &rows[5].wanted), (&vec![false, true], &vec![true, false]));
    assert!(rows[0].wanted.is_empty());
    Ok(())
}

#[test]
fn rows_follow_each_other_within_the_profile() -> candle_amp::Result<()> {
    let x = Var::from_tensor(&random(1, (16, 16), DType::F32))?;
    let profile = step(&x, |x| ops::softmax(&ops::matmul(&ops::relu(x)?, x)?, 1))?;
    let mut end = Duration::ZERO;
    for row in profile.rows() {
        assert!(row.start >= end && row.duration > Duration::ZERO, "{row:?} before {end:?}");
        end = row.start + row.duration;
    }
    assert!(end <= profile.duration());
    Ok(())
}

#[test]
fn a_recomputed_forward_lies_within_the_backward_of_its_checkpoint() -> candle_amp::Result<()> {
    let x = Var::from_tensor(&random(1, (4, 4), DType::F32))?;
    let profile = step(&x, |x| checkpoint(ops::relu, x))?;
    let names = names(&profile);
    // The first pass, the operator that it makes, and `sum`; then backward.
    let expected =
        ["relu", "checkpoint", "sum", "sum'", "checkpoint'", ">relu", ">seed", ">seed'", ">relu'"];
    assert_eq!(names, expected);
    let (outer, inner) = (&profile.rows()[4], &profile.rows()[8]);
    assert!(outer.start <= inner.start);
    assert!(inner.start + inner.duration <= outer.start + outer.duration);
    Ok(())
}

#[test]
fn a_failed_operator_has_no_row_and_those_after_it_do() -> Result<()> {
    let x = random(1, (4, 4), DType::F32);
    let wrong = random(1, (3, 3), DType::F32);
    let (_, profile) = profile(&Device::Cpu, || {
        assert!(ops::matmul(&x, &wrong).is_err());
        ops::relu(&x)
    })?;
    assert_eq!(names(&profile), ["relu"]);
    Ok(())
}

#[test]
fn an_inner_profile_has_its_rows_alone() -> Result<()> {
    let x = random(1, (4, 4), DType::F32);
    let (inner, outer) = profile(&Device::Cpu, || {
        ops::relu(&x)?;
        let (y, inner) = profile(&Device::Cpu, || ops::softmax(&x, 1))?;
        ops::sum(&y?)?;
        Result::Ok(inner)
    })?;
    assert_eq!(
        (names(&inner?), names(&outer)),
        (vec!["softmax".into()], { vec!["relu".into(), "sum".into()] })
    );
    Ok(())
}

/// Both ask how an operator was computed.
#[test]
fn a_trace_within_a_profile_knows_the_algorithms_too() -> Result<()> {
    let x = random(1, (4, 4), DType::F32);
    let ((y, trace), profile) =
        profile(&Device::Cpu, || Autocast::disabled().trace(|| ops::matmul(&x, &x)))?;
    y?;
    assert!(profile.rows()[0].algorithm.is_some());
    assert_eq!(trace.rows()[0].algorithm, profile.rows()[0].algorithm);
    Ok(())
}
