//! The CPU side: each tensor's gradient, weight and states are read and written in one pass.

use candle_core::{DType, Result, Tensor, bail};

use super::planes::{Gradient, Number, Part, Source};
use super::rule::{Rule, Squares};
use super::{Master, Slot};
use crate::kernels::cpu::dtype::Elements;
use crate::kernels::cpu::in_place::{SliceMut, write_all};
use crate::kernels::cpu::parallel::{By, TASK, share};
use crate::kernels::cpu::simd::vectorise;

/// One pass over all slots; the sums of squares of each.
///
/// Nobody holds the lock of more than one variable: whoever reads several, in any order, waits for none
/// forever.
pub(super) fn pass(slots: &[Slot<'_>]) -> Result<Vec<Squares>> {
    share(slots, |slot| slot.variable.elem_count(), update)
}

fn update(slot: &Slot<'_>, by: By) -> Result<Squares> {
    match slot.variable.dtype() {
        DType::F64 => {
            let gradient = Elements::<f64>::of(slot.gradient)?;
            typed(slot, Source::Own(&gradient), by)
        }
        _ => match slot.gradient.dtype() {
            DType::F16 => typed::<f32>(slot, Source::F16(&Elements::of(slot.gradient)?), by),
            DType::BF16 => typed::<f32>(slot, Source::BF16(&Elements::of(slot.gradient)?), by),
            _ => typed::<f32>(slot, Source::Own(&Elements::of(slot.gradient)?), by),
        },
    }
}

fn typed<T: Number>(slot: &Slot<'_>, gradient: Source<'_, T>, by: By) -> Result<Squares> {
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
        squares =
            Part::new(slices, gradient, len, slot.seed).map(|part| divide(part, slot.rule, by));
    })?;
    squares
}

/// Runs a part in tasks, cut where multiples of a task's size fall: the sums are added in the same
/// order for any number of threads.
fn divide<T: Number>(part: Part<'_, T>, rule: Rule, by: By) -> Squares {
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
    let (a, b) = match by {
        By::All => rayon::join(|| divide(a, rule, by), || divide(b, rule, by)),
        By::One => (divide(a, rule, by), divide(b, rule, by)),
    };
    [a[0] + b[0], a[1] + b[1]]
}
