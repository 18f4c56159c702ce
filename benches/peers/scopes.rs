//! What an autocast scope costs an operator that casts nothing.
//!
//! How much of an operator's time is the question whether there is a scope cannot be seen from
//! outside. What can: the same operator inside and outside, so the cost of a scope's answer.
//! Hundreds of calls a time, as one is shorter than the clock's own cost, inside and outside in turns,
//! and the fastest of each.

use std::hint::black_box;

use anyhow::Result;
use candle_amp::{Autocast, no_grad, ops};
use candle_amp_benches::measure::{Runner, seconds};
use candle_core::{DType, Device, Tensor};

const CALLS: usize = 500;
const TURNS: usize = 16;

/// A sum of single numbers, which agree: no scope casts them.
fn sums(one: &Tensor) -> Result<f64> {
    let all = seconds(|| {
        no_grad(|| {
            (0..CALLS).try_for_each(|_| ops::add(one, one).map(|sum| drop(black_box(sum))))
        })?;
        Ok(())
    })?;
    Ok(all / CALLS as f64)
}

fn one() -> Result<Tensor> {
    Ok(Tensor::ones(1, DType::F32, &Device::Cpu)?)
}

pub(crate) fn operator() -> Result<Runner> {
    let one = one()?;
    Ok(Box::new(move || sums(&one)))
}

/// Inside less outside.
pub(crate) fn in_scope(enabled: bool) -> Result<Runner> {
    let one = one()?;
    let amp = if enabled { Autocast::new(DType::BF16) } else { Autocast::disabled() };
    Ok(Box::new(move || {
        let [mut inside, mut outside] = [f64::INFINITY; 2];
        for _ in 0..TURNS {
            outside = outside.min(sums(&one)?);
            inside = inside.min(amp.scope(|| sums(&one))?);
        }
        Ok(inside - outside)
    }))
}

pub(crate) fn enter() -> Result<Runner> {
    let amp = Autocast::new(DType::BF16);
    Ok(Box::new(move || {
        let all = seconds(|| {
            (0..CALLS).for_each(|_| amp.scope(|| black_box(())));
            Ok(())
        })?;
        Ok(all / CALLS as f64)
    }))
}
