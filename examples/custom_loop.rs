//! What a loop may need beyond the quickstart: micro-batches, clipping, a schedule, two optimizers,
//! evaluation, a checkpoint, and an operator of one's own.

use candle_amp::autograd::{Backward, Gradient, Operator, apply};
use candle_amp::checkpoints::Checkpoint;
use candle_amp::{Autocast, Cast, GradScaler, Op, Parameters, ScaleConfig};
use candle_amp::{nn, no_grad, ops, random};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{AdamW, Optimizer, SGD, VarMap};

/// `x * sigmoid(x)`: computed in F32, given back in the dtype it came in.
struct Swish;

impl Operator for Swish {
    type Saved = Tensor;

    fn op(&self) -> Op {
        Op::user("swish", Cast::FullMath)
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Tensor)> {
        let x = &inputs[0]; // detached, and cast as the policy says
        Ok((x.to_dtype(DType::F32)?.silu()?.to_dtype(x.dtype())?, x.clone()))
    }

    fn backward(&self, ctx: &Backward<'_, Tensor>) -> Result<Vec<Option<Gradient>>> {
        let x = ctx.saved.to_dtype(DType::F32)?;
        let s = candle_nn::ops::sigmoid(&x)?;
        let slope = (&s * ((x * s.affine(-1.0, 1.0)?)? + 1.0)?)?; // s (1 + x (1 - s))
        // In the dtype at hand: what is wanted is another's business.
        Ok(vec![Some(Gradient::owned((slope * ctx.gradient.to_dtype(DType::F32)?)?))])
    }
}

/// Points on two interleaved spirals, and which of the two each is on.
fn spirals(n: u32) -> Result<(Tensor, Tensor)> {
    let point = |i: u32| {
        let (turn, side) = ((i / 2) as f32 / n as f32 * 8.0, 1.0 - 2.0 * (i % 2) as f32);
        vec![side * turn.cos() * (turn + 1.0) / 5.0, side * turn.sin() * (turn + 1.0) / 5.0]
    };
    let spiral = Tensor::from_iter((0..n).map(|i| i % 2), &Device::Cpu)?;
    Ok((Tensor::new((0..n).map(point).collect::<Vec<_>>(), &Device::Cpu)?, spiral))
}

fn main() -> candle_amp::Result<()> {
    let smoke = std::env::args().any(|arg| arg == "--smoke");
    let steps = if smoke { 30 } else { 600 };
    let (x, y) = spirals(256)?;
    random::manual_seed(1);
    let varmap = VarMap::new();
    let vb = nn::var_builder(&varmap, DType::F32, &Device::Cpu);
    let (body, head) = (nn::linear(2, 64, vb.pp("body"))?, nn::linear(64, 2, vb.pp("head"))?);
    let _forgotten = nn::linear(64, 2, vb.pp("spare"))?;
    let swish = |x: &Tensor| apply(Swish, &[x]);
    let model = nn::seq().add(body).add_fn(swish).add(head);
    let logits = |x: &Tensor| nn::Module::forward(&model, x);

    // Two optimizers of candle's. They keep their variables to themselves; `bind` tells the scaler
    // which they are, so that each steps, or skips, on account of its own gradients.
    let mut all = Parameters::from_varmap(&varmap);
    let body = all.filter(|name| name.starts_with("body."));
    let head = all.filter(|name| name.starts_with("head."));
    let mut adamw = AdamW::new_lr(body.vars(), 0.0)?;
    let mut sgd = SGD::new(head.vars(), 0.05)?;

    // A first scale that is too high, so that there is something to report.
    let high = 2f32.powi(27);
    let config = ScaleConfig { init_scale: high, max_scale: high, ..Default::default() };
    let mut scaler = GradScaler::new(config)?;
    let amp = Autocast::new(DType::F16);
    let mut taken = 0; // the schedule's clock: it stands still while steps are skipped
    for step in 0..steps {
        adamw.set_learning_rate(0.02 * ((taken + 1) as f64).min(20.0) / 20.0);
        for part in 0..4u32 {
            // Micro-batches: the gradients add up in the scaler, in F32.
            let rows = Tensor::arange_step(part, 256, 4, &Device::Cpu)?;
            let (x, y) = (x.index_select(&rows, 0)?, y.index_select(&rows, 0)?);
            let loss = amp.scope(|| ops::cross_entropy(&logits(&x)?, &y))?;
            scaler.scale(&(loss / 4.0)?)?.backward()?; // the mean over the parts
        }
        let norm = scaler.clip_grad_norm_of(&body, 1.0)?; // the true norm: it unscales first
        let missing = scaler.missing(&all); // before `update`, which forgets the gradients
        let outcome = scaler.step(&mut body.bind(&mut adamw))?;
        let _ = scaler.step(&mut head.bind(&mut sgd))?; // nothing hangs on whether it was skipped
        scaler.update()?;
        let scale = outcome.scale();
        if outcome.skipped()? {
            println!("step {step}: {}", outcome.report(&body)?);
        } else {
            taken += 1;
        }
        if step % 100 == 29 {
            let norm = norm.to_scalar::<f32>()?;
            println!("step {step}: norm {norm:.3}, scale {scale}, no gradient: {missing:?}");
        }
    }
    // Weights and scale, in one file. The moments of candle's optimizers cannot be read; those of
    // the crate's own would be a part more.
    let path = std::env::temp_dir().join(format!("custom-loop-{}.safetensors", std::process::id()));
    Checkpoint::new(taken).with("model", &all)?.with("scaler", &scaler)?.save(&path)?;
    let mut resumed = GradScaler::new(config)?;
    Checkpoint::open(&path)?.load(&mut [("model", &mut all), ("scaler", &mut resumed)])?;
    std::fs::remove_file(&path).map_err(candle_core::Error::from)?;
    assert_eq!(resumed.state(), scaler.state());
    println!("{taken} steps of {steps} taken; goes on at scale {}", resumed.current_scale());

    // Evaluation builds no graph. What does F16 cost? Deny it to the products, and see.
    for (name, amp) in [("F16", amp.clone()), ("F32", amp.deny(Op::Linear))] {
        let right = no_grad(|| amp.scope(|| logits(&x)))?.argmax(1)?.eq(&y)?;
        let accuracy = right.to_dtype(DType::F32)?.mean_all()?.to_scalar::<f32>()?;
        println!("accuracy with products in {name}: {accuracy:.3}");
        assert!(smoke || accuracy > 0.95);
    }
    Ok(())
}
