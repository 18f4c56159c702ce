//! The loss scale, and the steps that were skipped at it.

use anyhow::Result;
use plotters::prelude::*;

use super::{Axes, Colour, DOTS, Finished, Picture, WARNING, chart, last_step, line, steps, whole};

pub(super) fn picture(runs: &[Finished]) -> Result<Picture> {
    let lines: Vec<_> = runs.iter().map(stairs).collect();
    let all = || lines.iter().flatten().map(|point| point.1);
    let (low, high) = (all().fold(0., f64::min), all().fold(1., f64::max));
    let axes = Axes {
        x: 0.0..last_step(runs),
        y: low - 1. ..high + 1.,
        x_title: "step",
        x_label: &whole,
        y_label: &|power| if power.fract() == 0. { scale(*power) } else { String::new() },
    };
    let title = "Loss scale";
    let mut skipped = Vec::new();
    let drawing = chart(title, runs, &axes, |chart| {
        for (run, points) in runs.iter().zip(&lines) {
            let style = line(Colour::of(&run.precision), 2 * DOTS);
            chart.draw_series(LineSeries::new(points.iter().copied(), style))?;
        }
        for run in runs {
            let places: Vec<_> = steps(run)
                .filter(|step| step.skipped)
                .map(|step| (step.step as f64, log2(step.scale)))
                .collect();
            let style = line(WARNING, 2 * DOTS);
            chart.draw_series(places.iter().map(|&at| Cross::new(at, 4 * DOTS, style)))?;
            skipped.push((run, places.len()));
        }
        Ok(())
    })?;
    let mut caption =
        "Crosses: steps whose gradients overflowed, and which were skipped.".to_owned();
    if skipped.iter().all(|(_, count)| *count == 0) {
        caption = "No step was skipped.".to_owned();
    }
    Ok(Picture::new("loss-scale", title, caption, drawing))
}

/// The scale after each of its changes, as powers of two.
fn stairs(run: &Finished) -> Vec<(f64, f64)> {
    let mut points: Vec<(f64, f64)> = Vec::new();
    let mut last = None;
    for step in steps(run) {
        let (x, y) = (step.step as f64, log2(step.scale));
        match points.last() {
            Some(&(_, before)) if before == y => {}
            Some(&(_, before)) => points.extend([(x - 0.5, before), (x - 0.5, y)]),
            None => points.push((x - 1., y)),
        }
        last = Some((x, y));
    }
    points.extend(last);
    points
}

fn log2(scale: f32) -> f64 {
    f64::from(scale).log2()
}

/// Two to the power `power`, in few characters.
fn scale(power: f64) -> String {
    crate::common::progress::short(power.exp2() as f32)
}
