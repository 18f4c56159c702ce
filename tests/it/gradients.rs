//! Every operator's gradient: in `F64` against finite differences, in the other dtypes against the
//! same operator in `F64`, for every layout of its inputs, under plain `loss.backward()`.

use candle_amp::{Op, ops};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::Conv2dConfig;

use crate::cases::{self, Case};
use crate::devices::devices;
use crate::util::{FLOATS, assert_absolute, epsilon, largest, random, to_vec};

/// How an input lies in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Layout {
    Contiguous,
    /// Its first and last dimensions are stored the other way around.
    Transposed,
    /// The middle of a tensor that is longer at both ends of every dimension.
    Sliced,
    /// One index of its first dimension, repeated.
    Broadcast,
}

const LAYOUTS: [Layout; 4] =
    [Layout::Contiguous, Layout::Transposed, Layout::Sliced, Layout::Broadcast];

impl Layout {
    /// What to store for a view of the values of `x`, or of a part of them.
    fn store(self, x: &Tensor) -> Result<Tensor> {
        if x.rank() == 0 {
            return Ok(x.clone());
        }
        match self {
            Layout::Contiguous => Ok(x.clone()),
            Layout::Transposed => x.transpose(0, x.rank() - 1)?.contiguous(),
            Layout::Sliced => {
                (0..x.rank()).try_fold(x.clone(), |x, dim| x.pad_with_zeros(dim, 1, 1))
            }
            Layout::Broadcast => x.narrow(0, 0, 1)?.contiguous(),
        }
    }

    /// The view, of `dims`, of what was stored.
    fn view(self, stored: &Tensor, dims: &[usize]) -> Result<Tensor> {
        if dims.is_empty() {
            return Ok(stored.clone());
        }
        match self {
            Layout::Contiguous => Ok(stored.clone()),
            Layout::Transposed => stored.transpose(0, dims.len() - 1),
            Layout::Sliced => dims
                .iter()
                .enumerate()
                .try_fold(stored.clone(), |x, (dim, &size)| x.narrow(dim, 1, size)),
            Layout::Broadcast => stored.broadcast_as(dims),
        }
    }
}

/// A number that depends on every element of `y`, differently.
fn weigh(y: &Tensor) -> Result<Tensor> {
    let weights = random(99, y.shape(), DType::F64).to_device(y.device())?;
    // candle's sum of a tensor of no dimensions fails on CUDA.
    (y.to_dtype(DType::F64)? * weights)?.flatten_all()?.sum_all()
}

/// The gradients of the weighted output in the stored inputs, in `dtype` on a device.
fn gradients(case: &Case, dtype: DType, layout: Layout, on: &Device) -> Result<Vec<Tensor>> {
    let store = |x: &Tensor| Var::from_tensor(&layout.store(&x.to_dtype(dtype)?)?.to_device(on)?);
    let vars = case.inputs.iter().map(store).collect::<Result<Vec<_>>>()?;
    let views = vars.iter().zip(&case.inputs).map(|(var, x)| layout.view(var, x.dims()));
    let loss = weigh(&(case.f)(&views.collect::<Result<Vec<_>>>()?)?)?;
    let store = loss.backward()?;
    Ok(vars.iter().map(|v| store.get(v).expect("every input has a gradient").clone()).collect())
}

#[test]
fn in_f64_gradients_are_finite_differences() -> Result<()> {
    // Central differences err by step² and by epsilon / step.
    let step = f64::EPSILON.cbrt();
    for case in cases::all() {
        let value = |inputs: &[Tensor]| weigh(&(case.f)(inputs)?)?.to_scalar::<f64>();
        for (i, gradient) in
            gradients(&case, DType::F64, Layout::Contiguous, &Device::Cpu)?.iter().enumerate()
        {
            let (x, gradient) = (to_vec(&case.inputs[i]), to_vec(gradient));
            // Of a large input a sample, over all of it: each element costs two forward passes.
            for j in (0..x.len()).step_by(1 + x.len() / 96) {
                let moved = |by: f64| -> Result<f64> {
                    let (mut x, mut inputs) = (x.clone(), case.inputs.clone());
                    x[j] += by;
                    inputs[i] = Tensor::from_vec(x, inputs[i].shape(), &Device::Cpu)?;
                    value(&inputs)
                };
                let expected = (moved(step)? - moved(-step)?) / (2.0 * step);
                let tolerance = 100.0 * step * step * (1.0 + expected.abs());
                assert!(
                    (gradient[j] - expected).abs() <= tolerance,
                    "{:?} {}, input {i}, element {j}: {} is not {expected}",
                    case.op,
                    case.name,
                    gradient[j]
                );
            }
        }
    }
    Ok(())
}

#[test]
fn on_every_device_in_every_dtype_and_layout_gradients_are_those_of_f64() -> Result<()> {
    let devices = devices();
    for case in cases::all() {
        for layout in LAYOUTS {
            // Where a batch of equal rows has no variance, there is nothing to compare.
            if layout == Layout::Broadcast && case.op == Op::BatchNorm {
                continue;
            }
            let exact = gradients(&case, DType::F64, layout, &Device::Cpu)?;
            // Where what was broadcast cancels, its rounding errors do not.
            let plain = gradients(&case, DType::F64, Layout::Contiguous, &Device::Cpu)?;
            for (dtype, device) in
                devices.iter().flat_map(|device| FLOATS.map(|dtype| (dtype, device)))
            {
                let all = gradients(&case, dtype, layout, device)?;
                // cuBLAS adds up a product's terms in whatever order it likes, in F32 at least.
                let terms = case.inputs.iter().map(Tensor::elem_count).max().unwrap_or(0);
                let wide = matches!(dtype, DType::F32 | DType::F64);
                let order = if wide && device.is_cuda() { (terms as f64).sqrt() } else { 0.0 };
                for (i, (got, exact)) in all.iter().zip(&exact).enumerate() {
                    let (op, name) = (case.op, case.name);
                    assert_eq!(got.dtype(), dtype);
                    let on = device.location();
                    let what = format!("{op:?} {name}, input {i}, {layout:?}, {dtype:?}, {on:?}");
                    // candle adds up what was broadcast in the dtype of the gradient.
                    let repeats = match layout {
                        Layout::Broadcast => case.inputs[i].dims().first().map_or(0, |&n| n - 1),
                        _ => 0,
                    };
                    let roundings = case.roundings + repeats as f64 + order;
                    let scale = largest(exact).max(largest(&plain[i]));
                    assert_absolute(&what, got, exact, roundings * epsilon(dtype) * scale);
                }
            }
        }
    }
    Ok(())
}

/// A batch of nothing, as the last of an epoch may be: operators either take it, and give nothing
/// and gradients of nothing, or refuse it by name.
#[test]
fn a_batch_of_no_elements_is_taken_or_refused() -> Result<()> {
    let mut taken = Vec::new();
    // A number has no batch.
    for case in cases::all().into_iter().filter(|case| case.inputs[0].rank() > 0) {
        for dtype in [DType::F32, DType::BF16] {
            let cast = |x: &Tensor| Var::from_tensor(&x.to_dtype(dtype)?);
            let vars = case.inputs.iter().map(cast).collect::<Result<Vec<_>>>()?;
            let mut inputs: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
            let empty = Var::from_tensor(&inputs[0].narrow(0, 0, 0)?)?;
            inputs[0] = empty.as_tensor().clone();
            let what = format!("{:?} {}, {dtype:?}", case.op, case.name);
            match (case.f)(&inputs) {
                Err(error) => {
                    assert!(error.to_string().contains(case.op.name()), "{what}: {error}")
                }
                Ok(y) => {
                    let store = ops::sum(&y)?.backward()?;
                    assert_eq!(store.get(&empty).expect("a gradient").dims(), inputs[0].dims());
                    for var in &vars[1..] {
                        let gradient = to_vec(store.get(var).expect("a gradient"));
                        let finite = gradient.iter().all(|g| g.is_finite());
                        let zero = y.elem_count() > 0 || gradient.iter().all(|&g| g == 0.0);
                        assert!(finite && zero, "{what}: {gradient:?}");
                    }
                    taken.push(case.op);
                }
            }
        }
    }
    for op in [
        Op::Matmul,
        Op::Linear,
        Op::Conv2d,
        Op::Relu,
        Op::GeluTanh,
        Op::Softmax,
        Op::MaxPool2d,
        Op::LayerNorm,
    ] {
        assert!(taken.contains(&op), "{op:?} takes no empty batch");
    }
    Ok(())
}

#[test]
fn every_operator_has_a_case() {
    for &op in Op::ALL {
        assert!(cases::all().iter().any(|case| case.op == op), "{op:?} has none");
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
