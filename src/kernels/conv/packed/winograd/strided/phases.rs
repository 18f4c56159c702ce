//! The phases of a convolution at stride 2, and which of their places have products.

use crate::kernels::conv::packed::weights::Order;
use crate::kernels::conv::shape::Shape;

/// Products for a tile, channel and output channel in a phase: the places of a transformed tile.
pub(super) const PLACES: usize = 9;

/// Elements of a transformed tile that lie together: channels of the chunk, of one phase after the other.
pub(super) const ROW: usize = 128;

/// Channels that are transformed at a time.
pub(super) fn chunk(order: Order) -> usize {
    if order == Order::Forward { ROW / PHASES.len() } else { ROW }
}

/// Taps of even or of odd rows, and of even or of odd columns.
pub(super) type Phase = (usize, usize);

pub(super) const PHASES: [Phase; 4] = [(0, 0), (0, 1), (1, 0), (1, 1)];

/// Phases whose products are added: all in the forward pass, in dgrad each by itself.
#[derive(Clone, Debug)]
pub(super) struct Group {
    pub(super) phases: Vec<Phase>,
    /// By place, how many phases before each have products there; `None` where it has none itself.
    pub(super) before: [[Option<usize>; 4]; PLACES],
    /// How many phases have products at a place.
    pub(super) count: [usize; PLACES],
}

impl Group {
    /// The groups of a pass.
    pub(super) fn of(shape: &Shape, order: Order) -> Vec<Self> {
        match order {
            Order::Forward => vec![Self::new(PHASES.to_vec(), shape, order)],
            Order::Backward => PHASES.map(|phase| Self::new(vec![phase], shape, order)).to_vec(),
        }
    }

    fn new(phases: Vec<Phase>, shape: &Shape, order: Order) -> Self {
        let (mut before, mut count) = ([[None; 4]; PLACES], [0; PLACES]);
        for (place, (before, count)) in before.iter_mut().zip(&mut count).enumerate() {
            for (before, &phase) in before.iter_mut().zip(&phases) {
                if has_products(shape, phase, place, order) {
                    *before = Some(*count);
                    *count += 1;
                }
            }
        }
        Self { phases, before, count }
    }
}

/// Whether a phase has products at a place. Of three taps, one is odd: there the other one of a phase's two is zero, and so
/// is what it gives.
pub(super) fn has_products(shape: &Shape, phase: Phase, place: usize, order: Order) -> bool {
    // dgrad meets the taps in the opposite order.
    let none = if order == Order::Forward { 2 } else { 0 };
    let has = |taps: usize, phase: usize, place: usize| taps == 4 || phase == 0 || place != none;
    has(shape.kernel_height, phase.0, place / 3) && has(shape.kernel_width, phase.1, place % 3)
}

/// Products for a tile, channel and output channel in all phases.
pub(super) fn products(shape: &Shape) -> usize {
    let has = |phase| move |&place: &usize| has_products(shape, phase, place, Order::Forward);
    PHASES.into_iter().map(|phase| (0..PLACES).filter(has(phase)).count()).sum()
}
