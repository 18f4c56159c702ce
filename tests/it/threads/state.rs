//! What is a thread's stays the task's: the autocast scope, `no_grad`, the pass, the random state.

use std::sync::atomic::{AtomicUsize, Ordering};

use candle_amp::autograd::checkpoint;
use candle_amp::{Autocast, no_grad, ops, random};
use candle_core::{DType, Device, Tensor, Var};
use rayon::prelude::*;

use super::{pool, watched};
use crate::util::to_vec;

/// Tasks that enter nothing, beside tasks in an autocast scope and under `no_grad`, whose operators have
/// helpers: a thread that waited in rayon would run the first inside the others.
#[test]
fn no_task_runs_in_the_scope_of_another() {
    watched(
        |tasks| format!("after {tasks} tasks"),
        |progress| {
            let x = Tensor::ones((192, 192), DType::F32, &Device::Cpu).unwrap();
            let w = Var::ones((192, 192), DType::F32, &Device::Cpu).unwrap();
            let [scopes, dtypes, graphs] = [(); 3].map(|()| AtomicUsize::new(0));
            let count = |wrong: bool, count: &AtomicUsize| {
                count.fetch_add(usize::from(wrong), Ordering::Relaxed);
            };
            let task = |number: usize| {
                match number % 4 {
                    0 => _ = Autocast::new(DType::F16).scope(|| ops::matmul(&x, &w)).unwrap(),
                    1 => _ = no_grad(|| ops::matmul(&x, &w)).unwrap(),
                    _ => {
                        count(Autocast::current().dtype().is_some(), &scopes);
                        let y = ops::matmul(&x, &w).unwrap();
                        count(y.dtype() != DType::F32, &dtypes);
                        count(!y.track_op(), &graphs);
                    }
                }
                progress.step();
            };
            pool(4).install(|| (0..1200).into_par_iter().for_each(task));
            let wrong = [scopes, dtypes, graphs].map(AtomicUsize::into_inner);
            assert_eq!(
                wrong, [0; 3],
                "tasks in a scope, results of its dtype, graphs that are lost"
            );
        },
    );
}

/// A scope around many elementwise operators, beside tasks spawned into the same pool.
#[test]
fn no_spawned_task_runs_in_the_scope_of_another() {
    watched(
        |tasks| format!("after {tasks} tasks"),
        |progress| {
            let (x, leaked) =
                (Tensor::ones(1 << 18, DType::F32, &Device::Cpu).unwrap(), AtomicUsize::new(0));
            let (x, leaked, progress) = (&x, &leaked, &progress);
            pool(4).scope(|scope| {
                for number in 0..160 {
                    scope.spawn(move |_| {
                        if number % 2 == 0 {
                            Autocast::new(DType::BF16)
                                .scope(|| (0..5).for_each(|_| _ = ops::relu(x).unwrap()));
                        } else if Autocast::current().dtype().is_some() {
                            leaked.fetch_add(1, Ordering::Relaxed);
                        }
                        progress.step();
                    });
                }
            });
            assert_eq!(leaked.load(Ordering::Relaxed), 0);
        },
    );
}

/// Recomputed dropout has the forward pass's mask, and a task's own: `w` is the identity, so that `dy/dx` is
/// the mask, and so is `y` at ones.
#[test]
fn a_checkpoint_draws_from_its_own_random_state() {
    watched(
        |tasks| format!("after {tasks} tasks"),
        |progress| {
            let n = 160;
            let x = Tensor::ones((n, n), DType::F32, &Device::Cpu).unwrap();
            let w = Var::from_tensor(&Tensor::eye(n, DType::F32, &Device::Cpu).unwrap()).unwrap();
            let run = |seed: u64| {
                let _fork = random::fork_rng_guard();
                random::manual_seed(seed);
                let (w, v) = (w.clone(), Var::from_tensor(&x).unwrap());
                let block = move |x: &Tensor| {
                    let h = ops::dropout(&ops::matmul(x, &w)?, 0.5)?;
                    ops::dropout(&ops::matmul(&h, &w)?, 0.5)
                };
                let y = checkpoint(block, v.as_tensor()).unwrap();
                let gradients = ops::sum(&y).unwrap().backward().unwrap();
                let dv = to_vec(gradients.get(&v).unwrap());
                assert_eq!(to_vec(&y), dv, "the mask of another forward pass");
                progress.step();
                dv
            };
            let alone: Vec<_> = (0..6).map(run).collect();
            let together: Vec<_> =
                pool(3).install(|| (0..60).into_par_iter().map(|i| run(i % 6)).collect());
            for (i, mask) in together.iter().enumerate() {
                assert!(*mask == alone[i % 6], "run {i} has another task's random numbers");
            }
        },
    );
}

/// Passes of several runs in one pool: each has the gradients it has alone, to the bit.
#[test]
fn a_pass_is_its_tasks_own() {
    watched(
        |tasks| format!("after {tasks} tasks"),
        |progress| {
            let run = |seed: u64| {
                let w = crate::util::random(seed, (128, 128), DType::F32);
                let w = Var::from_tensor(&w).unwrap();
                let amp = match seed % 3 {
                    0 => Autocast::disabled(),
                    1 => Autocast::new(DType::BF16),
                    _ => Autocast::new(DType::F16),
                };
                let loss = amp.scope(|| {
                    let h = ops::gelu_tanh(&ops::matmul(&w, &w)?)?;
                    ops::mean(&ops::matmul(&h, &w)?)
                });
                let gradients = loss.unwrap().backward().unwrap();
                progress.step();
                to_vec(gradients.get(&w).unwrap())
            };
            let alone: Vec<_> = (0..6).map(run).collect();
            let together: Vec<_> =
                pool(3).install(|| (0..60).into_par_iter().map(|i| run(i % 6)).collect());
            for (i, gradient) in together.iter().enumerate() {
                assert!(*gradient == alone[i % 6], "run {i}");
            }
        },
    );
}
