//! Reads whatever the fuzzer makes up as a checkpoint, its checksum made right: an error or a run, no
//! panic, no half of one, and no more memory than the file is long.
//!
//! ```sh
//! cargo install cargo-fuzz
//! cargo fuzz run --fuzz-dir tests/fuzz --sanitizer none checkpoint target/corpus tests/fuzz/corpus -- \
//!     -max_len=16384 -malloc_limit_mb=64
//! ```
//!
//! `tests/fuzz/corpus` has a checkpoint of every part, files that were hostile once, and the smallest of those with which an
//! hour under AddressSanitizer reached new code (201,467 files, no fault); the tests read them, too. Without it the fuzzer
//! starts from a checkpoint that it saves itself.
#![no_main]

#[path = "../it/saving/every.rs"]
mod every;
#[path = "../it/saving/signed.rs"]
mod signed;

use std::cell::RefCell;
use std::path::PathBuf;

use every::Every;
use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};

/// A run, and all that could change of it.
type Target = (Every, Vec<(String, Vec<u64>)>);

thread_local! {
    static TARGET: RefCell<Target> = RefCell::new(target().expect("a run of every part"));
}

fn target() -> candle_amp::Result<Target> {
    let mut every = Every::new()?;
    every.save(&path("whole"))?;
    let bits = every.bits()?;
    Ok((every, bits))
}

fn path(what: &str) -> PathBuf {
    std::env::temp_dir().join(format!("candle-amp-fuzz-{}-{what}", std::process::id()))
}

fuzz_target!(|file: &[u8]| {
    TARGET.with_borrow_mut(|(every, bits)| {
        std::fs::write(path("file"), signed::signed(file.to_vec())).expect("a folder to write to");
        if every.load(&path("file")).is_ok() {
            let _ = every.step();
            every.load(&path("whole")).expect("what the run itself has saved");
        }
        assert!(every.bits().expect("parts that can be saved") == *bits, "something has changed");
    });
});

// From nothing, a fuzzer would take long to find the header.
fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, _seed: u32| {
    if size < 16 {
        TARGET.with_borrow(|_| ()); // which saves it
        let fresh = std::fs::read(path("whole")).expect("a folder to read from");
        if fresh.len() <= max_size {
            data[..fresh.len()].copy_from_slice(&fresh);
            return fuzzer_mutate(data, fresh.len(), max_size);
        }
    }
    fuzzer_mutate(data, size, max_size)
});
