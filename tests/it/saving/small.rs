//! A run with everything in it, and small: what damaged files are loaded into.

use std::path::Path;

use candle_amp::checkpoints::Checkpoint;
use candle_amp::optim::{AdamW, AdamWConfig};
use candle_amp::{GradScaler, Parameters, Result};
use candle_core::{DType, Device, Tensor, Var};

pub(crate) struct Run {
    pub(crate) parameters: Parameters,
    pub(crate) adamw: AdamW,
    pub(crate) scaler: GradScaler,
}

impl Run {
    pub(crate) fn new() -> Result<Self> {
        let values = Tensor::new(&[0.37f32, -0.81, 0.59], &Device::Cpu)?;
        let var = |dtype| Var::from_tensor(&values.to_dtype(dtype)?);
        let parameters = Parameters::named([("a", var(DType::F32)?), ("b", var(DType::BF16)?)])?;
        let mut adamw = AdamW::new(&parameters, AdamWConfig::default())?;
        let mut scaler = GradScaler::default();
        for var in parameters.vars() {
            scaler.scale(&var.to_dtype(DType::F32)?.sum_all()?)?.backward()?;
        }
        scaler.step(&mut adamw)?;
        scaler.update()?;
        Ok(Self { parameters, adamw, scaler })
    }

    /// Saves to `path`; the bytes of the file.
    pub(crate) fn save(&self, path: &Path) -> Result<Vec<u8>> {
        Checkpoint::new(9)
            .metric(0.5)
            .with("model", &self.parameters)?
            .with("optimizer", &self.adamw)?
            .with("scaler", &self.scaler)?
            .save(path)?;
        Ok(std::fs::read(path).unwrap())
    }

    pub(crate) fn load(&mut self, path: &Path) -> Result<()> {
        Checkpoint::open(path)?.load(&mut [
            ("model", &mut self.parameters),
            ("optimizer", &mut self.adamw),
            ("scaler", &mut self.scaler),
        ])
    }

    /// As bits: what was loaded may be NaN.
    pub(crate) fn weights(&self) -> Vec<u32> {
        let bits = |var: &Var| {
            let weights = var.to_dtype(DType::F32).and_then(|weights| weights.to_vec1::<f32>());
            weights.unwrap().into_iter().map(f32::to_bits)
        };
        self.parameters.iter().flat_map(|(_, var)| bits(var)).collect()
    }
}
