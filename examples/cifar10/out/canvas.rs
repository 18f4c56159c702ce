//! What pictures are drawn on: an SVG and a PNG, at once.

use std::io;

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::register_font;
use plotters_backend::{
    BackendColor, BackendCoord, BackendStyle, BackendTextStyle, DrawingErrorKind,
};

use super::images;

/// The font of both: a PNG has no other, and an SVG is laid out by its letters.
pub(super) const FONT: &str = "sans-serif";

pub(super) type Area<'a> = DrawingArea<Canvas<'a>, Shift>;

/// A picture that has been drawn.
#[derive(Debug)]
pub(super) struct Drawing {
    pub(super) size: (u32, u32),
    pub(super) svg: String,
    /// Red, green and blue of each pixel.
    pixels: Vec<u8>,
}

impl Drawing {
    /// A drawing of `size` by what `draw` does.
    pub(super) fn new(
        size: (u32, u32),
        draw: impl FnOnce(&Area<'_>) -> Result<()>,
    ) -> Result<Self> {
        for (style, bytes) in
            [(FontStyle::Normal, ttf_noto_sans::REGULAR), (FontStyle::Bold, ttf_noto_sans::BOLD)]
        {
            register_font(FONT, style, bytes).map_err(|_| anyhow!("the font cannot be read"))?;
        }
        let mut svg = String::new();
        let mut pixels = vec![0; 3 * size.0 as usize * size.1 as usize];
        let canvas = Canvas {
            svg: SVGBackend::with_string(&mut svg, size),
            pixels: BitMapBackend::with_buffer(&mut pixels, size),
        };
        let area = canvas.into_drawing_area();
        draw(&area)?;
        area.present()?;
        drop(area);
        Ok(Self { size, svg, pixels })
    }

    pub(super) fn png(&self) -> Result<Vec<u8>> {
        images::png_of_pixels(&self.pixels, self.size)
    }
}

/// Draws everything twice.
pub(super) struct Canvas<'a> {
    svg: SVGBackend<'a>,
    pixels: BitMapBackend<'a>,
}

type Drawn = std::result::Result<(), DrawingErrorKind<io::Error>>;

/// An error of a drawing in memory.
fn failed<E: std::error::Error + Send + Sync + 'static>(
    error: DrawingErrorKind<E>,
) -> DrawingErrorKind<io::Error> {
    match error {
        DrawingErrorKind::DrawingError(error) => {
            DrawingErrorKind::DrawingError(io::Error::other(error))
        }
        DrawingErrorKind::FontError(error) => DrawingErrorKind::FontError(error),
    }
}

impl Canvas<'_> {
    fn both(
        &mut self,
        svg: impl FnOnce(&mut SVGBackend<'_>) -> Drawn,
        pixels: impl FnOnce(
            &mut BitMapBackend<'_>,
        ) -> std::result::Result<
            (),
            DrawingErrorKind<<BitMapBackend<'static> as DrawingBackend>::ErrorType>,
        >,
    ) -> Drawn {
        svg(&mut self.svg)?;
        pixels(&mut self.pixels).map_err(failed)
    }
}

// Forms that the SVG has elements for go to both as they are; what is drawn of pixels, such as a
// picture in the picture, this example has not.
impl DrawingBackend for Canvas<'_> {
    type ErrorType = io::Error;

    fn get_size(&self) -> (u32, u32) {
        self.svg.get_size()
    }

    fn ensure_prepared(&mut self) -> Drawn {
        self.both(|to| to.ensure_prepared(), |to| to.ensure_prepared())
    }

    fn present(&mut self) -> Drawn {
        self.both(|to| to.present(), |to| to.present())
    }

    fn draw_pixel(&mut self, at: BackendCoord, colour: BackendColor) -> Drawn {
        self.both(|to| to.draw_pixel(at, colour), |to| to.draw_pixel(at, colour))
    }

    fn draw_line<S: BackendStyle>(
        &mut self,
        from: BackendCoord,
        end: BackendCoord,
        style: &S,
    ) -> Drawn {
        self.both(|to| to.draw_line(from, end, style), |to| to.draw_line(from, end, style))
    }

    fn draw_rect<S: BackendStyle>(
        &mut self,
        from: BackendCoord,
        end: BackendCoord,
        style: &S,
        fill: bool,
    ) -> Drawn {
        self.both(
            |to| to.draw_rect(from, end, style, fill),
            |to| to.draw_rect(from, end, style, fill),
        )
    }

    fn draw_path<S: BackendStyle, I: IntoIterator<Item = BackendCoord>>(
        &mut self,
        path: I,
        style: &S,
    ) -> Drawn {
        let path: Vec<_> = path.into_iter().collect();
        self.both(
            |to| to.draw_path(path.iter().copied(), style),
            |to| to.draw_path(path.iter().copied(), style),
        )
    }

    fn draw_circle<S: BackendStyle>(
        &mut self,
        centre: BackendCoord,
        radius: u32,
        style: &S,
        fill: bool,
    ) -> Drawn {
        self.both(
            |to| to.draw_circle(centre, radius, style, fill),
            |to| to.draw_circle(centre, radius, style, fill),
        )
    }

    fn fill_polygon<S: BackendStyle, I: IntoIterator<Item = BackendCoord>>(
        &mut self,
        corners: I,
        style: &S,
    ) -> Drawn {
        let corners: Vec<_> = corners.into_iter().collect();
        self.both(
            |to| to.fill_polygon(corners.iter().copied(), style),
            |to| to.fill_polygon(corners.iter().copied(), style),
        )
    }

    fn draw_text<S: BackendTextStyle>(&mut self, text: &str, style: &S, at: BackendCoord) -> Drawn {
        self.both(|to| to.draw_text(text, style, at), |to| to.draw_text(text, style, at))
    }
}
