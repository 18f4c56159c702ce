//! Where things are in the folder, and how they get there.
//!
//! ```text
//! DIR/options.json             what was asked for
//! DIR/report.json              all runs that ended, and a summary of each precision
//! DIR/index.html               the page, with all pictures in it
//! DIR/pictures/*.svg           the same pictures, each a file
//! DIR/f32-seed-0/              a folder for each run:
//!     history.jsonl            a row for every step and every epoch
//!     checkpoints/step-*       after an epoch: the last, and the one with the best accuracy
//!     report.json              what the run ended with
//!     test.json                what was taken for what, and the worst images
//!     worst-*.png              those images
//! ```

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, anyhow, bail};
use candle_amp::{
    GradScaler, Parameters,
    checkpoints::{Best, Checkpoint, Checkpointer, State},
    optim::{Scheduler, Sgd},
    random,
};
use serde::{Deserialize, Serialize};

use super::{
    images,
    page::Page,
    rows::{EpochRow, Row, Rows, StepRow},
};
use crate::{
    common::options::Usage,
    compare::Comparison,
    data::{CLASSES, Dataset},
    evaluation::{Answer, Confusion, Score},
    options::Options,
    report::{self, Report},
};

const OPTIONS: &str = "options.json";
const REPORT: &str = "report.json";
const PAGE: &str = "index.html";
const PICTURES: &str = "pictures";
const HISTORY: &str = "history.jsonl";
const CHECKPOINTS: &str = "checkpoints";
const TEST: &str = "test.json";

/// The folder of all runs.
#[derive(Debug)]
pub(crate) struct Folder {
    path: PathBuf,
}

/// The folder of one run.
#[derive(Debug)]
pub(crate) struct RunFolder {
    path: PathBuf,
    rows: Rows,
    checkpointer: Checkpointer,
}

/// Everything that a run needs to go on.
#[derive(Debug)]
pub(crate) struct Training<'a> {
    pub(crate) parameters: &'a Parameters,
    pub(crate) optimizer: &'a Sgd,
    pub(crate) scaler: &'a GradScaler,
    pub(crate) scheduler: &'a Scheduler,
    /// Epochs that are complete.
    pub(crate) epochs: usize,
    /// Steps taken, skipped ones included.
    pub(crate) steps: usize,
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

impl Folder {
    /// Makes a folder at `path`, where there may be an empty one, and writes the options there.
    pub(crate) fn create(path: &Path, options: &Options) -> Result<Self> {
        let shown = path.display();
        let asked = || format!("--out {shown}: cannot make this folder");
        let is_new = match fs::read_dir(path) {
            Ok(mut entries) => {
                let what = if path.join(OPTIONS).exists() { "holds a run" } else { "is not empty" };
                if entries.next().is_some() {
                    bail!(Usage(format!("--out {shown}: this folder {what}; name a new one")));
                }
                false
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                fs::create_dir_all(path).with_context(asked)?;
                true
            }
            Err(_) if path.is_file() => {
                bail!(Usage(format!("--out {shown}: this is a file; name a folder")));
            }
            Err(error) => return Err(error).with_context(asked),
        };
        let this = Self { path: path.to_owned() };
        let written = report::write(&path.join(OPTIONS), &report::json(options)?);
        if written.is_err() && is_new {
            let _ = fs::remove_dir(path);
        }
        written.with_context(|| format!("--out {shown}"))?;
        Ok(this)
    }

    pub(crate) fn page(&self) -> PathBuf {
        self.path.join(PAGE)
    }

    /// Makes the folder of a run of `options`.
    pub(crate) fn run(&self, options: &Options) -> Result<RunFolder> {
        let path = self.run_path(&options.precision.to_string(), options.seed);
        let checkpointer = Checkpointer::new(path.join(CHECKPOINTS))?.keep_last(1);
        let checkpointer = checkpointer.keep_best(Best::Highest);
        let rows = Rows::append(path.join(HISTORY))?;
        Ok(RunFolder { path, rows, checkpointer })
    }

    fn run_path(&self, precision: &str, seed: u64) -> PathBuf {
        self.path.join(format!("{precision}-seed-{seed}"))
    }

    /// Writes what the runs of `comparison` ended with, the pictures and the page.
    pub(crate) fn finish(&self, comparison: &Comparison) -> Result<()> {
        report::write(&self.path.join(REPORT), &report::json(&comparison.json())?)?;
        let runs = comparison.runs().iter();
        let runs = runs.map(|run| finished(&self.run_path(&run.precision, run.seed), run));
        let page = Page::new(comparison, runs.collect::<Result<_>>()?)?;
        let pictures = self.path.join(PICTURES);
        fs::create_dir_all(&pictures)
            .with_context(|| format!("cannot make {}", pictures.display()))?;
        for picture in page.pictures() {
            report::write(&pictures.join(picture.file_name()), &picture.svg)?;
        }
        report::write(&self.page(), page.html())
    }
}

/// Reads what a run left in the folder at `path`.
fn finished(path: &Path, report: &Report) -> Result<Finished> {
    let read = |name: &str| {
        let path = path.join(name);
        fs::read(&path).with_context(|| format!("cannot read {}", path.display()))
    };
    let test: Test = serde_json::from_slice(&read(TEST)?)
        .with_context(|| format!("{}: no result of a test", path.join(TEST).display()))?;
    let worst = (0..test.worst.len()).map(|at| read(&worst_name(at))).collect::<Result<_>>()?;
    let rows = super::rows::read(&path.join(HISTORY))?;
    Ok(Finished { precision: report.precision.clone(), seed: report.seed, rows, test, worst })
}

impl RunFolder {
    pub(crate) fn step(&mut self, row: StepRow) -> Result<()> {
        self.rows.add(&Row::Step(row))
    }

    pub(crate) fn epoch(&mut self, row: EpochRow) -> Result<()> {
        self.rows.add(&Row::Epoch(row))
    }

    /// Saves a checkpoint; the last one and the one with the highest `accuracy` stay.
    pub(crate) fn save(&self, training: &Training<'_>, accuracy: f64) -> Result<PathBuf> {
        let position = State::default().with("epochs", training.epochs);
        let checkpoint = Checkpoint::new(training.steps as u64)
            .metric(accuracy)
            .with("model", training.parameters)?
            .with("optimizer", training.optimizer)?
            .with("scaler", training.scaler)?
            .with("scheduler", training.scheduler)?
            .with("random", &random::Generator)?
            .with("loop", &position)?;
        // The crate's message has the system's in it already.
        self.checkpointer.save(&checkpoint).map_err(|error| anyhow!("{error}"))
    }

    /// Writes what the run ended with.
    pub(crate) fn finish(&self, report: &Report, score: &Score, data: &Dataset) -> Result<()> {
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

/// The file of the worst image but `at`.
fn worst_name(at: usize) -> String {
    format!("worst-{:02}.png", at + 1)
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
