//! The accuracy of the test after each epoch.

use anyhow::Result;
use plotters::prelude::*;

use super::{Axes, Colour, DOTS, Finished, Picture, chart, epochs, line, whole};

pub(super) fn picture(runs: &[Finished]) -> Result<Picture> {
    let points = |run| epochs(run).map(|epoch| (epoch.epoch as f64, 100. * epoch.test_accuracy));
    let lines: Vec<Vec<(f64, f64)>> = runs.iter().map(|run| points(run).collect()).collect();
    let last = lines.iter().flatten().map(|point| point.0).fold(1., f64::max);
    let axes = Axes {
        x: 0.0..1.03 * last,
        y: 0.0..100.0,
        x_title: "epoch",
        x_label: &whole,
        y_label: &|percent| format!("{percent:.0} %"),
    };
    let title = "Test accuracy";
    let drawing = chart(title, runs, &axes, |chart| {
        for (run, points) in runs.iter().zip(&lines) {
            let colour = Colour::of(&run.precision);
            chart.draw_series(LineSeries::new(points.iter().copied(), line(colour, 2 * DOTS)))?;
            let dots = points.iter().map(|&at| Circle::new(at, 3 * DOTS, colour.light.filled()));
            chart.draw_series(dots)?;
        }
        Ok(())
    })?;
    let caption = "The share of all test images that were recognised.".to_owned();
    Ok(Picture::new("accuracy", title, caption, drawing))
}
