//! Processes that are killed while they save: whoever starts next finds a whole checkpoint.
//!
//! `CANDLE_AMP_KILLS=200` for the whole test; a few otherwise.

use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use candle_amp::checkpoints::{Best, Checkpoint, Checkpointer, State};
use candle_amp::{Parameters, Result};
use candle_core::{DType, Device, Tensor, Var};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{Folder, elsewhere, workplace};

fn checkpointer(folder: &Path) -> Result<Checkpointer> {
    Ok(Checkpointer::new(folder)?.keep_last(2).keep_best(Best::Highest))
}

/// Parameters that all hold the number of the step: half of them would show.
fn parameters() -> Result<Parameters> {
    let sizes = [1, 1000, 300_000, 7];
    let var = |(at, size)| Ok((format!("w{at}"), Var::zeros(size, DType::F32, &Device::Cpu)?));
    Parameters::named(sizes.into_iter().enumerate().map(var).collect::<Result<Vec<_>>>()?)
}

/// The step that the last checkpoint is of, all of it.
fn step_of(checkpointer: &Checkpointer) -> Result<Option<u64>> {
    let Some(saved) = checkpointer.latest()? else { return Ok(None) };
    let (mut parameters, mut own) = (parameters()?, State::default());
    saved.load(&mut [("model", &mut parameters), ("loop", &mut own)])?;
    let step = saved.step();
    assert_eq!(own.value::<u64>("step")?, step);
    for (name, var) in parameters.iter() {
        let values = var.to_vec1::<f32>()?;
        assert!(values.iter().all(|x| *x == step as f32), "{name} is not of step {step}");
    }
    Ok(Some(step))
}

#[test]
#[ignore = "the other half of the test below, which runs and kills it"]
fn a_loop_of_checkpoints() -> Result<()> {
    let checkpointer = checkpointer(&workplace())?;
    let mut step = step_of(&checkpointer)?.unwrap_or(0);
    let parameters = parameters()?;
    loop {
        step += 1;
        for var in parameters.vars() {
            var.set(&Tensor::full(step as f32, var.shape(), &Device::Cpu)?)?;
        }
        let checkpoint = Checkpoint::new(step)
            .metric((step % 5) as f64)
            .with("model", &parameters)?
            .with("loop", &State::default().with("step", step))?;
        checkpointer.save(&checkpoint)?;
    }
}

/// Killed at the end, however the test ends.
struct Running(Child);

impl Running {
    fn start(folder: &Path) -> Self {
        let mut command = elsewhere("saving::crash::a_loop_of_checkpoints", folder);
        Self(command.stdout(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // `SIGKILL` on Unix: no handler runs.
        let _ = self.0.kill().and_then(|()| self.0.wait());
    }
}

#[test]
fn whenever_a_process_is_killed_a_whole_checkpoint_is_found() -> Result<()> {
    let kills = std::env::var("CANDLE_AMP_KILLS").ok().and_then(|count| count.parse().ok());
    let folder = Folder::new();
    let mut rng = ChaCha8Rng::seed_from_u64(9);
    let mut last = 0;
    for kill in 0..kills.unwrap_or(5) {
        let (start, reader) = (Instant::now(), Checkpointer::new(&folder.0)?);
        let mut child = Running::start(&folder.0);
        // Not before it saves, and then at any moment of a few checkpoints.
        while reader.steps()?.last().is_none_or(|step| *step <= last) {
            assert!(start.elapsed() < Duration::from_secs(60), "it does not save");
            assert_eq!(child.0.try_wait().unwrap(), None, "it ended by itself");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(rng.random_range(0..40_000)));
        drop(child);
        let checkpointer = checkpointer(&folder.0)?;
        let step = step_of(&checkpointer)?.expect("there was one before");
        assert!(step > last, "kill {kill}: back from step {last} to {step}");
        last = step;
        let best = checkpointer.best()?.and_then(|best| best.metric());
        assert_eq!(best, Some(last.min(4) as f64), "kill {kill}");
    }
    // What the processes left behind goes with the next checkpoint.
    let checkpointer = checkpointer(&folder.0)?;
    let best = if last < 4 { last } else { 4 };
    checkpointer.save(&Checkpoint::new(last + 1))?;
    assert_eq!(folder.names().len(), checkpointer.steps()?.len(), "{:?}", folder.names());
    let mut kept = vec![best, last, last + 1];
    kept.dedup();
    assert_eq!(checkpointer.steps()?, kept);
    Ok(())
}
