//! Which dtype comes out of every operator, for every input dtype, under every rule: exact, no
//! tolerance. With PyTorch's preset, PyTorch's answers.

use candle_amp::{Autocast, Cast, Op, Policy, ops};
use candle_core::{DType, Result, Tensor, Var};

use crate::cases::{self, Case};
use crate::util::{FLOATS, assert_absolute, assert_same, epsilon, largest, random};

/// Runs `op` on inputs of `dtype`; the dtype that comes out.
fn output(cases: &[Case], op: Op, dtype: DType) -> Result<DType> {
    let case = cases.iter().find(|case| case.op == op);
    Ok(case.expect("every operator has a case").output(dtype)?.dtype())
}

/// Losses are `F32` whatever comes in.
fn is_loss(op: Op) -> bool {
    matches!(
        op,
        Op::CrossEntropy
            | Op::LinearCrossEntropy
            | Op::Nll
            | Op::Mse
            | Op::Huber
            | Op::L1
            | Op::KlDiv
            | Op::BinaryCrossEntropyWithLogit
            | Op::BinaryCrossEntropy
    )
}

/// `None` where the operator is refused.
fn expected(op: Op, cast: Cast, compute: DType, input: DType) -> Option<DType> {
    Some(match cast {
        _ if input == DType::F64 => DType::F64,
        Cast::Banned if compute != DType::F32 => return None,
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
    let cases = cases::all();
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
                    check(&what, amp.scope(|| output(&cases, op, input)), expected);
                }
            }
        }
    }
}

/// The pointwise functions that PyTorch 2.15 computes in `F32` under autocast on CUDA: `AT_FORALL_FP32` of its
/// `autocast_mode.h`.
const PYTORCH_FP32: [&str; 17] = [
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow",
    "softplus",
    "logsumexp",
];

/// What PyTorch 2.15 gives on CUDA under autocast to half, for an input in half and in `F32`.
#[test]
fn the_pytorch_preset_gives_pytorchs_dtypes() {
    let cases = cases::all();
    for half in [DType::F16, DType::BF16] {
        let amp = Autocast::new(half).with_policy(Policy::pytorch());
        for &op in Op::ALL {
            let pointwise = cases::ROWS.iter().find(|row| row.op == op);
            let expected = match op {
                // fp32, of the operators of the table
                _ if pointwise.is_some_and(|row| PYTORCH_FP32.contains(&row.torch)) => {
                    Some((DType::F32, DType::F32))
                }
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
                | Op::Sum
                | Op::Cumsum
                | Op::Norm
                | Op::LogSumExp
                | Op::CrossEntropy
                | Op::LinearCrossEntropy
                | Op::Nll
                | Op::Huber
                | Op::L1
                | Op::KlDiv
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
                check(&format!("{op:?}"), amp.scope(|| output(&cases, op, input)), expected);
            }
        }
    }
}

#[test]
fn every_rule_can_be_given_to_every_operator() {
    let cases = cases::all();
    for cast in [Cast::Lower, Cast::Full, Cast::FullMath, Cast::Promote, Cast::Keep, Cast::Banned] {
        for &op in Op::ALL {
            let policy = Policy::default().with(op, cast);
            let amp = Autocast::new(DType::BF16).with_policy(policy);
            for input in FLOATS {
                let expected = expected(op, cast, DType::BF16, input);
                let what = format!("{op:?} {cast:?} {input:?}");
                check(&what, amp.scope(|| output(&cases, op, input)), expected);
            }
        }
    }
}

/// The weighted sum's gradient in every variable.
fn gradients(y: &Tensor, vars: &[Var]) -> Result<Vec<Tensor>> {
    let weights = random(99, y.shape(), DType::F64);
    let store = (y.to_dtype(DType::F64)? * weights)?.sum_all()?.backward()?;
    let of = |var: &Var| store.get(var).expect("every input has a gradient").clone();
    Ok(vars.iter().map(of).collect())
}

#[test]
fn autocast_is_casting_by_hand() -> Result<()> {
    for case in cases::all() {
        for compute in [DType::F16, DType::BF16] {
            for input in [DType::F32, compute] {
                let by_hand = match case.op.default_cast() {
                    Cast::Banned => continue,
                    Cast::Lower => compute,
                    Cast::Full => DType::F32,
                    _ => input,
                };
                let what = format!("{:?} {} of {input:?} in {compute:?}", case.op, case.name);
                let var = |x: &Tensor| Var::from_tensor(&x.to_dtype(input)?);
                let vars = case.inputs.iter().map(var).collect::<Result<Vec<_>>>()?;
                let run = |dtype| {
                    let cast = |var: &Var| var.to_dtype(dtype);
                    (case.f)(&vars.iter().map(cast).collect::<Result<Vec<_>>>()?)
                };
                let ours = Autocast::new(compute).scope(|| run(input))?;
                let theirs = run(by_hand)?;
                assert_same(&what, &ours, &theirs);
                let (ours, theirs) = (gradients(&ours, &vars)?, gradients(&theirs, &vars)?);
                let doubles =
                    case.inputs.iter().map(Var::from_tensor).collect::<Result<Vec<_>>>()?;
                let inputs: Vec<Tensor> = doubles.iter().map(|v| v.as_tensor().clone()).collect();
                let exact = gradients(&(case.f)(&inputs)?, &doubles)?;
                for ((ours, theirs), exact) in ours.iter().zip(&theirs).zip(&exact) {
                    assert_eq!(ours.dtype(), input, "{what}");
                    let rounding = epsilon(compute) * largest(exact);
                    assert_absolute(&what, ours, theirs, rounding);
                    let error = |gradient: &Tensor| {
                        let difference = gradient.to_dtype(DType::F64)? - exact;
                        Ok::<_, candle_core::Error>(largest(&difference?))
                    };
                    // What by hand is rounded once more may be nearer by chance, by half a place.
                    let (ours, theirs) = (error(ours)?, error(theirs)?);
                    assert!(
                        ours <= theirs + rounding / 2.0,
                        "{what}: {ours:e}, by hand {theirs:e}"
                    );
                }
            }
        }
    }
    Ok(())
}

/// Losses read 16 bits as they are where they are computed in `F32`, and only there.
#[test]
fn a_loss_that_is_to_be_computed_in_16_bits_has_its_inputs_cast() -> Result<()> {
    let (input, target) = (random(1, 100, DType::F16), random(2, 100, DType::F16));
    let bf16 = |x: &Tensor| x.to_dtype(DType::BF16);
    let expected = ops::mse(&bf16(&input)?, &bf16(&target)?)?;
    for (cast, loss) in [(Cast::Lower, expected), (Cast::Full, ops::mse(&input, &target)?)] {
        let amp = Autocast::new(DType::BF16).with_policy(Policy::default().with(Op::Mse, cast));
        let got = amp.scope(|| ops::mse(&input, &target))?;
        assert_same(&format!("{cast:?}"), &got, &loss);
    }
    Ok(())
}

#[test]
fn outside_a_scope_and_in_a_disabled_one_nothing_is_cast() -> Result<()> {
    let cases = cases::all();
    for &op in Op::ALL {
        for input in FLOATS {
            let expected = expected(op, Cast::Keep, DType::F32, input);
            assert_eq!(Some(output(&cases, op, input)?), expected, "{op:?} of {input:?}");
            let disabled = Autocast::new(DType::F16)
                .scope(|| Autocast::disabled().scope(|| output(&cases, op, input)))?;
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

/// As a residual is added to what a product left in half: without a copy in F32.
#[test]
fn a_sum_of_f32_and_a_half_has_gradients_in_both_dtypes() -> Result<()> {
    for half in [DType::F16, DType::BF16] {
        let wide = Var::from_tensor(&random(1, (5, 7), DType::F32))?;
        let narrow = Var::from_tensor(&random(2, (5, 7), half))?;
        let weights = random(3, (5, 7), DType::F32);
        for swapped in [false, true] {
            let operands: [&Tensor; 2] = if swapped { [&narrow, &wide] } else { [&wide, &narrow] };
            let amp = Autocast::new(half);
            let (sum, trace) = amp.trace(|| ops::add(operands[0], operands[1]));
            let (sum, row) = (sum?, &trace.rows()[0]);
            assert_eq!((row.cast, row.output), (Some(DType::F32), DType::F32));
            assert_eq!(row.inputs, operands.map(Tensor::dtype));
            assert_same("sum", &sum, &(wide.as_tensor() + narrow.to_dtype(DType::F32)?)?);
            let gradients = (sum * &weights)?.sum_all()?.backward()?;
            assert_same("of F32", gradients.get(&wide).expect("a gradient"), &weights);
            let of_half = gradients.get(&narrow).expect("a gradient");
            assert_same("of the half", of_half, &weights.to_dtype(half)?);
        }
    }
    Ok(())
}
