//! Where output pixels lie among those of the input, and the sizes of an input.

/// The sizes of an input: `(n, c, h, w)`.
pub(super) type Dims4 = (usize, usize, usize, usize);

/// Which input pixels an output pixel is made of, row by row and column by column.
#[derive(Clone, Debug)]
pub(crate) enum SamplingGrid {
    /// The pixel at that row and column.
    Nearest { rows: Vec<usize>, columns: Vec<usize>, rule: Rule },
    /// The average of four pixels.
    Linear { rows: Vec<Between>, columns: Vec<Between>, rule: Rule },
}

/// What rows and columns were made by: output pixel `i` is at `(i + centre) * step - centre`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rule {
    /// Vertical and horizontal.
    pub(super) steps: (f64, f64),
    pub(super) centre: f64,
}

impl Rule {
    fn place(self, i: usize, step: f64) -> f64 {
        ((i as f64 + self.centre) * step - self.centre).max(0.0)
    }
}

/// A place between two rows or columns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Between {
    pub(super) low: usize,
    pub(super) high: usize,
    /// How much `high` counts; `low` counts the rest.
    pub(super) weight: f64,
}

impl SamplingGrid {
    /// From `(height, width)` to `(height, width)`: output pixel `i` is pixel `floor(i * from / to)`, exactly. A rounded step,
    /// as candle's, takes the pixel before that for some sizes, such as 30 to 44.
    pub(crate) fn nearest(from: (usize, usize), to: (usize, usize)) -> Self {
        let steps = (from.0 as f64 / to.0 as f64, from.1 as f64 / to.1 as f64);
        let rule = Rule { steps, centre: 0.0 };
        let axis = |from: usize, to: usize| {
            let pixel = |i: usize| (i as u128 * from as u128 / to as u128) as usize;
            (0..to).map(pixel).collect()
        };
        let (rows, columns) = (axis(from.0, to.0), axis(from.1, to.1));
        Self::Nearest { rows, columns, rule }
    }

    /// As [`nearest`](Self::nearest); `scales`, vertical and horizontal, where the output's size
    /// was made of them by rounding. An axis that keeps its size is copied, whatever its scale, as in PyTorch's kernels
    /// of the CPU.
    pub(crate) fn linear(
        from: (usize, usize),
        to: (usize, usize),
        align_corners: bool,
        scales: Option<(f64, f64)>,
    ) -> Self {
        let step = |from: usize, to: usize, scale: Option<f64>| match scale {
            _ if from == to => 1.0,
            _ if align_corners && to == 1 => 0.0,
            _ if align_corners => (from - 1) as f64 / (to - 1) as f64,
            Some(scale) => 1.0 / scale,
            None => from as f64 / to as f64,
        };
        let (vertical, horizontal) = scales.unzip();
        let steps = (step(from.0, to.0, vertical), step(from.1, to.1, horizontal));
        let rule = Rule { steps, centre: if align_corners { 0.0 } else { 0.5 } };
        let axis = |from: usize, to: usize, step: f64| {
            let between = |i: usize| {
                if from == to {
                    return Between { low: i, high: i, weight: 0.0 };
                }
                let place = rule.place(i, step);
                let low = (place as usize).min(from - 1);
                let weight = (place - low as f64).clamp(0.0, 1.0);
                Between { low, high: (low + 1).min(from - 1), weight }
            };
            (0..to).map(between).collect()
        };
        let (rows, columns) = (axis(from.0, to.0, steps.0), axis(from.1, to.1, steps.1));
        Self::Linear { rows, columns, rule }
    }

    /// Height and width of the output.
    pub(super) fn size(&self) -> (usize, usize) {
        match self {
            Self::Nearest { rows, columns, .. } => (rows.len(), columns.len()),
            Self::Linear { rows, columns, .. } => (rows.len(), columns.len()),
        }
    }
}
