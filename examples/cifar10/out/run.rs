//! The folder of one run, while it trains and after it has ended.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Error, Result, anyhow};
use candle_amp::checkpoints::{Best, Checkpointer};
use serde::{Deserialize, Serialize};

use super::{
    images,
    rows::{self, EpochRow, Row, Rows, StepRow},
};
use crate::{
    common::progress::print,
    data::{CLASSES, Dataset},
    evaluation::{Answer, Confusion, Score},
    options::Options,
    ranks,
    report::{self, Report},
    resume::{self, Training},
};

const REPORT: &str = "report.json";
const HISTORY: &str = "history.jsonl";
const CHECKPOINTS: &str = "checkpoints";
const TEST: &str = "test.json";

/// The folder of one run. All ranks read it, and the first one writes it.
#[derive(Debug)]
pub(crate) struct RunFolder {
    path: PathBuf,
    /// On the first rank.
    rows: Option<Rows>,
    checkpointer: Checkpointer,
}

/// The test after the last epoch of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Test {
    pub(crate) classes: Vec<String>,
    /// Images of each class, by the class they were taken for.
    pub(crate) confusion: Confusion,
    pub(crate) worst: Vec<Answer>,
}

/// What a run left in its folder.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) precision: String,
    pub(crate) seed: u64,
    pub(crate) rows: Vec<Row>,
    pub(crate) test: Test,
    /// The worst images, as PNG.
    pub(crate) worst: Vec<Vec<u8>>,
}

impl RunFolder {
    pub(super) fn open(path: PathBuf) -> Result<Self> {
        let checkpointer = Checkpointer::new(path.join(CHECKPOINTS)).map_err(in_one_line)?;
        let checkpointer = checkpointer.keep_last(1).keep_best(Best::Highest);
        let rows = ranks::is_first().then(|| Rows::append(path.join(HISTORY))).transpose()?;
        Ok(Self { path, rows, checkpointer })
    }

    /// What the run ended with, if it has ended.
    pub(crate) fn ended(&self, options: &Options, data: &Dataset) -> Result<Option<Report>> {
        let path = self.path.join(REPORT);
        if !path.exists() {
            return Ok(None);
        }
        let text = read(&path)?;
        let report: Report = serde_json::from_slice(&text).with_context(|| {
            let path = path.display();
            format!(
                "{path}: no report of a run; without this file, the last checkpoint is tested again"
            )
        })?;
        if report.interrupted {
            return Ok(None);
        }
        if let Some(saved) = self.checkpointer.latest().map_err(in_one_line)? {
            resume::check_origin(&saved, options, data)?;
        }
        Ok(Some(report))
    }

    /// Takes over the last checkpoint, and drops the rows after it: all if there is none.
    pub(crate) fn resume(
        &mut self,
        training: &mut Training,
        options: &Options,
        data: &Dataset,
    ) -> Result<()> {
        if let Some(saved) = self.checkpointer.latest().map_err(in_one_line)? {
            resume::check_origin(&saved, options, data)?;
            training.load(&saved)?;
            if self.checkpointer.steps().map_err(in_one_line)?.last() > Some(&saved.step()) {
                let path = saved.path().display();
                print(&format!("A later checkpoint is damaged: going on from {path}\n"));
            }
        }
        let (steps, epochs) = (training.history.steps.count(), training.history.epochs.len());
        self.rows.as_mut().map_or(Ok(()), |rows| rows.cut(steps, epochs))
    }

    pub(crate) fn step(&mut self, row: StepRow) -> Result<()> {
        self.rows.as_mut().map_or(Ok(()), |rows| rows.add(&Row::Step(row)))
    }

    pub(crate) fn epoch(&mut self, row: EpochRow) -> Result<()> {
        self.rows.as_mut().map_or(Ok(()), |rows| rows.add(&Row::Epoch(row)))
    }

    /// Saves a checkpoint. The last one stays, and the one with the highest accuracy of those after an
    /// epoch.
    pub(crate) fn save(
        &self,
        training: &Training,
        options: &Options,
        data: &Dataset,
        accuracy: Option<f64>,
    ) -> Result<()> {
        self.rows.as_ref().map_or(Ok(()), Rows::sync)?;
        let checkpoint = training.checkpoint(options, data)?; // by all ranks, if the optimizer is sharded
        if self.rows.is_none() {
            return Ok(());
        }
        let checkpoint = match accuracy {
            Some(accuracy) => checkpoint.metric(accuracy),
            None => checkpoint,
        };
        self.checkpointer.save(&checkpoint).map(drop).map_err(in_one_line)
    }

    /// Writes what the run ended with. The report comes last: it says that the rest is there.
    pub(crate) fn finish(&self, report: &Report, score: &Score, data: &Dataset) -> Result<()> {
        if self.rows.is_none() {
            return Ok(());
        }
        for (at, answer) in score.worst.iter().enumerate() {
            let png = images::png(data.test.image(answer.index))?;
            report::write(&self.path.join(worst_name(at)), png)?;
        }
        let test = Test {
            classes: data.classes.map(str::to_owned).into(),
            confusion: score.confusion,
            worst: score.worst.clone(),
        };
        report::write(&self.path.join(TEST), &report::json(&test)?)?;
        report.write(&self.path.join(REPORT))
    }
}

/// The crate's messages have the system's in them already.
fn in_one_line(error: candle_amp::Error) -> Error {
    anyhow!("{error}")
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

/// The file of the worst image but `at`.
fn worst_name(at: usize) -> String {
    format!("worst-{:02}.png", at + 1)
}

impl Finished {
    /// Reads what the run of `report` left in the folder at `path`.
    pub(super) fn read(path: &Path, report: &Report) -> Result<Self> {
        let test: Test = serde_json::from_slice(&read(&path.join(TEST))?)
            .with_context(|| format!("{}: no result of a test", path.join(TEST).display()))?;
        let worst = (0..test.worst.len()).map(|at| read(&path.join(worst_name(at))));
        let worst = worst.collect::<Result<_>>()?;
        let rows = rows::read(&path.join(HISTORY))?;
        Ok(Self { precision: report.precision.clone(), seed: report.seed, rows, test, worst })
    }
}

impl Test {
    /// How many images there are of all classes.
    pub(crate) fn images(&self) -> usize {
        self.confusion.iter().flatten().sum()
    }

    /// The same with the images of another test.
    pub(crate) fn add(&mut self, other: &Self) {
        for label in 0..CLASSES {
            for prediction in 0..CLASSES {
                self.confusion[label][prediction] += other.confusion[label][prediction];
            }
        }
    }
}
