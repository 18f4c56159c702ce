//! What other threads do beside a graph.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Device, Module, Tensor};

use super::{HERE, STEPS, linear, rows};
use crate::kernels::testing::devices::gpus;
use crate::kernels::testing::own_process::in_own_process;
use crate::optim::graphed::GraphedStep;
use crate::optim::{Sgd, SgdConfig};
use crate::{GradScaler, Parameters, Result, ops, random};

/// Neither a capture nor a replay gives other threads' numbers a second time, or takes them for its own.
#[test]
fn other_threads_draw_beside_a_graph() -> Result<()> {
    let test = format!("{HERE}other_threads::other_threads_draw_beside_a_graph");
    if gpus().is_empty() || !in_own_process(&test, &[]) {
        return Ok(());
    }
    const CPU: Device = Device::Cpu;
    let draw = || random::rand(0.0, 1.0, 3, DType::F32, &CPU)?.to_vec1::<f32>();
    for device in gpus() {
        random::manual_seed(3);
        let (varmap, layer) = linear(&device)?;
        let parameters = Parameters::from_varmap(&varmap);
        let mut optimizer = Sgd::new(&parameters, SgdConfig { lr: 0.1, ..Default::default() })?;
        let others = RefCell::new(Vec::new());
        let forward = |inputs: &[Tensor]| {
            let dropped = ops::dropout(&layer.forward(&inputs[0])?, 0.5)?;
            let theirs = std::thread::scope(|threads| threads.spawn(draw).join().expect("a draw"))?;
            others.borrow_mut().push(theirs);
            ops::mean(&dropped)
        };
        let (mut step, mut scaler) = (GraphedStep::new(forward), GradScaler::disabled());
        let first = random::state().draws;
        for number in 0..STEPS {
            step.run(&mut scaler, &mut optimizer, &[rows(number, 5, &device)?])?;
            others.borrow_mut().push(draw()?);
        }
        assert!(step.is_captured());
        let theirs = others.borrow().len() as u64;
        assert!(theirs > STEPS);
        assert_eq!(random::state().draws - first, STEPS + theirs);
        for (at, one) in others.borrow().iter().enumerate() {
            assert!(!others.borrow()[..at].contains(one), "draw {at} is an earlier one");
        }
    }
    Ok(())
}

/// Another thread that waits for this one's launches would end the capture, and fail.
#[test]
fn another_thread_computes_beside_a_capture() -> Result<()> {
    let test = format!("{HERE}other_threads::another_thread_computes_beside_a_capture");
    if gpus().is_empty() || !in_own_process(&test, &[]) {
        return Ok(());
    }
    for device in gpus() {
        let (varmap, layer) = linear(&device)?;
        let parameters = Parameters::from_varmap(&varmap);
        let mut optimizer = Sgd::new(&parameters, SgdConfig { lr: 0.1, ..Default::default() })?;
        let forward = |inputs: &[Tensor]| {
            // As long as another thread takes to compute something.
            std::thread::sleep(std::time::Duration::from_millis(20));
            ops::mean(&layer.forward(&inputs[0])?)
        };
        let (mut step, mut scaler) = (GraphedStep::new(forward), GradScaler::disabled());
        let done = AtomicBool::new(false);
        std::thread::scope(|threads| -> Result<()> {
            let other = threads.spawn(|| -> candle_core::Result<usize> {
                let mut count = 0;
                while count < 2 || !done.load(Ordering::Relaxed) && count < 10_000 {
                    let x = Tensor::new(&[1f32, count as f32], &Device::Cpu)?.to_device(&device)?;
                    let y = ops::add(&x, &x)?.to_device(&Device::Cpu)?.to_vec1::<f32>()?;
                    assert_eq!(y, [2.0, 2.0 * count as f32]);
                    count += 1;
                }
                Ok(count)
            });
            let run = (0..STEPS).try_for_each(|number| {
                step.run(&mut scaler, &mut optimizer, &[rows(number, 5, &device)?]).map(drop)
            });
            done.store(true, Ordering::Relaxed);
            run?;
            other.join().expect("no panic")?;
            Ok(())
        })?;
        assert!(step.is_captured());
    }
    Ok(())
}
