//! What was taken for what.

use anyhow::Result;
use plotters::{
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use super::{Colour, DOTS, INK, LETTERS, LINES, MUTED, Picture, WARNING, draw, heading, text};
use crate::{data::CLASSES, out::run::Test};

const SIDE: i32 = 420 * DOTS as i32;
/// Where the cells begin, and how large one is.
const LEFT: i32 = 92 * DOTS as i32;
const TOP: i32 = 46 * DOTS as i32;
const CELL: i32 = 31 * DOTS as i32;
/// How opaque the colour of a full cell is: numbers stay legible on it, dark ones on light paper and light ones on dark.
const FULL: f64 = 0.55;
/// The height of the whole: what is under the cells are names, upright.
const HEIGHT: i32 = TOP + CELL * CLASSES as i32 + 78 * DOTS as i32;

/// The tests of all runs in `precision`, together.
pub(crate) fn confusion(precision: &str, test: &Test) -> Result<Picture> {
    let title = format!("Confusion matrix, {precision}");
    let size = (SIDE as u32, HEIGHT as u32);
    let d = DOTS as i32;
    let drawing = draw(size, |area| {
        area.draw(&Text::new(title.clone(), (14 * d, 12 * d), heading()))?;
        for (at, class) in test.classes.iter().enumerate() {
            let middle = CELL * at as i32 + CELL / 2;
            let names = text(LETTERS - DOTS, MUTED);
            let right = names.clone().pos(Pos::new(HPos::Right, VPos::Center));
            area.draw(&Text::new(class.clone(), (LEFT - 6 * d, TOP + middle), right))?;
            let turned = names.transform(FontTransform::Rotate270);
            let turned = turned.pos(Pos::new(HPos::Right, VPos::Center));
            let place = (LEFT + middle, TOP + CELL * CLASSES as i32 + 6 * d);
            area.draw(&Text::new(class.clone(), place, turned))?;
        }
        for (label, row) in test.confusion.iter().enumerate() {
            let images = row.iter().sum::<usize>().max(1) as f64;
            for (prediction, &count) in row.iter().enumerate() {
                let (x, y) = (LEFT + CELL * prediction as i32, TOP + CELL * label as i32);
                let share = count as f64 / images;
                let colour = if label == prediction { Colour::of(precision) } else { WARNING };
                let cell = [(x, y), (x + CELL, y + CELL)];
                area.draw(&Rectangle::new(cell, colour.light.mix(FULL * share.sqrt()).filled()))?;
                area.draw(&Rectangle::new(cell, LINES.light.stroke_width(DOTS)))?;
                if count > 0 {
                    let style = text(LETTERS, INK).pos(Pos::new(HPos::Center, VPos::Center));
                    let place = (x + CELL / 2, y + CELL / 2);
                    area.draw(&Text::new(count.to_string(), place, style))?;
                }
            }
        }
        Ok(())
    })?;
    let caption = format!(
        "Rows: what {} test images are. Columns: what they were taken for.",
        crate::common::progress::count(test.images())
    );
    let name = format!("confusion-{precision}");
    Ok(Picture::new(&name, &title, caption, drawing))
}
