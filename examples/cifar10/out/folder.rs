//! Where things are in the folder, and how they get there.
//!
//! ```text
//! DIR/options.toml             what was asked for, as --config reads it
//! DIR/report.json              all runs that ended, and a summary of each precision
//! DIR/index.html               the page, with all pictures in it
//! DIR/pictures/*.svg, *.png    the same pictures, each two files
//! DIR/f32-seed-0/              a folder for each run:
//!     history.jsonl            a row for every step and every epoch
//!     checkpoints/step-*       the last one, and that of the epoch with the best accuracy
//!     profile.json             where the time of some steps went, with --profile
//!     report.json              what the run ended with
//!     test.json                the confusion matrix, and the worst images
//!     worst-*.png              those images
//! ```

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};

use super::{
    page::Page,
    run::{Finished, RunFolder},
};
use crate::{
    common::options::Usage,
    compare::Comparison,
    config,
    options::{Options, run_name},
    ranks, report,
};

const REPORT: &str = "report.json";
const PAGE: &str = "index.html";
const PICTURES: &str = "pictures";

/// The folder of all runs.
#[derive(Debug)]
pub(crate) struct Folder {
    path: PathBuf,
}

impl Folder {
    /// The folder that `options` ask for, if they do: a new one, or that of runs to go on with.
    pub(crate) fn of(options: &Options) -> Result<Option<Self>> {
        let Some(path) = &options.out else { return Ok(None) };
        if options.resume.is_none() {
            ranks::on_first(|| create(path, options))?;
        }
        Ok(Some(Self { path: path.clone() }))
    }

    pub(crate) fn page(&self) -> PathBuf {
        self.path.join(PAGE)
    }

    /// The folder of a run of `options`, which it makes if there is none.
    pub(crate) fn run(&self, options: &Options) -> Result<RunFolder> {
        let path = self.run_path(&options.precision.to_string(), options.seed);
        ranks::agree(ranks::first_on_first(|| RunFolder::open(path)))
    }

    fn run_path(&self, precision: &str, seed: u64) -> PathBuf {
        self.path.join(run_name(precision, seed))
    }

    /// Writes what the runs of `comparison` ended with, the pictures and the page.
    pub(crate) fn finish(&self, comparison: &Comparison) -> Result<()> {
        report::write(&self.path.join(REPORT), &report::json(&comparison.json())?)?;
        let runs = comparison.runs().iter();
        let runs = runs.map(|run| Finished::read(&self.run_path(&run.precision, run.seed), run));
        let page = Page::new(comparison, runs.collect::<Result<_>>()?)?;
        let pictures = self.path.join(PICTURES);
        fs::create_dir_all(&pictures)
            .with_context(|| format!("cannot make {}", pictures.display()))?;
        for picture in page.pictures() {
            for (ending, bytes) in picture.files()? {
                report::write(&pictures.join(&picture.name).with_extension(ending), bytes)?;
            }
        }
        report::write(&self.page(), page.html())
    }
}

/// Makes a folder at `path`, where there may be an empty one, and writes the options there.
fn create(path: &Path, options: &Options) -> Result<()> {
    let shown = path.display();
    let asked = || format!("--out {shown}: cannot make this folder");
    let file = config::file_in(path);
    let is_new = match fs::read_dir(path) {
        Ok(mut entries) => {
            if file.exists() {
                bail!(Usage(format!(
                    "--out {shown}: this folder holds a run; name a new one, or go on with \
                     --resume {shown}"
                )));
            }
            if entries.next().is_some() {
                bail!(Usage(format!("--out {shown}: this folder is not empty; name a new one")));
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
    let written = config::save_sealed(options, &file);
    if written.is_err() && is_new {
        let _ = fs::remove_dir(path);
    }
    written.with_context(|| format!("--out {shown}"))
}
