//! The loss of training, and of the test after each epoch.

use anyhow::Result;
use plotters::prelude::*;

use super::{
    Axes, Colour, DOTS, Finished, Picture, chart, condense, epochs, last_step, line, short, steps,
    top, whole,
};

/// Points of a line: the loss of a single step is noise.
const POINTS: usize = 60;

pub(super) fn picture(runs: &[Finished]) -> Result<Picture> {
    let finite = |run| steps(run).filter_map(|step| Some((step.step as f64, step.loss?.into())));
    let train: Vec<_> =
        runs.iter().map(|run| condense(&finite(run).collect::<Vec<_>>(), POINTS, mean)).collect();
    let tests = |run| epochs(run).filter_map(|epoch| Some((epoch.step as f64, epoch.test_loss?)));
    let test: Vec<Vec<(f64, f64)>> = runs.iter().map(|run| tests(run).collect()).collect();
    let missing: usize =
        runs.iter().map(|run| steps(run).filter(|step| step.loss.is_none()).count()).sum();

    // The test of a network that has just begun may be far off, and would flatten everything else.
    let height = top(&train).max(top(&test).min(2. * top(&train)));
    let above = test.iter().flatten().filter(|point| point.1 > height).count();
    let axes = Axes {
        x: 0.0..last_step(runs),
        y: 0.0..height,
        x_title: "step",
        x_label: &whole,
        y_label: &short,
    };
    let title = "Loss";
    let drawing = chart(title, runs, &axes, |chart| {
        for ((run, train), test) in runs.iter().zip(&train).zip(&test) {
            let colour = Colour::of(&run.precision);
            chart.draw_series(LineSeries::new(train.iter().copied(), line(colour, 2 * DOTS)))?;
            let dots = test.iter().filter(|point| point.1 <= height);
            let dots = dots.map(|&at| Circle::new(at, 4 * DOTS, colour.light.filled()));
            chart.draw_series(dots)?;
        }
        Ok(())
    })?;
    let mut caption = "Lines: training, the mean of neighbouring steps, with label smoothing if the run has any. Dots: test, without.".to_owned();
    if above > 0 {
        caption += &format!(" {above} tests are above the picture.");
    }
    if missing > 0 {
        caption +=
            &format!(" The loss was infinite or NaN in {missing} steps, which are left out.");
    }
    Ok(Picture::new("loss", title, caption, drawing))
}

fn mean(values: &mut [f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}
