//! NaN, infinities and subnormal numbers in two inputs at once.

use candle_amp::{Op, ops};
use candle_core::{DType, Result, Tensor};

use super::specials::{Comparison, flushed, flushed_by_candle, replaced, run, run_without_candle};
use super::{Faults, Outcome};
use crate::cases::{self, Case};

const DTYPES: [DType; 3] = [DType::F16, DType::BF16, DType::F32];

/// Products, and gradients of products, in the registers of AMX, which smaller ones of F32 and F16 do not reach.
fn large_products() -> [Case; 2] {
    let matmul = |t: &[Tensor]| ops::matmul(&t[0], &t[1]);
    let linear = |t: &[Tensor]| ops::linear(&t[0], &t[1], Some(&t[2]));
    [
        cases::case(Op::Matmul, "large", &[&[32, 32], &[32, 32]], matmul),
        cases::case(Op::Linear, "large", &[&[32, 32], &[48, 32], &[48]], linear),
    ]
}

/// Calls `f` with every two inputs of every case but other large ones, which have the code of small ones here.
fn each_pair(mut f: impl FnMut(&Case, usize, usize) -> Result<()>) -> Result<()> {
    let small = |case: &Case| case.inputs.iter().all(|x| x.elem_count() <= 256);
    for case in cases::all().into_iter().filter(small).chain(large_products()) {
        for j in 0..case.inputs.len() {
            for i in 0..j {
                f(&case, i, j)?;
            }
        }
    }
    Ok(())
}

/// Both in their first elements, which meet in most operators, and in elements that mostly do not.
#[test]
fn two_special_numbers_go_where_they_do_in_f64() -> Result<()> {
    let mut faults = Faults::default();
    let specials = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
    each_pair(|case, i, j| {
        let plain = run(case, &case.inputs, DType::F64, false)?;
        let last = case.inputs[j].elem_count() - 1;
        for (a, b) in specials.iter().flat_map(|a| specials.map(|b| (*a, b))) {
            for at in [0, last] {
                let mut inputs = case.inputs.clone();
                inputs[i] = replaced(&inputs[i], 0, a)?;
                inputs[j] = replaced(&inputs[j], at, b)?;
                let exact = run(case, &inputs, DType::F64, false)?;
                for dtype in DTYPES {
                    let name = format!("{:?} {}", case.op, case.name);
                    let what =
                        &format!("{name}, {a} in input {i}, {b} in input {j} at {at}, {dtype:?}");
                    let got = run(case, &inputs, dtype, false)?;
                    let comparison = Comparison { what, case, dtype, flushed: 0.0 };
                    comparison.outcome(&mut faults, &got, &exact, &plain);
                }
            }
        }
        Ok(())
    })?;
    faults.none();
    Ok(())
}

/// Compares a case with subnormal inputs: in BF16, whose subnormal numbers candle's own sums may flush, without these too.
fn subnormal(
    faults: &mut Faults,
    what: &str,
    case: &Case,
    inputs: &[Tensor],
    dtype: DType,
    [exact, plain]: [&Outcome; 2],
) -> Result<()> {
    let terms = inputs.iter().map(Tensor::elem_count).max().unwrap_or(0);
    let what = &format!("{:?} {}, {what}", case.op, case.name);
    let comparison = Comparison { what, case, dtype, flushed: flushed(case.op, dtype, terms) };
    if dtype == DType::BF16 {
        let got = run_without_candle(case, inputs, dtype)?;
        comparison.outcome(faults, &got, exact, plain);
    }
    let flushed = comparison.flushed + flushed_by_candle(dtype)?;
    let comparison = Comparison { what: &format!("{what}, candle's"), flushed, ..comparison };
    comparison.outcome(faults, &run(case, inputs, dtype, false)?, exact, plain);
    Ok(())
}

/// Two whole inputs, so that nothing larger hides what becomes of them.
#[test]
fn two_subnormal_inputs_count() -> Result<()> {
    let mut faults = Faults::default();
    each_pair(|case, i, j| {
        for dtype in DTYPES {
            let tiny = if dtype == DType::F16 { 2f64.powi(-17) } else { 2f64.powi(-126) };
            let mut inputs = case.inputs.clone();
            for at in [i, j] {
                inputs[at] = (&inputs[at] * tiny)?;
            }
            // Rounded, so that what ties in this dtype ties in F64.
            let round = |x: &Tensor| x.to_dtype(dtype)?.to_dtype(DType::F64);
            let inputs = inputs.iter().map(round).collect::<Result<Vec<_>>>()?;
            let exact = run(case, &inputs, DType::F64, false)?;
            // A state is a sum that may cancel: errors come from its terms.
            let recurrent = matches!(case.op, Op::Lstm | Op::Gru);
            let plain = if recurrent { &case.inputs } else { &inputs };
            let plain = run(case, plain, DType::F64, false)?;
            let what = format!("inputs {i} and {j} subnormal, {dtype:?}");
            subnormal(&mut faults, &what, case, &inputs, dtype, [&exact, &plain])?;
        }
        Ok(())
    })?;
    faults.none();
    Ok(())
}

/// A NaN among numbers does not get lost where the other input is subnormal.
#[test]
fn a_nan_beside_subnormal_numbers_goes_where_it_does_in_f64() -> Result<()> {
    let mut faults = Faults::default();
    each_pair(|case, i, j| {
        for (special, small) in [(i, j), (j, i)] {
            for dtype in DTYPES {
                let tiny = if dtype == DType::F16 { 2f64.powi(-17) } else { 2f64.powi(-126) };
                let mut inputs = case.inputs.clone();
                inputs[small] = (&inputs[small] * tiny)?.to_dtype(dtype)?.to_dtype(DType::F64)?;
                let plain = run(case, &inputs, DType::F64, false)?;
                inputs[special] = replaced(&inputs[special], 0, f64::NAN)?;
                let exact = run(case, &inputs, DType::F64, false)?;
                let what = format!("NaN in input {special}, {small} subnormal, {dtype:?}");
                subnormal(&mut faults, &what, case, &inputs, dtype, [&exact, &plain])?;
            }
        }
        Ok(())
    })?;
    faults.none();
    Ok(())
}
