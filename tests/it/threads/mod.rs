//! Many threads, one model: nobody waits for ever, and nobody runs in another task's state.

mod aliased;
mod beside;
mod bits;
mod state;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use candle_core::Var;

/// Longer than anything here takes between two signs of life, on a busy machine too: beside many writers, an
/// operator may wait for seconds for its locks.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a test shows of its progress.
#[derive(Clone, Default)]
struct Progress {
    steps: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
}

impl Progress {
    /// Only of threads that end by themselves: one that goes on until others end would hide that those are stuck.
    fn step(&self) {
        self.steps.fetch_add(1, Ordering::Relaxed);
    }

    fn steps(&self) -> u64 {
        self.steps.load(Ordering::Relaxed)
    }

    /// Whether threads that go on until the test ends are to end.
    fn is_over(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// Runs `f` and returns what it returns. Panics, instead of hanging, where it makes no progress for long: the
/// threads that are stuck are left behind.
fn watched<R: Send + 'static>(
    what: impl Fn(u64) -> String,
    f: impl FnOnce(Progress) -> R + Send + 'static,
) -> R {
    let progress = Progress::default();
    let inside = progress.clone();
    let thread = thread::spawn(move || {
        let result = f(inside.clone());
        inside.stop.store(true, Ordering::Relaxed);
        result
    });
    let (mut last, mut since) = (progress.steps(), Instant::now());
    while !thread.is_finished() {
        thread::sleep(Duration::from_millis(5));
        let now = progress.steps();
        if now != last {
            (last, since) = (now, Instant::now());
        }
        if since.elapsed() > PATIENCE {
            progress.stop.store(true, Ordering::Relaxed);
            panic!("stuck: {}", what(now));
        }
    }
    progress.stop.store(true, Ordering::Relaxed);
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// A pool of its own, so that tests neither help nor hinder each other.
fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap()
}

/// Threads that write a variable. With several, one is always waiting for its lock: whoever reads the storage
/// twice waits for that one, which waits for the reader.
const WRITERS: usize = 3;

/// How many rounds a test takes: `few`, or `all` where `CANDLE_AMP_LOCK_ROUNDS=all` asks for that.
fn rounds(few: usize, all: usize) -> usize {
    let whole = std::env::var("CANDLE_AMP_LOCK_ROUNDS").is_ok_and(|value| value == "all");
    if whole { all } else { few }
}

/// Calls `f` while others write all of `variables`.
fn beside_writers<R>(progress: &Progress, variables: &[Var], f: impl FnOnce() -> R) -> R {
    let stop = Progress::default();
    thread::scope(|scope| {
        for variable in variables {
            for _ in 0..WRITERS {
                scope.spawn(|| {
                    let value = variable.copy().unwrap();
                    while !stop.is_over() && !progress.is_over() {
                        variable.set(&value).unwrap();
                    }
                });
            }
        }
        let result = f();
        stop.stop.store(true, Ordering::Relaxed);
        result
    })
}
