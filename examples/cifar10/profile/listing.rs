//! The list of `--trace`.

use candle_amp::diagnostics::{ProfileRow, Trace, TraceRow};
use candle_core::{DType, Shape};

use super::chrome::shape;

/// What ran alike, and how often.
type Row = [String; 5];

/// The operators of a step: forward from its trace, backward from its profile. Operators that ran alike
/// are one row, at the place of the first.
pub(super) fn listing(trace: &Trace, profile: &[ProfileRow]) -> String {
    let forward = trace.rows().iter().map(forward);
    let backward = profile.iter().filter(|row| row.backward).map(backward);
    let mut text = "\nForward pass of the first step:\n\n".to_owned();
    text += &columns(forward);
    text += "\nBackward pass, where dtype and shape are those of the gradient that comes in:\n\n";
    text += &columns(backward);
    text + "\n"
}

fn forward(row: &TraceRow) -> Row {
    let inputs: Vec<&str> = row.inputs.iter().map(DType::as_str).collect();
    let within = row.cast.map_or(String::new(), |dtype| format!(" in {}", dtype.as_str()));
    [
        row.op.name().to_owned(),
        format!("{}{within}", inputs.join(" ")),
        row.output.as_str().to_owned(),
        shapes(&row.input_shapes, &row.output_shape),
        row.algorithm.unwrap_or_default().to_owned(),
    ]
}

fn backward(row: &ProfileRow) -> Row {
    [
        row.name.to_owned(),
        row.output.as_str().to_owned(),
        String::new(),
        shape(&row.output_shape),
        row.algorithm.unwrap_or_default().to_owned(),
    ]
}

fn shapes(inputs: &[Shape], output: &Shape) -> String {
    let inputs: Vec<String> = inputs.iter().map(shape).collect();
    format!("{} -> {}", inputs.join(" "), shape(output))
}

/// The rows below each other, with how often each ran.
fn columns(rows: impl Iterator<Item = Row>) -> String {
    let mut counted: Vec<(usize, Row)> = Vec::new();
    for row in rows {
        match counted.iter_mut().find(|(_, other)| *other == row) {
            Some((count, _)) => *count += 1,
            None => counted.push((1, row)),
        }
    }
    let width = |column: usize| {
        counted.iter().map(|(_, row)| row[column].chars().count()).max().unwrap_or(0)
    };
    let widths: [usize; 5] = std::array::from_fn(width);
    let mut text = String::new();
    for (count, row) in &counted {
        let mut line = format!("{count:>4} x");
        for (cell, width) in row.iter().zip(widths).filter(|(_, width)| *width > 0) {
            line += &format!("  {cell:width$}");
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}
