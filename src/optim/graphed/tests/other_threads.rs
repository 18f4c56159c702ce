//! What other threads do beside a graph.

use std::cell::RefCell;

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
