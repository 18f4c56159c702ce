//! Half variables: what each way to keep them saves, and what it costs.

use candle_amp::error::OptimizerError;
use candle_amp::optim::{
    AdamW, AdamWConfig, Config, Ema, EmaConfig, LionConfig, Masters, Optim, Sgd, SgdConfig,
};
use candle_amp::{Error, Parameters, random};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};

use super::{ADAMW, LAMB, LION, SGD, gradients, optimizer, variables};
use crate::util::{assert_same, random as random_values, to_vec};

fn copies(vars: &[Var]) -> candle_core::Result<Vec<Var>> {
    vars.iter().map(|v| Var::from_tensor(&v.as_detached_tensor())).collect()
}

fn remainders_are_masters<C: Config>(config: C) -> candle_amp::Result<()> {
    // F16 variables have no remainder; F32 and F64 ones need none.
    let vars = variables(&[DType::BF16, DType::BF16, DType::F32, DType::BF16, DType::F64])?;
    let others = copies(&vars)?;
    let mut full = Optim::new(vars.clone(), config)?;
    let mut split = Optim::new(others.clone(), config)?.with_masters(Masters::Remainder)?;
    for step in 1..20 {
        let store = gradients(&vars, step, DType::BF16)?;
        full.step(&store)?;
        let mut same = GradStore::default();
        for (var, other) in vars.iter().zip(&others) {
            same.insert(other, store.get(var).expect("it has one").clone());
        }
        split.step(&same)?;
        for (var, other) in vars.iter().zip(&others) {
            let (a, b) = (full.master(var)?, split.master(other)?);
            assert_same("exact value", &a.expect("one"), &b.expect("one"));
            let far = |(a, b): (f64, f64)| (a - b).abs() > a.abs() / 100.0;
            assert!(!to_vec(var).into_iter().zip(to_vec(other)).any(far));
        }
    }
    Ok(())
}

#[test]
fn a_remainder_is_an_f32_master_bit_for_bit() -> candle_amp::Result<()> {
    remainders_are_masters(SGD)?;
    remainders_are_masters(ADAMW)?;
    remainders_are_masters(LION)?;
    remainders_are_masters(LAMB)
}

#[test]
fn half_variables_are_their_masters_rounded() -> candle_amp::Result<()> {
    let vars = variables(&[DType::F16, DType::BF16, DType::F16, DType::F32])?;
    // As F32 variables that start from the same numbers.
    let full = vars.iter().map(|v| Var::from_tensor(&v.to_dtype(DType::F32)?));
    let full: Vec<Var> = full.collect::<candle_core::Result<_>>()?;
    let (mut a, mut b) = (AdamW::new(vars.clone(), ADAMW)?, AdamW::new(full.clone(), ADAMW)?);
    for step in 1..10 {
        let store = gradients(&vars, step, DType::F16)?;
        let mut same = GradStore::default();
        for (var, other) in vars.iter().zip(&full) {
            same.insert(other, store.get(var).expect("it has one").clone());
        }
        a.step(&store)?;
        b.step(&same)?;
        for (var, full) in vars.iter().zip(&full) {
            assert_same("half", var, &full.to_dtype(var.dtype())?);
        }
    }
    Ok(())
}

#[test]
fn f16_variables_have_no_remainder() -> candle_amp::Result<()> {
    let vars = variables(&[DType::F32, DType::F16])?;
    let result = Sgd::new(vars, SGD)?.with_masters(Masters::Remainder);
    let message = result.unwrap_err().to_string();
    assert!(message.contains("variable 1") && message.contains("F16"), "{message}");
    assert!(message.contains("`Masters::Stochastic`"), "{message}");
    Ok(())
}

#[test]
fn masters_are_chosen_before_the_first_step() -> candle_amp::Result<()> {
    let vars = variables(&[DType::BF16])?;
    let mut sgd = Sgd::new(vars.clone(), SGD)?;
    sgd.step(&gradients(&vars, 1, DType::F32)?)?;
    let late = sgd.with_masters(Masters::Remainder);
    assert!(matches!(
        late,
        Err(Error::Optimizer(OptimizerError::AfterFirstStep { call: "with_masters" }))
    ));
    Ok(())
}

#[test]
fn what_is_written_before_the_first_step_counts() -> candle_amp::Result<()> {
    for masters in [Masters::F32, Masters::Remainder, Masters::Stochastic] {
        let _fork = random::fork_rng_guard();
        let w = Var::zeros(4, DType::BF16, &Device::Cpu)?;
        let config = SgdConfig { lr: 1.0, ..Default::default() };
        let mut sgd = optimizer(vec![w.clone()], config, masters, DType::F32)?;
        w.set(&Tensor::full(3f32, 4, &Device::Cpu)?.to_dtype(DType::BF16)?)?;
        sgd.backward_step(&w.to_dtype(DType::F32)?.sum_all()?)?;
        assert_eq!(to_vec(&w), [2.0; 4], "{masters:?}");
    }
    Ok(())
}

#[test]
fn masters_taken_again_before_the_first_step_are_those_of_the_first_step() -> candle_amp::Result<()>
{
    let w = Var::from_tensor(&Tensor::new(&[0.5f32, -3.0], &Device::Cpu)?.to_dtype(DType::BF16)?)?;
    let config = SgdConfig { lr: 0.25, ..Default::default() };
    let mut sgd = optimizer(vec![w.clone()], config, Masters::F32, DType::F32)?;
    sgd.reload_masters()?;
    w.set(&Tensor::new(&[3f32, 1.5], &Device::Cpu)?.to_dtype(DType::BF16)?)?;
    sgd.backward_step(&w.to_dtype(DType::F32)?.sum_all()?)?;
    assert_eq!(to_vec(&w), [2.75, 1.25]);
    Ok(())
}

#[test]
fn a_step_that_rounds_to_nearest_draws_no_random_numbers() -> candle_amp::Result<()> {
    let _fork = random::fork_rng_guard();
    for (masters, dtype, draws) in [
        (Masters::F32, DType::BF16, false),
        (Masters::Stochastic, DType::F32, false),
        (Masters::Stochastic, DType::BF16, true),
    ] {
        let vars = variables(&[dtype])?;
        let mut sgd = optimizer(vars.clone(), SGD, masters, DType::F32)?;
        let before = random::state();
        sgd.step(&gradients(&vars, 1, DType::F32)?)?;
        assert_eq!(random::state() != before, draws, "{masters:?}, {dtype:?}");
    }
    Ok(())
}

#[test]
fn masters_can_be_taken_from_the_variables_again() -> candle_amp::Result<()> {
    for masters in [Masters::F32, Masters::Remainder] {
        let vars = variables(&[DType::BF16, DType::F32])?;
        let mut sgd = optimizer(vars.clone(), SGD, masters, DType::F32)?;
        sgd.step(&gradients(&vars, 1, DType::F32)?)?;
        for var in &vars {
            var.set(&var.ones_like()?)?;
        }
        assert_eq!(sgd.masters(), masters);
        sgd.reload_masters()?;
        for var in &vars {
            let exact = sgd.master(var)?.expect("it has one");
            assert_same("master", &exact, &var.to_dtype(DType::F32)?);
        }
    }
    Ok(())
}

/// The mean of 4,096 weights that start at 1, after 1,000 steps of 2^-13 each: to 0.878 in exact
/// arithmetic. Half of BF16's last bit below 1 is 2^-9, of F16's 2^-12.
fn descend(dtype: DType, masters: Option<Masters>) -> candle_amp::Result<f64> {
    let w = Var::ones(4096, dtype, &Device::Cpu)?;
    let (lr, steps) = (2f64.powi(-13), 1000);
    let gradient = Tensor::ones(4096, DType::F32, &Device::Cpu)?;
    let Some(masters) = masters else {
        // Plain rounding.
        for _ in 0..steps {
            let next = (w.to_dtype(DType::F32)? - (&gradient * lr)?)?;
            w.set(&next.to_dtype(dtype)?)?;
        }
        return Ok(to_vec(&w).iter().sum::<f64>() / 4096.0);
    };
    let config = SgdConfig { lr, ..Default::default() };
    let mut sgd = optimizer(vec![w.clone()], config, masters, DType::F32)?;
    let mut store = GradStore::default();
    store.insert(&w, gradient);
    for _ in 0..steps {
        sgd.step(&store)?;
    }
    Ok(to_vec(&w).iter().sum::<f64>() / 4096.0)
}

/// What rounding at random saves: plain rounding moves not at all. What it costs: noise, of which a
/// weight gathers a last bit's worth of (2^-8 for BF16) times the root of the share of steps that
/// moved it.
#[test]
fn rounding_at_random_moves_where_plain_rounding_stalls() -> candle_amp::Result<()> {
    let _fork = random::fork_rng_guard();
    random::manual_seed(1);
    let exact = 1.0 - 1000.0 * 2f64.powi(-13);
    for dtype in [DType::BF16, DType::F16] {
        assert_eq!(descend(dtype, None)?, 1.0, "{dtype:?}: plain rounding trains now");
        let random = descend(dtype, Some(Masters::Stochastic))?;
        // The mean of 4,096 weights, each off by about sqrt(1000 * 2^-13 * 2^-8) = 0.022: 64 times
        // less off, and five of that.
        assert!((random - exact).abs() < 5.0 * 0.022 / 64.0, "{dtype:?}: {random} for {exact}");
        let full = descend(dtype, Some(Masters::F32))?;
        assert!((full - exact).abs() <= 2f64.powi(-9), "{dtype:?}: {full} for {exact}");
    }
    assert!((descend(DType::BF16, Some(Masters::Remainder))? - exact).abs() <= 2f64.powi(-9));
    Ok(())
}

/// Least squares of 64 weights over the same data: the loss in the end, from `start`.
fn fit<C: Config>(
    config: C,
    dtype: DType,
    masters: Masters,
    state: DType,
) -> candle_amp::Result<f64> {
    let x = crate::util::random(1, (256, 64), DType::F32);
    let y = x.matmul(&crate::util::random(2, (64, 1), DType::F32))?;
    let w = Var::zeros((64, 1), dtype, &Device::Cpu)?;
    let mut optimizer = optimizer(vec![w.clone()], config, masters, state)?;
    let loss = || (x.matmul(&w.to_dtype(DType::F32)?)? - &y)?.sqr()?.mean_all();
    for step in 0..400 {
        if step == 300 {
            optimizer.set_learning_rate(optimizer.learning_rate() / 10.0);
        }
        optimizer.backward_step(&loss()?)?;
    }
    Ok(loss()?.to_scalar::<f32>()?.into())
}

#[test]
fn training_works_with_state_in_bf16_and_without_masters() -> candle_amp::Result<()> {
    let _fork = random::fork_rng_guard();
    random::manual_seed(3);
    let adamw = AdamWConfig { lr: 0.02, weight_decay: 0.0, ..Default::default() };
    // Lion's steps do not shrink with the gradient: it stays further off in any dtype.
    let lion = LionConfig { lr: 0.005, ..Default::default() };
    let signs = fit(lion, DType::F32, Masters::F32, DType::F32)?;
    println!("Lion, F32: {signs:.2e}");
    // The loss of all zeros is about 64/9.
    for (name, loss, limit) in [
        ("F32", fit(adamw, DType::F32, Masters::F32, DType::F32)?, 1e-3),
        ("BF16 state", fit(adamw, DType::F32, Masters::F32, DType::BF16)?, 1e-3),
        ("no master", fit(adamw, DType::BF16, Masters::Stochastic, DType::F32)?, 1e-2),
        ("neither", fit(adamw, DType::BF16, Masters::Stochastic, DType::BF16)?, 1e-2),
        ("F16, no master", fit(adamw, DType::F16, Masters::Stochastic, DType::F32)?, 1e-3),
        ("Lion, BF16 state", fit(lion, DType::F32, Masters::F32, DType::BF16)?, 2.0 * signs),
    ] {
        println!("{name}: {loss:.2e}");
        assert!(loss < limit, "{name}: {loss}");
    }
    Ok(())
}

/// Rounded to nearest, a second moment in BF16 that should fall by a thousandth at a step stays.
#[test]
fn a_second_moment_in_bf16_forgets() -> candle_amp::Result<()> {
    let _fork = random::fork_rng_guard();
    random::manual_seed(4);
    let w = Var::zeros(1024, DType::F32, &Device::Cpu)?;
    let named = candle_amp::Parameters::named([("w", w.clone())])?;
    let mut adamw = optimizer(&named, AdamWConfig::default(), Masters::F32, DType::BF16)?;
    for step in 0..700 {
        let mut store = GradStore::default();
        let gradient = if step == 0 { 1f32 } else { 0.0 };
        store.insert(&w, Tensor::full(gradient, 1024, &Device::Cpu)?);
        adamw.step(&store)?;
    }
    let moments = to_vec(&adamw.state()?.tensors["w.exp_avg_sq"]);
    let mean = moments.iter().sum::<f64>() / 1024.0;
    let exact = 1e-3 * 0.999f64.powi(699);
    assert!((mean / exact - 1.0).abs() < 0.05, "{mean:e} for {exact:e}");
    Ok(())
}

/// A step of other variables does not make a written variable's master current.
#[test]
fn what_was_written_stays_so_while_others_are_stepped() -> candle_amp::Result<()> {
    let vars = variables(&[DType::BF16, DType::BF16])?;
    let mut adamw = Optim::new(vars.clone(), ADAMW)?;
    adamw.step(&gradients(&vars, 1, DType::BF16)?)?;
    vars[0].set(&random_values(3, vars[0].shape(), DType::BF16))?;
    let named = Parameters::named([("a", vars[0].clone())])?;
    Ema::new(&named, EmaConfig::default())?.copy_to()?; // a write that the crate knows of
    let alone = gradients(&vars[1..], 2, DType::BF16)?;
    adamw.step(&alone)?;
    let error = adamw.step(&gradients(&vars, 3, DType::BF16)?).unwrap_err().to_string();
    assert!(error.contains("an optimizer") || error.contains("master"), "{error}");
    adamw.reload_masters()?;
    adamw.step(&gradients(&vars, 3, DType::BF16)?)?;
    Ok(())
}
