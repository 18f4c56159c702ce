//! The same out of candle's tensor operators, for any device.
//!
//! Candle's operators cannot see bits: remainders and rounding at random go through the host.

use candle_core::{DType, Device, Result, Tensor};
use half::bf16;

use super::rounding::{Key, Stochastic, rebuild as join, split};
use super::rule::{AdamW, Lamb, Lion, Rule, Sgd, Squares};
use super::slot::{Master, Slot};
use crate::error::bail;
use crate::kernels::accumulator;
use crate::kernels::cast;
use crate::kernels::multi_tensor::portable::multiplied;

pub(super) fn update(slot: &Slot<'_>) -> Result<Squares> {
    let dtype = accumulator(slot.variable.dtype());
    let weight = match slot.master {
        Master::Itself => slot.variable.detach(),
        Master::Full(master) => master.clone(),
        Master::Remainder(rest) => rebuild(slot.variable, rest)?,
        Master::Stochastic => cast(slot.variable, dtype)?,
    };
    let gradient = multiplied(&cast(slot.gradient, dtype)?, slot.by)?;
    let states: Vec<Tensor> =
        slot.states.iter().map(|state| cast(state, dtype)).collect::<Result<_>>()?;
    let (weight, states, squares) = slot.rule.apply(weight, gradient, states)?;
    let key = |number| Key::new(slot.seed, number);
    if slot.rule.reads_gradient() {
        for (number, (place, state)) in slot.states.iter().zip(states).enumerate() {
            match place.dtype() == dtype {
                true => overwrite(place, &state)?,
                false => overwrite(place, &at_random(&state, place.dtype(), key(number + 1))?)?,
            }
        }
    }
    if slot.rule.writes_weight() {
        match slot.master {
            Master::Itself => overwrite(slot.variable, &weight)?,
            Master::Full(master) => {
                overwrite(master, &weight)?;
                overwrite(slot.variable, &cast(&weight, slot.variable.dtype())?)?;
            }
            Master::Remainder(rest) => {
                let values = on_host(&weight)?;
                let (halves, rests): (Vec<bf16>, Vec<i16>) =
                    values.iter().map(|&x| split(x)).unzip();
                let like = |x: Tensor| x.reshape(weight.shape())?.to_device(weight.device());
                overwrite(slot.variable, &like(Tensor::new(halves, &Device::Cpu)?)?)?;
                overwrite(rest, &like(Tensor::new(rests, &Device::Cpu)?)?)?;
            }
            Master::Stochastic => {
                overwrite(slot.variable, &at_random(&weight, slot.variable.dtype(), key(0))?)?;
            }
        }
    }
    Ok(squares)
}

pub(super) fn rebuild(rounded: &Tensor, rest: &Tensor) -> Result<Tensor> {
    let halves = rounded.detach().flatten_all()?.to_device(&Device::Cpu)?.to_vec1::<bf16>()?;
    let rests = rest.flatten_all()?.to_device(&Device::Cpu)?.to_vec1::<i16>()?;
    let values: Vec<f32> = halves.into_iter().zip(rests).map(|(h, r)| join(h, r)).collect();
    Tensor::from_vec(values, rounded.shape(), &Device::Cpu)?.to_device(rounded.device())
}

fn on_host(x: &Tensor) -> Result<Vec<f32>> {
    x.flatten_all()?.to_device(&Device::Cpu)?.to_vec1()
}

fn at_random(x: &Tensor, dtype: DType, key: Key) -> Result<Tensor> {
    fn typed<T: Stochastic>(x: &Tensor, key: Key) -> Result<Tensor> {
        let values = on_host(x)?;
        let mut rounded = vec![T::default(); values.len()];
        T::round_all(&values, &mut rounded, key, 0);
        Tensor::from_vec(rounded, x.shape(), &Device::Cpu)?.to_device(x.device())
    }
    match dtype {
        DType::F16 => typed::<half::f16>(x, key),
        _ => typed::<bf16>(x, key),
    }
}

fn overwrite(dst: &Tensor, src: &Tensor) -> Result<()> {
    // `slice_set` wants a dimension to slice.
    dst.detach().flatten_all()?.slice_set(&src.flatten_all()?, 0, 0)
}

/// The new weight and states, and the sums of squares.
type Updated = (Tensor, Vec<Tensor>, Squares);

impl Rule {
    fn apply(self, w: Tensor, g: Tensor, states: Vec<Tensor>) -> Result<Updated> {
        let nothing = [0.0; 2];
        match (self, states.as_slice()) {
            (Rule::Sgd(rule), states) => {
                let (w, states) = rule.apply(w, g, states)?;
                Ok((w, states, nothing))
            }
            (Rule::AdamW(rule), states) => {
                let (w, states) = rule.apply(w, g, states)?;
                Ok((w, states, nothing))
            }
            (Rule::Lion(rule), [m]) => {
                let (w, m) = rule.apply(w, g, m)?;
                Ok((w, vec![m], nothing))
            }
            (Rule::LambMoments(rule), [m, v]) => {
                let g = signed(g, rule.maximize)?;
                let (m, v) = moments(m, v, &g, rule.beta1, rule.beta2)?;
                let square = |x: &Tensor| {
                    let x = x.to_dtype(DType::F64).or_else(|_| x.to_dtype(DType::F32))?;
                    x.sqr()?.sum_all()?.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_scalar()
                };
                let squares = [square(&w)?, square(&rule.toward(&w, &m, &v)?)?];
                Ok((w, vec![m, v], squares))
            }
            (Rule::LambUpdate(rule, ratio), [m, v]) => {
                let step = (rule.toward(&w, m, v)? * (rule.lr * ratio))?;
                Ok(((w - step)?, states, nothing))
            }
            (Rule::Average(share), _) => Ok((lerp(&w, &g, share)?, states, nothing)),
            (rule, states) => bail!("{rule:?} with {} states", states.len()),
        }
    }
}

fn signed(g: Tensor, maximize: bool) -> Result<Tensor> {
    if maximize { g.neg() } else { Ok(g) }
}

fn lerp(a: &Tensor, b: &Tensor, share: f64) -> Result<Tensor> {
    let way = (b - a)?;
    // The weight, as the kernel has it: rounded first, then taken from 1.
    let rounded = if a.dtype() == DType::F64 { share } else { f64::from(share as f32) };
    if share < 0.5 { a + (way * rounded)? } else { b - (way * (1.0 - rounded))? }
}

/// Adam's.
fn moments(m: &Tensor, v: &Tensor, g: &Tensor, b1: f64, b2: f64) -> Result<(Tensor, Tensor)> {
    Ok((lerp(m, g, 1.0 - b1)?, ((v * b2)? + ((g * (1.0 - b2))? * g)?)?))
}

impl Sgd {
    fn apply(self, w: Tensor, g: Tensor, states: &[Tensor]) -> Result<(Tensor, Vec<Tensor>)> {
        let mut gradient = (signed(g, self.maximize)? + (&w * self.weight_decay)?)?;
        let mut buffers = Vec::new();
        if let [buffer] = states {
            let buffered = match self.first {
                true => gradient.clone(),
                false => ((buffer * self.momentum)? + (&gradient * (1.0 - self.dampening))?)?,
            };
            gradient = match self.nesterov {
                true => (gradient + (&buffered * self.momentum)?)?,
                false => buffered.clone(),
            };
            buffers.push(buffered);
        }
        Ok(((w - (gradient * self.lr)?)?, buffers))
    }
}

impl AdamW {
    fn apply(self, w: Tensor, g: Tensor, states: &[Tensor]) -> Result<(Tensor, Vec<Tensor>)> {
        let (m, v, top) = match states {
            [m, v] => (m, v, None),
            [m, v, top] => (m, v, Some(top)),
            _ => bail!("AdamW with {} states", states.len()),
        };
        let g = signed(g, self.maximize)?;
        let (m, v) = moments(m, v, &g, self.beta1, self.beta2)?;
        let mut states = vec![m.clone(), v.clone()];
        if let Some(top) = top {
            states.push(top.broadcast_maximum(&v)?);
        }
        let denominator = ((states[states.len() - 1].sqrt()? / self.correction)? + self.eps)?;
        let step = ((m * -self.step_size)? / denominator)?;
        Ok((((w * self.keep)? + step)?, states))
    }
}

impl Lion {
    fn apply(self, w: Tensor, g: Tensor, m: &Tensor) -> Result<(Tensor, Tensor)> {
        let g = signed(g, self.maximize)?;
        let toward = ((m * self.beta1)? + (&g * (1.0 - self.beta1))?)?;
        // x / |x| is NaN for 0 and infinities; comparisons are neither.
        let positive = toward.gt(0.0)?.to_dtype(w.dtype())?;
        let direction = (positive - toward.lt(0.0)?.to_dtype(w.dtype())?)?;
        let direction = toward.ne(&toward)?.where_cond(&toward, &direction)?;
        let m = ((m * self.beta2)? + (g * (1.0 - self.beta2))?)?;
        Ok((((w * self.keep)? - (direction * self.lr)?)?, m))
    }
}

impl Lamb {
    fn toward(&self, w: &Tensor, m: &Tensor, v: &Tensor) -> Result<Tensor> {
        let denominator = ((v.sqrt()? / self.correction2)? + self.eps)?;
        ((m / self.correction1)? / denominator)? + (w * self.weight_decay)?
    }
}
