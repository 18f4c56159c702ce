//! The same steps as PyTorch's, from its own numbers.

use candle_amp::Parameters;
use candle_amp::optim::{
    AdamWConfig, Config, Ema, EmaConfig, Optim, PlateauConfig, ReduceOnPlateau, Schedule,
    ScheduleShape, Scheduler, Sgd, SgdConfig,
};
use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};

use super::golden;
use crate::util::to_vec;

/// How many elements of `ours` are those of `theirs` bit for bit, and how far the others are, in the
/// last place of `size`: a sum is as exact as its largest term.
fn compare(ours: &Tensor, theirs: &Tensor, size: &[f32]) -> (usize, f64) {
    let (a, b) = (ours.to_vec1::<f32>().unwrap(), theirs.to_vec1::<f32>().unwrap());
    let same = a.iter().zip(&b).filter(|(a, b)| a.to_bits() == b.to_bits()).count();
    let far = a.iter().zip(&b).zip(size).map(|((a, b), size)| {
        f64::from((a - b).abs()) / f64::from(f32::EPSILON * size.abs().max(f32::MIN_POSITIVE))
    });
    (same, far.fold(0.0, f64::max))
}

fn follow<C: Config>(name: &str, config: C) -> candle_amp::Result<()> {
    let golden = golden();
    let w = Var::from_tensor(&golden["initial"])?;
    let parameters = Parameters::named([("w", w.clone())])?;
    let mut optimizer = Optim::new(&parameters, config)?;
    let mut largest = golden["initial"].abs()?;
    for step in 0..golden["gradients"].dim(0)? {
        let mut store = GradStore::default();
        store.insert(&w, golden["gradients"].get(step)?);
        optimizer.step(&store)?;
        let expected = golden[&format!("{name}.weights")].get(step)?;
        largest = largest.maximum(&expected.abs()?)?;
        let (same, far) = compare(&w, &expected, &largest.to_vec1::<f32>()?);
        println!("{name}, step {step}: {same} of 37 the same, {far:.2}");
        assert!(same >= 36 && far <= 1.0, "{name}, step {step}: {same} of 37, {far:.2}");
    }
    let state = optimizer.state()?;
    let prefix = format!("{name}.state.");
    let mut count = 0;
    for (key, theirs) in golden.iter().filter(|(key, _)| key.starts_with(&prefix)) {
        let ours = &state.tensors[&format!("w.{}", &key[prefix.len()..])];
        let (same, far) = compare(ours, theirs, &theirs.to_vec1::<f32>()?);
        println!("{key}: {same} of 37 the same, {far:.2}");
        assert!(same >= 36 && far <= 1.0, "{key}: {same} of 37, {far:.2}");
        count += 1;
    }
    assert_eq!(count, state.tensors.len(), "{name}");
    Ok(())
}

#[test]
fn optimizers_take_pytorchs_steps_to_the_last_bits() -> candle_amp::Result<()> {
    let sgd = SgdConfig { lr: 0.1, ..Default::default() };
    let momentum = SgdConfig { momentum: 0.9, weight_decay: 0.05, ..sgd };
    follow("sgd", sgd)?;
    follow("sgd_momentum", SgdConfig { dampening: 0.3, maximize: true, ..momentum })?;
    follow("sgd_nesterov", SgdConfig { nesterov: true, ..momentum })?;
    follow("adamw", AdamWConfig::default())?;
    follow(
        "adamw_amsgrad",
        AdamWConfig {
            lr: 0.05,
            beta1: 0.8,
            beta2: 0.95,
            eps: 1e-6,
            weight_decay: 0.1,
            amsgrad: true,
            maximize: true,
        },
    )?;
    let low = AdamWConfig { lr: 0.05, beta1: 0.3, beta2: 0.9, ..Default::default() };
    follow("adamw_low_beta1", AdamWConfig { weight_decay: 0.0, ..low })
}

#[track_caller]
fn assert_rates(name: &str, ours: &[f64], theirs: &Tensor) {
    assert_eq!(ours.len(), theirs.elem_count());
    for (step, (a, b)) in ours.iter().zip(to_vec(theirs)).enumerate() {
        // PyTorch multiplies its way from step to step in some.
        assert!((a - b).abs() <= 1e-12, "{name}, step {step}: {a} for {b}");
    }
}

#[test]
fn schedules_have_pytorchs_rates() -> candle_amp::Result<()> {
    let golden = golden();
    let (pct_start, div_factor, final_div_factor) = (0.45, 5.0, 20.0);
    let short = ScheduleShape::OneCycle { steps: 40, pct_start, div_factor, final_div_factor };
    let schedules = [
        ("cosine", Schedule { warm_up: 0, shape: ScheduleShape::Cosine { steps: 39, end: 0.1 } }),
        ("one_cycle", Schedule::one_cycle(40)),
        ("one_cycle_short", Schedule { warm_up: 0, shape: short }),
        ("step", Schedule::step(7, 0.5)),
        ("multi_step", Schedule::multi_step(vec![5, 11, 30], 0.1)),
    ];
    for (name, schedule) in schedules {
        let mut sgd = Sgd::new(vec![], SgdConfig { lr: 0.5, ..Default::default() })?;
        let mut scheduler = Scheduler::new(schedule, &mut sgd)?;
        let mut rates = Vec::new();
        for _ in 0..40 {
            rates.push(sgd.learning_rate());
            scheduler.after(true, &mut sgd);
        }
        assert_rates(name, &rates, &golden[&format!("schedule.{name}")]);
    }
    Ok(())
}

#[test]
fn plateaus_fall_where_pytorchs_do() -> candle_amp::Result<()> {
    let golden = golden();
    let configs = [
        ("default", PlateauConfig { patience: 3, ..Default::default() }),
        (
            "max",
            PlateauConfig {
                maximize: true,
                factor: 0.5,
                patience: 2,
                threshold: 0.02,
                relative: false,
                cooldown: 3,
                min_lr: 0.06,
                ..Default::default()
            },
        ),
    ];
    for (name, config) in configs {
        let mut sgd = Sgd::new(vec![], SgdConfig { lr: 0.5, ..Default::default() })?;
        let mut plateau = ReduceOnPlateau::new(config)?;
        let rates: Vec<f64> = to_vec(&golden["plateau.measures"])
            .into_iter()
            .map(|measure| {
                // Half way through, from what was saved.
                plateau = ReduceOnPlateau::restore(*plateau.config(), plateau.state()).unwrap();
                plateau.step(measure, &mut sgd);
                sgd.learning_rate()
            })
            .collect();
        assert_rates(name, &rates, &golden[&format!("plateau.{name}")]);
    }
    Ok(())
}

#[test]
fn an_average_is_pytorchs() -> candle_amp::Result<()> {
    let golden = golden();
    let w = Var::from_tensor(&golden["initial"])?;
    let parameters = Parameters::named([("w", w.clone())])?;
    let mut ema = Ema::new(&parameters, EmaConfig { decay: 0.9, warm_up: false })?;
    for weights in golden["sgd.weights"].chunk(12, 0)? {
        w.set(&weights.squeeze(0)?)?;
        ema.update()?;
    }
    let average = ema.average(&w).expect("it has one");
    let (same, far) = compare(average, &golden["ema"], &golden["ema"].to_vec1::<f32>()?);
    println!("ema: {same} of 37 the same, {far:.2}");
    assert!(same >= 36 && far <= 1.0, "{same} of 37 the same, {far}");
    Ok(())
}
