//! The history of a run as JSON Lines: a row for every step, and one for every epoch and its test.

use std::{
    fs::{self, File, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::{
    evaluation::Score,
    history::{Gradients, History},
};

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
    /// Of the last epoch of `history`, which `score` tested.
    pub(crate) fn new(history: &History, score: &Score) -> Self {
        let finite = |loss: f64| loss.is_finite().then_some(loss);
        Self {
            epoch: history.epochs.len(),
            step: history.steps.count(),
            train_loss: history.epochs.last().and_then(|epoch| finite(epoch.loss)),
            test_loss: finite(score.loss()),
            test_accuracy: score.accuracy(),
            gradients: history.gradients.clone(),
        }
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

    /// Waits for the disk, so that a checkpoint never counts rows that a power cut takes.
    pub(crate) fn sync(&self) -> Result<()> {
        self.file.sync_data().with_context(|| format!("cannot write {}", self.path.display()))
    }

    /// Drops the rows after `steps` steps and `epochs` epochs: a run goes on from there.
    pub(crate) fn cut(&mut self, steps: usize, epochs: usize) -> Result<()> {
        let text = text(&self.path)?;
        let (mut len, mut has) = (0, (0, 0));
        for row in lines(&self.path, &text) {
            let (line, row) = row?;
            match row {
                Row::Step(row) if row.step <= steps => has.0 += 1,
                Row::Epoch(row) if row.epoch <= epochs => has.1 += 1,
                _ => break,
            }
            len += line.len() as u64;
        }
        let (path, (found, tests)) = (self.path.display(), has);
        ensure!(
            has == (steps, epochs),
            "{path}: rows of {found} steps and {tests} epochs, expected those of {steps} and \
             {epochs}, as in the checkpoint; bring back the file that was there, or delete {}: \
             then this run begins anew",
            self.path.parent().unwrap_or(&self.path).display()
        );
        self.file.set_len(len).with_context(|| format!("cannot write {path}"))?;
        self.len = len;
        Ok(())
    }
}

/// The rows at `path`. A last one that a crash cut off does not count.
pub(crate) fn read(path: &Path) -> Result<Vec<Row>> {
    lines(path, &text(path)?).map(|row| row.map(|(_, row)| row)).collect()
}

fn text(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// The complete lines of `text`, which is at `path`, and the rows they hold.
fn lines<'a>(path: &Path, text: &'a str) -> impl Iterator<Item = Result<(&'a str, Row)>> {
    let complete = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    (1..).zip(complete).map(move |(number, line)| {
        let row = serde_json::from_str(line);
        let row = row.with_context(|| format!("{}: line {number} is no row", path.display()))?;
        Ok((line, row))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{history::InF16, testing::Folder};

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

    #[test]
    fn rows_after_a_checkpoint_are_cut_off() -> Result<()> {
        let folder = Folder::new()?;
        let path = folder.path("history.jsonl");
        let epoch = |epoch, step| {
            let (train_loss, test_loss, test_accuracy) = (None, None, 0.5);
            let gradients = None;
            Row::Epoch(EpochRow { epoch, step, train_loss, test_loss, test_accuracy, gradients })
        };
        let all = [step(1), step(2), epoch(1, 2), step(3), epoch(2, 3)];
        for (steps, epochs, left) in [(3, 2, 5), (3, 1, 4), (2, 1, 3), (2, 0, 2), (0, 0, 0)] {
            let mut rows = Rows::append(path.clone())?;
            rows.cut(0, 0)?;
            all.iter().try_for_each(|row| rows.add(row))?;
            rows.file.write_all(b"{\"kind\":\"st")?; // where a crash cut the row off
            rows.cut(steps, epochs)?;
            assert_eq!(read(&path)?, all[..left]);
            rows.add(&step(9))?;
            assert_eq!(read(&path)?.last(), Some(&step(9)));
        }
        let mut rows = Rows::append(path.clone())?;
        let before = fs::read(&path)?;
        let error = rows.cut(3, 1).expect_err("there are no such rows");
        let message =
            "rows of 0 steps and 0 epochs, expected those of 3 and 1, as in the checkpoint; ";
        let start = format!("{}: {message}", path.display());
        assert!(error.to_string().starts_with(&start), "{error}");
        assert_eq!(fs::read(&path)?, before);
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
