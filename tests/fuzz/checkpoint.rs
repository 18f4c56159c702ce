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

use std::cell::RefCell;
use std::path::PathBuf;

use candle_amp::optim::{AdamW, AdamWConfig};
use candle_amp::{Checkpoint, GradScaler, LossScale, Parameters, Result};
use candle_core::{DType, Device, Tensor, Var};
use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};

/// A run with everything in it, and small.
struct Run {
    parameters: Parameters,
    adamw: AdamW,
    scaler: GradScaler,
    path: PathBuf,
}

impl Run {
    fn new() -> Result<Self> {
        let var = |dtype| {
            Var::from_tensor(&Tensor::new(&[0.5f32, -2.0, 3.0], &Device::Cpu)?.to_dtype(dtype)?)
        };
        let parameters = Parameters::named([("a", var(DType::F32)?), ("b", var(DType::BF16)?)])?;
        let mut adamw = AdamW::new(&parameters, AdamWConfig::default())?;
        let mut scaler = GradScaler::default();
        for var in parameters.vars() {
            scaler.scale(&var.to_dtype(DType::F32)?.sum_all()?)?.backward()?;
        }
        scaler.step(&mut adamw)?;
        scaler.update()?;
        let path = std::env::temp_dir().join(format!("candle-amp-fuzz-{}", std::process::id()));
        Ok(Self { parameters, adamw, scaler, path })
    }

    fn save(&self) -> Result<()> {
        Checkpoint::new(9)
            .metric(0.5)
            .with("model", &self.parameters)?
            .with("optimizer", &self.adamw)?
            .with("scaler", &self.scaler)?
            .save(&self.path)
    }

    fn load(&mut self) -> Result<()> {
        Checkpoint::open(&self.path)?.load(&mut [
            ("model", &mut self.parameters),
            ("optimizer", &mut self.adamw),
            ("scaler", &mut self.scaler),
        ])
    }

    /// What it would save.
    fn bytes(&self) -> Vec<u8> {
        self.save().expect("a temporary folder can be written to");
        std::fs::read(&self.path).expect("it was just written")
    }

    /// What an error must leave as it was; weights as bits, as they may be NaN.
    fn state(&self) -> (Vec<u32>, Option<LossScale>, f64) {
        let weights = self.parameters.iter().flat_map(|(_, var)| {
            let weights = var.to_dtype(DType::F32).and_then(|weights| weights.to_vec1::<f32>());
            weights.expect("three numbers").into_iter().map(f32::to_bits)
        });
        (weights.collect(), self.scaler.state(), self.adamw.learning_rate())
    }

    fn read(&mut self, file: Vec<u8>) {
        let before = self.state();
        std::fs::write(&self.path, file).expect("a temporary folder can be written to");
        if self.load().is_err() {
            assert!(self.state() == before, "an error, and something has changed");
        }
    }
}

thread_local! {
    static RUN: RefCell<Run> = RefCell::new(Run::new().expect("a run of two variables"));
}

fuzz_target!(|file: &[u8]| {
    RUN.with_borrow_mut(|run| run.read(signed::signed(file.to_vec())));
});

// From nothing, a fuzzer would take long to find the header.
fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, _seed: u32| {
    let fresh = RUN.with_borrow(Run::bytes);
    if size < 16 && fresh.len() <= max_size {
        data[..fresh.len()].copy_from_slice(&fresh);
        return fuzzer_mutate(data, fresh.len(), max_size);
    }
    fuzzer_mutate(data, size, max_size)
});
