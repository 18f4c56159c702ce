//! Schedules in a run: groups, any optimizer, skipped steps, going on.

use candle_amp::error::ArgumentError;
use candle_amp::optim::{
    AdamW, AdamWConfig, LearningRate, PlateauConfig, ReduceOnPlateau, Schedule, ScheduleShape,
    Scheduler, Sgd, SgdConfig,
};
use candle_amp::{Error, GradScaler, MasterWeights, ops};
use candle_core::{DType, Device, Var};
use candle_nn::{Optimizer, SGD};

#[test]
fn a_skipped_step_holds_the_schedule_still() -> candle_amp::Result<()> {
    let w = Var::ones(1, DType::F32, &Device::Cpu)?;
    let mut adamw = AdamW::new(vec![w.clone()], AdamWConfig { lr: 1.0, ..Default::default() })?;
    let mut scheduler = Scheduler::new(Schedule::step(1, 0.5), &mut adamw)?;
    let mut scaler = GradScaler::default();
    let mut rates = Vec::new();
    for factor in [1.0, f64::INFINITY, 1.0, f64::NAN, f64::NAN, 1.0] {
        scaler.scale(&(ops::sum(&w)? * factor)?)?.backward()?;
        let outcome = scaler.step(&mut adamw)?;
        scheduler.step(&outcome, &mut adamw)?;
        scaler.update()?;
        rates.push(adamw.learning_rate());
    }
    assert_eq!(rates, [0.5, 0.5, 0.25, 0.25, 0.25, 0.125]);
    assert_eq!(scheduler.taken(), 3);
    Ok(())
}

#[test]
fn any_optimizer_can_be_scheduled() -> candle_amp::Result<()> {
    fn first_two(optimizer: &mut impl LearningRate) -> candle_amp::Result<[f64; 2]> {
        let mut scheduler = Scheduler::new(Schedule::cosine(2), optimizer)?;
        let first = optimizer.learning_rate();
        scheduler.after(true, optimizer);
        Ok([first, optimizer.learning_rate()])
    }
    let w = Var::ones(1, DType::BF16, &Device::Cpu)?;
    let mut raw = SGD::new(vec![w.clone()], 0.5)?;
    let mut masters = MasterWeights::<SGD>::new(vec![w.clone()], 0.5)?;
    let mut own = AdamW::new(vec![w], AdamWConfig { lr: 0.5, ..Default::default() })?;
    assert_eq!(first_two(&mut raw)?, [0.5, 0.25]);
    assert_eq!(first_two(&mut masters)?, [0.5, 0.25]);
    assert_eq!(first_two(&mut own.as_candle())?, [0.5, 0.25]);
    Ok(())
}

#[test]
fn a_schedule_goes_on_where_it_was_saved() -> candle_amp::Result<()> {
    let mut sgd = SGD::new(vec![], 0.3)?;
    let schedule = Schedule::one_cycle(20).with_warm_up(3);
    let mut first = Scheduler::new(schedule.clone(), &mut sgd)?;
    (0..9).for_each(|_| first.after(true, &mut sgd));
    let mut other = SGD::new(vec![], 1.0)?;
    let second = Scheduler::resume(schedule, first.base_lr(), first.taken(), &mut other)?;
    assert_eq!(second, first);
    assert_eq!(Optimizer::learning_rate(&other), Optimizer::learning_rate(&sgd));
    Ok(())
}

/// Schedules are chained, as PyTorch's are, and what was set by hand is a factor too.
#[test]
fn what_others_make_of_the_rate_stays() -> candle_amp::Result<()> {
    let mut sgd = Sgd::new(vec![], SgdConfig { lr: 1.0, ..Default::default() })?;
    let mut warm_up = Scheduler::new(Schedule::constant().with_warm_up(3), &mut sgd)?;
    let mut plateau = ReduceOnPlateau::new(PlateauConfig { patience: 0, ..Default::default() })?;
    for loss in [2.0, 2.0] {
        plateau.step(loss, &mut sgd);
    }
    let near = |rate: f64, expected: f64| (rate - expected).abs() <= 4.0 * f64::EPSILON;
    assert!(near(sgd.learning_rate(), 0.025));
    for expected in [0.05, 0.075, 0.1, 0.1] {
        warm_up.after(true, &mut sgd);
        assert!(near(sgd.learning_rate(), expected), "{}", sgd.learning_rate());
    }
    assert!(near(warm_up.base_lr(), 0.1));
    let mut halves = Scheduler::new(Schedule::step(1, 0.5), &mut sgd)?;
    for expected in [0.05, 0.025] {
        halves.after(true, &mut sgd);
        warm_up.after(true, &mut sgd);
        assert!(near(sgd.learning_rate(), expected), "{}", sgd.learning_rate());
    }
    sgd.set_learning_rate(0.5);
    halves.after(true, &mut sgd);
    assert!(near(sgd.learning_rate(), 0.25), "{}", sgd.learning_rate());
    // Not one that a factor of 0 came from.
    let mut line = Scheduler::new(Schedule::linear(2), &mut sgd)?;
    line.after(true, &mut sgd);
    line.after(true, &mut sgd);
    assert_eq!(sgd.learning_rate(), 0.0);
    line.after(true, &mut sgd);
    assert_eq!(sgd.learning_rate(), 0.0);
    Ok(())
}

#[test]
fn a_warm_up_rises_to_the_whole_rate() {
    let schedule = Schedule::constant().with_warm_up(4);
    let factors: Vec<f64> = (0..6).map(|taken| schedule.factor(taken)).collect();
    assert_eq!(factors, [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]);
}

/// `LinearLR(sgd, start_factor=1, end_factor=0.07, total_iters=4)` of PyTorch 2.15, at a rate of 1.
#[test]
fn a_line_is_pytorchs_linear_lr() {
    let schedule = Schedule { warm_up: 0, shape: ScheduleShape::Linear { steps: 4, end: 0.07 } };
    for (taken, expected) in [1.0, 0.7675, 0.535, 0.3025, 0.07, 0.07].into_iter().enumerate() {
        let factor = schedule.factor(taken as u64);
        assert!((factor - expected).abs() < 1e-12, "step {taken}: {factor} for {expected}");
    }
    let triangle = Schedule::linear(3).with_warm_up(2);
    let factors: Vec<f64> = (0..6).map(|taken| triangle.factor(taken)).collect();
    let expected = [1.0 / 3.0, 2.0 / 3.0, 1.0, 2.0 / 3.0, 1.0 / 3.0, 0.0];
    for (factor, expected) in factors.iter().zip(expected) {
        assert!((factor - expected).abs() < 1e-12, "{factors:?}");
    }
}

#[test]
fn no_schedule_leaves_its_range() {
    for steps in [1, 2, 3, 7, 1000] {
        for pct_start in [0.0, 0.3, 0.5, 0.99] {
            let shape = ScheduleShape::OneCycle {
                steps,
                pct_start,
                div_factor: 25.0,
                final_div_factor: 1e4,
            };
            for schedule in
                [Schedule { warm_up: 2, shape }, Schedule::cosine(steps), Schedule::linear(steps)]
            {
                for taken in (0..2 * steps + 5).chain([u64::MAX]) {
                    let factor = schedule.factor(taken);
                    assert!(
                        (0.0..=1.0 + 1e-12).contains(&factor),
                        "{schedule:?} {taken}: {factor}"
                    );
                }
            }
        }
    }
}

#[test]
fn bad_schedules_name_the_setting() -> candle_amp::Result<()> {
    let mut sgd = SGD::new(vec![], 0.3)?;
    let one_cycle = |div_factor, final_div_factor| ScheduleShape::OneCycle {
        steps: 9,
        pct_start: 0.5,
        div_factor,
        final_div_factor,
    };
    let cases = [
        (Schedule::cosine(0), "steps is 0"),
        (Schedule::step(0, 0.1), "size is 0"),
        (Schedule::step(3, f64::NAN), "gamma is NaN"),
        (Schedule::step(3, -0.5), "gamma is -0.5"),
        (Schedule::step(3, f64::INFINITY), "gamma is inf"),
        (Schedule { warm_up: 0, shape: one_cycle(0.0, 1e4) }, "div_factor is 0"),
        (Schedule { warm_up: 0, shape: one_cycle(f64::INFINITY, 1e4) }, "div_factor is inf"),
        (Schedule { warm_up: 0, shape: one_cycle(25.0, -1.0) }, "final_div_factor is -1"),
        (Schedule::multi_step(vec![3, 2], 0.1), "milestones is 2"),
        (
            Schedule {
                warm_up: 0,
                shape: ScheduleShape::OneCycle {
                    steps: 9,
                    pct_start: 1.5,
                    div_factor: 25.0,
                    final_div_factor: 1e4,
                },
            },
            "pct_start is 1.5",
        ),
    ];
    for (schedule, part) in cases {
        match Scheduler::new(schedule, &mut sgd) {
            Err(error @ Error::Argument(ArgumentError::Setting { .. })) => {
                assert!(error.to_string().contains(part), "{error}");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(Optimizer::learning_rate(&sgd), 0.3);
    }
    Ok(())
}

#[test]
fn a_milestone_that_is_there_twice_counts_twice() -> candle_amp::Result<()> {
    let mut sgd = SGD::new(vec![], 0.5)?;
    let mut scheduler = Scheduler::new(Schedule::multi_step(vec![1, 1, 3], 0.25), &mut sgd)?;
    let mut rates = vec![scheduler.learning_rate()];
    for _ in 0..3 {
        scheduler.after(true, &mut sgd);
        rates.push(scheduler.learning_rate());
    }
    assert_eq!(rates, [0.5, 0.03125, 0.03125, 0.0078125]);
    Ok(())
}

#[test]
fn schedulers_are_equal_where_they_stand_at_the_same_step_of_the_same_schedule()
-> candle_amp::Result<()> {
    let mut sgd = SGD::new(vec![], 0.5)?;
    let mut of = |steps, base_lr, taken| {
        Scheduler::resume(Schedule::cosine(steps), base_lr, taken, &mut sgd)
    };
    let scheduler = of(10, 0.5, 3)?;
    assert_eq!(scheduler, of(10, 0.5, 3)?);
    for other in [of(11, 0.5, 3)?, of(10, 0.25, 3)?, of(10, 0.5, 4)?] {
        assert_ne!(scheduler, other);
    }
    Ok(())
}
