//! Random runs with injected faults, in every order of calls, right or wrong, against a plain model
//! in `f64`: no weight is ever NaN, no skipped step moves one, and nothing panics.
//!
//! `cargo test` runs a seeded sample. `CANDLE_AMP_FAULT_RUNS=10000` runs the whole, and
//! `CANDLE_AMP_FAULT_SEED`, the seed that a failure prints, runs one alone.

mod model;
mod threads;
mod training;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

/// Calls `run` with one generator after another. A failure says which.
fn for_each_seed(what: &str, run: impl Fn(&mut ChaCha8Rng)) {
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let seeds = match number("CANDLE_AMP_FAULT_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("CANDLE_AMP_FAULT_RUNS").unwrap_or(300),
    };
    for seed in seeds {
        let one = || run(&mut ChaCha8Rng::seed_from_u64(seed));
        if let Err(panic) = catch_unwind(AssertUnwindSafe(one)) {
            eprintln!("{what}: failed with CANDLE_AMP_FAULT_SEED={seed}");
            resume_unwind(panic);
        }
    }
}
