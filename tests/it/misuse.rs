//! What would give wrong gradients without a word: graphs from before a step, gradients of another shape, and
//! operators that mind the scope around them.

use candle_amp::autograd::{Backward, Gradient, Operator, apply};
use candle_amp::optim::{Sgd, SgdConfig};
use candle_amp::{Autocast, Cast, Error, GradScaler, MasterWeights, Op, Parameters, ops};
use candle_core::{DType, Result, Tensor, Var};
use candle_nn::{Optimizer, SGD};

use crate::util::{assert_same, random};

fn var(seed: u64, dtype: DType) -> Result<Var> {
    Var::from_tensor(&random(seed, (3, 3), dtype))
}

/// Steps `w` by a loss made after `loss`, and goes back through `loss` then.
fn after_a_step(w: &Var, optimizer: &str, loss: &Tensor) -> candle_amp::Result<GradScaler> {
    let other = ops::sum(&ops::mul(w, w)?)?.to_dtype(DType::F32)?;
    let mut scaler = GradScaler::disabled();
    scaler.scale(&other)?.backward()?;
    match optimizer {
        "Sgd" => {
            let config = SgdConfig { lr: 0.5, ..Default::default() };
            scaler.step(&mut Sgd::new(&Parameters::named([("w", w.clone())])?, config)?)?
        }
        "MasterWeights" => scaler.step(&mut MasterWeights::<SGD>::new(vec![w.clone()], 0.5)?)?,
        _ => {
            let parameters = Parameters::named([("w", w.clone())])?;
            scaler.step(&mut parameters.bind(&mut SGD::new(vec![w.clone()], 0.5)?))?
        }
    };
    scaler.update()?;
    scaler.scale(loss)?.backward()?;
    Ok(scaler)
}

#[test]
fn a_graph_from_before_a_step_is_an_error() -> candle_amp::Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::F64] {
        let x = random(7, (2, 3), dtype);
        for optimizer in ["Sgd", "MasterWeights", "SGD"] {
            type Model = fn(&Tensor, &Tensor) -> Result<Tensor>;
            let models: [(&str, Model); 5] = [
                ("itself", |x, w| ops::linear(&ops::linear(x, w, None)?, w, None)),
                ("a transpose", |_, w| ops::matmul(w, &w.t()?)),
                ("a part", |_, w| ops::matmul(&w.narrow(0, 1, 2)?, &w.t()?.narrow(1, 0, 2)?)),
                ("within a curve", |_, w| ops::gelu_tanh(w)),
                ("among four", |_, w| {
                    let (scale, shift) = (w.get(0)?, w.get(1)?);
                    ops::batch_norm_relu(w, Some(&scale), Some(&shift), Some(w), 1e-5)
                        .map(|(y, _)| y)
                }),
            ];
            for (what, model) in models {
                let w = var(1, dtype)?;
                let forward = || ops::sum(&model(&x, &w)?)?.to_dtype(DType::F32);
                let (loss, second) = (forward()?, forward()?);
                let by_scaler = after_a_step(&w, optimizer, &loss).err().map(|e| e.to_string());
                let by_candle = second.backward().err().map(|e| e.to_string());
                for error in [by_scaler, by_candle] {
                    let error = error.unwrap_or_default();
                    assert!(
                        error.contains("written in place since"),
                        "{optimizer} {dtype:?} {what}: {error}"
                    );
                }
                let mut scaler = GradScaler::disabled();
                assert!(scaler.scale(&loss)?.backward().is_err() && scaler.grad(&w)?.is_none());
                scaler.scale(&forward()?)?.backward()?;
                assert!(scaler.grad(&w)?.is_some(), "{optimizer} {dtype:?} {what}: forward again");
            }
        }
    }
    Ok(())
}

#[test]
fn a_graph_with_copies_of_what_is_stepped_goes_back() -> candle_amp::Result<()> {
    let (w, other, x) = (var(1, DType::F32)?, var(2, DType::F32)?, random(7, (2, 3), DType::F32));
    let amp = Autocast::new(DType::BF16);
    let forward = |w: &Tensor| -> Result<Tensor> {
        amp.scope(|| ops::sum(&ops::linear(&ops::linear(&x, w, None)?, w, None)?))
    };
    let gradient = |loss: &Tensor| Ok::<_, Error>(loss.backward()?.get(&w).cloned().expect("one"));
    let loss = forward(&w)?;
    let before = gradient(&loss)?;
    let scaler = after_a_step(&w, "Sgd", &loss)?;
    assert_same("cast before the step", &scaler.grad(&w)?.expect("one"), &before);
    assert!(gradient(&forward(&w)?)?.sub(&before)?.abs()?.max_all()?.to_scalar::<f32>()? > 0.01);

    // A step of another variable, and no step between two passes.
    let loss = ops::sum(&ops::matmul(&w, &w)?)?;
    let before = gradient(&loss)?;
    let scaler = after_a_step(&other, "Sgd", &loss)?;
    assert_same("another's step", &scaler.grad(&w)?.expect("one"), &before);
    Ok(())
}

#[test]
fn what_backward_does_not_read_may_be_stepped() -> candle_amp::Result<()> {
    let x = random(7, (2, 3), DType::F32);
    type Model = fn(&Tensor, &Tensor) -> Result<Tensor>;
    let models: [(&str, Model); 6] = [
        ("of data", |x, w| ops::linear(x, w, None)),
        ("a bias", |x, w| ops::linear(x, &w.detach(), Some(&w.get(0)?))),
        ("a sum", |_, w| ops::add(w, w)),
        ("a mean", |_, w| ops::mean_dims(w, 0)),
        ("rows", |_, w| ops::embedding(&Tensor::new(&[2u32, 0, 2], w.device())?, w)),
        ("of data, elementwise", |x, w| ops::mul(&x.get(0)?.broadcast_as((3, 3))?, w)),
    ];
    for optimizer in ["Sgd", "MasterWeights", "SGD"] {
        for (what, model) in models {
            let w = var(1, DType::F32)?;
            let forward = || ops::sum(&model(&x, &w)?);
            let mut scaler = GradScaler::disabled();
            scaler.scale(&forward()?)?.backward()?;
            let before = scaler.grad(&w)?.expect("one");
            let after = after_a_step(&w, optimizer, &forward()?)?.grad(&w)?.expect("one");
            assert_same(&format!("{optimizer}, {what}"), &after, &before);
        }
    }
    Ok(())
}

#[test]
fn features_that_are_computed_once_serve_every_step() -> candle_amp::Result<()> {
    let (frozen, head) = (var(1, DType::F32)?, var(2, DType::F32)?);
    let features = ops::gelu_tanh(&ops::linear(&frozen, &frozen, None)?)?;
    let (mut sgd, mut scaler) = (SGD::new(vec![head.clone()], 0.1)?, GradScaler::default());
    for _ in 0..3 {
        let loss = ops::mean(&ops::linear(&features, &head, None)?)?;
        scaler.scale(&loss)?.retain_graph().backward()?;
        assert!(!scaler.step(&mut sgd)?.skipped()?); // which is not told whose gradients it gets
        scaler.update()?;
    }
    Ok(())
}

#[test]
fn a_frozen_weight_that_is_stepped_is_seen() -> candle_amp::Result<()> {
    let (generator, critic, x) =
        (var(1, DType::F32)?, var(2, DType::F32)?, random(7, (2, 3), DType::F32));
    let forward =
        || ops::sum(&ops::linear(&ops::linear(&x, &generator, None)?, &critic.detach(), None)?);
    let step = |loss: &Tensor| after_a_step(&critic, "Sgd", loss);
    step(&forward()?).err(); // from here on it is known to be a variable
    let error = step(&forward()?).expect_err("a step in between").to_string();
    assert!(error.contains("written in place since"), "{error}");
    Ok(())
}

/// `Σ a b`, which calls `b`, that is not its own, its gradient of `a`.
struct Dot;

impl Operator for Dot {
    type Saved = Tensor;

    fn op(&self) -> Op {
        Op::user("dot", Cast::Keep)
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Tensor)> {
        Ok(((&inputs[0] * &inputs[1])?.sum_all()?, inputs[1].clone()))
    }

    fn backward(&self, ctx: &Backward<'_, Tensor>) -> Result<Vec<Option<Gradient>>> {
        Ok(vec![Some(Gradient::owned(ctx.saved.clone())), None])
    }
}

#[test]
fn a_gradient_that_an_activation_has_kept_is_not_written_over() -> Result<()> {
    let x = var(1, DType::F32)?;
    let gradient = |h: &Tensor, other: &Tensor| -> Result<Tensor> {
        let loss = apply(Dot, &[&ops::gelu_tanh(h)?, other])?;
        Ok(loss.backward()?.get(&x).expect("one").clone())
    };
    let h = ops::relu(&x)?;
    let copy = h.copy()?.detach();
    assert_same("its own input", &gradient(&h, &h)?, &gradient(&ops::relu(&x)?, &copy)?);
    Ok(())
}

#[test]
fn gradients_of_nothing_go_back() -> candle_amp::Result<()> {
    let (x, a) = (
        Var::zeros((2, 0, 4), DType::F32, &candle_core::Device::Cpu)?,
        random(1, (4, 4), DType::F32),
    );
    let curves = [
        ops::gelu_tanh,
        ops::silu,
        ops::relu,
        ops::exp,
        |x: &Tensor| ops::mul(x, x),
        |x: &Tensor| ops::add(x, x),
    ];
    for curve in curves {
        let h = ops::linear(&x, &a, None)?;
        let loss = ops::sum(&ops::linear(&ops::add(&curve(&h)?, &h)?, &a, None)?)?;
        let mut scaler = GradScaler::default();
        scaler.scale(&loss)?.backward()?;
        assert_eq!(scaler.grad(&x)?.expect("one").dims(), [2, 0, 4]);
    }
    Ok(())
}

/// `x`, with a gradient of the wrong shape.
struct Misshapen(&'static [usize]);

impl Operator for Misshapen {
    type Saved = ();

    fn op(&self) -> Op {
        Op::user("misshapen", Cast::Keep)
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, ())> {
        Ok((inputs[0].clone(), ()))
    }

    fn backward(&self, ctx: &Backward<'_, ()>) -> Result<Vec<Option<Gradient>>> {
        let gradient = Tensor::ones(self.0, ctx.gradient.dtype(), ctx.gradient.device())?;
        Ok(vec![Some(Gradient::owned(gradient))])
    }
}

#[test]
fn a_gradient_of_another_shape_is_an_error() -> candle_amp::Result<()> {
    for shape in [&[][..], &[3], &[9], &[1, 3, 3], &[2, 3], &[3, 4]] {
        let w = var(1, DType::F32)?;
        type Below = fn(&Tensor) -> Result<Tensor>;
        let below: [Below; 5] = [
            |w| Ok(w.clone()),
            |w| w * 2.0,
            |w| ops::relu(w),
            |w| ops::gelu_tanh(w),
            |w| ops::linear(w, w, None)?.reshape((3, 3)),
        ];
        for below in below {
            let loss = ops::sum(&apply(Misshapen(shape), &[&below(&w)?])?)?;
            let mut scaler = GradScaler::default();
            let error = scaler.scale(&loss)?.backward().expect_err("another shape").to_string();
            let said = format!(
                "backward of `misshapen` returned a gradient of shape {shape:?} for input 0"
            );
            assert!(error.contains(&said), "{error}");
            assert!(scaler.grad(&w)?.is_none());
            assert!(loss.backward().is_err());
        }
    }
    Ok(())
}

/// `a · b`, by operators that autocast would cast for.
struct Product;

impl Operator for Product {
    type Saved = (Tensor, Tensor);

    fn op(&self) -> Op {
        Op::user("product", Cast::Full)
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Self::Saved)> {
        assert_eq!(Autocast::current().dtype(), None);
        let (a, b) = (inputs[0].clone(), inputs[1].clone());
        Ok((ops::matmul(&a, &b)?, (a, b)))
    }

    fn backward(&self, ctx: &Backward<'_, Self::Saved>) -> Result<Vec<Option<Gradient>>> {
        assert_eq!(Autocast::current().dtype(), None);
        let (a, b) = ctx.saved;
        let of = |a: &Tensor, b: &Tensor| ops::matmul(a, b).map(|g| Some(Gradient::owned(g)));
        Ok(vec![of(ctx.gradient, &b.t()?)?, of(&a.t()?, ctx.gradient)?])
    }
}

#[test]
fn a_user_s_operator_is_the_same_in_every_scope() -> candle_amp::Result<()> {
    let (a, b) = (var(1, DType::F32)?, var(2, DType::F32)?);
    let forward = || ops::sum(&apply(Product, &[&a, &b])?);
    let amp = Autocast::new(DType::BF16);
    let loss = forward()?;
    let gradients = loss.backward()?;
    for (forward_in, backward_in) in [(true, true), (true, false), (false, true)] {
        let scoped = |within: bool| if within { amp.clone() } else { Autocast::disabled() };
        let there = scoped(forward_in).scope(forward)?;
        assert_same("loss", &there, &loss);
        let _guard = scoped(backward_in).enter();
        let store = there.backward()?;
        for (name, var) in [("a", &a), ("b", &b)] {
            assert_same(name, store.get(var).expect("one"), gradients.get(var).expect("one"));
        }
        assert_eq!(Autocast::current().dtype(), scoped(backward_in).dtype(), "restored");
    }
    Ok(())
}

#[test]
fn a_learning_rate_that_is_no_rate_is_an_error_at_the_step() -> candle_amp::Result<()> {
    let w = var(1, DType::F32)?;
    let before = w.copy()?;
    let mut sgd = Sgd::new(&Parameters::named([("w", w.clone())])?, SgdConfig::default())?;
    for (lr, said) in [(f64::NAN, "lr is NaN"), (-0.1, "lr is -0.1"), (f64::INFINITY, "lr is inf")]
    {
        sgd.set_learning_rate(lr);
        let mut scaler = GradScaler::default();
        scaler.scale(&ops::sum(&ops::mul(&w, &w)?)?)?.backward()?;
        let error = scaler.step(&mut sgd).expect_err("no rate").to_string();
        assert!(error.contains(said), "{error}");
        assert_same("the weights", &w, &before);
    }
    sgd.set_learning_rate(0.1);
    sgd.backward_step(&ops::sum(&ops::mul(&w, &w)?)?)?;
    assert!(w.sub(&before)?.abs()?.max_all()?.to_scalar::<f32>()? > 0.0);
    Ok(())
}

#[test]
fn dtypes_that_no_scope_casts_are_said_to_be() -> candle_amp::Result<()> {
    let (w, x) = (var(1, DType::F32)?, random(2, (3, 3), DType::F64));
    for (a, b) in [(&x, w.as_tensor()), (w.as_tensor(), &x)] {
        let error = Autocast::new(DType::F16).scope(|| ops::matmul(a, b)).unwrap_err().to_string();
        assert!(error.contains("no scope casts F64"), "{error}");
    }
    let right = w.argmax(1)?.sum_all()?;
    for mut scaler in [GradScaler::default(), GradScaler::disabled()] {
        let error = scaler.scale(&right).unwrap_err().to_string();
        assert!(error.contains("the loss is U32, expected F32 or F64"), "{error}");
    }
    Ok(())
}
