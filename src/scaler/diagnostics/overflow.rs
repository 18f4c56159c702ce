//! Which gradients overflowed, and how.

use std::fmt;

use candle_core::Tensor;

use crate::{Result, kernels};

/// How much of a gradient was not finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NonFinite {
    /// Elements that were positive or negative infinity: an overflow, which a lower scale may cure.
    pub infinite: usize,
    /// Elements that were NaN: an infinity that was computed with, or what no scale cures.
    pub nan: usize,
    /// Elements in all.
    pub elements: usize,
}

impl NonFinite {
    /// Those of `gradient`. One pass.
    pub(crate) fn of(gradient: &Tensor) -> Result<Self> {
        let [infinite, nan] = kernels::multi_tensor::histogram::non_finite(gradient)?;
        Ok(Self { infinite, nan, elements: gradient.elem_count() })
    }
}

/// Why a step was skipped: which gradients were not finite, from
/// [`StepOutcome::report`](crate::StepOutcome::report). Printed, a table.
#[derive(Clone, Debug, PartialEq)]
pub struct OverflowReport {
    pub(crate) scale: f32,
    /// By name, and what has none last.
    pub(crate) rows: Vec<(Option<String>, NonFinite)>,
    /// How many gradients were checked.
    pub(crate) checked: usize,
}

impl OverflowReport {
    /// The scale the gradients were made with.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// Whether no gradient overflowed: the step was taken.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// How many gradients were not finite.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// The gradients that were not finite, sorted by the names of their variables; those without a
    /// name come last.
    pub fn iter(&self) -> impl Iterator<Item = (Option<&str>, NonFinite)> {
        self.rows.iter().map(|(name, found)| (name.as_deref(), *found))
    }
}

impl fmt::Display for OverflowReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { scale, rows, checked } = self;
        if rows.is_empty() {
            return write!(f, "no gradient overflowed at scale {scale}");
        }
        let count = rows.len();
        writeln!(f, "skipped at scale {scale}: {count} of {checked} gradients are not finite")?;
        let mut table = vec![["variable", "infinite", "NaN", "of"].map(str::to_owned)];
        for (name, found) in rows {
            let name = name.as_deref().unwrap_or("(no name)").to_owned();
            let NonFinite { infinite, nan, elements } = *found;
            table.push([name, infinite.to_string(), nan.to_string(), elements.to_string()]);
        }
        let width = |column: usize| table.iter().map(|row| row[column].chars().count()).max();
        let widths: [usize; 4] = std::array::from_fn(|column| width(column).unwrap_or(0));
        let lines = table.iter().map(|[name, counts @ ..]| {
            let first = format!("{name:0$}", widths[0]);
            let rest =
                counts.iter().zip(&widths[1..]).map(|(count, width)| format!("  {count:>width$}"));
            first + &rest.collect::<String>()
        });
        write!(f, "{}", lines.collect::<Vec<_>>().join("\n"))
    }
}
