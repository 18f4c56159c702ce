//! The token form: operators among candle's own, in any graph, and nothing left behind.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use candle_amp::autograd::{Backward, Gradient, Operator, apply};
use candle_amp::{Cast, GradScaler, Op, ScaleConfig, ops};
use candle_core::{DType, Device, Result, Tensor, Var};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::util::{FLOATS, assert_close, assert_same, random, to_vec};

#[derive(Clone, Copy, PartialEq)]
enum Operators {
    Candles,
    Mixed,
    /// But for views of the same elements in the same order, which are candle's.
    Ours,
}

/// Builds the same random graph out of such operators.
fn random_graph(seed: u64, vars: &[Var], operators: Operators) -> Result<Tensor> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut pool: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
    let all_ours = operators == Operators::Ours;
    let half = Tensor::full(0.5, (4, 4), &Device::Cpu)?;
    for _ in 0..rng.random_range(3..14) {
        let a = pool[rng.random_range(0..pool.len())].clone();
        let b = pool[rng.random_range(0..pool.len())].clone();
        // Drawn for all, so that all draw the same graph.
        let (kind, ours) = (rng.random_range(0..11), rng.random_bool(0.6));
        let ours = all_ours || ours && operators == Operators::Mixed;
        pool.push(match kind {
            1 if all_ours => ops::mul(&ops::matmul(&a, &b)?, &half)?,
            5 if ours => ops::mul(&a, &b)?,
            6 if all_ours => ops::sub(&half, &a)?,
            6 => (&half - a)?,
            7 => ops::relu(&a.reshape((2, 1, 8))?)?.reshape((4, 4))?,
            8 if all_ours => ops::softmax(&a, 0)?,
            8 if ours => ops::softmax(&a.t()?, 1)?.t()?,
            8 => candle_nn::ops::softmax(&a.t()?, 1)?.t()?,
            0 if ours => ops::add(&a, &b)?,
            0 => (a + b)?,
            1 if ours => (ops::matmul(&a, &b)? * 0.5)?,
            1 => (a.matmul(&b)? * 0.5)?,
            2 if ours => ops::relu(&a)?,
            2 => a.relu()?,
            3 if ours => ops::linear(&a, &b, None)?,
            3 => a.matmul(&b.t()?)?,
            4 if ours => ops::softmax(&a, 1)?,
            4 => candle_nn::ops::softmax(&a, 1)?,
            10 if ours => ops::silu(&a)?,
            10 => a.silu()?,
            9 if ours => ops::rms_norm(&a, None, 0.1)?,
            9 => a.broadcast_div(&a.sqr()?.mean_keepdim(1)?.affine(1.0, 0.1)?.sqrt()?)?,
            _ => (a * b)?,
        });
    }
    let last = pool.iter().rev().take(3);
    if all_ours {
        let means = last.map(|t| ops::mean(&ops::mul(t, t)?)).collect::<Result<Vec<_>>>()?;
        return ops::add(&ops::add(&means[0], &means[1])?, &means[2]);
    }
    let last = last.map(|t| t.sqr()?.mean_all()).collect::<Result<Vec<_>>>()?;
    Tensor::stack(&last, 0)?.sum_all()
}

#[test]
fn random_graphs_have_candles_gradients() -> Result<()> {
    for seed in 0..300 {
        let var = |i| Var::from_tensor(&random(seed * 10 + i, (4, 4), DType::F64));
        let vars = [var(0)?, var(1)?, var(2)?];
        let candles = random_graph(seed, &vars, Operators::Candles)?.backward()?;
        for operators in [Operators::Mixed, Operators::Ours] {
            let ours = random_graph(seed, &vars, operators)?;
            let first = ours.backward()?;
            let second = ours.backward()?;
            let config = ScaleConfig { init_scale: 1024.0, ..Default::default() };
            let mut scaler = GradScaler::new(config)?;
            let reached = vars.iter().any(|var| candles.get(var).is_some());
            if reached {
                scaler.scale(&ours)?.backward()?;
            }
            for (i, var) in vars.iter().enumerate() {
                let what = format!("seed {seed}, variable {i}");
                let scalers = scaler.grad(var)?;
                match (first.get(var), candles.get(var)) {
                    (Some(ours), Some(candles)) => {
                        assert_close(&what, ours, candles, DType::F64, 1e4);
                        assert_same(&what, second.get(var).unwrap(), ours);
                        assert_close(&what, &scalers.unwrap(), candles, DType::F64, 1e4);
                    }
                    (None, None) => assert!(scalers.is_none()),
                    (ours, candles) => panic!("{what}: {} / {}", ours.is_some(), candles.is_some()),
                }
            }
        }
    }
    Ok(())
}

#[test]
fn an_output_used_by_both_kinds_of_operators_gets_both_gradients() -> Result<()> {
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        // Odd, for none is 0, where relu's gradient is anybody's choice.
        let v = ((random(1, 9, DType::F64) * 4.0)?.round()? * 2.0)? + 1.0;
        let v = Var::from_tensor(&v?.to_dtype(dtype)?)?;
        let y = ops::add(&v, &v)?;
        let loss = ops::sum(&ops::add(&ops::relu(&y)?, &(y.sqr()? + y.affine(3.0, 0.0)?)?)?)?;
        let reference = {
            let v64 = Var::from_tensor(&v.detach().to_dtype(DType::F64)?)?;
            let y = (v64.as_tensor() * 2.0)?;
            let loss = ((y.relu()? + y.sqr()?)? + (&y * 3.0)?)?.sum_all()?;
            loss.backward()?.get(&v64).unwrap().clone()
        };
        // Small integers: exact in every dtype.
        let got = loss.backward()?.get(&v).unwrap().to_dtype(DType::F64)?;
        assert_same(&format!("{dtype:?}"), &got, &reference);
    }
    Ok(())
}

/// The sum of any number of inputs, each times its position.
struct WeightedSum;

impl Operator for WeightedSum {
    type Saved = usize;

    fn op(&self) -> Op {
        Op::user("weighted_sum", Cast::Promote)
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, usize)> {
        let mut sum = inputs[0].zeros_like()?;
        for (i, input) in inputs.iter().enumerate() {
            sum = (sum + (input * (i + 1) as f64)?)?;
        }
        Ok((sum, inputs.len()))
    }

    fn backward(&self, ctx: &Backward<'_, usize>) -> Result<Vec<Option<Gradient>>> {
        let gradient = |i: usize| (ctx.gradient * (i + 1) as f64).map(|g| Some(Gradient::owned(g)));
        (0..*ctx.saved).map(gradient).collect()
    }
}

#[test]
fn operators_take_any_number_of_inputs_of_any_kind() -> Result<()> {
    for n in 1..=12 {
        let vars: Vec<Var> =
            (0..n).map(|i| Var::from_tensor(&random(i, 5, DType::F32))).collect::<Result<_>>()?;
        // A variable, an operator's output, a candle output, a constant, and so on around.
        let input = |(i, var): (usize, &Var)| match i % 4 {
            0 => Ok(var.as_tensor().clone()),
            1 => ops::add(var, var),
            2 => var.affine(3.0, 0.0),
            _ => Ok(var.detach()),
        };
        let inputs: Vec<Tensor> = vars.iter().enumerate().map(input).collect::<Result<_>>()?;
        let y = apply(WeightedSum, &inputs.iter().collect::<Vec<_>>())?;
        let grads = y.sum_all()?.backward()?;
        for (i, var) in vars.iter().enumerate() {
            let factor = [1.0, 2.0, 3.0, 0.0][i % 4] * (i + 1) as f64;
            match grads.get(var) {
                Some(g) => assert_same(&format!("{i} of {n}"), g, &(var.ones_like()? * factor)?),
                None => assert_eq!(factor, 0.0, "{i} of {n}"),
            }
        }
    }
    Ok(())
}

/// Returns its own input, and fails backward as often as told, or panics.
struct Fails {
    left: AtomicUsize,
    panics: bool,
}

impl Operator for Fails {
    type Saved = ();

    fn op(&self) -> Op {
        Op::user("fails", Cast::Keep)
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, ())> {
        Ok((inputs[0].clone(), ()))
    }

    fn backward(&self, ctx: &Backward<'_, ()>) -> Result<Vec<Option<Gradient>>> {
        let left = self.left.load(Relaxed);
        if left > 0 {
            self.left.store(left - 1, Relaxed);
            assert!(!self.panics, "told to panic");
            candle_core::bail!("told to fail")
        }
        Ok(vec![Some(Gradient::shared(ctx.gradient.clone()))])
    }
}

#[test]
fn a_backward_that_failed_leaves_nothing_for_the_next() -> Result<()> {
    let v = Var::from_tensor(&random(1, 5, DType::F32))?;
    let y = ops::add(&v, &v)?;
    let expected = ops::sum(&ops::add(&ops::add(&v, &v)?, &ops::relu(&ops::add(&v, &v)?)?)?)?;
    let expected = expected.backward()?;
    for (panics, scaled) in [(false, false), (false, true), (true, false), (true, true)] {
        let fails = apply(Fails { left: AtomicUsize::new(2), panics }, &[&y])?;
        // Two ways back to `y`: when the one fails, the other has left its gradient there.
        let loss = ops::sum(&ops::add(&fails, &ops::relu(&y)?)?)?;
        let gradient = || -> Result<Option<Tensor>> {
            if !scaled {
                return Ok(loss.backward()?.get(&v).cloned());
            }
            let mut scaler = GradScaler::default();
            scaler.scale(&loss)?.retain_graph().backward()?;
            Ok(scaler.grad(&v)?)
        };
        for _ in 0..2 {
            let outcome = catch_unwind(AssertUnwindSafe(gradient));
            assert_eq!(outcome.is_err(), panics);
            assert!(!matches!(outcome, Ok(Ok(_))), "{panics} {scaled}");
        }
        let what = format!("third time, panics {panics}, scaled {scaled}");
        assert_same(&what, &gradient()?.expect("a gradient"), expected.get(&v).unwrap());
    }
    Ok(())
}

#[test]
fn an_operator_that_returns_its_input_does_not_take_its_storage() -> Result<()> {
    let v = Var::from_tensor(&random(1, 5, DType::F32))?;
    let before = v.to_vec1::<f32>()?;
    let y = apply(Fails { left: AtomicUsize::new(0), panics: false }, &[&v])?;
    assert_eq!(v.to_vec1::<f32>()?, before);
    assert_eq!(y.to_vec1::<f32>()?, before);
    v.set(&v.zeros_like()?)?;
    assert_eq!(y.to_vec1::<f32>()?, before, "the output is a value of its own");
    Ok(())
}

#[test]
fn graphs_are_built_and_walked_on_several_threads_at_once() -> Result<()> {
    let v = Var::from_tensor(&random(1, (16, 16), DType::F32))?;
    let shared = ops::relu(&ops::matmul(&v, &v)?)?;
    let loss = |x: &Tensor| ops::mean(&ops::add(&ops::matmul(x, x)?, &x.sqr()?)?);
    let expected = loss(&shared)?.backward()?.get(&v).unwrap().clone();
    std::thread::scope(|scope| {
        let work = || -> Result<()> {
            for _ in 0..20 {
                let grads = loss(&shared)?.backward()?;
                assert_same("on a thread", grads.get(&v).unwrap(), &expected);
            }
            Ok(())
        };
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|t| t.join().unwrap())
    })
}

/// Counts live outputs of its own, so that tests running beside it do not matter.
#[test]
fn nothing_is_alive_after_drop() -> Result<()> {
    struct Counted;
    static ALIVE: Mutex<i32> = Mutex::new(0);
    struct Alive;
    impl Alive {
        fn new() -> Self {
            *ALIVE.lock().unwrap() += 1;
            Self
        }
    }
    impl Drop for Alive {
        fn drop(&mut self) {
            *ALIVE.lock().unwrap() -= 1;
        }
    }
    impl Operator for Counted {
        type Saved = Alive;
        const KEEPS_OUTPUT: bool = true;
        fn op(&self) -> Op {
            Op::user("counted", Cast::Keep)
        }
        fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Alive)> {
            Ok((inputs[0].affine(2.0, 0.0)?, Alive::new()))
        }
        fn backward(&self, ctx: &Backward<'_, Alive>) -> Result<Vec<Option<Gradient>>> {
            Ok(vec![Some(Gradient::owned((ctx.gradient * 2.0)?))])
        }
    }
    let v = Var::from_tensor(&random(1, 5, DType::F32))?;
    let mut x = v.as_tensor().clone();
    for i in 0..10 {
        x = apply(Counted, &[&x])?;
        if i % 3 == 1 {
            x = (x.affine(1.0, 0.5)? + ops::relu(&x)?)?;
        }
    }
    let loss = ops::sum(&x)?;
    let grads = loss.backward()?;
    assert_eq!(*ALIVE.lock().unwrap(), 10);
    drop((x, loss));
    assert_eq!(*ALIVE.lock().unwrap(), 0, "what operators saved outlived the graph");
    assert!(grads.get(&v).is_some());
    assert!(!candle_amp::no_grad(|| apply(Counted, &[&v]))?.track_op());
    assert_eq!(*ALIVE.lock().unwrap(), 0, "saved under no_grad");
    Ok(())
}

#[test]
fn a_constant_needs_no_graph() -> Result<()> {
    let x = random(1, (3, 3), DType::F32);
    assert!(!ops::matmul(&x, &x)?.track_op());
    let v = Var::from_tensor(&x)?;
    let grads = ops::sum(&ops::matmul(&x, &v)?)?.backward()?;
    assert!(grads.get(&v).is_some());
    assert!(grads.get(&x).is_none(), "a gradient nobody wants was computed");
    assert_eq!(grads.get(&v).unwrap().device().location(), Device::Cpu.location());
    Ok(())
}

/// Hands out a view of a part of what it computed, last dimension first.
struct Turn;

impl Operator for Turn {
    type Saved = Vec<usize>;

    fn op(&self) -> Op {
        Op::user("turn", Cast::Keep)
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Vec<usize>)> {
        let double = inputs[0].affine(2.0, 0.0)?;
        Ok((double.narrow(0, 1, double.dim(0)? - 1)?.t()?, inputs[0].dims().to_vec()))
    }

    fn backward(&self, ctx: &Backward<'_, Vec<usize>>) -> Result<Vec<Option<Gradient>>> {
        let part = ctx.gradient.t()?.affine(2.0, 0.0)?.pad_with_zeros(0, 1, 0)?;
        assert_eq!(part.dims(), ctx.saved);
        Ok(vec![Some(Gradient::shared(part.t()?.contiguous()?.t()?))])
    }
}

#[test]
fn an_output_may_be_a_view() -> Result<()> {
    for dtype in FLOATS {
        let x = Var::from_tensor(&random(1, (4, 3), dtype))?;
        let y = apply(Turn, &[&x])?;
        let expected = (x.narrow(0, 1, 3)?.t()? * 2.0)?;
        assert_same("output", &y, &expected);
        let weights = random(2, (3, 3), dtype);
        let gradient = |y: &Tensor| -> Result<Tensor> {
            let store = (y * &weights)?.sum_all()?.backward()?;
            Ok(store.get(&x).expect("a gradient").clone())
        };
        assert_same("gradient", &gradient(&y)?, &gradient(&expected)?);
    }
    Ok(())
}

/// The same numbers, and a count of how often their gradient came.
struct Counted(Arc<AtomicUsize>);

impl Operator for Counted {
    type Saved = ();

    fn op(&self) -> Op {
        Op::user("counted", Cast::Keep)
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, ())> {
        Ok((inputs[0].clone(), ()))
    }

    fn backward(&self, ctx: &Backward<'_, ()>) -> Result<Vec<Option<Gradient>>> {
        self.0.fetch_add(1, Relaxed);
        Ok(vec![Some(Gradient::shared(ctx.gradient.clone()))])
    }
}

#[test]
fn each_operator_goes_back_once_when_all_its_consumers_have() -> Result<()> {
    let x = Var::from_tensor(&random(1, 5, DType::F32))?;
    let counts = [(); 3].map(|()| Arc::new(AtomicUsize::new(0)));
    let counted = |i: usize, x: &Tensor| apply(Counted(counts[i].clone()), &[x]);
    // Each output has a consumer that was made next, and one that was made last.
    let a = counted(0, &x)?;
    let b = counted(1, &ops::relu(&a)?)?;
    let c = counted(2, &ops::mul(&b, &a)?)?;
    let loss = ops::sum(&ops::add(&ops::add(&c, &b)?, &a)?)?;
    let mut scaler = GradScaler::default();
    scaler.scale(&loss)?.backward()?;
    assert_eq!(counts.map(|count| count.load(Relaxed)), [1; 3]);
    Ok(())
}

/// Sends its input no gradient.
struct Stop;

impl Operator for Stop {
    type Saved = ();

    fn op(&self) -> Op {
        Op::user("stop", Cast::Keep)
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, ())> {
        Ok((inputs[0].affine(3.0, 0.5)?, ()))
    }

    fn backward(&self, _: &Backward<'_, ()>) -> Result<Vec<Option<Gradient>>> {
        Ok(vec![None])
    }
}

#[test]
fn an_operator_without_a_gradient_may_follow_candles() -> candle_amp::Result<()> {
    let v = Var::from_tensor(&random(1, 5, DType::F32))?;
    let loss = || ops::sum(&apply(Stop, &[&v.sqr()?])?)? + v.sum_all()?;
    let grads = loss()?.backward()?;
    assert_eq!(to_vec(grads.get(&v).expect("it has one")), [1.0; 5]);
    let mut scaler = GradScaler::disabled();
    scaler.scale(&loss()?)?.backward()?;
    assert_eq!(to_vec(&scaler.grad(&v)?.expect("it has one")), [1.0; 5]);
    Ok(())
}

/// The sum of its inputs, and a note of the dtypes that their gradients are wanted in.
struct Noted(Arc<Mutex<Vec<Option<DType>>>>);

impl Operator for Noted {
    type Saved = ();

    fn op(&self) -> Op {
        Op::user("noted", Cast::Keep)
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, ())> {
        let sum = inputs[1..].iter().try_fold(inputs[0].clone(), |sum, input| sum + input)?;
        Ok((sum, ()))
    }

    fn backward(&self, ctx: &Backward<'_, ()>) -> Result<Vec<Option<Gradient>>> {
        *self.0.lock().unwrap() = ctx.wants.to_vec();
        let gradient = |want: &Option<DType>| {
            want.map(|dtype| ctx.gradient.to_dtype(dtype).map(Gradient::shared)).transpose()
        };
        ctx.wants.iter().map(gradient).collect()
    }
}

/// What a scaler collects is not rounded. What candle's operators go on with has their dtype.
#[test]
fn only_the_gradients_of_variables_are_wanted_in_f32() -> candle_amp::Result<()> {
    for dtype in [DType::F16, DType::BF16] {
        let v = Var::from_tensor(&random(1, 5, dtype))?;
        let of_candle = |factor| v.affine(factor, 0.0);
        let kinds = [v.as_tensor().clone(), of_candle(2.0)?, ops::add(&v, &v)?, v.detach()];
        let same = Some(dtype);
        let (scalers, candles) = ([Some(DType::F32), same, same, None], [same, same, same, None]);
        // candle's custom ops take three: with more that are tracked, candle's tensors get a node each.
        for times in [1, 2] {
            let inputs: Vec<&Tensor> = kinds.iter().cycle().take(4 * times).collect();
            let wants = Arc::new(Mutex::new(Vec::new()));
            let loss = ops::sum(&apply(Noted(wants.clone()), &inputs)?)?;
            loss.backward()?;
            assert_eq!(*wants.lock().unwrap(), candles.repeat(times), "candle's own");
            GradScaler::disabled().scale(&loss)?.retain_graph().backward()?;
            assert_eq!(*wants.lock().unwrap(), scalers.repeat(times), "a scaler's");
        }
    }
    Ok(())
}
