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
mod slot;
mod storage;

use candle_core::{Result, Tensor};

pub(crate) use rule::{AdamW, Lamb, Lion, Rule, Sgd};
pub(crate) use slot::{Master, Skip, Slot};

use crate::kernels::capture;
use crate::kernels::cuda::Gpu;

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
