//! What a program may forget, or do between two calls: an error, or the result that it would have otherwise.

use candle_amp::autograd::{
    Backward, Gradient, NoGradGuard, Operator, apply, checkpoint, no_grad_guard,
};
use candle_amp::checkpoints::Checkpoint;
use candle_amp::optim::{AdamW, AdamWConfig, Ema, EmaConfig, Sgd, SgdConfig};
use candle_amp::{
    Autocast, AutocastGuard, Cast, GradScaler, MasterVars, Op, Parameters, ScaleConfig, nn,
    no_grad, ops, random,
};
use candle_core::{DType, Device, Module, ModuleT, Result, Tensor, Var};
use candle_nn::{Optimizer, SGD};

use crate::bad_input;
use crate::util::{self, to_vec};

const CPU: Device = Device::Cpu;

fn var(x: f32) -> Result<Var> {
    Var::new(&[x], &CPU)
}

fn named(w: &Var) -> candle_amp::Result<Parameters> {
    Parameters::named([("w", w.clone())])
}

fn sgd(w: &Var) -> candle_amp::Result<Sgd> {
    Sgd::new(&named(w)?, SgdConfig { lr: 0.5, ..Default::default() })
}

#[track_caller]
fn assert_says<T>(result: std::result::Result<T, impl std::fmt::Display>, part: &str) {
    bad_input::assert_says(result, &[part]);
}

struct File(std::path::PathBuf);

impl File {
    fn new(name: &str) -> Self {
        let name = format!("candle-amp-forgotten-{}-{name}.safetensors", std::process::id());
        Self(std::env::temp_dir().join(name))
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn a_gradient_does_not_outlive_its_weights() -> candle_amp::Result<()> {
    let (w, file) = (var(1.0)?, File::new("roll-back"));
    let mut parameters = named(&w)?;
    Checkpoint::new(0).with("model", &parameters)?.save(&file.0)?;
    w.set(&Tensor::new(&[3f32], &CPU)?)?;
    let mut scaler = GradScaler::default();
    let backward =
        |scaler: &mut GradScaler| scaler.scale(&ops::sum(&ops::mul(&w, &w)?)?)?.backward();
    backward(&mut scaler)?;
    Checkpoint::open(&file.0)?.load(&mut [("model", &mut parameters)])?;
    let refused = scaler.step(&mut sgd(&w)?).map(drop);
    assert_says(
        refused,
        "was written (by a checkpoint that was loaded, for one) after its gradient",
    );
    assert_eq!(to_vec(&w), [1.0]);
    // One more backward adds to the old gradient.
    backward(&mut scaler)?;
    assert!(scaler.step(&mut sgd(&w)?).is_err());
    scaler.zero_grad();
    backward(&mut scaler)?;
    let _ = scaler.step(&mut sgd(&w)?)?;
    assert_eq!(to_vec(&w), [0.0]);
    Ok(())
}

/// The weights come back bit for bit, and the gradient is theirs.
#[test]
fn an_evaluation_by_averages_may_come_between_backward_and_step() -> candle_amp::Result<()> {
    let w = var(1.0)?;
    let mut ema = Ema::new(&named(&w)?, EmaConfig { decay: 0.5, ..Default::default() })?;
    let mut scaler = GradScaler::default();
    let loss = || ops::sum(&ops::mul(&w, &w)?);
    scaler.scale(&loss()?)?.backward()?;
    for _ in 0..3 {
        ema.scope(|| to_vec(&w))?;
    }
    let _ = scaler.step(&mut sgd(&w)?)?;
    scaler.update()?;
    assert_eq!(to_vec(&w), [0.0]);
    // Backward within it is of the averages.
    let within = ema.scope(|| scaler.scale(&loss()?)?.backward())?;
    within?;
    assert_says(scaler.step(&mut sgd(&w)?).map(drop), "after its gradient");
    // Also where it is added to a gradient of the weights.
    let mut scaler = GradScaler::default();
    scaler.scale(&loss()?)?.backward()?;
    let within = ema.scope(|| scaler.scale(&loss()?)?.backward())?;
    within?;
    assert_says(scaler.step(&mut sgd(&w)?).map(drop), "after its gradient");
    Ok(())
}

/// What a thread keeps is dropped at its end, in an order that nobody chooses. A panic there would end the process.
#[test]
fn a_guard_of_no_grad_may_end_with_its_thread() {
    use std::cell::RefCell;
    thread_local! {
        static KEPT: RefCell<Option<NoGradGuard>> = const { RefCell::new(None) };
    }
    let work = || {
        KEPT.set(Some(no_grad_guard()));
        let _amp = Autocast::new(DType::BF16).enter();
        let w = Var::ones((2, 2), DType::F32, &CPU)?;
        ops::matmul(&w, &w)
    };
    let product = std::thread::spawn(work).join().expect("no panic").expect("a product");
    assert_eq!(to_vec(&product), [2.0; 4]);
}

/// Whether the thread has its scopes and copies before it has what keeps the guard, or after.
#[test]
fn a_guard_of_autocast_may_end_with_its_thread() {
    use std::cell::RefCell;
    thread_local! {
        static KEPT: RefCell<Option<AutocastGuard>> = const { RefCell::new(None) };
    }
    for first in [false, true] {
        let work = move || {
            if first {
                KEPT.set(None);
            }
            KEPT.set(Some(Autocast::new(DType::BF16).enter()));
            let w = Var::ones((2, 2), DType::F32, &CPU)?;
            ops::matmul(&w, &w)
        };
        let product = std::thread::spawn(work).join().expect("no panic").expect("a product");
        assert_eq!(product.dtype(), DType::BF16);
    }
}

#[test]
fn what_is_written_while_averages_are_in_place_is_not_undone() -> candle_amp::Result<()> {
    let (w, other, file) = (var(1.0)?, var(5.0)?, File::new("meanwhile"));
    let both = Parameters::named([("other", other.clone()), ("w", w.clone())])?;
    let mut ema = Ema::new(&both, EmaConfig { decay: 0.75, ..Default::default() })?;
    other.set(&Tensor::new(&[9f32], &CPU)?)?;
    ema.update()?;
    let mut scaler = GradScaler::default();
    ema.swap_in()?;
    assert_eq!(to_vec(&other), [6.0]);
    assert_says(ema.load_state(&ema.state()?), "while the averages are in place");
    assert_says(Checkpoint::new(0).with("ema", &ema).map(drop), "while the averages are in place");
    scaler.scale(&ops::sum(&w)?)?.backward()?;
    let _ = scaler.step(&mut sgd(&w)?)?;
    scaler.update()?;
    assert_says(ema.swap_out(), "`w` was written, by a step or a checkpoint, while");
    assert_eq!([to_vec(&w), to_vec(&other)], [[0.5], [9.0]]);
    ema.swap_out()?; // nothing is in place
    assert_eq!(to_vec(&w), [0.5]);

    let mut parameters = named(&w)?;
    Checkpoint::new(0).with("model", &parameters)?.save(&file.0)?;
    w.set(&Tensor::new(&[7f32], &CPU)?)?;
    let loaded = ema.scope(|| Checkpoint::open(&file.0)?.load(&mut [("model", &mut parameters)]));
    assert_says(loaded.map(drop), "`w` was written");
    assert_eq!(to_vec(&w), [0.5]);
    Ok(())
}

#[test]
fn averages_of_masters_reach_the_model() -> candle_amp::Result<()> {
    let masters = MasterVars::new(DType::BF16, &CPU);
    let read = masters.var_builder().get_with_hints(1, "w", candle_nn::Init::Const(1.0))?;
    let parameters = masters.parameters();
    let config = EmaConfig { decay: 0.5, ..Default::default() };
    let mut ema = Ema::new(&parameters, config)?;
    let mut of_masters = Ema::of_masters(&masters, config)?;
    parameters.vars()[0].set(&Tensor::new(&[3f32], &CPU)?)?;
    masters.refresh()?;
    ema.update()?;
    of_masters.update()?;
    for refused in [ema.swap_in(), ema.copy_to()] {
        assert_says(refused, "`w` is a master of `MasterVars`");
    }
    assert_eq!(to_vec(&read), [3.0]);
    assert_eq!(of_masters.scope(|| to_vec(&read))?, [2.0]);
    assert_eq!(to_vec(&read), [3.0]);
    of_masters.copy_to()?;
    assert_eq!([to_vec(&read), to_vec(&parameters.vars()[0])], [[2.0], [2.0]]);
    // Nothing is to be refreshed.
    ops::sum(&ops::mul(&read, &read)?)?.to_dtype(DType::F32)?.backward()?;
    Ok(())
}

/// An optimizer of this crate with `F32` masters.
#[test]
fn weights_that_were_loaded_are_not_stepped_back() -> candle_amp::Result<()> {
    let file = File::new("masters");
    let w = Var::from_tensor(&util::random(1, 8, DType::BF16))?;
    let mut parameters = named(&w)?;
    Checkpoint::new(0).with("model", &parameters)?.save(&file.0)?;
    let before = to_vec(&w);
    let mut adamw = AdamW::new(&parameters, AdamWConfig { lr: 0.1, ..Default::default() })?;
    let step = |adamw: &mut AdamW| adamw.backward_step(&ops::sum(&w)?.to_dtype(DType::F32)?);
    step(&mut adamw)?;
    step(&mut adamw)?;
    let load =
        |parameters: &mut Parameters| Checkpoint::open(&file.0)?.load(&mut [("model", parameters)]);
    load(&mut parameters)?;
    let refused = step(&mut adamw).map_err(candle_amp::Error::from);
    assert_says(refused, "was written after its master");
    assert_eq!(to_vec(&w), before);
    adamw.reload_masters()?;
    step(&mut adamw)?;
    // What is loaded is what the masters are rounded to.
    Checkpoint::new(0).with("model", &parameters)?.save(&file.0)?;
    load(&mut parameters)?;
    step(&mut adamw)?;
    let moved = to_vec(&w).into_iter().zip(before).all(|(after, before)| after < before);
    assert!(moved);
    Ok(())
}

#[test]
fn a_new_head_beside_masters_is_trained() -> candle_amp::Result<()> {
    let _fork = util::seeded(1);
    let masters = MasterVars::new(DType::BF16, &CPU);
    let body = candle_nn::linear(2, 2, masters.var_builder())?;
    let map = nn::VarMap::new();
    let head = nn::linear(2, 2, nn::var_builder(&map, DType::F32, &CPU))?;
    let mut vars = masters.parameters().vars();
    vars.extend(map.all_vars());
    let mut sgd = SGD::new(vars, 0.1)?;
    let x = util::random(3, (3, 2), DType::BF16);
    let weights = || [to_vec(head.weight()), to_vec(body.weight())];
    let before = weights();
    let mut scaler = GradScaler::default();
    let loss = ops::mean(&head.forward(&body.forward(&x)?.to_dtype(DType::F32)?)?)?;
    scaler.scale(&loss)?.backward()?;
    let _ = scaler.step(&mut masters.bind(&mut sgd))?;
    scaler.update()?;
    assert!(weights().into_iter().zip(before).all(|(after, before)| after != before));
    Ok(())
}

/// As in vector quantisation: the output is not computed from the input.
struct StraightThrough(Tensor);

impl Operator for StraightThrough {
    type Saved = ();

    fn op(&self) -> Op {
        Op::user("straight_through", Cast::Keep)
    }

    fn forward(&self, _: &[Tensor]) -> Result<(Tensor, ())> {
        Ok((self.0.detach(), ()))
    }

    fn backward(&self, ctx: &Backward<'_, ()>) -> Result<Vec<Option<Gradient>>> {
        Ok(vec![Some(Gradient::shared(ctx.gradient.clone()))])
    }
}

#[test]
fn an_operator_may_return_a_tensor_that_it_keeps() -> Result<()> {
    let x = Var::new(&[0.2f32, 0.9], &CPU)?;
    let hard = Var::from_tensor(&x.round()?)?;
    let y = apply(StraightThrough(hard.as_tensor().clone()), &[&x])?;
    assert_eq!([to_vec(&y), to_vec(&hard)], [[0.0, 1.0]; 2]);
    hard.set(&Tensor::new(&[5f32, 6.0], &CPU)?)?;
    assert_eq!([to_vec(&y), to_vec(&hard)], [[0.0, 1.0], [5.0, 6.0]]);
    let gradients = ops::sum(&ops::mul(&y, &y)?)?.backward()?;
    assert_eq!(to_vec(gradients.get(&x).expect("a gradient")), [0.0, 2.0]);
    Ok(())
}

#[test]
fn a_checkpoint_whose_function_differs_is_refused() -> candle_amp::Result<()> {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let x = Var::from_tensor(&util::random(1, (4, 4), DType::F32))?;
    let weights = [2, 3].map(|seed| Var::from_tensor(&util::random(seed, (4, 4), DType::F32)));
    let [a, b] = weights;
    let (a, b) = (a?, b?);
    type Block = Box<dyn Fn(usize, &Tensor) -> Result<Tensor> + Send + Sync>;
    let drops = |count: [usize; 2]| -> Block {
        Box::new(move |call, x| (0..count[call]).try_fold(x.clone(), |x, _| ops::dropout(&x, 0.5)))
    };
    let chooses: Block = Box::new(move |call, x| ops::matmul(x, [&a, &b][call]));
    let casts: Block = Box::new(|call, x| ops::relu(&x.to_dtype([DType::F32, DType::F64][call])?));
    for (block, says) in [
        (drops([1, 2]), "2 random tensors when it was computed again, and 1 random tensors"),
        (drops([2, 1]), "1 random tensors when it was computed again, and 2 random tensors"),
        (chooses, "another variable of shape [4, 4]"),
        (casts, "a result of F64 and shape [4, 4] when it was computed again, and a result of F32"),
    ] {
        let calls = AtomicUsize::new(0);
        let y = checkpoint(move |x| block(calls.fetch_add(1, Ordering::Relaxed), x), &x)?;
        let mut scaler = GradScaler::disabled();
        assert_says(scaler.scale(&ops::sum(&y)?)?.backward(), says);
    }
    Ok(())
}

/// By candle's own step, of which nobody is told.
#[test]
fn a_metric_between_backward_and_step_keeps_no_old_weights() -> candle_amp::Result<()> {
    let (x, w) = (Tensor::ones((1, 1), DType::F32, &CPU)?, Var::ones((1, 1), DType::F32, &CPU)?);
    let mut sgd = SGD::new(vec![w.clone()], 0.5)?;
    let _amp = Autocast::new(DType::BF16).enter();
    let grads = ops::sum(&ops::linear(&x, &w, None)?)?.backward()?;
    let metric = no_grad(|| ops::linear(&x, &w, None))?;
    assert_eq!(to_vec(&metric), [1.0]);
    sgd.step(&grads)?;
    assert_eq!(to_vec(&ops::linear(&x, &w, None)?), [0.5]);
    Ok(())
}

/// PyTorch makes zeros of them.
#[test]
fn a_norm_beyond_f32_still_clips() -> candle_amp::Result<()> {
    let w = Var::ones(2, DType::F32, &CPU)?;
    let slope = Tensor::new(&[3e38f32, -3e38], &CPU)?;
    let mut sgd = Sgd::new(vec![w.clone()], SgdConfig { lr: 1.0, ..Default::default() })?;
    let mut scaler = GradScaler::new(ScaleConfig::constant(1.0))?;
    scaler.scale(&ops::sum(&ops::mul(&w, &slope)?)?)?.backward()?;
    let norm = scaler.clip_grad_norm(1.0)?.to_scalar::<f32>()?;
    assert!(norm.is_infinite() && !scaler.step(&mut sgd)?.skipped()?);
    for (actual, expected) in to_vec(&w).into_iter().zip([1.0 - 0.5f64.sqrt(), 1.0 + 0.5f64.sqrt()])
    {
        assert!((actual - expected).abs() < 4.0 * f64::from(f32::EPSILON), "{actual}");
    }
    Ok(())
}

#[test]
fn tied_names_load_one_value() -> candle_amp::Result<()> {
    let file = File::new("tied");
    let pair = |a: &Var, b: &Var| Parameters::named([("emb", a.clone()), ("head", b.clone())]);
    let (a, b, w) = (var(1.0)?, var(2.0)?, var(0.0)?);
    let mut other = sgd(&w)?;
    other.set_learning_rate(0.25);
    let parts = Checkpoint::new(0).with("sgd", &other)?.with("model", &pair(&a, &b)?)?;
    parts.save(&file.0)?;
    other.set_learning_rate(0.75);
    let mut tied = pair(&w, &w)?;
    let load = |sgd: &mut Sgd, tied: &mut Parameters| {
        Checkpoint::open(&file.0)?.load(&mut [("sgd", sgd), ("model", tied)])
    };
    assert_says(load(&mut other, &mut tied), "`head` is another tensor than `emb`");
    assert_eq!((to_vec(&w), other.learning_rate()), (vec![0.0], 0.75));
    b.set(&a)?;
    other.set_learning_rate(0.25);
    Checkpoint::new(0).with("sgd", &other)?.with("model", &pair(&a, &b)?)?.save(&file.0)?;
    other.set_learning_rate(0.75);
    load(&mut other, &mut tied)?;
    assert_eq!((to_vec(&w), other.learning_rate()), (vec![1.0], 0.25));
    Ok(())
}

/// In a process of its own there would be nobody else; here the process's generator is others' too.
#[test]
fn a_fork_is_not_loaded_as_the_process_s_generator() -> candle_amp::Result<()> {
    let file = File::new("fork");
    random::fork_rng(|| -> candle_amp::Result<()> {
        random::manual_seed(71);
        Checkpoint::new(1).with("random", &random::Generator)?.save(&file.0)
    })?;
    let load = || Checkpoint::open(&file.0)?.load(&mut [("random", &mut random::Generator)]);
    assert_says(load(), "that of a `fork_rng` that it was saved in");
    random::fork_rng(|| -> candle_amp::Result<()> {
        load()?;
        assert_eq!(random::state().seed, 71);
        Ok(())
    })?;
    assert_ne!(random::state().seed, 71);
    Ok(())
}

/// A candle dropout would not be seen; that of this crate is replayed.
#[test]
fn a_checkpoint_replays_dropout() -> candle_amp::Result<()> {
    let x = Var::ones(64, DType::F32, &CPU)?;
    let drop = nn::Dropout::new(0.5);
    let y = checkpoint(move |x| drop.forward_t(x, true), &x)?;
    let gradients = ops::sum(&y)?.backward()?;
    assert_eq!(to_vec(&y), to_vec(gradients.get(&x).expect("a gradient")));
    Ok(())
}
