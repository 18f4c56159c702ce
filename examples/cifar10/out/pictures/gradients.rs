//! How large the gradients of the last step are, against the range of F16.

use anyhow::Result;
use plotters::prelude::*;

use super::{
    Axes, Chart, Colour, DOTS, Finished, LETTERS, MUTED, Picture, WARNING, chart, epochs, line,
    text, top, whole,
};
use crate::history::Gradients;

/// F16 by exponents: from where to where, what becomes of a number there, and whether it is lost.
const RANGES: [(f64, f64, &str, Option<Colour>); 4] = [
    (f64::NEG_INFINITY, -25., "zero", Some(WARNING)),
    (-25., -14., "subnormal", Some(MUTED)),
    (-14., 16., "normal", None),
    (16., f64::INFINITY, "infinite", Some(WARNING)),
];

pub(super) fn picture(runs: &[Finished]) -> Result<Picture> {
    let outlines: Vec<_> =
        runs.iter().map(|run| last(run).map_or_else(Vec::new, outline)).collect();
    let places = || outlines.iter().flatten().map(|point| point.0);
    let (low, high) = (places().fold(-36., f64::min), places().fold(24., f64::max));
    let height = 1.15 * top(&outlines);
    let axes = Axes {
        x: low..high,
        y: 0.0..height,
        x_title: "gradient times loss scale, as a power of 2",
        x_label: &whole,
        y_label: &|percent| format!("{percent:.0} %"),
    };
    let title = "Gradient exponents";
    let drawing = chart(title, runs, &axes, |chart| {
        ranges(chart, (low, high), height)?;
        for (run, points) in runs.iter().zip(&outlines) {
            let style = line(Colour::of(&run.precision), 2 * DOTS);
            chart.draw_series(LineSeries::new(points.iter().copied(), style))?;
        }
        Ok(())
    })?;
    let caption = "Of the last step, as the backward pass computes them: times the loss scale. \
                   Behind them, what F16 makes of a number of that size."
        .to_owned();
    Ok(Picture::new("gradient-exponents", title, caption, drawing))
}

/// The gradients of the last epoch that has some.
pub(crate) fn last(run: &Finished) -> Option<&Gradients> {
    epochs(run).filter_map(|epoch| epoch.gradients.as_ref()).last()
}

/// The share of elements of each exponent, in per cent, as stairs.
fn outline(gradients: &Gradients) -> Vec<(f64, f64)> {
    let elements = gradients.elements().max(1) as f64;
    let shift = f64::from(gradients.scale).log2().floor();
    let (Some(first), Some(end)) = (gradients.exponents.first(), gradients.exponents.last()) else {
        return Vec::new();
    };
    let stair = |exponent: i32| {
        let count = gradients.exponents.iter().find(|(other, _)| *other == exponent);
        let percent = 100. * count.map_or(0, |(_, count)| *count) as f64 / elements;
        let x = f64::from(exponent) + shift;
        [(x, percent), (x + 1., percent)]
    };
    let (from, to) = (f64::from(first.0) + shift, f64::from(end.0) + shift + 1.);
    let stairs = (first.0..=end.0).flat_map(stair);
    std::iter::once((from, 0.)).chain(stairs).chain([(to, 0.)]).collect()
}

/// Draws the ranges of F16 behind the lines.
fn ranges(chart: &mut Chart<'_, '_>, (low, high): (f64, f64), height: f64) -> Result<()> {
    for (from, to, name, colour) in RANGES {
        let (from, to) = (from.max(low), to.min(high));
        if let Some(colour) = colour {
            let area = Rectangle::new([(from, 0.), (to, height)], colour.light.mix(0.12).filled());
            chart.draw_series([area])?;
        }
        let style = text(LETTERS - DOTS, colour.unwrap_or(MUTED));
        let centre = plotters::style::text_anchor::Pos::new(
            plotters::style::text_anchor::HPos::Center,
            plotters::style::text_anchor::VPos::Top,
        );
        let place = ((from + to) / 2., 0.985 * height);
        chart.draw_series([Text::new(name, place, style.pos(centre))])?;
    }
    Ok(())
}
