//! Every operator's gradient: in `F64` against finite differences, in the other dtypes against the
//! same operator in `F64`, under plain `loss.backward()`.

use candle_amp::{Op, ops, random as generator};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::Conv2dConfig;

use crate::util::{alone, assert_close, random, to_vec};

type Function = Box<dyn Fn(&[Tensor]) -> Result<Tensor>>;

/// An operator as a function of its differentiable inputs, and inputs for it.
struct Case {
    op: Op,
    name: &'static str,
    inputs: Vec<Tensor>,
    f: Function,
}

fn case(
    op: Op,
    name: &'static str,
    dims: &[&[usize]],
    f: impl Fn(&[Tensor]) -> Result<Tensor> + 'static,
) -> Case {
    // Odd multiples of 1/128, none twice among 128: exact in every dtype, so that all dtypes see
    // the same inputs; and so far apart that a finite difference crosses no kink of a maximum.
    let inputs = dims.iter().enumerate().map(|(i, dims)| {
        let count = dims.iter().product();
        let order = to_vec(&random(7 + i as u64, 128, DType::F64).arg_sort_last_dim(true).unwrap());
        let values = (0..count).map(|at| (2.0 * order[at % 128] - 127.0) / 128.0).collect();
        Tensor::from_vec(values, *dims, &Device::Cpu).unwrap()
    });
    Case { op, name, inputs: inputs.collect(), f: Box::new(f) }
}

fn cases() -> Vec<Case> {
    let config = |stride, padding, dilation, groups| Conv2dConfig {
        stride,
        padding,
        dilation,
        groups,
        ..Default::default()
    };
    let conv = |config| move |t: &[Tensor]| ops::conv2d(&t[0], &t[1], t.get(2), config);
    let targets = || Tensor::new(&[2u32, 0, 4], &Device::Cpu).unwrap();
    let eval = |t: &[Tensor]| {
        let dtype = if t[0].dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let mean = Tensor::new(&[0.25f64, -0.5, 0.125], &Device::Cpu)?.to_dtype(dtype)?;
        let var = Tensor::new(&[0.5f64, 2.0, 1.5], &Device::Cpu)?.to_dtype(dtype)?;
        ops::batch_norm_eval(&t[0], &mean, &var, t.get(1), t.get(2), 1e-3)
    };
    vec![
        case(Op::Matmul, "matmul", &[&[3, 5], &[5, 2]], |t| ops::matmul(&t[0], &t[1])),
        case(Op::Matmul, "batched", &[&[2, 3, 17], &[2, 17, 4]], |t| ops::matmul(&t[0], &t[1])),
        case(Op::Matmul, "transposed", &[&[3, 5], &[4, 5]], |t| ops::matmul(&t[0], &t[1].t()?)),
        case(Op::Linear, "bias", &[&[3, 7], &[5, 7], &[5]], |t| {
            ops::linear(&t[0], &t[1], Some(&t[2]))
        }),
        case(Op::Linear, "3-D", &[&[2, 3, 9], &[4, 9]], |t| ops::linear(&t[0], &t[1], None)),
        case(Op::Conv2d, "3x3", &[&[2, 3, 6, 5], &[4, 3, 3, 3], &[4]], conv(config(1, 1, 1, 1))),
        case(Op::Conv2d, "stride 2", &[&[3, 2, 7, 6], &[3, 2, 3, 3]], conv(config(2, 1, 1, 1))),
        case(Op::Conv2d, "1x1 stride 2", &[&[2, 3, 5, 4], &[4, 3, 1, 1]], conv(config(2, 0, 1, 1))),
        case(Op::Conv2d, "groups", &[&[2, 4, 5, 5], &[6, 2, 3, 3], &[6]], conv(config(1, 2, 1, 2))),
        case(Op::Conv2d, "dilated", &[&[1, 2, 8, 7], &[2, 2, 3, 2]], conv(config(1, 1, 2, 1))),
        case(Op::BatchNorm, "train", &[&[4, 3, 2, 5], &[3], &[3]], |t| {
            Ok(ops::batch_norm(&t[0], Some(&t[1]), Some(&t[2]), 1e-3)?.0)
        }),
        case(Op::BatchNorm, "train, plain", &[&[6, 3]], |t| {
            Ok(ops::batch_norm(&t[0], None, None, 1e-3)?.0)
        }),
        case(Op::BatchNorm, "train, bias only", &[&[6, 3], &[3]], |t| {
            Ok(ops::batch_norm(&t[0], None, Some(&t[1]), 1e-3)?.0)
        }),
        case(Op::BatchNorm, "eval", &[&[4, 3, 2, 5], &[3], &[3]], eval),
        case(Op::Relu, "relu", &[&[4, 9]], |t| ops::relu(&t[0])),
        case(Op::Dropout, "dropout", &[&[8, 9]], |t| {
            let _alone = alone();
            generator::manual_seed(5);
            ops::dropout(&t[0], 0.25)
        }),
        case(Op::Add, "add", &[&[4, 9], &[4, 9]], |t| ops::add(&t[0], &t[1])),
        case(Op::Add, "twice the same", &[&[4, 9]], |t| ops::add(&t[0], &t[0])),
        case(Op::AddRelu, "add_relu", &[&[4, 9], &[4, 9]], |t| {
            // A third, so that no sum is 0, where the gradient is anybody's choice.
            ops::add_relu(&t[0], &(&t[1] + 1.0 / 3.0)?)
        }),
        case(Op::MaxPool2d, "2/2", &[&[2, 2, 6, 4]], |t| ops::max_pool2d(&t[0], 2, 2, 0)),
        case(Op::MaxPool2d, "3/2/1", &[&[1, 2, 7, 5]], |t| ops::max_pool2d(&t[0], 3, 2, 1)),
        case(Op::MaxPool2d, "oblong", &[&[1, 2, 7, 5]], |t| {
            ops::max_pool2d(&t[0], (3, 2), (1, 2), (1, 0))
        }),
        case(Op::AvgPool2d, "3/2/1", &[&[2, 2, 7, 5]], |t| ops::avg_pool2d(&t[0], 3, 2, 1)),
        case(Op::AvgPool2d, "2/1", &[&[1, 3, 4, 5]], |t| ops::avg_pool2d(&t[0], 2, 1, 0)),
        case(Op::GlobalAvgPool2d, "global", &[&[2, 3, 5, 7]], |t| ops::global_avg_pool2d(&t[0])),
        case(Op::Flatten, "flatten", &[&[2, 3, 2, 2]], |t| ops::flatten(&t[0])),
        case(Op::Softmax, "last", &[&[3, 5]], |t| ops::softmax(&t[0], 1)),
        case(Op::Softmax, "first", &[&[3, 5]], |t| ops::softmax(&t[0], 0)),
        case(Op::LogSoftmax, "last", &[&[3, 5]], |t| ops::log_softmax(&t[0], 1)),
        case(Op::Sum, "sum", &[&[3, 5]], |t| ops::sum(&t[0])),
        case(Op::Mean, "mean", &[&[3, 5]], |t| ops::mean(&t[0])),
        case(Op::CrossEntropy, "cross entropy", &[&[3, 5]], move |t| {
            ops::cross_entropy(&t[0], &targets())
        }),
        case(Op::CrossEntropy, "smoothed", &[&[3, 5]], move |t| {
            ops::cross_entropy_smoothed(&t[0], &targets(), 0.1)
        }),
        case(Op::Mse, "mse", &[&[3, 5], &[3, 5]], |t| ops::mse(&t[0], &t[1])),
    ]
}

/// A number that depends on every element of `y`, differently.
fn weigh(y: &Tensor) -> Result<Tensor> {
    let weights = random(99, y.shape(), DType::F64);
    (y.to_dtype(DType::F64)? * weights)?.sum_all()
}

/// The gradients of the weighted output in `dtype`.
fn gradients(case: &Case, dtype: DType) -> Result<Vec<Tensor>> {
    let cast = |x: &Tensor| Var::from_tensor(&x.to_dtype(dtype)?);
    let vars = case.inputs.iter().map(cast).collect::<Result<Vec<_>>>()?;
    let inputs: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
    let store = weigh(&(case.f)(&inputs)?)?.backward()?;
    Ok(vars.iter().map(|v| store.get(v).expect("every input has a gradient").clone()).collect())
}

#[test]
fn in_f64_gradients_are_finite_differences() -> Result<()> {
    // Central differences err by step² and by epsilon / step.
    let step = f64::EPSILON.cbrt();
    for case in cases() {
        let value = |inputs: &[Tensor]| weigh(&(case.f)(inputs)?)?.to_scalar::<f64>();
        for (i, gradient) in gradients(&case, DType::F64)?.iter().enumerate() {
            let x = to_vec(&case.inputs[i]);
            for (j, gradient) in to_vec(gradient).into_iter().enumerate() {
                let moved = |by: f64| -> Result<f64> {
                    let (mut x, mut inputs) = (x.clone(), case.inputs.clone());
                    x[j] += by;
                    inputs[i] = Tensor::from_vec(x, inputs[i].shape(), &Device::Cpu)?;
                    value(&inputs)
                };
                let expected = (moved(step)? - moved(-step)?) / (2.0 * step);
                let tolerance = 100.0 * step * step * (1.0 + expected.abs());
                assert!(
                    (gradient - expected).abs() <= tolerance,
                    "{:?} {}, input {i}, element {j}: {gradient} is not {expected}",
                    case.op,
                    case.name
                );
            }
        }
    }
    Ok(())
}

#[test]
fn in_other_dtypes_gradients_are_those_of_f64() -> Result<()> {
    for case in cases() {
        let exact = gradients(&case, DType::F64)?;
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            for (i, (got, exact)) in gradients(&case, dtype)?.iter().zip(&exact).enumerate() {
                assert_eq!(got.dtype(), dtype);
                let what = format!("{:?} {}, input {i}, {dtype:?}", case.op, case.name);
                // The output's gradient, the output where it is used, and the result are each
                // rounded once, and batch norm subtracts two sums of such.
                assert_close(&what, got, exact, dtype, 6.0);
            }
        }
    }
    Ok(())
}

#[test]
fn every_operator_has_a_case() {
    for &op in Op::ALL {
        assert!(cases().iter().any(|case| case.op == op), "{op:?} has none");
    }
}

/// Where half sums saturate: 4,096 terms end at 2,048 in F16 and at 256 in BF16 in candle.
#[test]
fn long_sums_do_not_saturate() -> Result<()> {
    for dtype in [DType::F16, DType::BF16] {
        let ones = |dims: &[usize]| Var::ones(dims, dtype, &Device::Cpu);
        let value = |t: &Tensor| to_vec(t)[0];
        assert_eq!(value(&ops::sum(&*ones(&[4096])?)?), 4096.0);
        assert_eq!(value(&ops::mean(&*ones(&[65536])?)?), 1.0);
        assert_eq!(value(&ops::global_avg_pool2d(&*ones(&[1, 1, 64, 64])?)?), 1.0);
        let p = ops::softmax(&*ones(&[1, 4096])?, 1)?;
        assert_eq!(value(&p), 1.0 / 4096.0);
        let (x, w, b) = (ones(&[4096, 1])?, ones(&[1, 1])?, ones(&[1])?);
        let grads = ops::sum(&ops::linear(&x, &w, Some(&b))?)?.backward()?;
        assert_eq!(value(grads.get(&b).unwrap()), 4096.0, "bias gradient");
        assert_eq!(value(grads.get(&w).unwrap()), 4096.0, "weight gradient");
        let (x, w, b) = (ones(&[4, 1, 32, 32])?, ones(&[1, 1, 1, 1])?, ones(&[1])?);
        let y = ops::conv2d(&x, &w, Some(&b), Conv2dConfig::default())?;
        let grads = ops::sum(&y)?.backward()?;
        assert_eq!(value(grads.get(&b).unwrap()), 4096.0, "conv bias gradient");
        assert_eq!(value(grads.get(&w).unwrap()), 4096.0, "conv weight gradient");
        let logits = ones(&[1, 50257])?;
        let loss = ops::cross_entropy(&logits, &Tensor::new(&[7u32], &Device::Cpu)?)?;
        assert!((value(&loss) - 50257f64.ln()).abs() < 16.0 * f64::from(f32::EPSILON) * 11.0);
    }
    Ok(())
}
