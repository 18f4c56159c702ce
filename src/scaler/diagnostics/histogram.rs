//! Histograms of the sizes of gradients, and how well these fit `F16`.

use std::collections::BTreeMap;
use std::fmt;

use candle_core::Tensor;

use crate::Result;
use crate::kernels::multi_tensor::histogram::{self, Counts, LOWEST};

/// The exponents of a model's gradients, by variable and in all: from
/// [`GradScaler::histogram`](crate::GradScaler::histogram), to choose a constant loss scale, or to
/// see why a run does not learn. Histograms of several steps [`merge`](Self::merge) into one.
///
/// Printed, a bar chart of all elements and a line for each variable.
///
/// ```
/// use candle_amp::{GradScaler, Parameters, ops};
/// use candle_core::{Device, Tensor, Var};
///
/// let w = Var::new(&[1f32, 1.0, 1.0, 1.0], &Device::Cpu)?;
/// let parameters = Parameters::named([("w", w.clone())])?;
/// let factors = Tensor::new(&[2f32.powi(-27), 2f32.powi(-20), 0.0, 0.5], &Device::Cpu)?;
/// let mut scaler = GradScaler::default();
/// scaler.scale(&(w.as_tensor() * factors)?.sum_all()?)?.backward()?;
///
/// let histogram = scaler.histogram(&parameters)?;
/// let fit = histogram.all().in_f16(1.0); // without a loss scale
/// assert_eq!((fit.to_zero, fit.subnormal, fit.normal, fit.overflow), (1, 1, 1, 0));
/// assert_eq!(histogram.all().zeros(), 1); // one was zero already
/// let scale = histogram.all().suggested_scale(3); // leaves a factor of 8 to later gradients
/// assert_eq!(scale, Some(8192.0)); // 0.5 becomes 4096, and 8 times that is 32768
/// assert_eq!(histogram.all().in_f16(8192.0).normal, 3);
/// # Ok::<(), candle_amp::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GradientHistogram {
    variables: BTreeMap<String, Exponents>,
    all: Exponents,
}

/// How many gradient elements there are of each exponent, `floor(log2(|x|))`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Exponents(Counts);

/// What becomes of gradient elements in `F16` at a loss scale. Zeros are not among them, nor is what
/// was infinite or NaN before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct F16Fit {
    /// Rounded to zero: 2⁻²⁵ and below. They are lost.
    pub to_zero: u64,
    /// Below 2⁻¹⁴, the smallest normal number: they lose a bit of precision for each power of two.
    pub subnormal: u64,
    /// Kept, in full precision.
    pub normal: u64,
    /// Rounded to infinity: 65520 and above. The step would be skipped.
    pub overflow: u64,
}

impl F16Fit {
    /// How many elements there are.
    pub fn elements(&self) -> u64 {
        self.to_zero + self.subnormal + self.normal + self.overflow
    }

    /// The share of elements rounded to zero, from 0 to 1; 0 where there are none.
    pub fn share_to_zero(&self) -> f64 {
        share(self.to_zero, self.elements())
    }
}

fn share(part: u64, of: u64) -> f64 {
    if of == 0 { 0.0 } else { part as f64 / of as f64 }
}

/// `F16`'s largest exponent, that of its smallest normal number, and the one below its smallest.
const MAX_EXPONENT: i32 = 15;
const MIN_NORMAL: i32 = -14;
const TO_ZERO: i32 = -25;

impl Exponents {
    pub(crate) fn of(counts: Counts) -> Self {
        Self(counts)
    }

    /// How many elements there are.
    pub fn elements(&self) -> u64 {
        let counted: u64 = self.0.bins.iter().flatten().sum();
        counted + self.0.zero + self.0.infinite + self.0.nan
    }

    /// How many are zero.
    pub fn zeros(&self) -> u64 {
        self.0.zero
    }

    /// How many are infinite.
    pub fn infinite(&self) -> u64 {
        self.0.infinite
    }

    /// How many are NaN.
    pub fn nan(&self) -> u64 {
        self.0.nan
    }

    /// The exponents that occur, lowest first, with the number of elements. What is subnormal in
    /// `F32` counts under its true exponent; `F64` below 2⁻³⁰⁰ and above 2³⁰⁰ under those.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (i32, u64)> {
        let bin = |(at, thirds): (usize, &[u64; 3])| (LOWEST + at as i32, thirds.iter().sum());
        self.0.bins.iter().enumerate().map(bin).filter(|(_, count)| *count > 0)
    }

    /// What `F16` makes of the elements times `scale`, exactly: rounding counts. `scale` is taken as
    /// the power of two at or below it; of one that is not above zero, as a
    /// [`LossScale`](crate::LossScale) is, everything becomes zero.
    pub fn in_f16(&self, scale: f32) -> F16Fit {
        // The exponent itself: `log2` rounds. Of 0, NaN and below it is the lowest.
        let bits = f64::from(scale).to_bits() as i64;
        self.shifted(if scale > 0.0 { (bits >> 52) as i32 - 1023 } else { 2 * LOWEST })
    }

    fn shifted(&self, by: i32) -> F16Fit {
        let mut fit = F16Fit::default();
        for (exponent, &[power, between, top]) in (LOWEST + by..).zip(&self.0.bins) {
            let all = power + between + top;
            if exponent < TO_ZERO {
                fit.to_zero += all;
            } else if exponent == TO_ZERO {
                // Half of the smallest number: to even, which is zero. What is above goes up.
                fit.to_zero += power;
                fit.subnormal += between + top;
            } else if exponent < MIN_NORMAL {
                fit.subnormal += all;
            } else if exponent < MAX_EXPONENT {
                fit.normal += all;
            } else if exponent == MAX_EXPONENT {
                fit.normal += power + between;
                fit.overflow += top;
            } else {
                fit.overflow += all;
            }
        }
        fit
    }

    /// The largest power of two that a loss can be multiplied by, with which no gradient overflows
    /// `F16`, nor would if it grew by `headroom` powers of two: for
    /// [`ScaleConfig::constant`](crate::ScaleConfig::constant). At most 2¹²⁶ and at least 2⁻¹²⁶.
    /// `None` where all gradients are zero or not finite.
    ///
    /// Gradients differ from step to step, and are largest at the start: merge the histograms of
    /// many, or leave headroom. A headroom of 3, a factor of 8, is little; 7 is safe for most
    /// models.
    pub fn suggested_scale(&self, headroom: u32) -> Option<f32> {
        let largest = self.0.bins.iter().rposition(|bin| bin.iter().any(|&count| count > 0))?;
        let rounds_up = self.0.bins[largest][2] > 0;
        let exponent = LOWEST + largest as i32 + i32::from(rounds_up);
        let headroom = i32::try_from(headroom).unwrap_or(i32::MAX);
        let power = (MAX_EXPONENT - exponent).saturating_sub(headroom).clamp(-126, 126);
        Some(2f32.powi(power))
    }
}

impl GradientHistogram {
    /// The histogram of gradients that were not collected by a scaler: floating-point tensors with
    /// the names of their variables, and unscaled.
    ///
    /// # Errors
    ///
    /// What copying to the host meets.
    pub fn of<'a>(
        gradients: impl IntoIterator<Item = (impl AsRef<str>, &'a Tensor)>,
    ) -> Result<Self> {
        let mut histogram = Self::default();
        for (name, gradient) in gradients {
            histogram.add(Some(name.as_ref()), gradient, 1.0)?;
        }
        Ok(histogram)
    }

    pub(crate) fn add(&mut self, name: Option<&str>, gradient: &Tensor, factor: f32) -> Result<()> {
        let counts = histogram::exponents(gradient, factor)?;
        self.all.0.add(&counts);
        if let Some(name) = name {
            self.variables.entry(name.to_owned()).or_default().0.add(&counts);
        }
        Ok(())
    }

    /// Adds the counts of another step.
    pub fn merge(&mut self, other: &Self) {
        self.all.0.add(&other.all.0);
        for (name, theirs) in &other.variables {
            self.variables.entry(name.clone()).or_default().0.add(&theirs.0);
        }
    }

    /// All gradients together.
    pub fn all(&self) -> &Exponents {
        &self.all
    }

    /// The gradient of one variable.
    pub fn get(&self, name: &str) -> Option<&Exponents> {
        self.variables.get(name)
    }

    /// The gradients by the names of their variables, sorted.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Exponents)> {
        self.variables.iter().map(|(name, counts)| (name.as_str(), counts))
    }
}

impl fmt::Display for Exponents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// Characters of the longest bar, and how many lines there are at most.
        const WIDTH: usize = 40;
        const LINES: usize = 40;
        let (zeros, infinite, nan) = (self.zeros(), self.infinite(), self.nan());
        let elements = self.elements();
        write!(f, "{elements} elements: {zeros} zero, {infinite} infinite, {nan} NaN")?;
        let counted: Vec<_> = self.iter().collect();
        let (Some(&(low, _)), Some(&(high, _))) = (counted.first(), counted.last()) else {
            return Ok(());
        };
        let step = ((high - low) as usize / LINES + 1) as i32;
        let mut lines = vec![0u64; ((high - low) / step + 1) as usize];
        for (exponent, count) in counted {
            lines[((exponent - low) / step) as usize] += count;
        }
        let most = lines.iter().copied().max().unwrap_or(1);
        for (at, &count) in lines.iter().enumerate().rev() {
            let from = low + at as i32 * step;
            let length = (share(count, most) * WIDTH as f64).ceil() as usize;
            let percent = 100.0 * share(count, elements);
            let becomes = match from {
                ..=-26 => "zero in F16",
                -25..=-15 => "subnormal in F16",
                -14..=15 => "",
                16.. => "infinite in F16",
            };
            let bar = "#".repeat(length);
            let line = format!("2^{from:<4} |{bar:WIDTH$}| {percent:5.1} %  {becomes}");
            write!(f, "\n{}", line.trim_end())?;
        }
        Ok(())
    }
}

impl fmt::Display for GradientHistogram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.all)?;
        let scale = self.all.suggested_scale(3).unwrap_or(1.0);
        let titles = ["variable", "elements", "zero", "largest", "lost in F16", "at scale"];
        let mut table = vec![titles.map(str::to_owned)];
        table[0][5] = format!("at scale {scale}");
        let all = [("(all)", &self.all)];
        for (name, counts) in self.iter().chain(all) {
            let largest = counts.iter().next_back();
            let lost = |scale| format!("{:.2} %", 100.0 * counts.in_f16(scale).share_to_zero());
            table.push([
                name.to_owned(),
                counts.elements().to_string(),
                counts.zeros().to_string(),
                largest.map_or("-".to_owned(), |(exponent, _)| format!("2^{exponent}")),
                lost(1.0),
                lost(scale),
            ]);
        }
        let width = |column: usize| table.iter().map(|row| row[column].chars().count()).max();
        let widths: [usize; 6] = std::array::from_fn(|column| width(column).unwrap_or(0));
        for row in &table {
            write!(f, "\n{:1$}", row[0], widths[0])?;
            for (cell, width) in row.iter().zip(widths).skip(1) {
                write!(f, "  {cell:>width$}")?;
            }
        }
        Ok(())
    }
}
