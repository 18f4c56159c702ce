//! How long the steps took.

use anyhow::Result;
use plotters::prelude::*;

use super::{
    Axes, Colour, DOTS, Finished, Picture, chart, condense, last_step, line, short, steps, top,
    whole,
};

/// Points of a line.
const POINTS: usize = 100;

pub(super) fn picture(runs: &[Finished]) -> Result<Picture> {
    let points = |run| steps(run).map(|step| (step.step as f64, step.ms)).collect::<Vec<_>>();
    let lines: Vec<_> = runs.iter().map(|run| condense(&points(run), POINTS, median)).collect();
    let axes = Axes {
        x: 0.0..last_step(runs),
        y: 0.0..top(&lines),
        x_title: "step",
        x_label: &whole,
        y_label: &|ms| format!("{} ms", short(ms)),
    };
    let title = "Time a step";
    let drawing = chart(title, runs, &axes, |chart| {
        for (run, points) in runs.iter().zip(&lines) {
            let style = line(Colour::of(&run.precision), 2 * DOTS);
            chart.draw_series(LineSeries::new(points.iter().copied(), style))?;
        }
        Ok(())
    })?;
    let longest = runs.iter().map(|run| steps(run).count()).max().unwrap_or(0);
    let caption = match longest.div_ceil(POINTS) {
        0 | 1 => "From making the batch to moving the scale.".to_owned(),
        stretch => format!("The median of {stretch} steps each, without the tests."),
    };
    Ok(Picture::new("step-time", title, caption, drawing))
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}
