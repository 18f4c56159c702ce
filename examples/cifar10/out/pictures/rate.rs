//! The learning rate of each step.

use anyhow::Result;
use plotters::prelude::*;

use super::{
    Axes, Colour, DOTS, Finished, Picture, chart, condense, last_step, line, short, steps, top,
    whole,
};

pub(super) fn picture(runs: &[Finished]) -> Result<Picture> {
    let points = |run| steps(run).map(|step| (step.step as f64, step.lr)).collect::<Vec<_>>();
    let last = |values: &mut [f64]| values.last().copied().unwrap_or_default();
    let lines: Vec<_> = runs.iter().map(|run| condense(&points(run), 400, last)).collect();
    let axes = Axes {
        x: 0.0..last_step(runs),
        y: 0.0..top(&lines),
        x_title: "step",
        x_label: &whole,
        y_label: &short,
    };
    let title = "Learning rate";
    let drawing = chart(title, runs, &axes, |chart| {
        // The first run on top, for all may have the same.
        for (run, points) in runs.iter().zip(&lines).rev() {
            let style = line(Colour::of(&run.precision), 2 * DOTS);
            chart.draw_series(LineSeries::new(points.iter().copied(), style))?;
        }
        Ok(())
    })?;
    let caption = "A skipped step does not move it. Lines that agree cover each other.".to_owned();
    Ok(Picture::new("learning-rate", title, caption, drawing))
}
