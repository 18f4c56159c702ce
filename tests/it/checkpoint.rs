//! Recomputing gives what keeping gives.

use candle_amp::autograd::checkpoint;
use candle_amp::{Autocast, GradScaler, Op, nn, no_grad, ops, random as generator};
use candle_core::{DType, Device, Module, ModuleT, Result, Tensor, Var};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::util::{assert_close, assert_same, random, seeded, to_vec};

const CPU: Device = Device::Cpu;

/// Convolution, batch norm, dropout, a residual that mixes in candle's own operators.
#[derive(Clone)]
struct Block {
    conv: nn::Conv2d,
    norm: nn::BatchNorm,
}

impl Block {
    fn new(vb: nn::VarBuilder) -> Result<Self> {
        let config = nn::Conv2dConfig { padding: 1, ..Default::default() };
        Ok(Self {
            conv: nn::conv2d(3, 3, 3, config, vb.pp("conv"))?,
            norm: nn::batch_norm(3, 1e-5, vb.pp("norm"))?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.norm.forward_t(&self.conv.forward(x)?, true)?;
        let y = ops::dropout(&ops::gelu_tanh(&y)?, 0.3)?;
        ops::add(&(y * 0.5)?, x)
    }
}

struct Run {
    loss: Tensor,
    gradients: Vec<Tensor>,
    running_mean: Vec<f64>,
    next_random: generator::RandomState,
}

/// Two blocks, one after another, forward and backward, from the same seed.
fn run(dtype: DType, with_scaler: bool, recompute: bool) -> candle_amp::Result<Run> {
    generator::manual_seed(11);
    let varmap = nn::VarMap::new();
    let vb = nn::var_builder(&varmap, DType::F32, &CPU);
    let blocks = [Block::new(vb.pp("a"))?, Block::new(vb.pp("b"))?];
    let x = Var::from_tensor(&random(1, (2, 3, 5, 7), DType::F32))?;
    let amp = Autocast::new(dtype).deny(Op::GeluTanh);
    let loss = amp.scope(|| {
        let mut y = x.as_tensor().clone();
        for block in &blocks {
            let block = block.clone();
            y = match recompute {
                true => checkpoint(move |x| block.forward(x), &y)?,
                false => block.forward(&y)?,
            };
        }
        ops::mean(&ops::mul(&y, &y)?)
    })?;
    let mut vars: Vec<_> = varmap.data().lock().unwrap().clone().into_iter().collect();
    vars.sort_by(|a, b| a.0.cmp(&b.0));
    let trained = vars.iter().filter(|(name, _)| !name.contains("running")).map(|(_, var)| var);
    let trained = trained.chain([&x]);
    let gradients = if with_scaler {
        let mut scaler = GradScaler::default();
        scaler.scale(&loss)?.backward()?;
        trained.map(|var| Ok(scaler.grad(var)?.expect("a gradient"))).collect::<Result<Vec<_>>>()?
    } else {
        let store = loss.backward()?;
        trained.map(|var| store.get(var).expect("a gradient").clone()).collect()
    };
    let running_mean = to_vec(blocks[1].norm.running_mean());
    Ok(Run { loss, gradients, running_mean, next_random: generator::state() })
}

#[test]
fn recomputed_gradients_are_the_same_bits() -> candle_amp::Result<()> {
    let _fork = seeded(1);
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for with_scaler in [false, true] {
            let kept = run(dtype, with_scaler, false)?;
            let recomputed = run(dtype, with_scaler, true)?;
            assert_same("loss", &recomputed.loss, &kept.loss);
            assert_eq!(recomputed.gradients.len(), kept.gradients.len());
            for (a, b) in recomputed.gradients.iter().zip(&kept.gradients) {
                assert_same(&format!("{dtype:?}, scaler {with_scaler}"), a, b);
                assert_eq!(a.dtype(), DType::F32);
            }
            assert_eq!(recomputed.running_mean, kept.running_mean, "statistics are averaged once");
            assert_eq!(recomputed.next_random, kept.next_random, "the generator goes on as before");
        }
    }
    Ok(())
}

/// Each recomputes the draws of its own, whatever the process's generator does meanwhile.
#[test]
fn dropout_is_the_same_the_second_time_inside_of_checkpoints_too() -> Result<()> {
    let _fork = seeded(2);
    let x = Var::from_tensor(&random(1, (4, 33), DType::F32))?;
    let drop = |x: &Tensor| ops::dropout(x, 0.5);
    let nested = move |x: &Tensor| checkpoint(drop, &drop(&checkpoint(drop, x)?)?);
    for f in
        [Box::new(drop) as Box<dyn Fn(&Tensor) -> Result<Tensor> + Send + Sync>, Box::new(nested)]
    {
        generator::manual_seed(3);
        let y = checkpoint(f, &x)?;
        generator::manual_seed(99);
        let before = generator::state();
        let store = ops::sum(&y)?.backward()?;
        assert_eq!(generator::state(), before);
        // Where an element was kept, its gradient is what it was multiplied by.
        let product = (store.get(&x).expect("a gradient") * x.as_tensor())?;
        assert_close("dropout", &product, &y, DType::F32, 2.0);
    }
    Ok(())
}

#[test]
fn only_the_input_of_a_checkpoint_is_kept() -> Result<()> {
    let w = Var::from_tensor(&random(1, (4, 4), DType::F32))?;
    let x = Var::from_tensor(&random(2, (3, 4), DType::F32))?;
    let calls = Arc::new(AtomicUsize::new(0));
    let deep = {
        let (w, calls) = (w.as_tensor().clone(), calls.clone());
        move |x: &Tensor| {
            calls.fetch_add(1, Ordering::Relaxed);
            (0..10).try_fold(x.clone(), |x, _| ops::tanh(&ops::matmul(&x, &w)?))
        }
    };
    // Other tests make and drop nodes meanwhile: count those of a graph by walking it.
    let kept = deep(&x)?;
    let recomputed = checkpoint(deep.clone(), &x)?;
    assert!(kept.sorted_nodes().len() > 20);
    let names: usize = recomputed.sorted_nodes().len();
    assert!(names <= 4, "{names} nodes: the output, its token, x and w");
    let exact = ops::sum(&kept)?.backward()?;
    assert_eq!(calls.load(Ordering::Relaxed), 2);
    let store = ops::sum(&recomputed)?.backward()?;
    assert_eq!(calls.load(Ordering::Relaxed), 3);
    for var in [&w, &x] {
        assert_same("gradient", store.get(var).unwrap(), exact.get(var).unwrap());
    }
    Ok(())
}

#[test]
fn checkpoints_nest() -> Result<()> {
    let w = Var::from_tensor(&random(1, (4, 4), DType::F32))?;
    let x = random(2, (3, 4), DType::F32);
    let inner = {
        let w = w.as_tensor().clone();
        move |x: &Tensor| ops::tanh(&ops::matmul(x, &w)?)
    };
    let outer = {
        let inner = inner.clone();
        move |x: &Tensor| checkpoint(inner.clone(), &checkpoint(inner.clone(), x)?)
    };
    let gradient = |y: Tensor| -> Result<Tensor> {
        Ok(ops::sum(&y)?.backward()?.get(&w).expect("a gradient").clone())
    };
    let nested = gradient(checkpoint(outer, &x)?)?;
    assert_same("nested", &nested, &gradient(inner(&inner(&x)?)?)?);
    Ok(())
}

#[test]
fn without_variables_or_gradients_there_is_nothing_to_keep() -> Result<()> {
    let x = Var::from_tensor(&random(2, (3, 4), DType::F32))?;
    let y = checkpoint(ops::relu, &x)?;
    let store = ops::sum(&y)?.backward()?;
    let expected: Vec<f64> = to_vec(&x).iter().map(|&x| f64::from(x > 0.0)).collect();
    assert_eq!(to_vec(store.get(&x).unwrap()), expected);
    assert!(!no_grad(|| checkpoint(ops::relu, &x))?.track_op());
    assert!(!checkpoint(ops::relu, &x.detach())?.track_op());
    // A constant that the function hands out stays the caller's.
    let constant = random(3, 5, DType::F32);
    let kept = constant.clone();
    let y = checkpoint(move |_| Ok(kept.clone()), &x)?;
    assert_same("constant", &y, &constant);
    assert_eq!(constant.elem_count(), 5);
    assert_eq!(to_vec(&constant).len(), 5);
    Ok(())
}

#[test]
fn what_a_function_has_captured_stays_the_caller_s() -> Result<()> {
    let w = Var::from_tensor(&random(1, (3, 4), DType::F32))?;
    let captured = ops::tanh(&w)?;
    let expected = to_vec(&captured);
    for view in
        [|x: &Tensor| Ok(x.clone()), |x: &Tensor| x.t()] as [fn(&Tensor) -> Result<Tensor>; 2]
    {
        let (kept, x) = (captured.clone(), random(2, 1, DType::F32));
        let y = checkpoint(move |_| view(&kept), &x)?;
        assert_eq!(to_vec(&captured), expected);
        assert_same("view", &y, &view(&captured.detach())?);
        let store = ops::sum(&y)?.backward()?;
        let exact = ops::sum(&captured)?.backward()?;
        assert_same("gradient", store.get(&w).unwrap(), exact.get(&w).unwrap());
    }
    Ok(())
}

#[test]
fn what_a_function_has_captured_of_candles_stays_the_caller_s_too() -> Result<()> {
    let w = Var::from_tensor(&random(1, (3, 4), DType::F32))?;
    let captured = w.tanh()?;
    let expected = to_vec(&captured);
    let kept = captured.clone();
    let y = checkpoint(move |_| Ok(kept.clone()), &random(2, 1, DType::F32))?;
    assert_eq!((to_vec(&captured), to_vec(&y)), (expected.clone(), expected));
    Ok(())
}

#[test]
fn a_function_that_changes_its_mind_is_an_error() -> Result<()> {
    let x = Var::from_tensor(&random(2, (3, 4), DType::F32))?;
    let calls = AtomicUsize::new(0);
    let fickle = move |x: &Tensor| match calls.fetch_add(1, Ordering::Relaxed) {
        0 => ops::relu(x),
        _ => ops::sum(x),
    };
    let y = checkpoint(fickle, &x)?;
    let error = ops::sum(&y)?.backward().unwrap_err().to_string();
    assert!(error.contains("must do the same both times"), "{error}");
    Ok(())
}

/// Checkpoints within one another are limited, and not those after one another.
#[test]
fn a_thread_recomputes_any_number_of_checkpoints() -> candle_amp::Result<()> {
    let x = Var::from_tensor(&random(1, (3, 4), DType::F32))?;
    for _ in 0..40 {
        let loss = ops::mean(&checkpoint(ops::tanh, &x)?)?;
        GradScaler::disabled().scale(&loss)?.backward()?;
    }
    Ok(())
}

/// A checkpoint within a checkpoint captures what the outer one has, which a pass goes through before: what that saved
/// is not freed under it.
#[test]
fn what_an_inner_function_has_captured_is_kept_for_it() -> candle_amp::Result<()> {
    let w = Var::from_tensor(&random(1, (3, 4), DType::F32))?;
    let h = ops::tanh(&w)?;
    let sum = h.sum_all()?; // candle's, so that candle chooses the order
    let outer = move |x: &Tensor| {
        let sum = sum.clone();
        checkpoint(move |x| x.sum_all()? + &sum, x)
    };
    let y = checkpoint(outer, &random(2, 3, DType::F32))?;
    let loss = ops::add(&y, &h.sum_all()?)?;
    let mut scaler = GradScaler::disabled();
    scaler.scale(&loss)?.backward()?;
    let exact = (1.0 - h.detach().sqr()?)?;
    assert_close("gradient", &scaler.grad(&w)?.unwrap(), &(exact * 2.0)?, DType::F32, 4.0);
    Ok(())
}

/// Nor is it missed, where the inner result is not used.
#[test]
fn what_no_result_needs_may_have_been_freed() -> candle_amp::Result<()> {
    let w = Var::from_tensor(&random(1, (3, 4), DType::F32))?;
    let v = Var::from_tensor(&random(2, (3, 4), DType::F32))?;
    let h = ops::tanh(&w)?;
    let outer = {
        let (h, v) = (h.clone(), v.clone());
        move |x: &Tensor| {
            let h = h.clone();
            checkpoint(move |x| ops::add(x, &h), x)?;
            ops::exp(&v)
        }
    };
    let y = checkpoint(outer, &random(3, (3, 4), DType::F32))?;
    let loss = (ops::sum(&y)? + h.mean_all()?)?;
    let mut scaler = GradScaler::disabled();
    scaler.scale(&loss)?.backward()?;
    assert_close("gradient", &scaler.grad(&v)?.unwrap(), &v.exp()?, DType::F32, 4.0);
    let exact = ((1.0 - h.detach().sqr()?)? * (1.0 / 12.0))?;
    assert_close("gradient", &scaler.grad(&w)?.unwrap(), &exact, DType::F32, 4.0);
    Ok(())
}

#[test]
fn what_has_been_freed_cannot_be_captured() -> candle_amp::Result<()> {
    let w = Var::from_tensor(&random(1, (3, 4), DType::F32))?;
    let h = ops::tanh(&w)?;
    GradScaler::disabled().scale(&ops::sum(&h)?)?.backward()?;
    let error = checkpoint(move |x| ops::add(x, &h), &random(3, (3, 4), DType::F32)).unwrap_err();
    assert!(error.to_string().contains("`tanh` has run backward already"), "{error}");
    Ok(())
}

/// A function may keep its result, as a hook does.
#[test]
fn what_a_function_keeps_of_its_result_stays_whole() -> Result<()> {
    let w = Var::from_tensor(&random(1, (3, 4), DType::F32))?;
    for of_candle in [false, true] {
        let kept = Arc::new(std::sync::Mutex::new(Vec::new()));
        let function = {
            let (kept, w) = (kept.clone(), w.clone());
            move |x: &Tensor| {
                let y = if of_candle { x.mul(&w)?.tanh()? } else { ops::tanh(&ops::mul(x, &w)?)? };
                kept.lock().unwrap().push(y.clone());
                Ok(y)
            }
        };
        let y = checkpoint(function, &random(2, (3, 4), DType::F32))?;
        let kept = kept.lock().unwrap();
        assert_same("what was kept", &kept[0].detach(), &y);
    }
    Ok(())
}
