//! NaN, infinities and subnormal numbers in each input, and in the gradient of the output.

use candle_amp::{GradScaler, Op, ScaleConfig, ops};
use candle_core::{DType, Device, Result, Tensor, Var};

use super::{Faults, Outcome, fresh, outcome, weigh};
use crate::cases::{self, Case};
use crate::util::{FLOATS, epsilon, to_vec};

/// The smallest number above zero.
fn least(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2f64.powi(-24),
        DType::BF16 => 2f64.powi(-133),
        DType::F32 => 2f64.powi(-149),
        _ => 0.0,
    }
}

/// `x` with one element replaced.
pub(super) fn replaced(x: &Tensor, at: usize, by: f64) -> Result<Tensor> {
    let mut values = to_vec(x);
    values[at] = by;
    Tensor::from_vec(values, x.shape(), x.device())
}

pub(super) fn run(
    case: &Case,
    inputs: &[Tensor],
    dtype: DType,
    transposed: bool,
) -> Result<Outcome> {
    let cast = inputs.iter().map(|x| x.to_dtype(dtype)).collect::<Result<Vec<_>>>()?;
    let last = |x: &Tensor| x.rank().saturating_sub(1);
    if !transposed {
        let roots = fresh(&cast)?;
        let inputs: Vec<Tensor> = roots.iter().map(|root| root.as_tensor().clone()).collect();
        return outcome(case, &inputs, &roots, false);
    }
    let turn = |x: &Tensor| if x.rank() > 1 { x.transpose(0, last(x)) } else { Ok(x.clone()) };
    let stored = cast.iter().map(turn).collect::<Result<Vec<_>>>()?;
    let roots = fresh(&stored)?;
    let views = roots.iter().map(|root| turn(root)).collect::<Result<Vec<_>>>()?;
    let Outcome { output, gradients } = outcome(case, &views, &roots, false)?;
    let gradients =
        gradients.iter().map(|g| g.as_ref().map(turn).transpose()).collect::<Result<_>>()?;
    Ok(Outcome { output, gradients })
}

/// As [`run`], by a scaler, and with gradients that end in operators of this crate in `dtype`. candle adds up its own
/// gradients, and its additions of BF16 flush where the processor has instructions for BF16.
pub(super) fn run_without_candle(case: &Case, inputs: &[Tensor], dtype: DType) -> Result<Outcome> {
    let cast = inputs.iter().map(|x| x.to_dtype(dtype)).collect::<Result<Vec<_>>>()?;
    let roots = fresh(&cast)?;
    let within = |root: &Var| ops::neg(&ops::neg(root)?);
    let output = (case.f)(&roots.iter().map(within).collect::<Result<Vec<_>>>()?)?;
    let mut scaler = GradScaler::new(ScaleConfig::constant(0.5))?;
    scaler.scale(&weigh(&output)?)?.backward()?;
    let gradients = roots.iter().map(|root| Ok(scaler.grad(root)?)).collect::<Result<_>>()?;
    Ok(Outcome { output: output.detach(), gradients })
}

/// How far a gradient in BF16 may be off that candle adds to zeros and to another.
pub(super) fn flushed_by_candle(dtype: DType) -> Result<f64> {
    let subnormal = Tensor::full(2f32.powi(-130), 64, &Device::Cpu)?.to_dtype(DType::BF16)?;
    let sum = to_vec(&(&subnormal + subnormal.zeros_like()?)?);
    let flushes = dtype == DType::BF16 && sum.contains(&0.0);
    Ok(if flushes { 2.0 * 2f64.powi(-126) } else { 0.0 })
}

/// Whether a number is NaN, or infinite and which way.
fn kind(x: f64) -> &'static str {
    match x {
        _ if x.is_nan() => "NaN",
        f64::INFINITY => "infinity",
        f64::NEG_INFINITY => "-infinity",
        _ => "finite",
    }
}

/// A comparison with the same in `F64`.
pub(super) struct Comparison<'a> {
    pub(super) what: &'a str,
    pub(super) case: &'a Case,
    pub(super) dtype: DType,
    /// How far numbers may be off that count as zero.
    pub(super) flushed: f64,
}

impl Comparison<'_> {
    /// `plain` is the same of ordinary numbers, to say how large those are that errors come from.
    fn tensor(
        &self,
        faults: &mut Faults,
        part: &str,
        got: &Tensor,
        exact: &Tensor,
        plain: &Tensor,
    ) {
        // What this dtype ends before is infinite in it.
        let end = match got.dtype() {
            DType::F16 => 65520.0,
            DType::F64 => f64::INFINITY,
            _ => f64::from(f32::MAX),
        };
        let ended = |x: f64| if x.abs() >= end { x.signum() * f64::INFINITY } else { x };
        let (got, exact) = (to_vec(got), to_vec(exact));
        let exact: Vec<f64> = exact.into_iter().map(ended).collect();
        let finite = exact
            .iter()
            .chain(&to_vec(plain))
            .filter(|x| x.is_finite())
            .copied()
            .collect::<Vec<_>>();
        let largest = finite.iter().fold(0.0f64, |most, x| most.max(x.abs()));
        let roundings = 2.0 * self.case.roundings + 2.0;
        let error =
            roundings * epsilon(self.dtype) * largest + 8.0 * least(self.dtype) + self.flushed;
        for (at, (got, exact)) in got.iter().zip(&exact).enumerate() {
            // A scale and a shift that are infinite give NaN, in PyTorch too.
            let norm = NORMS.contains(&self.case.op) && !got.is_finite() && !exact.is_finite();
            let near = !got.is_finite() || (got - exact).abs() <= error;
            if !norm && (kind(*got) != kind(*exact) || !near) {
                let what = self.what;
                faults.note(format!("{what}, {part}, element {at}: {got} is not {exact}"));
                return;
            }
        }
    }

    pub(super) fn outcome(
        &self,
        faults: &mut Faults,
        got: &Outcome,
        exact: &Outcome,
        plain: &Outcome,
    ) {
        self.tensor(faults, "output", &got.output, &exact.output, &plain.output);
        let gradients = got.gradients.iter().zip(&exact.gradients).zip(&plain.gradients);
        for (number, ((got, exact), plain)) in gradients.enumerate() {
            let [got, exact, plain] = [got, exact, plain].map(|g| g.as_ref().expect("a gradient"));
            self.tensor(faults, &format!("gradient {number}"), got, exact, plain);
        }
    }
}

const NORMS: [Op; 6] = [
    Op::BatchNorm,
    Op::BatchNormRelu,
    Op::BatchNormRelu6,
    Op::LayerNorm,
    Op::GroupNorm,
    Op::RmsNorm,
];

fn check(faults: &mut Faults, case: &Case, special: f64) -> Result<()> {
    let plain = run(case, &case.inputs, DType::F64, false)?;
    for at in 0..case.inputs.len() {
        let count = case.inputs[at].elem_count();
        for element in [0, count / 2, count - 1] {
            for dtype in FLOATS {
                let mut inputs = case.inputs.clone();
                inputs[at] = replaced(&inputs[at], element, special)?;
                let name = format!("{:?} {}, {special} in input {at}", case.op, case.name);
                let exact = run(case, &inputs, DType::F64, false)?;
                for transposed in [false, true] {
                    let how = if transposed { ", transposed" } else { "" };
                    let what = &format!("{name} at {element}, {dtype:?}{how}");
                    let got = run(case, &inputs, dtype, transposed)?;
                    let comparison = Comparison { what, case, dtype, flushed: 0.0 };
                    comparison.outcome(faults, &got, &exact, &plain);
                }
            }
        }
    }
    Ok(())
}

#[test]
fn a_nan_goes_where_it_does_in_f64() -> Result<()> {
    let mut faults = Faults::default();
    cases::all().iter().try_for_each(|case| check(&mut faults, case, f64::NAN))?;
    faults.none();
    Ok(())
}

#[test]
fn infinities_go_where_they_do_in_f64() -> Result<()> {
    let mut faults = Faults::default();
    for infinity in [f64::INFINITY, f64::NEG_INFINITY] {
        cases::all().iter().try_for_each(|case| check(&mut faults, case, infinity))?;
    }
    faults.none();
    Ok(())
}

/// How far products may be off whose operands are subnormal: instructions for BF16 take those for zero.
pub(super) fn flushed(op: Op, dtype: DType, terms: usize) -> f64 {
    #[cfg(target_arch = "x86_64")]
    let flushes = std::arch::is_x86_feature_detected!("avx512bf16");
    #[cfg(not(target_arch = "x86_64"))]
    let flushes = false;
    let products = [
        Op::Matmul,
        Op::Linear,
        Op::Conv1d,
        Op::Conv2d,
        Op::ConvTranspose1d,
        Op::ConvTranspose2d,
        Op::Lstm,
        Op::Gru,
        Op::Sdpa,
        Op::LinearCrossEntropy,
    ];
    let smallest = if dtype == DType::F16 { 2f64.powi(-14) } else { 2f64.powi(-126) };
    if flushes && products.contains(&op) { smallest * terms as f64 } else { 0.0 }
}

/// A whole input of them, so that nothing larger hides what becomes of them.
#[test]
fn subnormal_numbers_count() -> Result<()> {
    let mut faults = Faults::default();
    // A logarithm's gradient is infinite in F16 there.
    for case in cases::all().into_iter().filter(|case| case.op != Op::Log) {
        for at in 0..case.inputs.len() {
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                // Multiples of 1/128, which stay exact.
                let tiny = if dtype == DType::F16 { 2f64.powi(-17) } else { 2f64.powi(-126) };
                let mut inputs = case.inputs.clone();
                inputs[at] = (&inputs[at] * tiny)?;
                // Rounded, so that what ties in this dtype ties in F64.
                let round = |x: &Tensor| x.to_dtype(dtype)?.to_dtype(DType::F64);
                let inputs = inputs.iter().map(round).collect::<Result<Vec<_>>>()?;
                let exact = run(&case, &inputs, DType::F64, false)?;
                let terms = inputs.iter().map(Tensor::elem_count).max().unwrap_or(0);
                let what = format!("{:?} {}, input {at} subnormal, {dtype:?}", case.op, case.name);
                let flushed = flushed(case.op, dtype, terms);
                let comparison = Comparison { what: &what, case: &case, dtype, flushed };
                if dtype == DType::BF16 {
                    let got = run_without_candle(&case, &inputs, dtype)?;
                    comparison.outcome(&mut faults, &got, &exact, &exact);
                }
                let (what, flushed) =
                    (format!("{what}, candle's"), flushed + flushed_by_candle(dtype)?);
                let comparison = Comparison { what: &what, flushed, ..comparison };
                let got = run(&case, &inputs, dtype, false)?;
                comparison.outcome(&mut faults, &got, &exact, &exact);
            }
        }
    }
    faults.none();
    Ok(())
}

/// The gradients of the output's elements times these numbers, in the inputs.
fn gradients(case: &Case, dtype: DType, at: usize, special: f64) -> Result<Vec<Tensor>> {
    let cast = |x: &Tensor| Var::from_tensor(&x.to_dtype(dtype)?);
    let roots = case.inputs.iter().map(cast).collect::<Result<Vec<_>>>()?;
    let inputs: Vec<Tensor> = roots.iter().map(|root| root.as_tensor().clone()).collect();
    let output = (case.f)(&inputs)?;
    let place = at % output.elem_count();
    let factor = replaced(&output.zeros_like()?.to_dtype(DType::F64)?, place, special)?;
    let loss = (weigh(&output)? + (output.to_dtype(DType::F64)? * factor)?.sum_all()?)?;
    let store = loss.backward()?;
    Ok(roots.iter().map(|root| store.get(root).expect("a gradient").clone()).collect())
}

#[test]
fn what_is_not_finite_in_a_gradient_goes_where_it_does_in_f64() -> Result<()> {
    let mut faults = Faults::default();
    for case in cases::all() {
        let plain = gradients(&case, DType::F64, 0, 0.0)?;
        for special in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            for at in [0, 7] {
                let exact = gradients(&case, DType::F64, at, special)?;
                for dtype in [DType::F32, DType::BF16, DType::F16] {
                    let what =
                        format!("{:?} {}, {special} in the gradient at {at}", case.op, case.name);
                    let what = format!("{what}, {dtype:?}");
                    let comparison = Comparison { what: &what, case: &case, dtype, flushed: 0.0 };
                    let got = gradients(&case, dtype, at, special)?;
                    let all = got.iter().zip(&exact).zip(&plain);
                    for (number, ((got, exact), plain)) in all.enumerate() {
                        let part = format!("gradient {number}");
                        comparison.tensor(&mut faults, &part, got, exact, plain);
                    }
                }
            }
        }
    }
    faults.none();
    Ok(())
}
