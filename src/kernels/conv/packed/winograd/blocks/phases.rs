//! The phases of a convolution, and which of their places have products.

use crate::kernels::conv::packed::weights::Order;
use crate::kernels::conv::shape::Shape;

/// Taps of even or of odd rows, and of even or of odd columns; at stride 1, all of them.
pub(super) type Phase = (usize, usize);

/// The phases of a convolution at this stride, which is 1 or 2.
pub(super) fn phases(stride: usize) -> Vec<Phase> {
    let all = [(0, 0), (0, 1), (1, 0), (1, 1)];
    all[..stride * stride].to_vec()
}

/// Places of the largest transformed tile.
const PLACES: usize = 36;

/// Phases whose products are added: all in the forward pass, in dgrad each by itself.
#[derive(Clone, Debug)]
pub(super) struct Group {
    pub(super) phases: Vec<Phase>,
    before: [[Option<usize>; 4]; PLACES],
    count: [usize; PLACES],
}

impl Group {
    /// The groups of a pass, with tiles of so many pixels a side.
    pub(super) fn of(shape: &Shape, order: Order, side: usize) -> Vec<Self> {
        let phases = phases(shape.geometry.stride);
        match order {
            Order::Forward => vec![Self::new(phases, shape, order, side)],
            Order::Backward => {
                phases.into_iter().map(|phase| Self::new(vec![phase], shape, order, side)).collect()
            }
        }
    }

    fn new(phases: Vec<Phase>, shape: &Shape, order: Order, side: usize) -> Self {
        let (mut before, mut count) = ([[None; 4]; PLACES], [0; PLACES]);
        let places = before.iter_mut().zip(&mut count).take(side * side);
        for (place, (before, count)) in places.enumerate() {
            for (before, &phase) in before.iter_mut().zip(&phases) {
                if has_products(shape, phase, (place / side, place % side), order) {
                    *before = Some(*count);
                    *count += 1;
                }
            }
        }
        Self { phases, before, count }
    }

    /// How many phases before this one have products at a place; `None` where it has none itself.
    #[inline(always)]
    pub(super) fn before<const SIDE: usize>(&self, place: usize, phase: usize) -> Option<usize> {
        if const { has_one_phase(SIDE) } { Some(0) } else { self.before[place][phase] }
    }

    /// How many phases have products at a place.
    #[inline(always)]
    pub(super) fn count<const SIDE: usize>(&self, place: usize) -> usize {
        if const { has_one_phase(SIDE) } { 1 } else { self.count[place] }
    }
}

/// Whether tiles of so many pixels a side have one phase, with products at all places. A constant, it spares loops over places
/// a lookup and a branch at each.
const fn has_one_phase(side: usize) -> bool {
    side > 3
}

/// Whether a phase has products at a place. At stride 2, one of three taps is odd: there the other one of a phase's two is
/// zero, and so is what it gives. At stride 1, the one phase has products at all places.
pub(super) fn has_products(
    shape: &Shape,
    phase: Phase,
    place: (usize, usize),
    order: Order,
) -> bool {
    // dgrad meets the taps in the opposite order.
    let none = if order == Order::Forward { 2 } else { 0 };
    let has = |taps: usize, phase: usize, place: usize| taps == 4 || phase == 0 || place != none;
    has(shape.kernel_height, phase.0, place.0) && has(shape.kernel_width, phase.1, place.1)
}

/// Products for a tile, channel and output channel in all phases.
pub(super) fn products(shape: &Shape, order: Order, side: usize) -> usize {
    let groups = Group::of(shape, order, side);
    groups.iter().flat_map(|group| &group.count).sum()
}
