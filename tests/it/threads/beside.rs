//! Steps beside evaluations of the same model.
//!
//! The evaluations go on until the steps are taken, and so show no progress. One that is stuck shows after the last
//! step: the test does not end.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use candle_amp::optim::{AdamW, AdamWConfig, Sgd, SgdConfig};
use candle_amp::{Autocast, GradScaler, no_grad, ops};
use candle_core::{DType, Device, Tensor, Var};
use rayon::prelude::*;

use super::{Progress, beside_writers, pool, rounds, watched};
use crate::util::{random, to_vec};

const STEPS: usize = 12;

/// Steps on the mean of `w`, until `STEPS` are taken.
fn train(w: &Var, progress: &Progress) {
    let mut optimizer =
        Sgd::new(vec![w.clone()], SgdConfig { lr: 1e-9, ..Default::default() }).unwrap();
    let mut scaler = GradScaler::default();
    for _ in 0..STEPS {
        let loss = ops::mean(w).unwrap();
        scaler.scale(&loss).unwrap().backward().unwrap();
        scaler.step(&mut optimizer).unwrap();
        scaler.update().unwrap();
        progress.step();
    }
}

/// Large enough for every loop over it to have helpers.
fn weight() -> Var {
    Var::ones((512, 512), DType::F32, &Device::Cpu).unwrap()
}

/// Evaluations in a pool's `par_iter`, and steps from a thread outside of it.
#[test]
fn steps_beside_evaluations_in_a_pool() {
    watched(
        |steps| format!("after {steps} steps"),
        |progress| {
            let (w, over) = (weight(), AtomicBool::new(false));
            let x = Tensor::ones((64, 512), DType::F32, &Device::Cpu).unwrap();
            let evaluate = |_: usize| _ = no_grad(|| ops::linear(&x, &w, None)).unwrap();
            thread::scope(|scope| {
                scope.spawn(|| {
                    let pool = pool(3);
                    while !over.load(Ordering::Relaxed) && !progress.is_over() {
                        pool.install(|| (0..16).into_par_iter().for_each(evaluate));
                    }
                });
                train(&w, &progress);
                over.store(true, Ordering::Relaxed);
            });
        },
    );
}

/// Training and evaluation as two sides of a `rayon::join`, and as tasks of one pool.
#[test]
fn training_and_evaluation_joined_by_rayon() {
    watched(
        |steps| format!("after {steps} steps"),
        |progress| {
            let (w, over) = (weight(), AtomicBool::new(false));
            let x = Tensor::ones((64, 512), DType::F32, &Device::Cpu).unwrap();
            let training = || {
                train(&w, &progress);
                over.store(true, Ordering::Relaxed);
            };
            let evaluation = || {
                (0..100_000).into_par_iter().for_each(|_| {
                    if !over.load(Ordering::Relaxed) && !progress.is_over() {
                        no_grad(|| ops::linear(&x, &w, None)).unwrap();
                    }
                });
            };
            for threads in [2, 3] {
                over.store(false, Ordering::Relaxed);
                pool(threads).install(|| rayon::join(training, evaluation));
            }
        },
    );
}

/// Many variables, which a step locks together, and evaluations that read them in pairs.
#[test]
fn a_step_over_many_variables_beside_evaluations_of_pairs() {
    watched(
        |steps| format!("after {steps} steps"),
        |progress| {
            let vars: Vec<Var> = (0..12)
                .map(|seed| {
                    let dtype = if seed % 3 == 0 { DType::BF16 } else { DType::F32 };
                    Var::from_tensor(&random(seed, (40, 40), dtype)).unwrap()
                })
                .collect();
            let stop = AtomicBool::new(false);
            thread::scope(|scope| {
                for reverse in [false, true] {
                    let (vars, stop, progress) = (&vars, &stop, &progress);
                    scope.spawn(move || {
                        let amp = Autocast::new(DType::BF16);
                        while !stop.load(Ordering::Relaxed) && !progress.is_over() {
                            for i in 0..vars.len() {
                                let (a, b) = (&vars[i], &vars[(i + 5) % vars.len()]);
                                let (a, b) = if reverse { (b, a) } else { (a, b) };
                                amp.scope(|| no_grad(|| ops::matmul(a, b))).unwrap();
                            }
                        }
                    });
                }
                let mut optimizer = AdamW::new(vars.clone(), AdamWConfig::default()).unwrap();
                let mut scaler = GradScaler::default();
                for _ in 0..STEPS {
                    let sums = vars
                        .iter()
                        .map(|var| ops::sum(&var.to_dtype(DType::F32).unwrap()).unwrap());
                    let loss = sums.reduce(|a, b| ops::add(&a, &b).unwrap()).unwrap();
                    scaler.scale(&loss).unwrap().backward().unwrap();
                    scaler.clip_grad_norm(1.0).unwrap();
                    scaler.step(&mut optimizer).unwrap();
                    scaler.update().unwrap();
                    progress.step();
                }
                stop.store(true, Ordering::Relaxed);
            });
        },
    );
}

/// What an evaluation reads is a weight before or after a step, never one that is half written.
#[test]
fn an_evaluation_never_sees_half_a_step() {
    watched(
        |steps| format!("after {steps} steps"),
        |progress| {
            let w = Var::zeros(300_000, DType::F32, &Device::Cpu).unwrap();
            let stop = AtomicBool::new(false);
            thread::scope(|scope| {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) && !progress.is_over() {
                        let copy = to_vec(&no_grad(|| ops::mul(&w, &w)).unwrap());
                        assert!(copy.iter().all(|x| *x == copy[0]), "half of a step");
                    }
                });
                let mut optimizer =
                    Sgd::new(vec![w.clone()], SgdConfig { lr: 1.0, ..Default::default() }).unwrap();
                let mut scaler = GradScaler::default();
                for _ in 0..STEPS {
                    let loss = ops::sum(&w).unwrap();
                    scaler.scale(&loss).unwrap().backward().unwrap();
                    scaler.step(&mut optimizer).unwrap();
                    scaler.update().unwrap();
                    progress.step();
                }
                stop.store(true, Ordering::Relaxed);
            });
            assert_eq!(to_vec(&w)[299_999], -(STEPS as f64));
        },
    );
}

/// Two threads that read two variables in opposite orders, and a writer for each.
#[test]
fn readers_in_opposite_orders_pass_waiting_writers() {
    watched(
        |rounds| format!("after {rounds} rounds"),
        |progress| {
            let var = |seed| Var::from_tensor(&random(seed, (16, 16), DType::F32)).unwrap();
            let (a, b) = (var(1), var(2));
            beside_writers(&progress, &[a.clone(), b.clone()], || {
                thread::scope(|scope| {
                    for (x, y) in [(&a, &b), (&b, &a)] {
                        let progress = &progress;
                        scope.spawn(move || {
                            // Readers that wait behind a writer are stuck in the first or second round.
                            for _ in 0..rounds(30, 300) {
                                no_grad(|| ops::mul(x, y).and(ops::matmul(x, y))).unwrap();
                                no_grad(|| ops::mse(x, y).and(ops::linear(x, y, None))).unwrap();
                                progress.step();
                            }
                        });
                    }
                });
            });
        },
    );
}
