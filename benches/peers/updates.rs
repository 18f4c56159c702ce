//! What happens between backward and the next step, over gradients of given size.
//!
//! Each is one public call, timed by itself. The gradients get into the scaler before, untimed, as
//! fresh copies; PyTorch's side copies into its gradients too, so that caches are alike.

use anyhow::Result;
use candle_amp::optim::{AdamW, AdamWConfig, Sgd, Step};
use candle_amp::{GradScaler, ScaleConfig};
use candle_amp_benches::measure::{Runner, seconds};
use candle_amp_benches::networks::SGD;
use candle_amp_benches::{loss_with, normal};
use candle_core::{DType, Tensor, Var};
use rayon::prelude::*;

struct Updates {
    variables: Vec<Var>,
    gradients: Vec<Tensor>,
}

impl Updates {
    fn new(tensors: usize, length: usize) -> Result<Self> {
        let many = || (0..tensors).map(|_| normal(length, DType::F32));
        let variables = many().map(|values| Var::from_tensor(&values?));
        let variables = variables.collect::<candle_core::Result<_>>()?;
        Ok(Self { variables, gradients: many().collect::<candle_core::Result<_>>()? })
    }

    /// Puts the gradients into the scaler.
    fn collect(&self, scaler: &mut GradScaler) -> Result<()> {
        let inputs: Vec<&Tensor> = self.variables.iter().map(Var::as_tensor).collect();
        let loss = loss_with(&inputs, self.gradients.clone())?;
        Ok(scaler.scale(&loss)?.backward()?)
    }

    /// Times one `update` after another, each on new gradients.
    fn runner(
        self,
        mut scaler: GradScaler,
        mut update: impl FnMut(&mut GradScaler) -> Result<f64> + 'static,
    ) -> Runner {
        Box::new(move || {
            self.collect(&mut scaler)?;
            let seconds = update(&mut scaler)?;
            scaler.zero_grad();
            Ok(seconds)
        })
    }

    fn optimizer(
        self,
        scaler: GradScaler,
        clip: bool,
        mut optimizer: impl Step + 'static,
    ) -> Runner {
        self.runner(scaler, move |scaler| {
            seconds(|| {
                if clip {
                    scaler.clip_grad_norm(1.0)?;
                }
                let _ = scaler.step(&mut optimizer)?;
                Ok(())
            })
        })
    }
}

/// The bound: nothing that reads and writes every number can be faster.
pub(crate) fn pass(length: usize) -> Result<Runner> {
    let from: Vec<f32> = (0..length).map(|i| i as f32).collect();
    let mut into = from.clone();
    let part = length.div_ceil(rayon::current_num_threads()).max(1);
    Ok(Box::new(move || {
        into.copy_from_slice(&from);
        let factor = std::hint::black_box(0.5f32);
        seconds(|| {
            into.par_chunks_mut(part).for_each(|part| part.iter_mut().for_each(|x| *x *= factor));
            Ok(())
        })
    }))
}

/// The bound of an optimizer: a gradient is read, a variable and one state or two read and written.
pub(crate) fn same_bytes(length: usize, states: usize) -> Result<Runner> {
    /// Elements that stay in the nearest cache.
    const NEAR: usize = 1024;
    let from: Vec<f32> = (0..length).map(|i| i as f32).collect();
    let mut gradient = from.clone();
    let mut kept = vec![from.clone(); 1 + states];
    let part = length.div_ceil(rayon::current_num_threads()).max(1);
    Ok(Box::new(move || {
        gradient.copy_from_slice(&from);
        let factor = std::hint::black_box(0.5f32);
        let mut parts: Vec<_> = gradient.chunks(part).map(|gradient| (gradient, vec![])).collect();
        for kept in &mut kept {
            parts.iter_mut().zip(kept.chunks_mut(part)).for_each(|(part, kept)| part.1.push(kept));
        }
        seconds(|| {
            parts.par_iter_mut().for_each(|(gradient, kept)| {
                for (n, gradient) in gradient.chunks(NEAR).enumerate() {
                    for kept in kept.iter_mut() {
                        let kept = &mut kept[n * NEAR..][..gradient.len()];
                        kept.iter_mut().zip(gradient).for_each(|(x, g)| *x = *x * factor + g);
                    }
                }
            });
            Ok(())
        })
    }))
}

fn scaler() -> Result<GradScaler> {
    Ok(GradScaler::new(ScaleConfig::constant(1024.0))?)
}

pub(crate) fn unscale(tensors: usize, length: usize) -> Result<Runner> {
    let updates = Updates::new(tensors, length)?;
    Ok(updates.runner(scaler()?, |scaler| seconds(|| Ok(scaler.unscale()?))))
}

/// Of gradients far longer than they may be.
pub(crate) fn clip(tensors: usize, length: usize) -> Result<Runner> {
    let updates = Updates::new(tensors, length)?;
    Ok(updates.runner(GradScaler::disabled(), |scaler| {
        scaler.unscale()?;
        seconds(|| {
            scaler.clip_grad_norm(1.0)?;
            Ok(())
        })
    }))
}

pub(crate) fn sgd(tensors: usize, length: usize) -> Result<Runner> {
    let updates = Updates::new(tensors, length)?;
    let sgd = Sgd::new(updates.variables.clone(), SGD)?;
    Ok(updates.optimizer(GradScaler::disabled(), false, sgd))
}

pub(crate) fn adamw(tensors: usize, length: usize) -> Result<Runner> {
    let updates = Updates::new(tensors, length)?;
    let adamw = AdamW::new(updates.variables.clone(), AdamWConfig::default())?;
    Ok(updates.optimizer(GradScaler::disabled(), false, adamw))
}

/// Of gradients far longer than they may be, where they are clipped.
pub(crate) fn update(tensors: usize, length: usize, clip: bool) -> Result<Runner> {
    let updates = Updates::new(tensors, length)?;
    let adamw = AdamW::new(updates.variables.clone(), AdamWConfig::default())?;
    Ok(updates.optimizer(scaler()?, clip, adamw))
}
