//! Operators that add what waits for their input to the gradient they make.

use std::sync::{Arc, Mutex};

use candle_amp::autograd::{Backward, Gradient, Operator, apply};
use candle_amp::{Cast, GradScaler, Op, ScaleConfig, ops};
use candle_core::{D, DType, Result, Tensor, Var};

use crate::util::{FLOATS, assert_close, random};

/// Doubles its input, and notes the shape of what waits for it.
struct Double(Arc<Mutex<Vec<Option<Vec<usize>>>>>);

impl Operator for Double {
    type Saved = ();

    fn op(&self) -> Op {
        Op::user("double", Cast::Keep)
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, ())> {
        Ok(((&inputs[0] * 2.0)?, ()))
    }

    fn backward(&self, ctx: &Backward<'_, ()>) -> Result<Vec<Option<Gradient>>> {
        let pending = ctx.take_pending(0)?;
        assert!(ctx.take_pending(0)?.is_none() && ctx.take_pending(1)?.is_none());
        let shape = pending.as_ref().map(|pending| pending.tensor().dims().to_vec());
        self.0.lock().unwrap().push(shape);
        let gradient = (ctx.gradient * 2.0)?;
        let sum = match pending {
            Some(pending) => (gradient + pending.tensor())?,
            None => gradient,
        };
        Ok(vec![Some(Gradient::owned(sum))])
    }
}

fn gradient(loss: &Tensor, v: &Var, by_candle: bool) -> candle_amp::Result<Tensor> {
    let gradient = if by_candle {
        loss.backward()?.get(v).cloned()
    } else {
        let config = ScaleConfig { init_scale: 256.0, ..Default::default() };
        let mut scaler = GradScaler::new(config)?;
        scaler.scale(loss)?.backward()?;
        scaler.grad(v)?
    };
    Ok(gradient.expect("a gradient"))
}

#[test]
fn whoever_goes_back_later_finds_what_others_have_sent() -> candle_amp::Result<()> {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let double = |x: &Tensor| apply(Double(seen.clone()), &[x]);
    let v = Var::from_tensor(&random(1, (4, 3), DType::F64))?;
    let weight = random(2, (4, 3), DType::F64);
    let loss = || -> Result<Tensor> {
        let h = ops::mul(&v, &v)?;
        let viewed = double(&h.reshape((2, 6))?)?.reshape((4, 3))?; // last of all to go back
        let whole = double(&h)?;
        let twice = ops::add(&double(&v)?, &h)?; // of a variable, where nothing waits
        let sum = ops::add(&ops::add(&viewed, &whole)?, &twice)?;
        ops::sum(&ops::mul(&sum, &weight)?)
    };
    // 5 v² + 2 v
    let slope = (v.as_tensor() * 10.0)?.affine(1.0, 2.0)?.mul(&weight)?;
    let shapes = [None, Some(vec![4, 3]), Some(vec![2, 6])];
    for by_candle in [true, false] {
        let loss = loss()?;
        let gradient = gradient(&loss, &v, by_candle)?;
        assert_close("5 v² + 2 v", &gradient, &slope, DType::F64, 16.0);
        assert_eq!(std::mem::take(&mut *seen.lock().unwrap()), shapes);
    }
    Ok(())
}

#[test]
fn a_norm_before_a_branch_adds_the_residual() -> candle_amp::Result<()> {
    let ours = |x: &Tensor, centred: bool| match centred {
        true => ops::layer_norm(x, None, None, 1e-5),
        false => ops::rms_norm(x, None, 1e-5),
    };
    let candles = |x: &Tensor, centred: bool| -> Result<Tensor> {
        let mean = x.mean_keepdim(D::Minus1)?;
        let x = if centred { x.broadcast_sub(&mean)? } else { x.clone() };
        x.broadcast_div(&x.sqr()?.mean_keepdim(D::Minus1)?.affine(1.0, 1e-5)?.sqrt()?)
    };
    for dtype in FLOATS {
        let v = Var::from_tensor(&random(1, (7, 33), dtype))?;
        let weight = random(2, (7, 33), dtype);
        let wide = weight.to_dtype(if dtype == DType::F64 { dtype } else { DType::F32 })?;
        for centred in [true, false] {
            // Of what is normalised, the residual comes on top, before or after; and another norm of it.
            let ours = |residual_first: bool| -> Result<Tensor> {
                let x = ops::mul(&v, &weight)?;
                let residual = ops::relu(&x)?;
                let (mut a, mut b) = (ours(&x, centred)?, residual);
                if residual_first {
                    std::mem::swap(&mut a, &mut b);
                }
                let sum = ops::add(&ops::add(&a, &b)?, &ours(&x, centred)?)?;
                ops::sum(&ops::mul(&sum.to_dtype(wide.dtype())?, &wide)?)
            };
            let exact = {
                let (v, weight) = (v.to_dtype(DType::F64)?, weight.to_dtype(DType::F64)?);
                let v = Var::from_tensor(&v)?;
                let x = (v.as_tensor() * &weight)?.to_dtype(dtype)?.to_dtype(DType::F64)?;
                let sum = (x.relu()? + (candles(&x, centred)? * 2.0)?)?;
                gradient(&(sum * weight)?.sum_all()?, &v, true)?
            };
            for (residual_first, by_candle) in
                [(false, false), (true, false), (false, true), (true, true)]
            {
                let gradient = gradient(&ours(residual_first)?, &v, by_candle)?;
                let what = format!("{dtype:?} {centred} {residual_first} {by_candle}");
                assert_close(&what, &gradient, &exact, dtype, 4.0);
            }
        }
    }
    Ok(())
}
