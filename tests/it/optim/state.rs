//! Saved and loaded: going on is going on, bit for bit; what does not fit changes nothing.

use std::collections::BTreeMap;

use candle_amp::error::OptimizerError;
use candle_amp::optim::{
    AdamW, AdamWConfig, Config, Group, Masters, Optim, OptimizerState, Sgd, SgdConfig,
};
use candle_amp::{Error, Parameters, random};
use candle_core::{DType, Device, Tensor, Var};

use super::{ADAMW, CHOICES, LAMB, LION, SGD, gradients, optimizer, variables};
use crate::util::assert_same;

fn named(vars: &[Var]) -> candle_amp::Result<Parameters> {
    let names = ["a.weight", "b", "c.weight", "d", "e"];
    Parameters::named(names.into_iter().zip(vars.iter().cloned()))
}

/// Through the bytes of a file.
fn saved(state: OptimizerState) -> candle_core::Result<OptimizerState> {
    let bytes = safetensors(&state.tensors)?;
    let tensors = candle_core::safetensors::load_buffer(&bytes, &Device::Cpu)?;
    Ok(OptimizerState { tensors: tensors.into_iter().collect(), ..state })
}

fn safetensors(tensors: &BTreeMap<String, Tensor>) -> candle_core::Result<Vec<u8>> {
    let number = std::thread::current().id();
    let path = std::env::temp_dir().join(format!("candle-amp-{}-{number:?}", std::process::id()));
    let all = tensors.iter().map(|(k, v)| (k.clone(), v.clone())).collect();
    candle_core::safetensors::save(&all, &path)?;
    let bytes = std::fs::read(&path)?;
    std::fs::remove_file(&path)?;
    Ok(bytes)
}

fn resumes<C: Config>(config: C) -> candle_amp::Result<()> {
    let _fork = random::fork_rng_guard();
    for (masters, state, dtypes) in CHOICES {
        random::manual_seed(5);
        let vars = variables(dtypes)?;
        let mut first = optimizer(&named(&vars)?, config, masters, state)?;
        for step in 1..4 {
            let mut store = gradients(&vars, step, DType::F32)?;
            if step == 2 {
                store.remove(&vars[0]); // so that step counts differ
            }
            first.step(&store)?;
        }
        first.set_learning_rate(0.75 * first.learning_rate());
        let generator = random::state();
        let state_saved = saved(first.state()?)?;
        let others: Vec<Var> = vars
            .iter()
            .map(|v| Var::from_tensor(&v.as_detached_tensor()))
            .collect::<candle_core::Result<_>>()?;
        for step in 4..7 {
            first.step(&gradients(&vars, step, DType::F32)?)?;
        }
        // What stands in another one's place is forgotten.
        let mut second = optimizer(&named(&others)?, config, masters, state)?;
        second.load_state(&state_saved)?;
        random::set_state(generator);
        for step in 4..7 {
            second.step(&gradients(&others, step, DType::F32)?)?;
        }
        for (a, b) in vars.iter().zip(&others) {
            assert_same(&format!("{config:?}, {masters:?}, {state:?}"), a, b);
        }
        let (a, b) = (first.state()?, second.state()?);
        assert_eq!((a.steps, a.groups), (b.steps, b.groups));
        assert!(a.tensors.keys().eq(b.tensors.keys()));
        for (name, tensor) in &a.tensors {
            assert_same(name, tensor, &b.tensors[name]);
        }
    }
    Ok(())
}

#[test]
fn every_optimizer_goes_on_where_it_was_saved() -> candle_amp::Result<()> {
    resumes(SGD)?;
    resumes(SgdConfig { momentum: 0.0, nesterov: false, ..SGD })?;
    resumes(ADAMW)?;
    resumes(AdamWConfig { amsgrad: false, ..ADAMW })?;
    resumes(LION)?;
    resumes(LAMB)
}

/// Settings may ask for a state between two steps, and a checkpoint may be saved there.
#[test]
fn a_state_that_the_next_step_makes_is_saved_as_such() -> candle_amp::Result<()> {
    fn resumes<C: Config>(before: C, after: C, kind: &str) -> candle_amp::Result<()> {
        let vars = variables(&[DType::BF16, DType::F32])?;
        let mut first = optimizer(&named(&vars)?, before, Masters::F32, DType::F32)?;
        first.step(&gradients(&vars, 1, DType::F32)?)?;
        first.set_config(0, after)?;
        let state = saved(first.state()?)?;
        assert_eq!(state.tensors[&format!("b.{kind}")].elem_count(), 0);
        let others: Vec<Var> = vars
            .iter()
            .map(|v| Var::from_tensor(&v.as_detached_tensor()))
            .collect::<candle_core::Result<_>>()?;
        let mut second = optimizer(&named(&others)?, before, Masters::F32, DType::F32)?;
        second.load_state(&state)?;
        for step in 2..4 {
            first.step(&gradients(&vars, step, DType::F32)?)?;
            second.step(&gradients(&others, step, DType::F32)?)?;
        }
        for (a, b) in vars.iter().zip(&others) {
            assert_same(kind, a, b);
        }
        // One that is not there at all is still an error, and so is one before a state that is there.
        let mut lacks = state.clone();
        lacks.tensors.remove(&format!("b.{kind}"));
        assert!(second.load_state(&lacks).is_err());
        Ok(())
    }
    let plain = SgdConfig { momentum: 0.0, nesterov: false, ..SGD };
    // The first momentum is the gradient, whole.
    let momentum = SgdConfig { momentum: 0.9, dampening: 0.5, nesterov: false, ..SGD };
    resumes(plain, momentum, "momentum_buffer")?;
    resumes(AdamWConfig { amsgrad: false, ..ADAMW }, ADAMW, "max_exp_avg_sq")?;
    let vars = variables(&[DType::F32])?;
    let mut adamw = AdamW::new(&named(&vars)?, ADAMW)?;
    adamw.step(&gradients(&vars, 1, DType::F32)?)?;
    let mut emptied = adamw.state()?;
    let nothing = Tensor::zeros(0, DType::F32, &Device::Cpu)?;
    emptied.tensors.insert("b.exp_avg".to_owned(), nothing);
    let error = adamw.load_state(&emptied).unwrap_err().to_string();
    assert!(error.contains("b.exp_avg"), "{error}");
    Ok(())
}

#[test]
fn a_state_says_what_it_is_of() -> candle_amp::Result<()> {
    let vars = variables(&[DType::BF16, DType::F32])?;
    let mut adamw = AdamW::new(&named(&vars)?, ADAMW)?;
    assert!(adamw.state()?.tensors.is_empty());
    adamw.step(&gradients(&vars, 1, DType::F32)?)?;
    let state = adamw.state()?;
    let names: Vec<&str> = state.tensors.keys().map(String::as_str).take(7).collect();
    assert_eq!(
        names,
        [
            "a.weight.exp_avg",
            "a.weight.exp_avg_sq",
            "a.weight.master",
            "a.weight.max_exp_avg_sq",
            "b.exp_avg",
            "b.exp_avg_sq",
            "b.max_exp_avg_sq",
        ]
    );
    assert_eq!((state.optimizer.as_str(), state.groups.len()), ("adamw", 1));
    let group = &state.groups[0];
    assert_eq!((group.settings["lr"], group.settings["amsgrad"]), (0.01, 1.0));
    assert_eq!(group.variables, ["a.weight", "b", "c.weight", "d", "e"]);
    // A copy: the next step leaves it alone.
    let before = state.tensors["b.exp_avg"].to_scalar::<f32>()?;
    adamw.step(&gradients(&vars, 2, DType::F32)?)?;
    assert_eq!(state.tensors["b.exp_avg"].to_scalar::<f32>()?, before);
    Ok(())
}

#[test]
fn settings_come_with_the_state() -> candle_amp::Result<()> {
    let vars = variables(&[DType::F32])?;
    let group = |part: &[Var], config| {
        let names = ["a", "b", "c", "d", "e"].into_iter().skip(if part.len() == 2 { 0 } else { 2 });
        Ok::<_, Error>(Group::new(&Parameters::named(names.zip(part.iter().cloned()))?, config))
    };
    let make = |one: AdamWConfig, two: AdamWConfig| {
        AdamW::from_groups(vec![group(&vars[..2], one)?, group(&vars[2..], two)?])
    };
    let mut first = make(ADAMW, AdamWConfig { lr: 0.5, amsgrad: false, ..ADAMW })?;
    first.step(&gradients(&vars, 1, DType::F32)?)?;
    first.set_learning_rate(0.002);
    let mut second = make(AdamWConfig::default(), AdamWConfig::default())?;
    second.load_state(&first.state()?)?;
    assert!(first.configs().eq(second.configs()));
    second.set_learning_rate(0.01);
    assert_eq!(second.configs().last().map(|config| config.lr), Some(0.5));
    Ok(())
}

/// That loading `state` fails, says so, and changes nothing.
#[track_caller]
fn refuses<C: Config>(optimizer: &mut Optim<C>, state: &OptimizerState, parts: &[&str]) {
    let before = optimizer.state().unwrap();
    let message = optimizer.load_state(state).unwrap_err().to_string();
    assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    let after = optimizer.state().unwrap();
    assert_eq!((before.steps, before.groups), (after.steps, after.groups));
    for (name, tensor) in &before.tensors {
        assert_same(name, tensor, &after.tensors[name]);
    }
}

#[test]
fn a_state_that_does_not_fit_changes_nothing() -> candle_amp::Result<()> {
    let vars = variables(&[DType::BF16, DType::F32])?;
    let make = |masters, state| optimizer(&named(&vars)?, ADAMW, masters, state);
    let mut adamw = make(Masters::F32, DType::F32)?;
    adamw.step(&gradients(&vars, 1, DType::F32)?)?;
    let good = adamw.state()?;
    let edit = |change: &dyn Fn(&mut OptimizerState)| {
        let mut state = good.clone();
        change(&mut state);
        state
    };
    let wrong = edit(&|s| drop(s.tensors.remove("b.exp_avg")));
    refuses(&mut adamw, &wrong, &["`b.exp_avg` is missing", "F32 of shape []"]);
    let other = Tensor::zeros(3, DType::F32, &Device::Cpu)?;
    let wrong = edit(&|s| drop(s.tensors.insert("d.exp_avg".into(), other.clone())));
    refuses(&mut adamw, &wrong, &["`d.exp_avg` is F32 of shape [3]", "[2, 1, 7]"]);
    let half = good.tensors["d.exp_avg"].to_dtype(DType::BF16)?;
    let wrong = edit(&|s| drop(s.tensors.insert("d.exp_avg".into(), half.clone())));
    refuses(&mut adamw, &wrong, &["`d.exp_avg` is BF16", "expected F32"]);
    let wrong = edit(&|s| drop(s.tensors.insert("f.exp_avg".into(), other.clone())));
    refuses(&mut adamw, &wrong, &["`f.exp_avg` is more than there is a place for"]);
    let wrong = edit(&|s| drop(s.tensors.insert("b.momentum_buffer".into(), other.clone())));
    refuses(&mut adamw, &wrong, &["more than there is a place for"]);
    let wrong = edit(&|s| _ = s.steps.insert("f".into(), 1));
    refuses(&mut adamw, &wrong, &["`f` is more"]);
    let wrong = edit(&|s| s.optimizer = "lamb".into());
    refuses(&mut adamw, &wrong, &["the optimizer is \"lamb\"", "\"adamw\""]);
    let wrong = edit(&|s| s.groups.clear());
    refuses(&mut adamw, &wrong, &["number of groups is 0, expected 1"]);
    let wrong = edit(&|s| s.groups[0].variables[1] = "g".into());
    refuses(&mut adamw, &wrong, &["variables", "\"g\""]);
    let wrong = edit(&|s| _ = s.groups[0].settings.remove("beta1"));
    refuses(&mut adamw, &wrong, &["settings", "beta1"]);
    let wrong = edit(&|s| _ = s.groups[0].settings.insert("lr".into(), -1.0));
    refuses(&mut adamw, &wrong, &["lr is -1"]);
    let wrong = edit(&|s| s.groups[0].base_lr = f64::NAN);
    refuses(&mut adamw, &wrong, &["base_lr is NaN"]);
    refuses(&mut make(Masters::Remainder, DType::F32)?, &good, &["`a.weight.remainder`"]);
    refuses(&mut make(Masters::Stochastic, DType::F32)?, &good, &["more than"]);
    refuses(&mut make(Masters::F32, DType::BF16)?, &good, &["exp_avg` is F32", "expected BF16"]);
    Ok(())
}

#[test]
fn variables_without_names_have_no_state_to_save() -> candle_amp::Result<()> {
    let vars = variables(&[DType::F32])?;
    let mut unnamed = Sgd::new(vars.clone(), SGD)?;
    let message = unnamed.state().unwrap_err().to_string();
    assert!(message.contains("`Parameters`"), "{message}");
    let state = Sgd::new(&named(&vars)?, SGD)?.state()?;
    assert!(matches!(
        unnamed.load_state(&state),
        Err(Error::Optimizer(OptimizerError::Unnamed { call: "load_state" }))
    ));
    Ok(())
}
