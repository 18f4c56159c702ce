//! What the programs share: data, initial values, precision, and the losses. `pytorch/run.py` has the same data and initial
//! values.

use candle_amp::nn::{VarBuilder, VarMap, var_builder};
use candle_amp::{Autocast, GradScaler, Parameters};
use candle_core::{DType, Device, Result, Shape, Tensor};

/// A run of a program.
pub(crate) struct Run {
    pub(crate) device: Device,
    pub(crate) amp: Autocast,
    pub(crate) scaler: GradScaler,
    pub(crate) steps: usize,
    pub(crate) losses: Vec<f32>,
    varmap: VarMap,
}

impl Run {
    pub(crate) fn new(dtype: DType, steps: usize) -> Self {
        let amp = match dtype {
            DType::F32 => Autocast::disabled(),
            dtype => Autocast::new(dtype),
        };
        let scaler = match dtype {
            DType::F16 => GradScaler::default(),
            _ => GradScaler::disabled(),
        };
        Self { device: Device::Cpu, amp, scaler, steps, losses: vec![], varmap: VarMap::new() }
    }

    pub(crate) fn vb(&self) -> VarBuilder<'static> {
        var_builder(&self.varmap, DType::F32, &self.device)
    }

    /// All parameters, set to the values that the original starts from: each by its place in the order of the names.
    pub(crate) fn initialised(&self) -> Result<Parameters> {
        let parameters = Parameters::from_varmap(&self.varmap);
        for (seed, (_, var)) in parameters.iter().enumerate() {
            var.set(&initial(var.dims(), seed, &self.device)?)?;
        }
        Ok(parameters)
    }

    /// For every step, noise over the pattern of one of ten classes, and the class.
    pub(crate) fn images(&self, batch: usize) -> Result<Vec<(Tensor, Tensor)>> {
        let patterns = self.noise((10, 3, 32, 32), 1000)?;
        let step = |step| {
            let classes: Vec<u32> = (0..batch).map(|i| hash(i, 2000 + step) % 10).collect();
            let classes = Tensor::new(classes, &self.device)?;
            let noise = self.noise((batch, 3, 32, 32), step)?;
            Ok((((patterns.index_select(&classes, 0)? * 0.5)? + (noise * 0.5)?)?, classes))
        };
        (0..self.steps).map(step).collect()
    }

    /// For every step, images of blocks in noise, and where the blocks are.
    pub(crate) fn masks(&self, batch: usize, size: usize) -> Result<Vec<(Tensor, Tensor)>> {
        let step = |step| {
            let blocks = self.noise((batch, 1, size / 8, size / 8), 3000 + step)?.ge(0f32)?;
            let mask = blocks.to_dtype(DType::F32)?.upsample_nearest2d(size, size)?;
            let noise = self.noise((batch, 3, size, size), step)?;
            Ok(((noise * 0.5)?.broadcast_add(&mask)?, mask))
        };
        (0..self.steps).map(step).collect()
    }

    /// For every step, sequences that count in steps of 1, 2 or 3, and the tokens that follow.
    pub(crate) fn tokens(
        &self,
        vocabulary: usize,
        batch: usize,
        length: usize,
    ) -> Result<Vec<(Tensor, Tensor)>> {
        let step = |step| {
            let vocabulary = vocabulary as u32;
            let token = |row, i: usize| {
                let first = hash(row, 4000 + step) % vocabulary;
                let pace = hash(batch + row, 4000 + step) % 3 + 1;
                (first + i as u32 * pace) % vocabulary
            };
            let text: Vec<u32> =
                (0..batch).flat_map(|row| (0..=length).map(move |i| token(row, i))).collect();
            let text = Tensor::from_vec(text, (batch, length + 1), &self.device)?;
            Ok((text.narrow(1, 0, length)?, text.narrow(1, 1, length)?.contiguous()?))
        };
        (0..self.steps).map(step).collect()
    }

    /// What a generator makes an image of.
    pub(crate) fn latent(&self, shape: impl Into<Shape>, step: usize) -> Result<Tensor> {
        self.noise(shape, 5000 + step)
    }

    pub(crate) fn report(&mut self, loss: &Tensor) -> Result<()> {
        self.losses.push(loss.to_scalar()?);
        Ok(())
    }

    fn noise(&self, shape: impl Into<Shape>, seed: usize) -> Result<Tensor> {
        noise(shape, seed, &self.device)
    }
}

/// A whole number of 32 bits, by its position.
fn hash(i: usize, seed: usize) -> u32 {
    let mut x = (i as u32).wrapping_mul(2_654_435_761).wrapping_add((seed as u32 + 1) * 40_503);
    for (shift, factor) in [(15, 2_246_822_519), (13, 3_266_489_917)] {
        x = (x ^ (x >> shift)).wrapping_mul(factor);
    }
    x ^ (x >> 16)
}

/// Numbers from -1 to 1.
fn noise(shape: impl Into<Shape>, seed: usize, device: &Device) -> Result<Tensor> {
    let shape = shape.into();
    let value = |i| (f64::from(hash(i, seed)) / f64::from(1u32 << 31) - 1.0) as f32;
    Tensor::from_iter((0..shape.elem_count()).map(value), device)?.reshape(shape)
}

/// Vectors, which are norms' and biases, are positive. Matrices have the variance of 1 over the fan-in.
fn initial(dims: &[usize], seed: usize, device: &Device) -> Result<Tensor> {
    let values = noise(dims, seed, device)?;
    match dims {
        [_] => values.affine(0.5, 0.5),
        _ => values.affine(((3 * dims[0]) as f64 / values.elem_count() as f64).sqrt(), 0.0),
    }
}
