//! Backward within backward, and what a failed one leaves.

use std::panic::{AssertUnwindSafe, catch_unwind};

use candle_amp::autograd::{Backward, Gradient, Operator, apply, checkpoint};
use candle_amp::{
    Autocast, Cast, GradScaler, Op, Parameters, Result, ScaleConfig, nn, no_grad, ops,
};
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Shape, Tensor, Var};
use candle_nn::{Optimizer, RNN, VarMap};

use crate::util::random;

fn var(seed: u64, shape: &[usize], dtype: DType) -> Result<Var> {
    Ok(Var::from_tensor(&random(seed, shape, dtype))?)
}

fn values(gradient: Option<Tensor>) -> Result<Vec<f32>> {
    Ok(gradient.expect("a gradient").flatten_all()?.to_vec1()?)
}

/// Of 128 times 1,024, which is infinite in F16.
#[test]
fn a_checkpoint_of_many_variables_has_f32_gradients() -> Result<()> {
    let of = |shape: &[usize]| -> Result<Var> {
        let half = Tensor::full(0.5f32, shape, &Device::Cpu)?.to_dtype(DType::F16)?;
        Ok(Var::from_tensor(&half)?)
    };
    let (w1, b1, w2, b2) = (of(&[2, 2])?, of(&[2])?, of(&[2, 2])?, of(&[2])?);
    let x = Tensor::ones((128, 2), DType::F16, &Device::Cpu)?;
    let variables = [w1.clone(), b1.clone(), w2.clone(), b2.clone()];
    let block = move |x: &Tensor| ops::linear(&ops::linear(x, &w1, Some(&b1))?, &w2, Some(&b2));
    let run = |y: Tensor| -> Result<Vec<Vec<f32>>> {
        let loss = (ops::sum(&y.to_dtype(DType::F32)?)? * (1.0 / 64.0))?;
        let mut scaler = GradScaler::default();
        scaler.scale(&loss)?.backward()?;
        variables.iter().map(|var| values(scaler.grad(var)?)).collect()
    };
    let (plain, checkpointed) = (run(block(&x)?)?, run(checkpoint(block, &x)?)?);
    assert_eq!(plain[3], [2.0, 2.0]);
    assert_eq!(plain, checkpointed);
    Ok(())
}

/// The gradients of the sum of `y`, which no rounding to the dtype of the variables has reached.
fn has_f32_gradients(varmap: &VarMap, y: &Tensor) -> Result<()> {
    let (dtype, scale) = (y.dtype(), 1024.0);
    let mut scaler = GradScaler::new(ScaleConfig::constant(scale))?;
    scaler.scale(&ops::sum(&y.to_dtype(DType::F32)?)?)?.backward()?;
    for (name, var) in Parameters::from_varmap(varmap).iter() {
        let gradient = scaler.grad(var)?.expect("a gradient");
        assert_eq!(gradient.dtype(), DType::F32, "{name}");
        let values = gradient.flatten_all()?.to_vec1::<f32>()?;
        assert!(values.iter().all(|x| x.is_finite()), "{name}: {values:?}");
        let scaled = values.iter().map(|x| x * scale);
        let rounded = |x: f32| match dtype {
            DType::F16 => half::f16::from_f32(x).to_f32(),
            _ => half::bf16::from_f32(x).to_f32(),
        };
        assert!(scaled.clone().any(|x| x != rounded(x)), "{name} was rounded to {dtype:?}");
    }
    Ok(())
}

#[test]
fn an_lstm_of_16_bit_variables_has_f32_gradients() -> Result<()> {
    for dtype in [DType::F16, DType::BF16] {
        let varmap = VarMap::new();
        let lstm =
            nn::lstm(3, 4, Default::default(), nn::var_builder(&varmap, dtype, &Device::Cpu))?;
        let states = lstm.seq(&random(7, (2, 5, 3), dtype))?;
        has_f32_gradients(&varmap, &lstm.states_to_tensor(&states)?)?;
    }
    Ok(())
}

#[test]
fn a_gru_of_16_bit_variables_has_f32_gradients() -> Result<()> {
    for dtype in [DType::F16, DType::BF16] {
        let varmap = VarMap::new();
        let gru = nn::gru(3, 4, Default::default(), nn::var_builder(&varmap, dtype, &Device::Cpu))?;
        let states = gru.seq(&random(7, (2, 5, 3), dtype))?;
        has_f32_gradients(&varmap, &gru.states_to_tensor(&states)?)?;
    }
    Ok(())
}

/// gelu, whose backward builds a graph and runs backward through it.
struct Own;

impl Operator for Own {
    type Saved = Tensor;

    fn op(&self) -> Op {
        Op::user("own", Cast::Keep)
    }

    fn forward(&self, inputs: &[Tensor]) -> candle_core::Result<(Tensor, Tensor)> {
        Ok((ops::gelu_tanh(&inputs[0])?, inputs[0].clone()))
    }

    fn backward(&self, ctx: &Backward<'_, Tensor>) -> candle_core::Result<Vec<Option<Gradient>>> {
        let x = Var::from_tensor(ctx.saved)?;
        let y = ops::sum(&ops::mul(&ops::gelu_tanh(&x)?, ctx.gradient)?)?;
        let gradient = y.backward()?.remove(&x);
        assert!(gradient.is_some(), "the inner backward has its own gradients");
        Ok(vec![gradient.map(Gradient::owned)])
    }
}

#[test]
fn a_users_backward_may_run_backward() -> Result<()> {
    let w = var(11, &[5], DType::F32)?;
    let h = ops::mul(&w, &w)?;
    let loss = ops::sum(&ops::add(&apply(Own, &[&h])?, &h)?)?;
    let plain = ops::sum(&ops::add(&ops::gelu_tanh(&h)?, &h)?)?;
    let expected = values(plain.backward()?.get(&w).cloned())?;
    assert_eq!(values(loss.backward()?.get(&w).cloned())?, expected);
    assert_eq!(values(no_grad(|| loss.backward())?.get(&w).cloned())?, expected);
    for through_candle in [false, true] {
        let loss = if through_candle { (&loss * 1.0)? } else { loss.clone() };
        let mut scaler = GradScaler::disabled();
        scaler.scale(&loss)?.retain_graph().backward()?;
        assert_eq!(values(scaler.grad(&w)?)?, expected);
    }
    Ok(())
}

/// A candle operator whose backward runs one through the crate's operators.
struct Inner;

impl CustomOp1 for Inner {
    fn name(&self) -> &'static str {
        "inner"
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((s.clone(), l.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let x = Var::from_tensor(&x.detach())?;
        let y = ops::sum(&ops::mul(&x, &grad.detach())?)?;
        Ok(y.backward()?.remove(&x))
    }
}

/// Nobody can tell the crate that candle's operator has begun a pass of its own.
#[test]
fn a_nested_backward_of_candles_operators_is_refused() -> Result<()> {
    let w = var(13, &[4], DType::F32)?;
    let loss = ops::sum(&ops::mul(&w, &w)?.apply_op1(Inner)?)?;
    let expected: Vec<f32> = w.to_vec1::<f32>()?.iter().map(|x| 2.0 * x).collect();
    assert_eq!(values(loss.backward()?.get(&w).cloned())?, expected);
    let mut scaler = GradScaler::disabled();
    let error = scaler.scale(&loss)?.backward().expect_err("it would collect the inner gradients");
    assert!(error.to_string().contains("autograd::Operator"), "{error}");
    assert!(scaler.grad(&w)?.is_none());
    Ok(())
}

#[test]
fn a_checkpoint_does_not_mind_no_grad_at_backward() -> Result<()> {
    let w = var(17, &[4, 4], DType::F32)?;
    let block = {
        let w = w.clone();
        move |x: &Tensor| ops::tanh(&ops::matmul(x, &w)?)
    };
    let x = random(18, (2, 4), DType::F32);
    let loss = ops::sum(&checkpoint(block, &x)?)?;
    let expected = values(loss.backward()?.get(&w).cloned())?;
    assert_eq!(values(no_grad(|| loss.backward())?.get(&w).cloned())?, expected);
    Ok(())
}

/// candle has no gradient for this pooling. What had arrived before that must not be added to the next one's.
#[test]
fn a_candle_operator_that_fails_leaves_no_gradients() -> Result<()> {
    let w = Var::ones((3, 3), DType::F32, &Device::Cpu)?;
    let h = ops::relu(&w)?;
    let pool = h.reshape((1, 1, 3, 3))?.max_pool2d_with_stride(2, 1)?.sum_all()?;
    let mut scaler = GradScaler::disabled();
    let loss = ops::add(&pool, &ops::sum(&h)?)?;
    assert!(scaler.scale(&loss)?.retain_graph().backward().is_err());
    scaler.scale(&ops::sum(&h)?)?.backward()?;
    assert_eq!(values(scaler.grad(&w)?)?, [1.0; 9]);
    Ok(())
}

/// The same under candle's own backward, whose end nobody tells the crate.
#[test]
fn a_candle_operator_that_fails_under_candle_leaves_no_gradients() -> Result<()> {
    let w = Var::ones((3, 3), DType::F32, &Device::Cpu)?;
    let h = ops::relu(&w)?;
    let pool = h.reshape((1, 1, 3, 3))?.max_pool2d_with_stride(2, 1)?.sum_all()?;
    let fails = [ops::add(&pool, &ops::sum(&h)?)?, ops::add(&ops::sum(&h)?, &pool)?];
    for failing in fails {
        assert!(failing.backward().is_err());
        // Through the node that has a gradient from before, and through candle's operators only.
        let through = ops::sum(&h)?.backward()?;
        assert_eq!(values(through.get(&w).cloned())?, [1.0; 9]);
        assert!(failing.backward().is_err());
        let by_candle = (&h * 2.0)?.sum_all()?.backward()?;
        assert_eq!(values(by_candle.get(&w).cloned())?, [2.0; 9]);
    }
    Ok(())
}

/// Several passes of candle's in turns, on graphs that share nodes.
#[test]
fn candle_s_passes_do_not_mix() -> Result<()> {
    let w = var(21, &[3], DType::F32)?;
    let h = ops::mul(&w, &w)?;
    let branches = [ops::sum(&ops::exp(&h)?)?, (ops::sum(&ops::exp(&h)?)? * 1.0)?];
    let expected = values(branches[0].backward()?.get(&w).cloned())?;
    for _ in 0..3 {
        for branch in &branches {
            assert_eq!(values(branch.backward()?.get(&w).cloned())?, expected);
        }
    }
    // Two branches of one loss, whose parts candle walks one after the other.
    let both = (&branches[0] + &branches[1])?;
    let twice: Vec<f32> = expected.iter().map(|x| 2.0 * x).collect();
    for (got, want) in values(both.backward()?.get(&w).cloned())?.iter().zip(twice) {
        assert!((got - want).abs() <= 4.0 * f32::EPSILON * want.abs(), "{got} {want}");
    }
    Ok(())
}

/// Backward reads the statistics that forward had.
#[test]
fn evaluation_keeps_its_statistics() -> Result<()> {
    let norm = nn::batch_norm(2, 1e-5, nn::var_builder(&VarMap::new(), DType::F32, &Device::Cpu))?;
    let x = Var::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu)?;
    let loss = ops::sum(&norm.forward_eval(&x)?)?;
    let before = values(loss.backward()?.get(&x).cloned())?;
    norm.forward_train(&Tensor::new(&[[0f32, 0.0], [100.0, 100.0]], &Device::Cpu)?)?;
    assert_eq!(values(loss.backward()?.get(&x).cloned())?, before);
    Ok(())
}

/// candle takes what is rounded for a constant. A gradient for what is computed from it would stay among the first ones,
/// as if their pass were under way.
#[test]
fn candle_goes_back_again_while_its_first_gradients_are_held() -> Result<()> {
    let (v, w) = (var(23, &[4], DType::F32)?, var(24, &[4], DType::F32)?);
    let steps = ops::exp(&v.round()?)?;
    let loss = ops::sum(&ops::mul(&steps, &w)?)?;
    let first = loss.backward()?;
    let second = loss.backward()?;
    for store in [first, second] {
        assert_eq!(values(store.get(&w).cloned())?, steps.to_vec1::<f32>()?);
        assert!(store.get(&v).is_none());
    }
    Ok(())
}

/// How a backward pass within another ends.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ends {
    Well,
    WithAnError,
    WithAPanic,
}

/// Returns its input. Its backward ends so.
struct Ending(Ends);

impl Operator for Ending {
    type Saved = ();

    fn op(&self) -> Op {
        Op::user("ending", Cast::Keep)
    }

    fn forward(&self, inputs: &[Tensor]) -> candle_core::Result<(Tensor, ())> {
        Ok((inputs[0].clone(), ()))
    }

    fn backward(&self, ctx: &Backward<'_, ()>) -> candle_core::Result<Vec<Option<Gradient>>> {
        match self.0 {
            Ends::Well => Ok(vec![Some(Gradient::shared(ctx.gradient.clone()))]),
            Ends::WithAnError => candle_core::bail!("told to fail"),
            Ends::WithAPanic => panic!("told to panic"),
        }
    }
}

/// A candle operator whose backward runs one of a scaler, through candle's operators too, and does not mind how that
/// ends.
struct InnerScaled(Ends);

impl CustomOp1 for InnerScaled {
    fn name(&self) -> &'static str {
        "inner scaled"
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((s.clone(), l.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let x = Var::from_tensor(&x.detach())?;
        let y = (ops::sum(&apply(Ending(self.0), &[&x])?)? * 1.0)?;
        let mut scaler = GradScaler::disabled();
        let end = catch_unwind(AssertUnwindSafe(|| scaler.scale(&y)?.backward()));
        let end = match end {
            Ok(Ok(())) => Ends::Well,
            Ok(Err(_)) => Ends::WithAnError,
            Err(_) => Ends::WithAPanic,
        };
        assert_eq!(end, self.0);
        Ok(Some(grad.clone()))
    }
}

/// The outer pass has sent one gradient to `h` by then, and sends another.
#[test]
fn a_pass_goes_on_however_a_scaler_s_within_it_ends() -> Result<()> {
    let w = var(25, &[4], DType::F32)?;
    let expected: Vec<f32> = w.to_vec1::<f32>()?.iter().map(|x| 2.0 * (2.0 * x)).collect();
    for end in [Ends::Well, Ends::WithAnError, Ends::WithAPanic] {
        let h = ops::mul(&w, &w)?;
        let (inner, beside) = (ops::sum(&h.apply_op1(InnerScaled(end))?)?, ops::sum(&h)?);
        for loss in [(&inner + &beside)?, (&beside + &inner)?] {
            assert_eq!(values(loss.backward()?.get(&w).cloned())?, expected, "candle's, {end:?}");
            let mut scaler = GradScaler::disabled();
            scaler.scale(&loss)?.retain_graph().backward()?;
            assert_eq!(values(scaler.grad(&w)?)?, expected, "a scaler's, {end:?}");
        }
    }
    Ok(())
}

/// A candle operator whose backward runs one from the tensor that it has.
struct InnerFrom(Tensor);

impl CustomOp1 for InnerFrom {
    fn name(&self) -> &'static str {
        "inner from"
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((s.clone(), l.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        self.0.backward()?;
        Ok(Some(grad.clone()))
    }
}

/// candle lists the tensor that an operator of this crate has below its output. Who goes back from there, within a pass
/// that has a gradient on its way there, takes that away.
#[test]
fn an_operator_does_not_go_back_twice_in_a_pass() -> Result<()> {
    let w = var(27, &[4], DType::F32)?;
    let h = ops::mul(&w, &w)?;
    let below = h.sorted_nodes()[1].clone();
    let (inner, beside) = (ops::sum(&h.apply_op1(InnerFrom(below))?)?, ops::sum(&h)?);
    // candle goes back through the second operand first.
    let error = (inner + beside)?.backward().expect_err("a part of the gradient is elsewhere");
    assert!(error.to_string().contains("autograd::Operator"), "{error}");
    Ok(())
}

/// `x²` whose backward runs one of a scaler through the crate's operators, for its own gradient.
struct InnerSquare;

impl CustomOp1 for InnerSquare {
    fn name(&self) -> &'static str {
        "inner square"
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let squares = s.as_slice::<f32>()?.iter().map(|x| x * x).collect();
        Ok((CpuStorage::F32(squares), l.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let x = Var::from_tensor(&x.detach())?;
        let y = ops::sum(&ops::linear(
            &ops::mul(&x, &x)?,
            &Tensor::eye(4, DType::F32, x.device())?,
            None,
        )?)?;
        let mut scaler = GradScaler::disabled();
        let slope = scaler.scale(&y).and_then(|y| y.backward()).and_then(|()| scaler.grad(&x));
        let slope = slope.map_err(candle_core::Error::wrap)?.expect("a gradient");
        Ok(Some((slope * grad)?))
    }
}

#[test]
fn the_caller_s_scopes_do_not_reach_a_candle_operator_s_backward() -> Result<()> {
    // In BF16, products of these would be rounded.
    let w = Var::new(&[[1.001f32, -2.003, 0.3001, 5.017]], &Device::Cpu)?;
    let loss = || -> Result<Tensor> { Ok((ops::sum(&w.apply_op1(InnerSquare)?)? * 1.0)?) };
    let expected: Vec<f32> = w.flatten_all()?.to_vec1::<f32>()?.iter().map(|x| 2.0 * x).collect();
    for in_scope in [false, true] {
        let (loss, mut scaler) = (loss()?, GradScaler::disabled());
        let scaled = scaler.scale(&loss)?;
        match in_scope {
            true => Autocast::new(DType::BF16).scope(|| scaled.backward())?,
            false => no_grad(|| scaled.backward())?,
        }
        assert_eq!(values(scaler.grad(&w)?)?, expected);
    }
    Ok(())
}

/// `x`, with a gradient that claims the storage of the one it was given.
struct StraightThrough;

impl Operator for StraightThrough {
    type Saved = ();

    fn op(&self) -> Op {
        Op::user("straight through", Cast::Keep)
    }

    fn forward(&self, inputs: &[Tensor]) -> candle_core::Result<(Tensor, ())> {
        Ok((inputs[0].copy()?, ()))
    }

    fn backward(&self, ctx: &Backward<'_, ()>) -> candle_core::Result<Vec<Option<Gradient>>> {
        Ok(vec![Some(Gradient::owned(ctx.gradient.clone()))])
    }
}

/// `s`, `p` and `q` are given one gradient. The first claims it for `h`, where `q`'s is added, and `p` has it yet to receive.
#[test]
fn what_a_users_operator_claims_of_others_is_not_written_over() -> Result<()> {
    let (w, u) = (var(31, &[64], DType::F32)?, var(32, &[64], DType::F32)?);
    let run = |through: &dyn Fn(&Tensor) -> candle_core::Result<Tensor>| -> Result<Vec<Vec<f32>>> {
        let h = ops::mul(&w, &w)?;
        let (p, q) = (ops::exp(&u)?, ops::gelu_tanh(&h)?);
        let s = through(&h)?;
        let loss = ops::sum(&ops::add(&ops::add(&s, &p)?, &q)?)?;
        let mut scaler = GradScaler::disabled();
        scaler.scale(&loss)?.backward()?;
        [&w, &u].into_iter().map(|var| values(scaler.grad(var)?)).collect()
    };
    let expected = run(&|h| ops::mul(h, &h.ones_like()?))?;
    assert_eq!(run(&|h| apply(StraightThrough, &[h]))?, expected);
    Ok(())
}

/// `Σ a b`, whose gradient of `a` claims the storage of `b`.
struct ClaimsOperand;

impl Operator for ClaimsOperand {
    type Saved = Tensor;

    fn op(&self) -> Op {
        Op::user("claims operand", Cast::Keep)
    }

    fn forward(&self, inputs: &[Tensor]) -> candle_core::Result<(Tensor, Tensor)> {
        Ok(((&inputs[0] * &inputs[1])?.sum_all()?, inputs[1].clone()))
    }

    fn backward(&self, ctx: &Backward<'_, Tensor>) -> candle_core::Result<Vec<Option<Gradient>>> {
        Ok(vec![Some(Gradient::owned(ctx.saved.clone())), None])
    }
}

/// candle's optimizers are given gradients multiplied in place.
#[test]
fn a_frozen_operand_is_not_unscaled() -> Result<()> {
    let (w, frozen) = (var(33, &[8], DType::F32)?, random(34, 8, DType::F32));
    let before = frozen.to_vec1::<f32>()?;
    let mut scaler = GradScaler::new(ScaleConfig { init_scale: 1024.0, ..Default::default() })?;
    let mut sgd = candle_nn::SGD::new(vec![w.clone()], 0.5)?;
    let loss = apply(ClaimsOperand, &[&w, &frozen])?;
    scaler.scale(&loss)?.backward()?;
    scaler.step(&mut sgd)?;
    assert_eq!(frozen.to_vec1::<f32>()?, before);
    Ok(())
}
