//! Lesson 7, an operator of your own: `apply` casts its inputs by the policy, and adds it to the graph.

use candle_amp::autograd::{Backward, Gradient, Operator, apply};
use candle_amp::{Autocast, Cast, Op, ops};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Optimizer, SGD};

/// `ln(1 + x²)`, a loss that outliers do not dominate.
struct Cauchy;

impl Operator for Cauchy {
    type Saved = Tensor; // what backward needs
    fn op(&self) -> Op {
        Op::user("cauchy", Cast::Full) // in F32, whatever the scope
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Tensor)> {
        Ok(((inputs[0].sqr()? + 1.0)?.log()?, inputs[0].clone()))
    }

    fn backward(&self, ctx: &Backward<'_, Tensor>) -> Result<Vec<Option<Gradient>>> {
        let derivative = ((ctx.saved * 2.0)? / (ctx.saved.sqr()? + 1.0)?)?;
        Ok(vec![Some(Gradient::owned((derivative * ctx.gradient)?))])
    }
}

pub(crate) fn main() -> candle_amp::Result<()> {
    let data = Tensor::new(&[1.9f32, 2.0, 2.1, 50.0], &Device::Cpu)?;
    let (centre, amp) = (Var::zeros(1, DType::F32, &Device::Cpu)?, Autocast::new(DType::BF16));
    let mut sgd = SGD::new(vec![centre.clone()], 0.5)?;
    for _ in 0..50 {
        let loss = amp.scope(|| ops::mean(&apply(Cauchy, &[&ops::sub(&data, &centre)?])?))?;
        sgd.backward_step(&loss)?; // candle's own backward, or a scaler's
    }
    let (mean, centre) = (data.mean_all()?.to_scalar::<f32>()?, centre.to_vec1::<f32>()?[0]);
    println!("of 1.9, 2.0, 2.1 and 50.0, the mean is {mean}, the centre by this loss {centre:.2}");
    assert!((centre - 2.0).abs() < 0.1);
    Ok(())
}
