//! The CPU side: each tensor's gradient, weight and states are read and written in one pass.

use candle_core::{DType, Result, Tensor, bail};
use rayon::prelude::*;

use super::planes::{Gradient, Number, Part, Source};
use super::rule::{Rule, Squares};
use super::{Master, Slot};
use crate::kernels::element::Elements;
use crate::kernels::elementwise::blocks::vectorise;
use crate::kernels::in_place::{SliceMut, write_all};

/// Elements a task.
const TASK: usize = 1 << 16;

/// Tasks a thread, at least, where tensors are tasks: the last one to end keeps others waiting.
const FAIR: usize = 8;

/// One pass over all slots; the sums of squares of each.
///
/// Tensors of a task's size, or of little beside the others, share the threads; a larger one has them all
/// to itself, and ends before the next begins. Nobody holds the lock of more than one variable: whoever
/// reads several, in any order, waits for none forever.
pub(super) fn pass(slots: &[Slot<'_>]) -> Result<Vec<Squares>> {
    let len = |slot: &Slot<'_>| slot.variable.elem_count();
    let share = slots.iter().map(len).sum::<usize>() / (FAIR * rayon::current_num_threads());
    let small = |slot: &Slot<'_>| len(slot) <= TASK.max(share);
    let mut squares = vec![[0.0; 2]; slots.len()];
    for (slot, squares) in slots.iter().zip(&mut squares).filter(|(slot, _)| !small(slot)) {
        *squares = update(slot, true)?;
    }
    if slots.iter().any(small) {
        let small = slots.par_iter().zip(&mut squares).filter(|(slot, _)| small(slot));
        small.try_for_each(|(slot, squares)| {
            *squares = update(slot, false)?;
            Ok::<_, candle_core::Error>(())
        })?;
    }
    Ok(squares)
}

/// Of one slot, by all `threads` or by this one.
fn update(slot: &Slot<'_>, threads: bool) -> Result<Squares> {
    match slot.variable.dtype() {
        DType::F64 => {
            let gradient = Elements::<f64>::of(slot.gradient)?;
            typed(slot, Source::Own(&gradient), threads)
        }
        _ => match slot.gradient.dtype() {
            DType::F16 => typed::<f32>(slot, Source::F16(&Elements::of(slot.gradient)?), threads),
            DType::BF16 => typed::<f32>(slot, Source::BF16(&Elements::of(slot.gradient)?), threads),
            _ => typed::<f32>(slot, Source::Own(&Elements::of(slot.gradient)?), threads),
        },
    }
}

fn typed<T: Number>(slot: &Slot<'_>, gradient: Source<'_, T>, threads: bool) -> Result<Squares> {
    let mut squares = Ok([0.0; 2]);
    let gradient = Gradient { source: gradient, by: slot.by.on_host()?.map(T::of) };
    let master = match slot.master {
        Master::Full(master) | Master::Remainder(master) => Some(master),
        Master::Itself | Master::Stochastic => None,
    };
    let mut tensors: [&Tensor; 5] = [slot.variable; 5];
    let mut count = 1;
    for tensor in master.into_iter().chain(slot.states) {
        let Some(place) = tensors.get_mut(count) else { bail!("more than three states") };
        *place = tensor;
        count += 1;
    }
    let without_master = master.is_none();
    write_all(&tensors[..count], &mut |slices: [SliceMut<'_>; 5]| {
        let [weight, a, b, c, d] = slices;
        let slices = match without_master {
            true => [weight, SliceMut::None, a, b, c],
            false => [weight, a, b, c, d],
        };
        let len = slot.variable.elem_count();
        squares = Part::new(slices, gradient, len, slot.seed)
            .map(|part| divide(part, slot.rule, threads));
    })?;
    squares
}

/// Runs a part in tasks, cut where multiples of a task's size fall: the sums are added in the same
/// order for any number of threads.
fn divide<T: Number>(part: Part<'_, T>, rule: Rule, threads: bool) -> Squares {
    if part.len() <= TASK {
        let (mut part, mut squares) = (Some(part), [0.0; 2]);
        vectorise(
            #[inline(always)]
            || {
                if let Some(part) = part.take() {
                    squares = part.run(rule);
                }
            },
        );
        return squares;
    }
    let (a, b) = {
        let mid = part.len().div_ceil(TASK) / 2 * TASK;
        part.split_at(mid)
    };
    let (a, b) = match threads {
        true => rayon::join(|| divide(a, rule, true), || divide(b, rule, true)),
        false => (divide(a, rule, false), divide(b, rule, false)),
    };
    [a[0] + b[0], a[1] + b[1]]
}
