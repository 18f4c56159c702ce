//! Parameter groups: settings of their own, and one learning rate that moves them all.

use candle_amp::error::ArgumentError;
use candle_amp::optim::{
    AdamW, AdamWConfig, AsCandle, Group, Lamb, LambConfig, Lion, LionConfig, Masters, Schedule,
    Scheduler, Sgd, SgdConfig, decay_groups,
};
use candle_amp::{Error, Parameters, nn};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Optimizer, VarMap};

use super::{ADAMW, gradients, variables};
use crate::util::{assert_same, random, to_vec};

#[test]
fn every_group_goes_by_its_own_settings() -> candle_amp::Result<()> {
    let configs = [ADAMW, AdamWConfig { lr: 0.1, weight_decay: 0.0, amsgrad: false, ..ADAMW }];
    let (grouped, alone) = (variables(&[DType::F32])?, variables(&[DType::F32])?);
    let group = |number: usize| {
        let mine = grouped.iter().skip(number).step_by(2).cloned().collect::<Vec<_>>();
        Group::new(mine, configs[number])
    };
    let mut together = AdamW::from_groups(vec![group(0), group(1)])?;
    let mut apart: Vec<AdamW> = Vec::new();
    for (number, config) in configs.into_iter().enumerate() {
        let mine: Vec<Var> = alone.iter().skip(number).step_by(2).cloned().collect();
        apart.push(AdamW::new(mine, config)?);
    }
    for step in 1..4 {
        together.step(&gradients(&grouped, step, DType::F32)?)?;
        let store = gradients(&alone, step, DType::F32)?;
        apart.iter_mut().try_for_each(|optimizer| optimizer.step(&store))?;
    }
    for (a, b) in grouped.iter().zip(&alone) {
        assert_same("weight", a, b);
    }
    Ok(())
}

#[test]
fn one_learning_rate_keeps_the_groups_apart() -> candle_amp::Result<()> {
    let var = || Var::ones(1, DType::F32, &Device::Cpu);
    let group =
        |lr| Ok::<_, Error>(Group::new(vec![var()?], SgdConfig { lr, ..SgdConfig::default() }));
    let mut sgd = Sgd::from_groups(vec![group(0.3)?, group(0.6)?, group(0.0)?])?;
    let rates = |sgd: &Sgd| sgd.configs().map(|config| config.lr).collect::<Vec<_>>();
    sgd.set_learning_rate(0.1);
    assert_eq!((sgd.learning_rate(), rates(&sgd)), (0.1, vec![0.1, 0.2, 0.0]));
    sgd.set_learning_rate(0.0);
    assert_eq!(rates(&sgd), [0.0; 3]);
    let mut scheduler = Scheduler::new(Schedule::step(1, 0.5), {
        sgd.set_learning_rate(0.3);
        &mut sgd
    })?;
    scheduler.after(true, &mut sgd);
    assert_eq!(rates(&sgd), [0.15, 0.3, 0.0]);
    sgd.set_config(2, SgdConfig { lr: 0.9, momentum: 0.5, ..Default::default() })?;
    assert_eq!(rates(&sgd), [0.15, 0.3, 0.9]);
    scheduler.after(true, &mut sgd);
    let near = |(a, b): (f64, f64)| (a - b).abs() <= 2.0 * f64::EPSILON;
    assert!(rates(&sgd).into_iter().zip([0.075, 0.15, 0.45]).all(near), "{:?}", rates(&sgd));
    assert_eq!(sgd.configs().last().map(|config| config.momentum), Some(0.5));
    for (group, config) in
        [(3, SgdConfig::default()), (0, SgdConfig { lr: -1.0, ..Default::default() })]
    {
        let before = rates(&sgd);
        assert!(matches!(
            sgd.set_config(group, config),
            Err(Error::Argument(ArgumentError::Setting { .. }))
        ));
        assert_eq!(rates(&sgd), before);
    }
    Ok(())
}

/// Weight decay is raised in the middle of a warm-up.
#[test]
fn settings_read_and_written_back_keep_the_schedule() -> candle_amp::Result<()> {
    for number in [0, 1] {
        let group = || Group::new(Vec::<Var>::new(), SgdConfig { lr: 1.0, ..Default::default() });
        let mut sgd = Sgd::from_groups(vec![group(), group()])?;
        let rates = |sgd: &Sgd| sgd.configs().map(|config| config.lr).collect::<Vec<_>>();
        let mut scheduler = Scheduler::new(Schedule::constant().with_warm_up(3), &mut sgd)?;
        assert_eq!(rates(&sgd), [0.25; 2]);
        let now = *sgd.configs().nth(number).expect("two groups");
        sgd.set_config(number, SgdConfig { weight_decay: 0.1, ..now })?;
        scheduler.after(true, &mut sgd);
        assert_eq!(rates(&sgd), [0.5; 2], "group {number}");
        // Half of what the schedule has made of it, from here on too.
        sgd.set_config(number, SgdConfig { lr: 0.25, ..now })?;
        scheduler.after(true, &mut sgd);
        let mut expected = [0.75; 2];
        expected[number] = 0.375;
        assert_eq!(rates(&sgd), expected, "group {number}");
    }
    Ok(())
}

#[test]
fn groups_keep_their_rates_where_the_first_was_made_with_none() -> candle_amp::Result<()> {
    let group = |lr| Group::new(Vec::<Var>::new(), SgdConfig { lr, ..SgdConfig::default() });
    let mut sgd = Sgd::from_groups(vec![group(0.0), group(0.25), group(0.0)])?;
    sgd.set_learning_rate(0.5);
    assert_eq!(sgd.configs().map(|config| config.lr).collect::<Vec<_>>(), [0.5, 0.25, 0.0]);
    Ok(())
}

#[test]
fn norms_and_biases_are_spared_the_decay() -> candle_amp::Result<()> {
    let varmap = VarMap::new();
    let vb = nn::var_builder(&varmap, DType::F32, &Device::Cpu);
    nn::conv2d(2, 3, 3, Default::default(), vb.pp("conv"))?;
    nn::batch_norm(3, 1e-5, vb.pp("norm"))?;
    let parameters = Parameters::from_varmap(&varmap);
    let config = SgdConfig { lr: 0.5, weight_decay: 0.5, ..Default::default() };
    let mut sgd = Sgd::from_groups(decay_groups(&parameters, config))?;
    let before: Vec<Tensor> =
        parameters.vars().iter().map(|var| var.copy()).collect::<candle_core::Result<_>>()?;
    let mut store = candle_core::backprop::GradStore::default();
    for var in parameters.vars() {
        store.insert(&var, var.zeros_like()?);
    }
    sgd.step(&store)?;
    for ((name, var), before) in parameters.iter().zip(&before) {
        let kept = if name == "conv.weight" { 0.75 } else { 1.0 };
        assert_same(name, var, &(before * kept)?);
    }
    Ok(())
}

#[test]
fn a_variable_belongs_to_one_group() -> candle_amp::Result<()> {
    let w = Var::ones(1, DType::F32, &Device::Cpu)?;
    let named = Parameters::named([("deep.w", w.clone())])?;
    let groups = vec![
        Group::new(vec![w.clone(), w.clone()], SgdConfig::default()),
        Group::new(&named, SgdConfig::default()),
    ];
    let message = Sgd::from_groups(groups).unwrap_err().to_string();
    assert!(message.contains("`deep.w` is in two parameter groups"), "{message}");
    let other = Parameters::named([("deep.w", Var::ones(1, DType::F32, &Device::Cpu)?)])?;
    let groups = [&named, &other].map(|part| Group::new(part, SgdConfig::default()));
    let result = Sgd::from_groups(groups.into());
    assert!(
        matches!(result, Err(Error::Argument(ArgumentError::DuplicateName { name })) if name == "deep.w")
    );
    Ok(())
}

#[test]
fn integers_are_left_out_and_small_floats_are_refused() -> candle_amp::Result<()> {
    let (w, count) =
        (variables(&[DType::F32])?[0].clone(), Var::ones(2, DType::U32, &Device::Cpu)?);
    let mut sgd = Sgd::new(vec![count.clone(), w.clone()], SgdConfig::default())?;
    assert!(sgd.master(&count)?.is_none());
    let before = to_vec(&w);
    sgd.step(&gradients(std::slice::from_ref(&w), 1, DType::F32)?)?;
    assert!(to_vec(&w) != before && to_vec(&count) == [1.0, 1.0]);
    let small = Var::ones(2, DType::F8E4M3, &Device::Cpu)?;
    let refused = Sgd::new(vec![small], SgdConfig::default());
    assert!(matches!(
        refused,
        Err(Error::Argument(ArgumentError::DType { op: "sgd", got: DType::F8E4M3, .. }))
    ));
    Ok(())
}

#[test]
fn bad_settings_name_themselves() {
    let says = |result: candle_amp::Result<()>, part: &str| {
        let message = result.unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    };
    let adamw = |config| AdamW::new(vec![], config).map(|_| ());
    says(adamw(AdamWConfig { beta2: 1.0, ..Default::default() }), "beta2 is 1");
    says(adamw(AdamWConfig { beta1: -0.1, ..Default::default() }), "beta1 is -0.1");
    says(adamw(AdamWConfig { eps: f64::NAN, ..Default::default() }), "eps is NaN");
    says(adamw(AdamWConfig { lr: f64::INFINITY, ..Default::default() }), "lr is inf");
    let lion = LionConfig { weight_decay: -1.0, ..Default::default() };
    says(Lion::new(vec![], lion).map(|_| ()), "weight_decay is -1");
    says(Lamb::new(vec![], LambConfig { beta1: 2.0, ..Default::default() }).map(|_| ()), "beta1");
    let sgd = Sgd::new(vec![], SgdConfig::default()).and_then(|o| o.with_state_dtype(DType::F16));
    says(sgd.map(|_| ()), "state is F16, expected F32 or BF16");
}

#[test]
fn gradients_that_do_not_fit_change_nothing() -> candle_amp::Result<()> {
    let vars = variables(&[DType::F32, DType::BF16])?;
    let before: Vec<Vec<f64>> = vars.iter().map(|v| to_vec(v)).collect();
    let mut adamw = AdamW::new(vars.clone(), ADAMW)?;
    let last = vars.last().expect("there are some");
    for bad in [random(1, 3, DType::F32), Tensor::zeros(1030, DType::U32, &Device::Cpu)?] {
        let mut store = gradients(&vars, 1, DType::F32)?;
        store.insert(last, bad);
        let message = adamw.step(&store).unwrap_err().to_string();
        assert!(message.contains("adamw: a gradient"), "{message}");
        let after: Vec<Vec<f64>> = vars.iter().map(|v| to_vec(v)).collect();
        assert_eq!(before, after);
    }
    Ok(())
}

#[test]
fn a_variable_without_a_gradient_does_not_step() -> candle_amp::Result<()> {
    let vars = variables(&[DType::F32])?;
    let named = vars.iter().zip(["a", "b", "c", "d", "e"]).map(|(v, n)| (n, v.clone()));
    let mut adamw = AdamW::new(&Parameters::named(named)?, ADAMW)?;
    let before = to_vec(&vars[1]);
    for step in 1..4 {
        let mut store = gradients(&vars, step, DType::F32)?;
        store.remove(&vars[1]);
        adamw.step(&store)?;
    }
    let steps = adamw.state()?.steps;
    assert_eq!((steps.get("a"), steps.get("b")), (Some(&3), None));
    assert_eq!(to_vec(&vars[1]), before);
    Ok(())
}

#[test]
fn a_gradient_may_share_the_memory_of_a_variable() -> candle_amp::Result<()> {
    let (a, b) = (Var::new(&[1f32, 2.0], &Device::Cpu)?, Var::new(&[3f32, 4.0], &Device::Cpu)?);
    let mut store = candle_core::backprop::GradStore::default();
    store.insert(&a, b.as_tensor().clone());
    store.insert(&b, b.as_detached_tensor());
    let config = SgdConfig { lr: 1.0, ..Default::default() };
    Sgd::new(vec![a.clone(), b.clone()], config)?.step(&store)?;
    assert_eq!((a.to_vec1::<f32>()?, b.to_vec1::<f32>()?), (vec![-2.0, -2.0], vec![0.0, 0.0]));
    Ok(())
}

#[test]
fn gradients_come_in_any_dtype_and_layout() -> candle_amp::Result<()> {
    let gradient = random(1, (5, 3), DType::BF16); // exact in all but F16
    for dtype in [DType::BF16, DType::F32, DType::F64] {
        let make = || Var::from_tensor(&random(2, (3, 5), DType::F32));
        let (a, b) = (make()?, make()?);
        let mut adamw = AdamW::new(vec![a.clone(), b.clone()], ADAMW)?;
        let mut store = candle_core::backprop::GradStore::default();
        store.insert(&a, gradient.to_dtype(dtype)?.t()?);
        store.insert(&b, gradient.to_dtype(DType::F32)?.t()?.contiguous()?);
        adamw.step(&store)?;
        assert_same(&format!("{dtype:?}"), &a, &b);
    }
    Ok(())
}

/// A step holds the lock of one variable at a time: who reads two together is not in its way.
#[test]
fn a_gradient_in_16_bit_serves_an_f64_variable() -> candle_amp::Result<()> {
    let gradient = random(1, (5, 3), DType::BF16);
    let make = || Var::from_tensor(&random(2, (5, 3), DType::F64));
    let (a, b) = (make()?, make()?);
    let mut adamw = AdamW::new(vec![a.clone(), b.clone()], ADAMW)?;
    let mut store = candle_core::backprop::GradStore::default();
    store.insert(&b, gradient.to_dtype(DType::F64)?);
    store.insert(&a, gradient);
    adamw.step(&store)?;
    assert_same("weights", &a, &b);
    Ok(())
}

#[test]
fn an_evaluation_on_another_thread_and_a_step_do_not_wait_for_each_other() -> candle_amp::Result<()>
{
    let make = |seed| Var::from_tensor(&random(seed, 70_003, DType::F32));
    let (a, b) = (make(1)?, make(2)?);
    let mut adamw = AdamW::new(vec![a.clone(), b.clone()], ADAMW)?;
    let store = gradients(&[a.clone(), b.clone()], 1, DType::F32)?;
    std::thread::scope(|threads| {
        let evaluation = threads.spawn(|| -> candle_core::Result<()> {
            for _ in 0..300 {
                let _ = (b.as_tensor() + a.as_tensor())?;
                let _ = (a.as_tensor() + b.as_tensor())?;
            }
            Ok(())
        });
        for _ in 0..300 {
            adamw.step(&store)?;
        }
        evaluation.join().expect("no panic")
    })?;
    Ok(())
}

#[test]
fn it_serves_where_a_candle_optimizer_is_asked_for() -> candle_core::Result<()> {
    fn train<O: Optimizer>(opt: &mut O, w: &Var) -> candle_core::Result<f64> {
        opt.set_learning_rate(0.25);
        opt.backward_step(&w.to_dtype(DType::F32)?.sum_all()?)?;
        Ok(opt.learning_rate())
    }
    let w = Var::ones(1, DType::BF16, &Device::Cpu)?;
    let mut lion =
        Lion::new(vec![w.clone()], LionConfig::default())?.with_masters(Masters::Remainder)?;
    assert_eq!(train(&mut lion.as_candle(), &w)?, 0.25);
    assert_eq!((to_vec(&w), lion.learning_rate()), (vec![0.75], 0.25));
    let mut owned = AsCandle::<Lion>::new(vec![w.clone()], LionConfig::default())?;
    train(&mut owned, &w)?;
    assert_eq!(to_vec(&w), [0.5]);
    assert_eq!(owned.inner().masters(), Masters::F32);
    Ok(())
}
