//! What a scaled loss frees as it goes back, and what it leaves for others.

use std::sync::{Arc, Barrier, Mutex};

use candle_amp::autograd::{Backward, Gradient, Operator, apply, checkpoint};
use candle_amp::error::GraphError;
use candle_amp::{Cast, Error, GradScaler, Op, ops};
use candle_core::{DType, Result, Tensor, Var};
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::util::{assert_same, random};

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    fn note(&self, what: &str, number: usize) {
        self.0.lock().unwrap().push(format!("{what} {number}"));
    }

    fn take(&self) -> String {
        std::mem::take(&mut *self.0.lock().unwrap()).join(", ")
    }
}

/// Returns its input, and notes when it goes back and when what it keeps is dropped.
struct Noted(usize, Log);

struct Kept(usize, Log);

impl Drop for Kept {
    fn drop(&mut self) {
        self.1.note("freed", self.0);
    }
}

impl Operator for Noted {
    type Saved = Kept;

    fn op(&self) -> Op {
        Op::user("noted", Cast::Keep)
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Kept)> {
        Ok((inputs[0].clone(), Kept(self.0, self.1.clone())))
    }

    fn backward(&self, ctx: &Backward<'_, Kept>) -> Result<Vec<Option<Gradient>>> {
        self.1.note(if ctx.last { "last" } else { "back" }, self.0);
        Ok(vec![Some(Gradient::shared(ctx.gradient.clone()))])
    }
}

fn noted(number: usize, log: &Log, x: &Tensor) -> Result<Tensor> {
    apply(Noted(number, log.clone()), &[x])
}

fn var() -> Result<Var> {
    Var::from_tensor(&random(1, (3, 5), DType::F32))
}

#[test]
fn an_operator_keeps_nothing_once_it_has_gone_back() -> candle_amp::Result<()> {
    let (v, log) = (var()?, Log::default());
    let loss = || ops::sum(&noted(2, &log, &noted(1, &log, &noted(0, &log, &v)?)?)?);
    // By itself, and through an operator of candle's.
    for freed in [loss()?, (loss()? * 2.0)?] {
        GradScaler::default().scale(&freed)?.backward()?;
        assert_eq!(log.take(), "last 2, freed 2, last 1, freed 1, last 0, freed 0");
        drop(freed);
        assert_eq!(log.take(), "");
    }

    let kept = loss()?;
    for _ in 0..2 {
        GradScaler::default().scale(&kept)?.retain_graph().backward()?;
        assert_eq!(log.take(), "back 2, back 1, back 0");
        kept.backward()?;
        assert_eq!(log.take(), "back 2, back 1, back 0", "by candle");
    }
    GradScaler::default().scale(&kept)?.backward()?;
    assert_eq!(log.take(), "last 2, freed 2, last 1, freed 1, last 0, freed 0");
    Ok(())
}

#[test]
fn a_checkpoint_frees_what_it_computes_anew() -> candle_amp::Result<()> {
    let (v, log) = (var()?, Log::default());
    let outside = noted(9, &log, &v)?;
    let block = {
        let (log, outside) = (log.clone(), outside.clone());
        move |x: &Tensor| noted(2, &log, &noted(1, &log, &ops::add(x, &outside)?)?)
    };
    let loss = ops::sum(&checkpoint(block.clone(), &checkpoint(block, &v)?)?)?;
    log.take();
    let again = "last 2, freed 2, last 1, freed 1, back 9";
    // Whether the rest is kept or not. What the block was given from outside is not the block's.
    GradScaler::default().scale(&loss)?.retain_graph().backward()?;
    assert_eq!(log.take(), [again, again].join(", "));
    GradScaler::default().scale(&loss)?.backward()?;
    assert_eq!(log.take(), [again, again].join(", "));
    Ok(())
}

/// Neither what candle computed in between, nor what that was computed from.
#[test]
fn a_checkpoint_with_operators_of_candle_s_keeps_nothing_of_its_first_pass()
-> candle_amp::Result<()> {
    let (v, log) = (var()?, Log::default());
    let block = {
        let log = log.clone();
        move |x: &Tensor| ops::relu(&(noted(0, &log, x)? * 2.0)?)
    };
    let loss = ops::sum(&checkpoint(block, &v)?)?;
    assert_eq!(log.take(), "freed 0");
    GradScaler::default().scale(&loss)?.backward()?;
    assert_eq!(log.take(), "last 0, freed 0");
    Ok(())
}

#[test]
fn what_another_loss_needs_stays() -> candle_amp::Result<()> {
    let (v, log) = (var()?, Log::default());
    let mut scaler = GradScaler::default();
    let shared = noted(0, &log, &v)?;
    let (one, other) = (noted(1, &log, &shared)?, noted(2, &log, &shared)?);
    let (one, other) = (ops::sum(&one)?, ops::sum(&other)?);
    scaler.scale(&one)?.backward()?;
    assert_eq!(log.take(), "last 1, freed 1, back 0");
    scaler.scale(&other)?.backward()?;
    assert_eq!(log.take(), "last 2, freed 2, last 0, freed 0");
    scaler.unscale()?;
    let gradient = scaler.grad(&v)?.expect("a gradient");
    assert_same("of both", &gradient, &(v.ones_like()? * 2.0)?);

    let shared = noted(0, &log, &v)?;
    let (one, other) = (noted(1, &log, &shared)?, noted(2, &log, &shared)?);
    drop(other);
    assert_eq!(log.take(), "freed 2");
    GradScaler::default().scale(&ops::sum(&one)?)?.backward()?;
    assert_eq!(log.take(), "last 1, freed 1, last 0, freed 0", "nobody else is left");
    Ok(())
}

#[test]
fn a_loss_that_was_freed_does_not_go_back() -> candle_amp::Result<()> {
    let (v, log) = (var()?, Log::default());
    let mut scaler = GradScaler::disabled();
    let features = noted(0, &log, &v)?;
    let loss = ops::sum(&features)?;
    scaler.scale(&loss)?.backward()?;
    let later = ops::sum(&ops::relu(&features)?)?;
    for (what, loss, freed) in [("again", &loss, "sum"), ("a later one", &later, "noted")] {
        let error = scaler.scale(loss)?.backward().expect_err(what);
        let says = |op| Error::Graph(GraphError::Freed { op }).to_string();
        assert!(says(freed).contains("retain_graph()"));
        assert!(error.to_string().contains(&says(freed)), "{what}: {error}");
        // As far as the scaler came, the later one is freed as well.
        let error = loss.backward().expect_err(what);
        assert!(error.to_string().contains(&says("sum")), "{what}, by candle: {error}");
    }
    let gradient = scaler.grad(&v)?.expect("a gradient");
    assert_same("only of the first", &gradient, &v.ones_like()?);
    assert_eq!(features.to_vec2::<f32>()?, v.to_vec2::<f32>()?, "it can be read");
    Ok(())
}

/// Several losses of one random graph: one after another, in any order, they have the gradients of their sum.
#[test]
fn losses_of_one_graph_go_back_in_any_order() -> candle_amp::Result<()> {
    for seed in 0..100 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let vars = [0, 1].map(|i| random(100 + i, (4, 4), DType::F64));
        let vars = vars.map(|t| Var::from_tensor(&t).unwrap());
        let log = Log::default();
        let mut pool: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
        let operators = rng.random_range(2..10);
        for i in 0..operators {
            let [a, b] = [(); 2].map(|()| pool[rng.random_range(0..pool.len())].clone());
            let y = match rng.random_range(0..4) {
                0 => ops::add(&a, &b)?,
                1 => ops::mul(&a, &b)?,
                2 => ops::softmax(&a, 1)?,
                _ => ops::relu(&a)?,
            };
            pool.push(noted(i, &log, &y)?);
        }
        let last = &pool[pool.len().saturating_sub(4).max(2)..];
        let mut losses = last.iter().map(ops::mean).collect::<Result<Vec<_>>>()?;
        let sum = losses[1..].iter().try_fold(losses[0].clone(), |sum, loss| sum + loss)?;
        let expected = sum.backward()?;
        drop((sum, pool));
        losses.shuffle(&mut rng);
        log.take();
        let mut scaler = GradScaler::disabled();
        for loss in &losses {
            scaler.scale(loss)?.backward()?;
        }
        for (i, v) in vars.iter().enumerate() {
            match (scaler.grad(v)?, expected.get(v)) {
                // Of numbers around 1, which may cancel.
                (Some(got), Some(want)) => {
                    let off = (got - want)?.abs()?.max_all()?.to_scalar::<f64>()?;
                    assert!(off <= 64.0 * f64::EPSILON, "{i} of {seed}: {off}");
                }
                (got, want) => assert_eq!((got.is_some(), want.is_some()), (false, false)),
            }
        }
        let kept = log.take();
        let freed = |i: &usize| kept.contains(&format!("freed {i}"));
        let last = |i: &usize| kept.contains(&format!("last {i}"));
        let back = |i: &usize| last(i) || kept.contains(&format!("back {i}"));
        assert!(
            (0..operators).all(|i| back(&i) == last(&i) && last(&i) <= freed(&i)),
            "{seed}: {kept}"
        );
    }
    Ok(())
}

/// Returns its input. Whoever drops what it keeps meets somebody else at the barrier, twice.
struct Parks(Arc<Barrier>);

struct Parked(Arc<Barrier>);

impl Drop for Parked {
    fn drop(&mut self) {
        self.0.wait();
        self.0.wait();
    }
}

impl Operator for Parks {
    type Saved = Parked;

    fn op(&self) -> Op {
        Op::user("parks", Cast::Keep)
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Parked)> {
        Ok((inputs[0].clone(), Parked(self.0.clone())))
    }

    fn backward(&self, ctx: &Backward<'_, Parked>) -> Result<Vec<Option<Gradient>>> {
        Ok(vec![Some(Gradient::shared(ctx.gradient.clone()))])
    }
}

/// A loss of another thread has sent its gradient on, needs its operators no more, and is stopped there.
#[test]
fn what_waits_on_another_thread_stays() -> candle_amp::Result<()> {
    let (v, log, barrier) = (var()?, Log::default(), Arc::new(Barrier::new(2)));
    let shared = noted(0, &log, &v)?;
    let one = ops::sum(&ops::relu(&shared)?)?;
    let other = ops::sum(&apply(Parks(barrier.clone()), &[&shared])?)?;
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| GradScaler::disabled().scale(&other)?.backward());
        barrier.wait();
        let result = GradScaler::disabled().scale(&one).and_then(|loss| loss.backward());
        let first = log.take();
        barrier.wait();
        let other = thread.join().unwrap();
        assert_eq!((first, log.take()), ("back 0".to_owned(), "last 0, freed 0".to_owned()));
        result.and(other)
    })
}

/// Returns its input. Who goes back through it waits for another that does.
struct Meets(Barrier);

impl Operator for Meets {
    type Saved = ();

    fn op(&self) -> Op {
        Op::user("meets", Cast::Keep)
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, ())> {
        Ok((inputs[0].clone(), ()))
    }

    fn backward(&self, ctx: &Backward<'_, ()>) -> Result<Vec<Option<Gradient>>> {
        self.0.wait();
        match ctx.last {
            true => candle_core::bail!("another thread is at it as well"),
            false => Ok(vec![Some(Gradient::shared(ctx.gradient.clone()))]),
        }
    }
}

#[test]
fn nobody_is_the_last_while_another_is_at_it() -> candle_amp::Result<()> {
    let v = var()?;
    let shared = apply(Meets(Barrier::new(2)), &[&v])?;
    let losses = [ops::sum(&ops::relu(&shared)?)?, ops::sum(&ops::relu(&shared)?)?];
    std::thread::scope(|scope| {
        let threads = losses.each_ref().map(|loss| {
            scope.spawn(|| -> candle_amp::Result<()> {
                GradScaler::disabled().scale(loss)?.backward()
            })
        });
        threads.into_iter().try_for_each(|thread| thread.join().unwrap())
    })
}

#[test]
fn losses_of_one_graph_go_back_on_several_threads() -> candle_amp::Result<()> {
    for round in 0..50 {
        let (v, log) = (var()?, Log::default());
        let trunk = (0..10).try_fold(v.as_tensor().clone(), |x, i| noted(i, &log, &x))?;
        let losses = (0..4).map(|_| ops::sum(&ops::relu(&trunk)?)).collect::<Result<Vec<_>>>()?;
        let expected = losses[0].backward()?.get(&v).expect("a gradient").clone();
        log.take();
        std::thread::scope(|scope| {
            let threads: Vec<_> = losses
                .iter()
                .map(|loss| {
                    scope.spawn(|| -> candle_amp::Result<()> {
                        let mut scaler = GradScaler::disabled();
                        scaler.scale(loss)?.backward()?;
                        let gradient = scaler.grad(&v)?.expect("a gradient");
                        assert_same("on a thread", &gradient, &expected);
                        Ok(())
                    })
                })
                .collect();
            threads.into_iter().try_for_each(|thread| thread.join().unwrap())
        })?;
        let kept = log.take();
        assert_eq!(kept.matches("freed").count(), 10, "{round}: {kept}");
    }
    Ok(())
}
