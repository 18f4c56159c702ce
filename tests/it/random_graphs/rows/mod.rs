//! Every operator of the crate, and many of candle's: how to draw a call, run it, and what it should give.
//!
//! A new operator wants a row here.

mod activations;
mod attention;
mod candle;
mod conv;
mod indexing;
mod losses;
mod norms;
mod pairs;
mod recurrent;
mod user;
mod views;
mod vision;

use std::sync::OnceLock;

use candle_amp::Op;
use candle_core::{Result, Tensor};

use super::array::Array;
use super::draft::Draft;
use super::program::{Call, Row};
use super::tape::Tape;

pub(super) fn rows() -> &'static [Row] {
    static ROWS: OnceLock<Vec<Row>> = OnceLock::new();
    ROWS.get_or_init(|| {
        let families = [
            attention::rows(),
            candle::rows(),
            conv::rows(),
            activations::rows(),
            indexing::rows(),
            losses::rows(),
            norms::rows(),
            pairs::rows(),
            recurrent::rows(),
            user::rows(),
            views::rows(),
            vision::rows(),
        ];
        families.into_iter().flatten().collect()
    })
}

pub(super) fn named(name: &str) -> &'static Row {
    rows().iter().find(|row| row.name == name).unwrap_or_else(|| panic!("no row {name}"))
}

fn row(
    op: Option<Op>,
    name: &'static str,
    draw: fn(&mut Draft, usize) -> Option<Call>,
    run: fn(&[Tensor], &[usize]) -> Result<Tensor>,
    reference: fn(&mut Tape, &[Array], &[usize]) -> Array,
) -> Row {
    let (exact, mixed, rounded, cuts) = (false, false, false, false);
    Row { op, name, draw, run, reference, exact, mixed, rounded, cuts }
}

impl Row {
    fn exact(self) -> Self {
        Self { exact: true, ..self }
    }

    fn mixed(self) -> Self {
        Self { mixed: true, ..self }
    }

    fn rounded(self) -> Self {
        Self { rounded: true, ..self }
    }

    fn cuts(self) -> Self {
        Self { cuts: true, ..self }
    }
}

/// On the value as it is.
fn alone(_: &mut Draft, x: usize) -> Option<Call> {
    Some((vec![x], vec![]))
}
