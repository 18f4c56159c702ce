//! The history of a run as JSON Lines: a row for every step, and one for every epoch and its test.

use std::{
    fs::{File, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use candle_amp::diagnostics::Exponents;
use serde::{Deserialize, Serialize};

use crate::{evaluation::Score, history::History};

/// A line of the history.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub(crate) enum Row {
    Step(StepRow),
    Epoch(EpochRow),
}

/// A step of training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct StepRow {
    /// Counted from 1, skipped ones included.
    pub(crate) step: usize,
    pub(crate) epoch: usize,
    /// `null` if it was infinite or NaN.
    pub(crate) loss: Option<f32>,
    /// The learning rate.
    pub(crate) lr: f64,
    /// The loss scale its gradients were made with.
    pub(crate) scale: f32,
    pub(crate) skipped: bool,
    /// Milliseconds from the end of the step before.
    pub(crate) ms: f64,
}

/// An epoch, and the test after it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct EpochRow {
    pub(crate) epoch: usize,
    /// Taken since the start.
    pub(crate) step: usize,
    /// The mean over the epoch's steps; `null` if it was infinite or NaN.
    pub(crate) train_loss: Option<f64>,
    pub(crate) test_loss: Option<f64>,
    pub(crate) test_accuracy: f64,
    /// Of the epoch's last step.
    pub(crate) gradients: Option<Gradients>,
}

impl EpochRow {
    /// Of the last epoch of `history`, after `step` steps, which `score` tested.
    pub(crate) fn new(
        epoch: usize,
        step: usize,
        history: &History,
        score: &Score,
        gradients: Option<Gradients>,
    ) -> Self {
        let finite = |loss: f64| loss.is_finite().then_some(loss);
        let train_loss = history.epochs.last().and_then(|epoch| finite(epoch.loss));
        let (test_loss, test_accuracy) = (finite(score.loss()), score.accuracy());
        Self { epoch, step, train_loss, test_loss, test_accuracy, gradients }
    }
}

/// How large the gradients of a step were, before they were multiplied by the loss scale.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Gradients {
    /// The loss scale.
    pub(crate) scale: f32,
    pub(crate) zeros: u64,
    pub(crate) infinite: u64,
    pub(crate) nan: u64,
    /// How many there are of each `floor(log2(|x|))`.
    pub(crate) exponents: Vec<(i32, u64)>,
    pub(crate) in_f16: InF16,
}

/// What becomes of gradients in F16, at the loss scale.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct InF16 {
    pub(crate) to_zero: u64,
    pub(crate) subnormal: u64,
    pub(crate) normal: u64,
    pub(crate) overflow: u64,
}

impl Gradients {
    pub(crate) fn new(exponents: &Exponents, scale: f32) -> Self {
        let fit = exponents.in_f16(scale);
        Self {
            scale,
            zeros: exponents.zeros(),
            infinite: exponents.infinite(),
            nan: exponents.nan(),
            exponents: exponents.iter().collect(),
            in_f16: InF16 {
                to_zero: fit.to_zero,
                subnormal: fit.subnormal,
                normal: fit.normal,
                overflow: fit.overflow,
            },
        }
    }

    pub(crate) fn elements(&self) -> u64 {
        let counted: u64 = self.exponents.iter().map(|(_, count)| count).sum();
        counted + self.zeros + self.infinite + self.nan
    }
}

/// The file of a history.
#[derive(Debug)]
pub(crate) struct Rows {
    path: PathBuf,
    file: File,
    /// Bytes of complete rows.
    len: u64,
}

impl Rows {
    /// Writes behind what is at `path`, if there is anything.
    pub(crate) fn append(path: PathBuf) -> Result<Self> {
        let open = || {
            let file = OpenOptions::new().create(true).append(true).open(&path)?;
            let len = file.metadata()?.len();
            Ok::<_, std::io::Error>((file, len))
        };
        let (file, len) = open().with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self { path, file, len })
    }

    /// Writes a row at once, so that a crash of the program loses none.
    pub(crate) fn add(&mut self, row: &Row) -> Result<()> {
        let line = serde_json::to_string(row)? + "\n";
        let written = self.file.write_all(line.as_bytes());
        if written.is_err() {
            // A full disk may have taken half of the row.
            let _ = self.file.set_len(self.len);
        }
        written.with_context(|| format!("cannot write {}", self.path.display()))?;
        self.len += line.len() as u64;
        Ok(())
    }
}

/// The rows at `path`. A last one that a crash cut off does not count.
pub(crate) fn read(path: &Path) -> Result<Vec<Row>> {
    let shown = path.display();
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {shown}"))?;
    let complete = text.rfind('\n').map_or("", |end| &text[..end]);
    let row = |(number, line)| {
        serde_json::from_str(line).with_context(|| format!("{shown}: line {number} is no row"))
    };
    (1..).zip(complete.lines()).map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: usize) -> Row {
        let (lr, scale) = (0.1, 65536.);
        Row::Step(StepRow { step, epoch: 1, loss: None, lr, scale, skipped: true, ms: 1.5 })
    }

    #[test]
    fn rows_are_on_disk_at_once_and_come_back() -> Result<()> {
        let path = std::env::temp_dir().join(format!("candle-amp-rows-{}", std::process::id()));
        let gradients = Gradients {
            scale: 8.,
            zeros: 1,
            infinite: 2,
            nan: 3,
            exponents: vec![(-20, 4), (3, 5)],
            in_f16: InF16 { to_zero: 0, subnormal: 4, normal: 5, overflow: 0 },
        };
        let epoch = Row::Epoch(EpochRow {
            epoch: 1,
            step: 1,
            train_loss: Some(0.1),
            test_loss: None,
            test_accuracy: 0.3,
            gradients: Some(gradients),
        });
        let mut rows = Rows::append(path.clone())?;
        rows.add(&step(1))?;
        assert_eq!(read(&path)?, [step(1)]);
        rows.add(&epoch)?;
        drop(rows);
        Rows::append(path.clone())?.add(&step(2))?;
        assert_eq!(read(&path)?, [step(1), epoch.clone(), step(2)], "appended");

        let text = std::fs::read_to_string(&path)?;
        std::fs::write(&path, format!("{text}{{\"kind\":\"st"))?;
        assert_eq!(read(&path)?, [step(1), epoch, step(2)], "a row that was cut off");
        std::fs::write(&path, "{}\n")?;
        let error = read(&path).expect_err("no row");
        std::fs::remove_file(&path)?;
        assert_eq!(error.to_string(), format!("{}: line 1 is no row", path.display()));
        Ok(())
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_one_clear_line() -> Result<()> {
        let mut rows = Rows::append("/dev/full".into())?;
        let error = format!("{:#}", rows.add(&step(1)).expect_err("a full disk"));
        assert_eq!(error, "cannot write /dev/full: No space left on device (os error 28)");
        Ok(())
    }
}
