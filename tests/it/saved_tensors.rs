//! Tensors that an operator keeps besides variables, and what a checkpoint reads again, written before backward.

use candle_amp::autograd::{Backward, Gradient, Operator, apply, checkpoint};
use candle_amp::checkpoints::Checkpoint;
use candle_amp::optim::{Ema, EmaConfig};
use candle_amp::{Cast, GradScaler, MasterWeights, Op, Parameters, nn, ops};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{ModuleT, SGD};

use crate::bad_input::assert_says;
use crate::util::{assert_same, random, to_vec};

const MODIFIED: &str = "its old values are gone";
const RECOMPUTED: &str = "`checkpoint`, whose function read a tensor that was written in place";

fn var(seed: u64, shape: &[usize]) -> Result<Var> {
    Var::from_tensor(&random(seed, shape, DType::F32))
}

/// Runs backward by a scaler, and by candle from another loss, both of which have to say `what`.
fn assert_refused(losses: [Tensor; 2], what: &str) {
    let [by_scaler, by_candle] = losses;
    assert_says(GradScaler::disabled().scale(&by_scaler).and_then(|loss| loss.backward()), &[what]);
    assert_says(by_candle.backward(), &[what]);
}

/// The gradient of `v` by a scaler.
fn gradient(loss: &Tensor, v: &Var) -> candle_amp::Result<Tensor> {
    let mut scaler = GradScaler::disabled();
    scaler.scale(loss)?.backward()?;
    Ok(scaler.grad(v)?.expect("a gradient"))
}

fn norm() -> Result<nn::BatchNorm> {
    let varmap = nn::VarMap::new();
    nn::batch_norm(3, 1e-5, nn::var_builder(&varmap, DType::F32, &Device::Cpu))
}

#[test]
fn running_statistics_that_an_operator_read_are_not_averaged_unnoticed() -> candle_amp::Result<()> {
    let (norm, x, v) = (norm()?, random(1, (5, 3), DType::F32), var(2, &[5, 3])?);
    let loss = || ops::sum(&ops::mul(&v, &norm.running_var().broadcast_as((5, 3))?)?);
    let losses = [loss()?, loss()?];
    norm.forward_train(&x)?;
    assert_refused(losses, MODIFIED);
    gradient(&loss()?, &v)?;
    Ok(())
}

/// A plain evaluation keeps its statistics. One that is recomputed would take others.
#[test]
fn a_checkpoint_of_an_evaluation_is_refused_after_a_training_step() -> candle_amp::Result<()> {
    let (norm, x, v) = (norm()?, random(1, (5, 3), DType::F32), var(2, &[5, 3])?);
    let loss = || {
        let norm = norm.clone();
        ops::sum(&ops::square(&checkpoint(move |x| norm.forward_eval(x), &v)?)?)
    };
    let losses = [loss()?, loss()?];
    norm.forward_train(&x)?;
    assert_refused(losses, RECOMPUTED);
    let plain = gradient(&ops::sum(&ops::square(&norm.forward_eval(&v)?)?)?, &v)?;
    assert_same("with the new statistics", &gradient(&loss()?, &v)?, &plain);
    Ok(())
}

/// Statistics are averaged in the first pass alone: an evaluation before that would see others when it is recomputed,
/// and one after it sees the same.
#[test]
fn training_and_evaluation_in_one_checkpoint() -> candle_amp::Result<()> {
    let v = var(2, &[5, 3])?;
    let block = |norm: &nn::BatchNorm, first: bool| {
        let norm = norm.clone();
        move |x: &Tensor| norm.forward_t(&norm.forward_t(x, first)?, !first)
    };
    let weighed = |y: Tensor| ops::sum(&ops::mul(&y, &random(4, (5, 3), DType::F32))?);
    let plain = gradient(&weighed(block(&norm()?, true)(&v)?)?, &v)?;
    let recomputed = gradient(&weighed(checkpoint(block(&norm()?, true), &v)?)?, &v)?;
    assert_same("training first", &recomputed, &plain);
    let loss = || weighed(checkpoint(block(&norm()?, false), &v)?);
    assert_refused([loss()?, loss()?], RECOMPUTED);
    Ok(())
}

/// What a teacher computes with, whose weights are an average.
#[test]
fn an_average_that_an_operator_read_is_not_updated_unnoticed() -> candle_amp::Result<()> {
    let (w, x) = (var(1, &[3, 3])?, var(2, &[5, 3])?);
    let parameters = Parameters::named([("w", w.clone())])?;
    let mut ema = Ema::new(&parameters, EmaConfig { decay: 0.5, ..Default::default() })?;
    let loss = |ema: &Ema| ops::sum(&ops::linear(&x, ema.average(&w).expect("it has one"), None)?);
    let losses = [loss(&ema)?, loss(&ema)?];
    ema.update()?;
    assert_refused(losses, MODIFIED);
    gradient(&loss(&ema)?, &x)?;
    Ok(())
}

#[test]
fn a_master_that_an_operator_read_is_not_stepped_unnoticed() -> candle_amp::Result<()> {
    let half = Var::from_tensor(&random(1, (3, 3), DType::BF16))?;
    let mut masters = MasterWeights::<SGD>::new(vec![half.clone()], 0.5)?;
    let master = masters.master(&half).expect("it has one").clone();
    let loss = || ops::sum(&ops::mul(&master, &master)?);
    let losses = [loss()?, loss()?];
    let mut scaler = GradScaler::disabled();
    scaler.scale(&ops::sum(&half)?.to_dtype(DType::F32)?)?.backward()?;
    scaler.step(&mut masters)?;
    assert_refused(losses, MODIFIED);
    gradient(&loss()?, &master)?;
    Ok(())
}

/// Writes to `variables` what they hold already, as a checkpoint that is loaded does.
fn reload(variables: &[&Var]) -> candle_amp::Result<()> {
    let names = ["a", "b"].into_iter().zip(variables.iter().map(|&var| var.clone()));
    let mut parameters = Parameters::named(names)?;
    let (id, thread) = (std::process::id(), std::thread::current().id());
    let file = format!("candle-amp-saved-{id}-{thread:?}.safetensors");
    let path = std::env::temp_dir().join(file.replace(['(', ')'], "-"));
    Checkpoint::new(1).with("model", &parameters)?.save(&path)?;
    Checkpoint::open(&path)?.load(&mut [("model", &mut parameters)])?;
    Ok(std::fs::remove_file(path).map_err(candle_core::Error::from)?)
}

#[test]
fn angles_that_were_written_are_noticed() -> candle_amp::Result<()> {
    let (cos, sin, v) = (var(1, &[5, 2])?, var(2, &[5, 2])?, var(3, &[1, 2, 5, 4])?);
    for written in [&cos, &sin] {
        let plain = || ops::sum(&ops::rope(&v, &cos, &sin)?);
        let block = || {
            let (cos, sin) = (cos.as_detached_tensor(), sin.as_detached_tensor());
            ops::sum(&checkpoint(move |x| ops::rope(x, &cos, &sin), &v)?)
        };
        let (plains, blocks) = ([plain()?, plain()?], [block()?, block()?]);
        reload(&[written])?;
        assert_refused(plains, MODIFIED);
        assert_refused(blocks, RECOMPUTED);
        gradient(&plain()?, &v)?;
    }
    Ok(())
}

#[test]
fn integers_that_were_written_are_noticed() -> candle_amp::Result<()> {
    let ids = Var::from_tensor(&Tensor::new(&[1u32, 0, 2], &Device::Cpu)?)?;
    let is = Var::from_tensor(&Tensor::new(&[1u8, 0, 1], &Device::Cpu)?)?;
    let v = var(3, &[3, 3])?;
    type Model = fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>;
    let models: [(&str, Model); 5] = [
        ("embedding", |ids, _, v| ops::embedding(ids, v)),
        ("where_cond", |_, is, v| ops::where_cond(is, &v.get(0)?, &v.get(1)?)),
        ("cross_entropy", |ids, _, v| ops::cross_entropy(v, ids)),
        ("nll", |ids, _, v| ops::nll(&ops::log_softmax(v, 1)?, ids)),
        ("linear_cross_entropy", |ids, _, v| ops::linear_cross_entropy(v, v, None, ids)),
    ];
    for (what, model) in models {
        let loss = || ops::sum(&model(&ids, &is, &v)?);
        let losses = [loss()?, loss()?];
        let before = to_vec(&gradient(&loss()?, &v)?);
        reload(&[&ids, &is])?;
        assert_refused(losses, MODIFIED);
        assert_eq!(to_vec(&gradient(&loss()?, &v)?), before, "{what}");
    }
    Ok(())
}

/// The derivative of a sum reads neither operand. What comes after it in a checkpoint does read the sum.
#[test]
fn what_only_the_forward_pass_reads_counts_in_a_checkpoint() -> candle_amp::Result<()> {
    let (bias, v) = (var(1, &[3, 3])?, var(2, &[3, 3])?);
    let frozen = bias.as_detached_tensor();
    let plain = || ops::sum(&ops::relu(&ops::add(&v, &bias)?)?);
    let block = |bias: &Tensor| {
        let bias = bias.clone();
        ops::sum(&checkpoint(move |x| ops::relu(&ops::add(x, &bias)?), &v)?)
    };
    let expected = gradient(&plain()?, &v)?;
    let (kept, blocks) = (plain()?, [block(&bias)?, block(&frozen)?]);
    reload(&[&bias])?;
    assert_same("relu keeps its output", &gradient(&kept, &v)?, &expected);
    for (block, what) in blocks.into_iter().zip([MODIFIED, RECOMPUTED]) {
        assert_says(GradScaler::disabled().scale(&block)?.backward(), &[what]);
    }
    Ok(())
}

/// A user's operator that keeps a tensor which is no input.
struct Times(Tensor);

impl Operator for Times {
    type Saved = ();

    fn op(&self) -> Op {
        Op::user("times", Cast::Keep)
    }

    fn captured(&self, _in_backward: bool) -> Vec<&Tensor> {
        vec![&self.0]
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, ())> {
        Ok(((&inputs[0] * &self.0)?, ()))
    }

    fn backward(&self, ctx: &Backward<'_, ()>) -> Result<Vec<Option<Gradient>>> {
        Ok(vec![Some(Gradient::owned((ctx.gradient * &self.0)?))])
    }
}

#[test]
fn a_user_s_operator_names_what_it_captures() -> candle_amp::Result<()> {
    let (factor, v) = (var(1, &[3, 3])?, var(2, &[3, 3])?);
    let times = || Times(factor.as_detached_tensor());
    let loss = || ops::sum(&apply(times(), &[&v])?);
    let losses = [loss()?, loss()?];
    reload(&[&factor])?;
    assert_refused(losses, MODIFIED);
    assert_same("again", &gradient(&loss()?, &v)?, &factor);
    Ok(())
}
