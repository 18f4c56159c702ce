//! Settings that `F64` has and `F32`, in which optimizers compute, has not.

use candle_amp::optim::{
    AdamWConfig, Config, LambConfig, LionConfig, Optim, Schedule, Scheduler, SgdConfig,
};
use candle_core::{DType, Device, Result, Var};

use crate::bad_input::assert_says;

fn weight() -> Result<Var> {
    Var::ones(2, DType::F32, &Device::Cpu)
}

/// Refused when the optimizer is made, when it is set, and at the step, where nothing changes.
fn refuses<C: Config>(good: C, bad: &[(C, &str)]) -> Result<()> {
    let w = weight()?;
    let mut optimizer = Optim::new(vec![w.clone()], good)?;
    for (config, says) in bad {
        let expected = [*says, "F32"];
        assert_says(Optim::new(vec![w.clone()], *config), &expected);
        assert_says(optimizer.set_config(0, *config), &expected);
    }
    for lr in [1e300, 4e38] {
        optimizer.set_learning_rate(lr);
        assert_says(optimizer.backward_step(&w.sum_all()?), &["lr is", "3.4e38"]);
        assert_eq!(w.to_vec1::<f32>()?, [1.0, 1.0]);
    }
    optimizer.set_learning_rate(0.5);
    optimizer.backward_step(&w.sum_all()?)?;
    assert!(w.to_vec1::<f32>()?.iter().all(|w| w.is_finite() && *w < 1.0));
    Ok(())
}

#[test]
fn settings_that_are_infinite_in_f32_are_refused() -> Result<()> {
    let sgd = SgdConfig::default();
    refuses(
        sgd,
        &[
            (SgdConfig { lr: 1e300, ..sgd }, "lr is 1000"),
            (SgdConfig { momentum: 1e39, ..sgd }, "momentum is 1000"),
            (SgdConfig { dampening: -1e39, momentum: 0.5, ..sgd }, "dampening is -1000"),
            (SgdConfig { weight_decay: 1e39, ..sgd }, "weight_decay is 1000"),
            (SgdConfig { lr: 1e20, weight_decay: 1e20, ..sgd }, "product with weight_decay"),
        ],
    )?;
    let adamw = AdamWConfig::default();
    refuses(
        adamw,
        &[
            (AdamWConfig { lr: 1e300, ..adamw }, "lr is 1000"),
            (AdamWConfig { eps: 1e39, ..adamw }, "eps is 1000"),
            (AdamWConfig { weight_decay: 1e39, ..adamw }, "weight_decay is 1000"),
            (AdamWConfig { lr: 1e20, weight_decay: 1e20, ..adamw }, "product with weight_decay"),
            (AdamWConfig { lr: 1e38, weight_decay: 0.0, ..adamw }, "1 - beta1"),
        ],
    )?;
    let lion = LionConfig::default();
    refuses(
        lion,
        &[
            (LionConfig { lr: 1e300, ..lion }, "lr is 1000"),
            (LionConfig { lr: 1e20, weight_decay: 1e20, ..lion }, "product with weight_decay"),
        ],
    )?;
    let lamb = LambConfig::default();
    refuses(
        lamb,
        &[
            (LambConfig { lr: 1e300, ..lamb }, "lr is 1000"),
            (LambConfig { eps: 1e39, ..lamb }, "eps is 1000"),
        ],
    )
}

/// The largest there are give finite numbers.
#[test]
fn the_largest_settings_that_are_taken_give_finite_steps() -> Result<()> {
    let w = weight()?;
    let mut sgd =
        Optim::new(vec![w.clone()], SgdConfig { lr: f32::MAX.into(), ..Default::default() })?;
    sgd.backward_step(&w.sum_all()?)?;
    assert!(w.to_vec1::<f32>()?.iter().all(|w| w.is_finite()));
    let w = weight()?;
    let config = AdamWConfig { lr: 1e37, weight_decay: 10.0, ..Default::default() };
    let mut adamw = Optim::new(vec![w.clone()], config)?;
    adamw.backward_step(&w.sum_all()?)?;
    assert!(w.to_vec1::<f32>()?.iter().all(|w| w.is_finite()), "{w}");
    Ok(())
}

#[test]
fn schedules_that_cannot_be_do_not_panic() -> Result<()> {
    assert_eq!(Schedule::step(0, 0.5).factor(2), 0.25, "as a size of 1, if nobody checks");
    assert_eq!(Schedule::constant().with_warm_up(u64::MAX).factor(u64::MAX - 1), 1.0);
    let mut sgd = Optim::new(vec![weight()?], SgdConfig::default())?;
    assert_says(Scheduler::new(Schedule::step(0, 0.5), &mut sgd), &["size is 0"]);
    Ok(())
}
