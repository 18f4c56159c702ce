//! What the examples share: the program around the training, its options, its display, what it measures.

use std::{
    process,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicBool, Ordering},
    },
};

use anyhow::{Context, Result};
use candle_amp::{backend::on_workers, optim::Schedule};
use candle_core::Tensor;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

pub(crate) mod exit;
#[cfg(all(test, feature = "mpi"))]
pub(crate) mod mpirun;
pub(crate) mod optimizer;
pub(crate) mod options;
pub(crate) mod progress;
pub(crate) mod ranks;
pub(crate) mod steps;
#[cfg(test)]
pub(crate) mod testing;

/// Keeps the memory of a step for the next one: the system's own allocator hands large buffers
/// back, and having them zeroed again costs more than much of the arithmetic in them. What lies
/// free for a second this one hands back too, unless the environment has MIMALLOC_PURGE_DELAY=-1.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// True once Ctrl-C was pressed.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// True once the launcher of several ranks has asked this one to end.
static TERMINATED: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// Runs a program with these options, and prints what goes wrong. Its exit code.
pub(crate) fn start<O>(
    options: impl FnOnce() -> Result<O> + Send,
    run: fn(&O) -> Result<()>,
) -> u8 {
    let result = ranks::join().and_then(|()| finish_on_ctrl_c());
    let code = exit::end(&result.and_then(|()| on_workers(|| run(&options()?))));
    ranks::leave(); // after an error is reported: it may wait for the other ranks
    code
}

pub(crate) fn interrupted() -> bool {
    if TERMINATED.load(Ordering::Relaxed) {
        interrupt();
    }
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Makes the first Ctrl-C end the training after its step, and the second one the program. `mpirun` passes
/// Ctrl-C on to its ranks as SIGTERM.
fn finish_on_ctrl_c() -> Result<()> {
    #[cfg(unix)]
    if ranks::count() > 1 {
        signal_hook::flag::register(signal_hook::consts::SIGTERM, TERMINATED.clone())
            .context("cannot handle SIGTERM")?;
    }
    let handler = || {
        if !interrupt() {
            process::exit(130);
        }
    };
    ctrlc::set_handler(handler).context("cannot handle Ctrl-C")
}

/// Has the training end after its step. Whether that is new.
fn interrupt() -> bool {
    let is_new = !INTERRUPTED.swap(true, Ordering::Relaxed);
    if is_new {
        progress::print(
            "\nEnding soon, a training after this step and a test; Ctrl-C again ends at once.\n",
        );
    }
    is_new
}

/// The mean of all ranks' losses, and whether to end after this step. Where one of several ranks is to, all are.
pub(crate) fn after_step(loss: &Tensor, stop: bool) -> Result<(Tensor, bool)> {
    let (loss, stop) = ranks::mean_and_any(loss, stop)?;
    if stop && ranks::count() > 1 {
        interrupt();
    }
    Ok((loss, stop))
}

/// A cosine over `steps` steps, after a linear warm-up over the first twentieth.
pub(crate) fn rates(steps: usize) -> Schedule {
    let warm_up = steps.div_ceil(20);
    let rest = steps.saturating_sub(warm_up).max(1);
    Schedule::cosine(rest as u64).with_warm_up(warm_up as u64)
}

/// The random number generator of an item, which `key` names: items can be made in any order, on
/// any thread.
pub(crate) fn rng(key: [u64; 4]) -> ChaCha8Rng {
    let mut seed = [0; 32];
    for (bytes, word) in seed.chunks_exact_mut(8).zip(key) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    ChaCha8Rng::from_seed(seed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_warms_up_peaks_and_falls_to_nothing() {
        let schedule = rates(200);
        let rates: Vec<f64> = (0..200).map(|taken| schedule.factor(taken)).collect();
        assert_eq!(rates[10], 1.);
        assert!(rates[..10].is_sorted() && rates[0] > 0.);
        assert!(rates[10..].is_sorted_by(|a, b| a > b) && rates[199] > 0.);
        assert!((rates[105] - 0.5).abs() < 1e-9, "{}", rates[105]);
        assert!(rates[199] < 2e-3);
        assert_eq!(super::rates(1).factor(0), 0.5);
    }
}
