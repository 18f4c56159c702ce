//! Synthetic images of ten shapes and textures, for training without a download.
//!
//! It takes real learning. A shape has any position, size and angle; it is brighter or darker than
//! its background in every channel at random, so that neither colour nor mean tells the class; and
//! strokes that mean nothing, colour gradients and noise lie over and under it.

use std::{
    f32::consts::{PI, TAU},
    ops::Range,
};

use rand::Rng;
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

use crate::{
    data::{CLASSES, Dataset, Images, Norm, PIXELS, PLANE, SIDE},
    rng::{Stream, rng},
};

/// What is drawn.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Disc,
    Ring,
    Square,
    Triangle,
    Cross,
    Star,
    Rows,
    Columns,
    Checker,
    Dots,
}

/// The kind of every label, and its name.
const KINDS: [(Kind, &str); CLASSES] = [
    (Kind::Disc, "disc"),
    (Kind::Ring, "ring"),
    (Kind::Square, "square"),
    (Kind::Triangle, "triangle"),
    (Kind::Cross, "cross"),
    (Kind::Star, "star"),
    (Kind::Rows, "rows"),
    (Kind::Columns, "columns"),
    (Kind::Checker, "checker"),
    (Kind::Dots, "dots"),
];

/// Deviation of the pixel noise.
const NOISE: f32 = 10.;

/// Draws `train` training and `test` test images from `seed`.
pub(crate) fn dataset(train: usize, test: usize, seed: u64) -> Dataset {
    let train = draw(Stream::DrawTrain, train, seed);
    let test = draw(Stream::DrawTest, test, seed);
    let norm = Norm::of(&train);
    let classes = KINDS.map(|(_, name)| name);
    Dataset { name: "synthetic images".to_owned(), classes, train, test, norm }
}

/// Draws `len` images, the classes in turn.
pub(crate) fn draw(stream: Stream, len: usize, seed: u64) -> Images {
    let mut pixels = vec![0; len * PIXELS];
    pixels.par_chunks_mut(PIXELS).enumerate().for_each(|(index, image)| {
        draw_image(KINDS[index % CLASSES].0, &mut rng(stream, seed, 0, index), image);
    });
    Images::new(pixels, (0..len).map(|index| (index % CLASSES) as u8).collect())
}

/// Draws one image, channel after channel.
fn draw_image(kind: Kind, rng: &mut ChaCha8Rng, image: &mut [u8]) {
    let shape = Shape::random(kind, rng);
    let base: [f32; 3] = std::array::from_fn(|_| rng.random_range(70f32..186.));
    let slope: [[f32; 2]; 3] =
        std::array::from_fn(|_| [rng.random_range(-1.2f32..1.2), rng.random_range(-1.2f32..1.2)]);
    let paint = paint(rng, 70f32..120.);
    let strokes: [Stroke; 3] = std::array::from_fn(|_| Stroke::random(rng));
    let (under, over) = strokes.split_at(2);

    for i in 0..PLANE {
        let (x, y) = ((i % SIDE) as f32, (i / SIDE) as f32);
        let mut added = [0f32; 3];
        if let Some(stroke) = under.iter().rfind(|stroke| stroke.covers(x, y)) {
            added = stroke.paint;
        }
        if shape.covers(x, y) {
            added = paint;
        }
        if let Some(stroke) = over.iter().rfind(|stroke| stroke.covers(x, y)) {
            added = stroke.paint;
        }
        for c in 0..3 {
            let ground = base[c] + slope[c][0] * (x - 15.5) + slope[c][1] * (y - 15.5);
            let value = ground + added[c] + NOISE * normal(rng);
            image[c * PLANE + i] = value.clamp(0., 255.) as u8;
        }
    }
}

/// What a paint adds to the three channels, or takes from them: at most `contrast`.
fn paint(rng: &mut ChaCha8Rng, contrast: Range<f32>) -> [f32; 3] {
    let contrast = rng.random_range(contrast);
    let contrast = if rng.random() { contrast } else { -contrast };
    std::array::from_fn(|_| contrast * rng.random_range(0.2f32..1.))
}

/// Roughly a standard normal number: the sum of four bytes, at a tenth of the cost.
fn normal(rng: &mut ChaCha8Rng) -> f32 {
    let sum: u16 = rng.random::<u32>().to_le_bytes().into_iter().map(u16::from).sum();
    (f32::from(sum) - 510.) / 147.8
}

/// A shape at its place.
#[derive(Debug)]
struct Shape {
    kind: Kind,
    centre: [f32; 2],
    radius: f32,
    /// Sine and cosine of the angle.
    turn: (f32, f32),
    /// Wavelength and phases of a texture, in pixels.
    wave: f32,
    phase: [f32; 2],
}

impl Shape {
    fn random(kind: Kind, rng: &mut ChaCha8Rng) -> Self {
        let radius = rng.random_range(7f32..11.);
        let span = radius..(SIDE as f32 - 1. - radius);
        let centre = [rng.random_range(span.clone()), rng.random_range(span)];
        let wave = rng.random_range(3.6f32..6.);
        let phase = [rng.random_range(0. ..wave), rng.random_range(0. ..wave)];
        Self { kind, centre, radius, turn: rng.random_range(0. ..TAU).sin_cos(), wave, phase }
    }

    /// True when the shape covers the pixel at (`x`, `y`).
    fn covers(&self, x: f32, y: f32) -> bool {
        let (dx, dy) = (x - self.centre[0], y - self.centre[1]);
        if dx * dx + dy * dy > self.radius * self.radius {
            return false;
        }
        // In the shape's own frame: turned, and inside the circle of radius 1.
        let (sin, cos) = self.turn;
        let u = (dx * cos + dy * sin) / self.radius;
        let v = (dy * cos - dx * sin) / self.radius;
        let crest = |at: f32, phase: f32| (at + phase).rem_euclid(self.wave) < self.wave / 2.;
        let patch = u.abs().max(v.abs()) < 0.7;
        match self.kind {
            Kind::Disc => u.hypot(v) < 0.85,
            Kind::Ring => (0.55..0.9).contains(&u.hypot(v)),
            Kind::Square => patch,
            Kind::Triangle => (0..3).all(|i| side(u, v, i as f32 * TAU / 3.) < 0.48),
            Kind::Cross => u.abs().min(v.abs()) < 0.22,
            Kind::Star => in_star(u, v),
            Kind::Rows => patch && crest(dy, self.phase[1]),
            Kind::Columns => patch && crest(dx, self.phase[0]),
            Kind::Checker => patch && (crest(dx, self.phase[0]) != crest(dy, self.phase[1])),
            Kind::Dots => (u.abs() - 0.55).hypot(v) < 0.4,
        }
    }
}

/// How far (`u`, `v`) lies from the centre toward `angle`.
fn side(u: f32, v: f32, angle: f32) -> f32 {
    u * angle.cos() + v * angle.sin()
}

/// True inside a star of five points.
fn in_star(u: f32, v: f32) -> bool {
    // Folded to half a point, a star is one straight edge: from a point at angle 0 and radius 1 to
    // a notch at angle PI / 5 and radius 0.42.
    let angle = (v.atan2(u).rem_euclid(TAU / 5.) - PI / 5.).abs();
    let angle = PI / 5. - angle;
    let (x, y) = (u.hypot(v) * angle.cos(), u.hypot(v) * angle.sin());
    let (nx, ny) = (0.42 * (PI / 5.).cos(), 0.42 * (PI / 5.).sin());
    (1. - x) * ny > (1. - nx) * y
}

/// A short line that means nothing.
#[derive(Debug)]
struct Stroke {
    from: [f32; 2],
    /// Direction, of length 1.
    along: [f32; 2],
    length: f32,
    width: f32,
    paint: [f32; 3],
}

impl Stroke {
    fn random(rng: &mut ChaCha8Rng) -> Self {
        let end = SIDE as f32 - 1.;
        let (sin, cos) = rng.random_range(0. ..TAU).sin_cos();
        Self {
            from: [rng.random_range(0. ..end), rng.random_range(0. ..end)],
            along: [cos, sin],
            length: rng.random_range(6f32..18.),
            width: rng.random_range(0.5f32..1.),
            paint: paint(rng, 30f32..80.),
        }
    }

    /// True when the stroke covers the pixel at (`x`, `y`).
    fn covers(&self, x: f32, y: f32) -> bool {
        let (dx, dy) = (x - self.from[0], y - self.from[1]);
        let along = dx * self.along[0] + dy * self.along[1];
        let across = dy * self.along[0] - dx * self.along[1];
        (0. ..self.length).contains(&along) && across.abs() < self.width
    }
}

#[cfg(test)]
mod tests;
