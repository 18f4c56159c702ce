//! A step of an optimizer: gradients, weights, masters and states of many tensors, in one pass over
//! memory on the CPU.
//!
//! Arithmetic is `F32` (`F64` for `F64` variables), in the order of [`rule`], which holds the
//! formulas. What is kept in 16 bits is widened on the way in and rounded once on the way out.

mod cpu;
mod cuda;
mod portable;
mod rounding;
mod rule;
mod storage;

use candle_core::{Result, Tensor};

pub(crate) use rule::{AdamW, Lamb, Lion, Rule, Sgd};

use crate::kernels::capture;
use crate::kernels::cuda::Gpu;
use crate::kernels::multi_tensor::Multiplier;

/// Where the exact value of a variable is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Master<'a> {
    /// In an `F32` or `F64` variable.
    Itself,
    /// In an `F32` tensor; the variable is that, rounded to nearest even.
    Full(&'a Tensor),
    /// In the variable, `BF16`, and an `I16` tensor: what [`split`](rounding::split) makes.
    Remainder(&'a Tensor),
    /// Nowhere: the 16-bit variable is rounded at random.
    Stochastic,
}

/// A variable, what belongs to it, and what to do with it.
///
/// All tensors have its shape and device, are contiguous, and have a storage each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot<'a> {
    pub(crate) variable: &'a Tensor,
    pub(crate) master: Master<'a>,
    /// In the order the rule names them, `F32` (`F64` for `F64` variables) or `BF16`, which is
    /// rounded at random. Rounded to nearest, a second moment would stop at a size where a
    /// thousandth of it is below the last bit.
    pub(crate) states: &'a [Tensor],
    /// `F64` for an `F64` variable, else `F32`, `F16` or `BF16`.
    pub(crate) gradient: &'a Tensor,
    /// What the gradient is multiplied by, where it is read.
    pub(crate) by: &'a Multiplier,
    pub(crate) rule: Rule,
    /// Of the random bits, different for every tensor and step.
    pub(crate) seed: u64,
}

/// A step on a GPU that is taken or not: the GPU decides.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Skip<'a> {
    /// One `U32`: skipped where it is not zero.
    pub(crate) flag: &'a Tensor,
    /// `U32`, one for each variable of the optimizer: its steps that were skipped. They are counted
    /// here, and taken off [`Rule`]'s number of the step.
    pub(crate) counts: &'a Tensor,
    /// Where in `counts` each slot's is.
    pub(crate) places: &'a [usize],
}

/// One step of every slot. With a `skip`, all are on its GPU.
///
/// # Synchronisation
///
/// None on CUDA.
pub(crate) fn step(mut slots: Vec<Slot<'_>>, skip: Option<Skip<'_>>) -> Result<()> {
    while let Some(first) = slots.first() {
        let device = first.variable.device().clone();
        let here = |slot: &Slot<'_>| slot.variable.device().location() == device.location();
        let (chosen, others): (Vec<_>, Vec<_>) = slots.into_iter().partition(here);
        match Gpu::of(&device) {
            Some(gpu) => cuda::step(gpu, &chosen, skip)?,
            None => step_on_host(chosen)?,
        }
        slots = others;
    }
    Ok(())
}

fn step_on_host(mut slots: Vec<Slot<'_>>) -> Result<()> {
    let on_cpu = slots.iter().all(|slot| slot.variable.device().is_cpu());
    while !slots.is_empty() {
        let squares = if on_cpu {
            cpu::pass(&slots)?
        } else {
            slots.iter().map(portable::update).collect::<Result<_>>()?
        };
        let mut left = Vec::new();
        for (slot, squares) in slots.into_iter().zip(squares) {
            left.extend(slot.rule.next(squares).map(|rule| Slot { rule, ..slot }));
        }
        slots = left;
    }
    Ok(())
}

/// What a captured step reads anew at each replay: the numbers of `rule`, and the seed of its random bits.
pub(crate) fn per_step(rule: Rule, seed: u64) -> [u64; capture::ROW] {
    cuda::per_step(rule, seed)
}

/// The `F32` value of a `BF16` tensor and its remainder, on any device.
pub(crate) fn rebuild(rounded: &Tensor, rest: &Tensor) -> Result<Tensor> {
    match Gpu::of(rounded.device()) {
        Some(gpu) => cuda::rebuild(gpu, rounded, rest),
        None => portable::rebuild(rounded, rest),
    }
}

#[cfg(test)]
mod cuda_tests;
#[cfg(test)]
mod tests;
