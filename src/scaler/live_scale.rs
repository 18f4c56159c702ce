//! The loss scale of a run: on the host, or on the GPU the gradients are on, with the host following.

use candle_core::{Device, Tensor, TensorId};

use crate::autograd::{self, Backward, Gradient, Operator};
use crate::kernels::cuda::Gpu;
use crate::kernels::multi_tensor::{DeviceScale, FoundInf, Growth, Number};
use crate::scaler::diagnostics::warnings::Watch;
use crate::{Cast, Error, LossScale, Op, Result};

/// The rule, and where its state is.
///
/// On a GPU the state moves there, by flags that the host has not seen. The host reads them when
/// somebody asks for the scale or its history, or every 1,024 updates, and applies the same rule.
#[derive(Debug)]
pub(crate) struct LiveScale {
    /// As of the last flag read; `None` when disabled.
    pub(crate) rule: Option<LossScale>,
    device: Option<DeviceScale>,
    pub(crate) watch: Watch,
    /// An error from reading the device, kept until a call can return it.
    failure: Option<Error>,
}

/// A product with a constant of the same shape and dtype: an operator, so that a loss which operators of this
/// crate alone have made runs backward without candle.
struct Times(Tensor);

impl Operator for Times {
    type Saved = ();

    fn op(&self) -> Op {
        Op::user("scale", Cast::Keep)
    }

    fn forward(&self, inputs: &[Tensor]) -> candle_core::Result<(Tensor, ())> {
        Ok(((&inputs[0] * &self.0)?, ()))
    }

    fn backward(&self, ctx: &Backward<'_, ()>) -> candle_core::Result<Vec<Option<Gradient>>> {
        Ok(vec![Some(Gradient::owned((ctx.gradient * &self.0)?))])
    }
}

impl LiveScale {
    pub(crate) fn new(rule: Option<LossScale>) -> Self {
        Self { rule, device: None, watch: Watch::default(), failure: None }
    }

    /// The state after the last update. Waits for a GPU that has it; where that cannot be read, what
    /// was known before, and the error waits for [`check`](Self::check).
    pub(crate) fn synchronised(&mut self) -> &Self {
        if let Err(error) = self.synchronise() {
            self.failure = Some(error);
        }
        self
    }

    /// The error that a synchronisation could not return.
    pub(crate) fn check(&mut self) -> Result<()> {
        self.failure.take().map_or(Ok(()), Err)
    }

    /// Goes on from another state.
    pub(crate) fn load(&mut self, rule: Option<LossScale>) -> Result<()> {
        self.synchronise()?;
        (self.rule, self.device) = (rule, None);
        Ok(())
    }

    /// `loss` times the scale, in its dtype.
    pub(crate) fn multiply(&mut self, loss: &Tensor) -> Result<Tensor> {
        let Some(rule) = self.rule else { return Ok(loss.clone()) };
        let scale = match self.on(loss.device())? {
            Some(device) => device.scale()?,
            None => Tensor::full(rule.get(), loss.shape(), loss.device())?,
        };
        let scale = scale.to_dtype(loss.dtype())?.reshape(loss.shape())?;
        match autograd::is_output(loss) && !autograd::second_order::is_wanted() {
            true => Ok(autograd::apply(Times(scale), &[loss])?),
            false => Ok((loss * scale)?), // which can be differentiated twice
        }
    }

    /// What unscales gradients on `device`.
    pub(crate) fn factor(&mut self, device: &Device) -> Result<Number> {
        let Some(rule) = self.rule else { return Ok(Number::Host(1.0)) };
        match self.on(device)? {
            Some(scale) => Ok(scale.inverse()?),
            None => Ok(Number::Host(rule.inverse())),
        }
    }

    /// The scale now: a copy on the GPU that has it.
    pub(crate) fn snapshot(&self) -> Result<Number> {
        Ok(match (&self.device, self.rule) {
            (Some(device), _) => device.snapshot()?,
            (None, rule) => Number::Host(rule.map_or(1.0, |rule| rule.get())),
        })
    }

    /// Which state of a device's this is; `None` on the host.
    pub(crate) fn device_state(&self) -> Option<TensorId> {
        self.device.as_ref().map(DeviceScale::id)
    }

    /// Notes an update by a graph that a device has been given.
    pub(crate) fn replayed(&mut self) -> Result<()> {
        let Some(device) = self.device.as_mut().filter(|_| self.rule.is_some()) else {
            return Ok(());
        };
        device.updated();
        if device.is_full() {
            self.synchronise()?;
        }
        Ok(())
    }

    /// Moves the scale.
    pub(crate) fn update(&mut self, found: FoundInf) -> Result<()> {
        match (found, &mut self.device) {
            (FoundInf::Device(found), Some(device)) => {
                let Some(rule) = self.rule else { return Ok(()) };
                device.update(found.tensor(), &growth(&rule))?;
                if device.is_full() {
                    self.synchronise()?;
                }
            }
            (FoundInf::Device(found), None) => {
                let found = found.is_set()?;
                self.after(found);
            }
            (FoundInf::Host(found), _) => {
                self.synchronise()?;
                self.device = None;
                self.after(found);
            }
        }
        Ok(())
    }

    fn after(&mut self, found_inf: bool) {
        self.watch.after_update(self.rule, found_inf);
        self.rule = self.rule.map(|rule| rule.after(found_inf));
    }

    fn synchronise(&mut self) -> Result<()> {
        let Some(device) = &mut self.device else { return Ok(()) };
        for found in device.read()? {
            self.after(found);
        }
        Ok(())
    }

    /// The state on `device`, if that is a GPU that can have it.
    fn on(&mut self, device: &Device) -> Result<Option<&DeviceScale>> {
        let Some(gpu) = Gpu::of(device) else {
            // The host's, then: nothing may be on its way.
            self.synchronise()?;
            self.device = None;
            return Ok(None);
        };
        let there = |scale: &DeviceScale| scale.gpu().device().same_device(device);
        if !self.device.as_ref().is_some_and(there) {
            self.synchronise()?;
            let Some(rule) = self.rule else { return Ok(None) };
            let trackers = [rule.growth_tracker(), rule.hysteresis_tracker()];
            self.device = Some(DeviceScale::new(gpu, rule.get(), rule.inverse(), trackers)?);
        }
        Ok(self.device.as_ref())
    }
}

fn growth(rule: &LossScale) -> Growth {
    let config = rule.config();
    Growth {
        growth_factor: config.growth_factor,
        backoff_factor: config.backoff_factor,
        growth_interval: config.growth_interval,
        hysteresis: config.hysteresis,
        min_scale: config.min_scale,
        max_scale: config.max_scale,
    }
}
