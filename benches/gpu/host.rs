//! The host's part of an operator's passes.

use std::time::Instant;

use anyhow::Result;
use candle_amp::GradScaler;
use candle_amp_benches::loss_with;
use candle_amp_benches::measure::{median, seconds};
use candle_amp_benches::precision::Precision;
use candle_core::{DType, Device, Tensor};

use crate::operators::{Applied, Operator, Pass};

/// Seconds that the host takes for the operator's own forward and backward.
pub(crate) struct HostPart {
    /// With what joins the graph.
    pub(crate) forward: f64,
    /// Backward from a loss of the operator, less backward from one of the operator's inputs: both go through the loss
    /// and whatever made the inputs, and hand as many gradients to the scaler.
    pub(crate) backward: f64,
}

impl HostPart {
    /// Medians of `count` passes of each kind or more, in turns, which take so many seconds or more: one alone takes
    /// microseconds. The device has nothing to do when one begins.
    pub(crate) fn of(
        operator: Operator,
        pass: Pass,
        precision: Precision,
        device: &Device,
        count: usize,
        at_least: f64,
    ) -> Result<Self> {
        let Applied { forward, wanted } = operator.applied(pass, precision.dtype(), device)?;
        let run = || precision.autocast().scope(&forward);
        let y = run()?;
        let gradient = vec![Tensor::ones(y.shape(), y.dtype(), device)?];
        drop(y);
        // As operators hand them over: those of variables in F32.
        let like = |input: &Tensor| match input.is_variable() {
            true => Tensor::ones(input.shape(), DType::F32, device),
            false => Tensor::ones(input.shape(), input.dtype(), device),
        };
        let gradients = wanted.iter().map(like).collect::<candle_core::Result<Vec<_>>>()?;
        let inputs: Vec<&Tensor> = wanted.iter().collect();
        let mut scaler = GradScaler::disabled();
        let mut backward = |loss: Tensor| {
            let loss = scaler.scale(&loss)?;
            device.synchronize()?;
            let taken = seconds(|| Ok(loss.backward()?));
            scaler.zero_grad();
            taken
        };
        let (mut forwards, mut with, mut without) = (Vec::new(), Vec::new(), Vec::new());
        let start = Instant::now();
        while with.len() < count || start.elapsed().as_secs_f64() < at_least {
            device.synchronize()?;
            let begun = Instant::now();
            let y = run()?;
            forwards.push(begun.elapsed().as_secs_f64());
            let loss = loss_with(&[&y], gradient.clone())?;
            drop(y);
            with.push(backward(loss)?);
            without.push(backward(loss_with(&inputs, gradients.clone())?)?);
        }
        Ok(Self { forward: median(forwards), backward: median(with) - median(without) })
    }
}
