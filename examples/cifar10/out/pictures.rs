//! Pictures of the runs, as SVG and PNG. Each file draws one.
//!
//! They are drawn in the colours of the light page. The page puts names of colours in their place,
//! so that they follow the reader's choice of light or dark.

use std::ops::Range;

use anyhow::Result;
use plotters::{coord::types::RangedCoordf64, prelude::*};

use super::{
    canvas::{Area, Canvas, Drawing, FONT},
    rows::{EpochRow, Row, StepRow},
    run::Finished,
};

mod accuracy;
mod confusion;
mod gradients;
mod loss;
mod rate;
mod scale;
mod time;

pub(crate) use confusion::confusion;
pub(crate) use gradients::last as last_gradients;

/// A picture, and what a reader must know about it.
#[derive(Debug)]
pub(crate) struct Picture {
    /// Of its file, without the ending.
    pub(crate) name: String,
    pub(crate) title: String,
    pub(crate) caption: String,
    drawing: Drawing,
}

/// A colour by what it is for: in CSS, on a light page and on a dark one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Colour {
    pub(crate) name: &'static str,
    light: RGBColor,
    pub(crate) dark: &'static str,
}

const fn colour(name: &'static str, [r, g, b]: [u8; 3], dark: &'static str) -> Colour {
    Colour { name, light: RGBColor(r, g, b), dark }
}

const PAPER: Colour = colour("paper", [0xff, 0xff, 0xff], "#171b21");
const INK: Colour = colour("ink", [0x1b, 0x1f, 0x24], "#e6e8eb");
const MUTED: Colour = colour("muted", [0x5a, 0x64, 0x6e], "#a3adb8");
const LINES: Colour = colour("lines", [0xdf, 0xe3, 0xe8], "#30373f");
const WARNING: Colour = colour("warning", [0xbf, 0x1b, 0x4b], "#ff7595");
const F32: Colour = colour("f32", [0x0b, 0x68, 0xb5], "#64b2f4");
const BF16: Colour = colour("bf16", [0xc0, 0x50, 0x0a], "#ff9f5a");
const F16: Colour = colour("f16", [0x0f, 0x86, 0x5c], "#50d0a0");

/// All colours; no two are alike.
pub(crate) const COLOURS: [Colour; 8] = [PAPER, INK, MUTED, LINES, WARNING, F32, BF16, F16];

impl Colour {
    /// As SVG names it on a light page.
    pub(crate) fn light(&self) -> String {
        let RGBColor(r, g, b) = self.light;
        format!("#{r:02X}{g:02X}{b:02X}")
    }

    /// That of a precision.
    fn of(precision: &str) -> Self {
        match precision {
            "f32" => F32,
            "bf16" => BF16,
            _ => F16,
        }
    }
}

/// Dots of a picture for one CSS pixel: plotters rounds places to whole dots.
const DOTS: u32 = 3;
/// A picture's size in dots.
const SIZE: (u32, u32) = (420 * DOTS, 290 * DOTS);
/// The height of letters, of which plotters makes lines: the letters themselves are a fifth smaller.
const LETTERS: u32 = 15 * DOTS;

type Chart<'a, 'b> = ChartContext<'a, Canvas<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

/// The axes of a chart.
struct Axes<'a> {
    x: Range<f64>,
    y: Range<f64>,
    x_title: &'a str,
    x_label: &'a dyn Fn(&f64) -> String,
    y_label: &'a dyn Fn(&f64) -> String,
}

/// Text of a picture.
fn text(letters: u32, colour: Colour) -> TextStyle<'static> {
    (FONT, letters).into_font().color(&colour.light)
}

/// The title of a picture.
fn heading() -> TextStyle<'static> {
    (FONT, LETTERS + DOTS, FontStyle::Bold).into_font().color(&INK.light)
}

/// Draws a picture of `size` by what `draw` does.
fn draw(size: (u32, u32), draw: impl FnOnce(&Area<'_>) -> Result<()>) -> Result<Drawing> {
    Drawing::new(size, |area| {
        area.fill(&PAPER.light)?;
        draw(area)
    })
}

/// Draws a chart with a title and a legend of the precisions.
fn chart(
    title: &str,
    runs: &[Finished],
    axes: &Axes<'_>,
    plot: impl FnOnce(&mut Chart<'_, '_>) -> Result<()>,
) -> Result<Drawing> {
    draw(SIZE, |area| {
        let (left, top, d) = ((14 * DOTS) as i32, (12 * DOTS) as i32, DOTS as i32);
        area.draw(&Text::new(title.to_owned(), (left, top), heading()))?;
        let mut x = left;
        for precision in precisions(runs) {
            let colour = Colour::of(precision);
            let middle = top + 26 * d;
            let bar = [(x, middle - 2 * d), (x + 18 * d, middle + d)];
            area.draw(&Rectangle::new(bar, colour.light.filled()))?;
            let place = (x + 23 * d, middle - 7 * d);
            area.draw(&Text::new(precision.to_owned(), place, text(LETTERS, INK)))?;
            x += 70 * d;
        }
        let mut chart = ChartBuilder::on(area)
            .margin_top(52 * DOTS)
            .margin_right(16 * DOTS)
            .margin_bottom(8 * DOTS)
            .margin_left(4 * DOTS)
            .x_label_area_size(42 * DOTS)
            .y_label_area_size(56 * DOTS)
            .build_cartesian_2d(axes.x.clone(), axes.y.clone())?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .max_light_lines(0)
            .bold_line_style(LINES.light.stroke_width(DOTS))
            .axis_style(MUTED.light.stroke_width(DOTS))
            .set_all_tick_mark_size(4 * DOTS)
            .label_style(text(LETTERS, MUTED))
            .axis_desc_style(text(LETTERS, MUTED))
            .x_labels(6)
            .y_labels(6)
            .x_desc(axes.x_title)
            .x_label_formatter(axes.x_label)
            .y_label_formatter(axes.y_label)
            .draw()?;
        plot(&mut chart)
    })
}

/// The colour of a line, `dots` wide.
fn line(colour: Colour, dots: u32) -> ShapeStyle {
    colour.light.stroke_width(dots)
}

/// The precisions of `runs`, each once.
pub(crate) fn precisions(runs: &[Finished]) -> Vec<&str> {
    let mut names: Vec<&str> = Vec::new();
    for run in runs {
        if !names.contains(&run.precision.as_str()) {
            names.push(&run.precision);
        }
    }
    names
}

/// All pictures of `runs` but those of one precision alone.
pub(crate) fn charts(runs: &[Finished]) -> Result<Vec<Picture>> {
    [
        loss::picture,
        accuracy::picture,
        rate::picture,
        scale::picture,
        gradients::picture,
        time::picture,
    ]
    .into_iter()
    .map(|picture| picture(runs))
    .collect()
}

fn steps(run: &Finished) -> impl Iterator<Item = &StepRow> {
    run.rows.iter().filter_map(|row| match row {
        Row::Step(step) => Some(step),
        Row::Epoch(_) => None,
    })
}

fn epochs(run: &Finished) -> impl Iterator<Item = &EpochRow> {
    run.rows.iter().filter_map(|row| match row {
        Row::Epoch(epoch) => Some(epoch),
        Row::Step(_) => None,
    })
}

/// The steps of the longest run: where the axis of steps ends.
fn last_step(runs: &[Finished]) -> f64 {
    let last = runs.iter().filter_map(|run| steps(run).last()).map(|step| step.step).max();
    last.unwrap_or(1).max(2) as f64
}

/// At most `count` points for as many stretches of `points`: the mean place, and what `middle` makes
/// of the values.
fn condense(points: &[(f64, f64)], count: usize, middle: fn(&mut [f64]) -> f64) -> Vec<(f64, f64)> {
    let stretches = points.chunks(points.len().div_ceil(count).max(1));
    let point = |stretch: &[(f64, f64)]| {
        let x = stretch.iter().map(|point| point.0).sum::<f64>() / stretch.len() as f64;
        (x, middle(&mut stretch.iter().map(|point| point.1).collect::<Vec<_>>()))
    };
    stretches.map(point).collect()
}

/// The upper end of an axis that begins at 0 and holds the values of `lines`.
fn top(lines: &[Vec<(f64, f64)>]) -> f64 {
    let highest = lines.iter().flatten().map(|point| point.1).fold(0., f64::max);
    if highest > 0. { 1.08 * highest } else { 1. }
}

/// A whole number of steps or epochs; nothing between them.
fn whole(value: &f64) -> String {
    if value.fract().abs() < 1e-6 { format!("{value:.0}") } else { String::new() }
}

/// `number` with few digits.
fn short(number: &f64) -> String {
    match number.abs() {
        size if size < 1e-9 => "0".to_owned(),
        ..0.01 => format!("{number:.0e}"),
        ..1. => format!("{number:.2}"),
        ..10. => format!("{number:.1}"),
        ..1e5 => format!("{number:.0}"),
        _ => format!("{number:.0e}"),
    }
}

impl Picture {
    fn new(name: &str, title: &str, caption: String, drawing: Drawing) -> Self {
        Self { name: name.to_owned(), title: title.to_owned(), caption, drawing }
    }

    /// The files that hold it: their endings, and what is in them.
    pub(crate) fn files(&self) -> Result<[(&'static str, Vec<u8>); 2]> {
        Ok([("svg", self.drawing.svg.clone().into_bytes()), ("png", self.drawing.png()?)])
    }

    /// The picture as a part of the page: as wide as its place, in the page's colours, with its
    /// title for those who cannot see it.
    pub(crate) fn inline(&self) -> String {
        let Drawing { size: (width, height), svg, .. } = &self.drawing;
        let body = svg.find('>').map_or("", |end| &svg[end + 1..]);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" width=\"{width}\" \
             height=\"{height}\" viewBox=\"0 0 {width} {height}\"><title>{}</title>{body}",
            super::page::escape(&self.title)
        );
        for colour in COLOURS {
            svg = svg.replace(&colour.light(), &format!("var(--{})", colour.name));
        }
        svg
    }
}
