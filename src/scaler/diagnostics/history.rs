//! Where the scale has been.

use std::collections::VecDeque;
use std::fmt;

/// One `update` of a scaler.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct ScaleStep {
    /// Its number, counted from 0.
    pub step: u64,
    /// The scale its gradients were made with.
    pub scale: f32,
    /// Whether one of them was infinite or NaN.
    pub skipped: bool,
}

/// The last steps of a loss scale, oldest first: from
/// [`GradScaler::history`](crate::GradScaler::history). A plain value, with room for a set number of
/// steps.
///
/// Printed, a line for each stretch of steps at one scale:
///
/// ```
/// use candle_amp::diagnostics::ScaleHistory;
///
/// let mut history = ScaleHistory::new(100);
/// history.push(65536.0, true);
/// for _ in 0..3 {
///     history.push(32768.0, false);
/// }
/// assert_eq!(history.to_string(), "\
/// steps  scale  skipped
/// 0      65536        1
/// 1-3    32768        0");
/// ```
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(from = "Unchecked"))]
pub struct ScaleHistory {
    capacity: usize,
    steps: VecDeque<ScaleStep>,
    total: u64,
    total_skipped: u64,
}

/// A [`ScaleHistory`] that may not be one.
#[cfg(feature = "serde")]
#[derive(serde::Deserialize)]
struct Unchecked {
    capacity: usize,
    steps: VecDeque<ScaleStep>,
    total: u64,
    total_skipped: u64,
}

/// With the last steps that it has room for.
#[cfg(feature = "serde")]
impl From<Unchecked> for ScaleHistory {
    fn from(saved: Unchecked) -> Self {
        let Unchecked { capacity, mut steps, total, total_skipped } = saved;
        let capacity = capacity.max(1);
        steps.drain(..steps.len().saturating_sub(capacity));
        Self { capacity, steps, total, total_skipped }
    }
}

impl Default for ScaleHistory {
    /// Room for 1024 steps.
    fn default() -> Self {
        Self::new(1024)
    }
}

impl ScaleHistory {
    /// An empty history with room for `capacity` steps, at least one.
    pub fn new(capacity: usize) -> Self {
        let capacity = capacity.max(1);
        Self { capacity, steps: VecDeque::new(), total: 0, total_skipped: 0 }
    }

    /// Adds a step; the oldest makes room for it.
    pub fn push(&mut self, scale: f32, skipped: bool) {
        if self.steps.len() == self.capacity {
            self.steps.pop_front();
        }
        self.steps.push_back(ScaleStep { step: self.total, scale, skipped });
        self.total = self.total.saturating_add(1);
        self.total_skipped = self.total_skipped.saturating_add(u64::from(skipped));
    }

    /// The steps it still holds, oldest first.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = ScaleStep> + ExactSizeIterator {
        self.steps.iter().copied()
    }

    /// How many steps it holds.
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// Whether there was no step yet.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// How many steps there were in all.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// How many of them were skipped.
    pub fn total_skipped(&self) -> u64 {
        self.total_skipped
    }

    /// How many of the last `count` steps were skipped, as far back as it reaches.
    pub fn skipped_of_last(&self, count: usize) -> usize {
        self.iter().rev().take(count).filter(|step| step.skipped).count()
    }
}

impl fmt::Display for ScaleHistory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = vec![["steps", "scale", "skipped"].map(str::to_owned)];
        let mut steps = self.iter().peekable();
        while let Some(first) = steps.next() {
            let (mut last, mut skipped) = (first, usize::from(first.skipped));
            while let Some(step) = steps.next_if(|step| step.scale == first.scale) {
                skipped += usize::from(step.skipped);
                last = step;
            }
            let range = match first.step == last.step {
                true => first.step.to_string(),
                false => format!("{}-{}", first.step, last.step),
            };
            table.push([range, first.scale.to_string(), skipped.to_string()]);
        }
        let widths: [usize; 3] = std::array::from_fn(|column| {
            table.iter().map(|row| row[column].len()).max().unwrap_or(0)
        });
        let line = |[steps, scale, skipped]: &[String; 3]| {
            let [a, b, c] = widths;
            format!("{steps:a$}  {scale:>b$}  {skipped:>c$}")
        };
        write!(f, "{}", table.iter().map(line).collect::<Vec<_>>().join("\n"))
    }
}
