//! Reads whatever the fuzzer makes up as a checkpoint, its checksum made right: an error or a run, no
//! panic, no half of one, and no more memory than the file is long.
//!
//! ```sh
//! cargo install cargo-fuzz
//! cargo fuzz run --fuzz-dir tests/fuzz --sanitizer none checkpoint -- -max_len=8192 -malloc_limit_mb=64
//! ```
//!
//! Without a corpus it starts from a checkpoint that it saves itself.
#![no_main]

#[path = "../it/saving/signed.rs"]
mod signed;
#[path = "../it/saving/small.rs"]
mod small;

use std::cell::RefCell;
use std::path::PathBuf;

use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};
use small::Run;

thread_local! {
    static RUN: RefCell<Run> = RefCell::new(Run::new().expect("a run of two variables"));
}

fn path() -> PathBuf {
    std::env::temp_dir().join(format!("candle-amp-fuzz-{}", std::process::id()))
}

fuzz_target!(|file: &[u8]| {
    std::fs::write(path(), signed::signed(file.to_vec())).expect("a folder to write to");
    RUN.with_borrow_mut(|run| {
        let state = |run: &Run| (run.weights(), run.scaler.state(), run.adamw.learning_rate());
        let before = state(run);
        if run.load(&path()).is_err() {
            assert!(state(run) == before, "an error, and something has changed");
        }
    });
});

// From nothing, a fuzzer would take long to find the header.
fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, _seed: u32| {
    if size < 16 {
        let fresh = RUN.with_borrow(|run| run.save(&path())).expect("a folder to write to");
        if fresh.len() <= max_size {
            data[..fresh.len()].copy_from_slice(&fresh);
            return fuzzer_mutate(data, fresh.len(), max_size);
        }
    }
    fuzzer_mutate(data, size, max_size)
});
