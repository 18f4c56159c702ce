//! Optimizer steps on the CPU: gradients, weights, masters and states of all tensors, in one pass over memory.
//!
//! Tensors are cut into chunks of [`TASK`] elements, and small neighbours are one task, so that many small tensors cost
//! few tasks. `storage.rs` widens and rounds a chunk's elements, and `rule.rs` has the formulas. These multiply
//! gradients by their factors where they read them, so that unscaling and clipping by norm take no pass of their own.
//!
//! LAMB takes two passes, because its update needs norms over a whole tensor. Chunks have F64 sums of squares, which
//! are added pairwise in an order that depends on sizes alone. So the number of threads changes no bit.

use candle_core::{DType, Result};

use super::rule::{Rule, Squares};
use super::slot::{Master, Slot};
use super::storage::{Chunk, FromSlice, Gradient, GradientSlice};
use crate::error::bail;
use crate::kernels::cpu::in_place::{Access, Locked, SliceMut, lock_sets};
use crate::kernels::cpu::parallel::{TASK, map_sized};
use crate::kernels::cpu::simd::vectorise_in;

/// Elements of the variables that are locked together: an evaluation on another thread waits for a pass over
/// them, and not for the whole step.
const TOGETHER: usize = 1 << 22;

/// One pass over all slots; the sums of squares of each.
///
/// What belongs to some slots is locked, without waiting while anything is ([`lock_sets`]), and updated by all
/// threads. So whoever reads several variables, in any order, waits for a pass, and never for ever.
pub(super) fn pass(slots: &[Slot<'_>]) -> Result<Vec<Squares>> {
    let mut squares = Vec::with_capacity(slots.len());
    while squares.len() < slots.len() {
        let (rest, mut elements) = (&slots[squares.len()..], 0);
        let few = rest.iter().take_while(|slot| {
            let before = elements;
            elements += slot.variable.elem_count();
            before < TOGETHER
        });
        let sets: Vec<_> = few.map(accesses).collect();
        let mut locked = lock_sets(&sets)?;
        if locked.is_empty() {
            bail!("no variable could be locked");
        }
        squares.extend(update(rest, &mut locked)?);
    }
    Ok(squares)
}

/// The variable, its gradient, its master if it has one, and its states. The variable comes first: that others
/// have it, and nobody the rest, makes it the one to wait for.
fn accesses<'a>(slot: &Slot<'a>) -> Vec<Access<'a>> {
    let master = match slot.master {
        Master::Full(master) | Master::Remainder(master) => Some(master),
        Master::Itself | Master::Stochastic => None,
    };
    let mut all = vec![Access::Write(slot.variable), Access::Read(slot.gradient)];
    all.extend(master.into_iter().chain(slot.states).map(Access::Write));
    all
}

/// A part of a slot, in the type of its arithmetic.
enum Typed<'a> {
    F32(Chunk<'a, f32>),
    F64(Chunk<'a, f64>),
}

impl Typed<'_> {
    fn len(&self) -> usize {
        match self {
            Self::F32(part) => part.len(),
            Self::F64(part) => part.len(),
        }
    }
}

/// Updates the slots whose tensors are locked, by tasks of all together.
fn update(slots: &[Slot<'_>], locked: &mut [Vec<Locked<'_>>]) -> Result<Vec<Squares>> {
    let mut tasks = Vec::new();
    for (slot, locked) in slots.iter().zip(&mut *locked) {
        let mut add = |part| tasks.push((part, slot.rule));
        match slot.variable.dtype() {
            DType::F64 => cut(part::<f64>(slot, locked)?, |part| add(Typed::F64(part))),
            _ => cut(part::<f32>(slot, locked)?, |part| add(Typed::F32(part))),
        }
    }
    let run = |(part, rule)| match part {
        Typed::F32(part) => run(part, rule),
        Typed::F64(part) => run(part, rule),
    };
    let squares = map_sized(tasks, |(part, _)| part.len(), run);
    let mut squares = squares.as_slice();
    let sum = |slot: &Slot<'_>| {
        let parts = slot.variable.elem_count().div_ceil(TASK).max(1);
        Ok(add_up(squares.split_off(..parts).unwrap_or_default()))
    };
    slots[..locked.len()].iter().map(sum).collect()
}

/// All of a slot.
fn part<'a, T: FromSlice>(slot: &Slot<'_>, locked: &'a mut [Locked<'_>]) -> Result<Chunk<'a, T>> {
    let [variable, gradient, others @ ..] = locked else { bail!("a variable and its gradient") };
    let source = match slot.gradient.dtype() {
        DType::F16 => GradientSlice::F16(gradient.slice()?),
        DType::BF16 => GradientSlice::BF16(gradient.slice()?),
        _ => GradientSlice::Own(gradient.slice()?),
    };
    let gradient = Gradient { source, by: slot.by.on_host()?.map(T::of) };
    let without_master = matches!(slot.master, Master::Itself | Master::Stochastic);
    // The weight, its master, and three states.
    let mut slices: [SliceMut<'a>; 5] = Default::default();
    let first = if without_master { 2 } else { 1 };
    if first + others.len() > slices.len() {
        bail!("more than three states");
    }
    slices[0] = variable.slice_mut()?;
    for (place, other) in slices[first..].iter_mut().zip(others) {
        *place = other.slice_mut()?;
    }
    Chunk::new(slices, gradient, slot.variable.elem_count(), slot.seed)
}

/// Cuts a part where multiples of a task's size fall.
fn cut<'a, T: FromSlice>(mut part: Chunk<'a, T>, mut each: impl FnMut(Chunk<'a, T>)) {
    while part.len() > TASK {
        let (first, rest) = part.split_at(TASK);
        each(first);
        part = rest;
    }
    each(part);
}

fn run<T: FromSlice>(part: Chunk<'_, T>, rule: Rule) -> Squares {
    let (mut part, mut squares) = (Some(part), [0.0; 2]);
    vectorise_in::<T>(
        #[inline(always)]
        || {
            if let Some(part) = part.take() {
                squares = part.run(rule);
            }
        },
    );
    squares
}

/// Adds halves, in the same order for any number of threads.
fn add_up(parts: &[Squares]) -> Squares {
    match parts {
        [] => [0.0; 2],
        [one] => *one,
        _ => {
            let (a, b) = parts.split_at(parts.len() / 2);
            let (a, b) = (add_up(a), add_up(b));
            [a[0] + b[0], a[1] + b[1]]
        }
    }
}
