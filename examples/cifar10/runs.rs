//! All runs that the options ask for: one alone, or several side by side.

use anyhow::Result;
use candle_core::Device;

use crate::{
    common::{interrupted, progress::print},
    compare::{self, Comparison},
    data::Dataset,
    memory,
    options::Options,
    out::{Folder, RunFolder},
    progress, ranks,
    report::Report,
    schedule::Schedule,
    train::{Run, train},
};

/// What all runs share.
#[derive(Debug)]
pub(crate) struct All<'a> {
    pub(crate) options: &'a Options,
    pub(crate) data: &'a Dataset,
    pub(crate) schedule: Schedule,
    pub(crate) device: &'a Device,
    pub(crate) folder: Option<&'a Folder>,
    /// Says, after so many steps of a run, whether to end there.
    pub(crate) stop: fn(usize) -> bool,
}

impl All<'_> {
    /// Trains the only run, and prints what it ended with. Whether it is complete.
    pub(crate) fn alone(&self) -> Result<bool> {
        let (options, stop) = (self.options, self.stop);
        let folder = self.folder_of(options)?;
        let report = match self.ended(folder.as_ref(), options)? {
            Some(report) => report,
            None => {
                let (heading, prefix) = (Some(options), String::new());
                self.train(Run { options, heading, prefix, folder, stop, held: None })?
            }
        };
        print(&progress::closing(&report, &self.data.classes));
        let comparison = Comparison::of(report.clone());
        match options.report.as_ref().filter(|_| ranks::is_first()) {
            Some(path) if compare::is_markdown(path) => comparison.write(path)?,
            Some(path) => report.write(path)?,
            None => {}
        }
        self.finish(&comparison)?;
        Ok(comparison.is_complete())
    }

    /// Trains with each seed in each precision, and prints them side by side: after Ctrl-C or an error,
    /// too, those that there are. Whether all are complete.
    pub(crate) fn compare(&self) -> Result<bool> {
        let (count, stop) = (self.options.run_count(), self.stop);
        let (mut comparison, mut heading) = (Comparison::new(count), Some(self.options));
        let outcome = self.options.runs().enumerate().try_for_each(|(index, one)| {
            if ranks::any(interrupted())? || comparison.is_cut_short() {
                return Ok(());
            }
            let folder = self.folder_of(&one)?;
            if let Some(report) = self.ended(folder.as_ref(), &one)? {
                comparison.add(report);
                if index + 1 < count {
                    return Ok(()); // what is written has more runs than these
                }
            } else {
                let (precision, seed, number) = (one.precision, one.seed, index + 1);
                let prefix = format!("{precision}, seed {seed} ({number} of {count})  ");
                if index > 0 {
                    memory::return_free_memory();
                }
                let (heading, held) = (heading.take(), Some(memory::reset_peak_rss()));
                let run = Run { options: &one, heading, prefix, folder, stop, held };
                comparison.add(self.train(run)?);
            }
            // After every run, so that nothing that ends the program loses those before.
            let path = self.options.report.as_ref().filter(|_| ranks::is_first());
            path.map_or(Ok(()), |path| comparison.write(path))?;
            self.finish(&comparison)
        });
        print(&format!("\n{}", comparison.text()));
        outcome.map(|()| comparison.is_complete())
    }

    fn train(&self, run: Run<'_>) -> Result<Report> {
        train(run, self.data, self.schedule, self.device)
    }

    fn folder_of(&self, run: &Options) -> Result<Option<RunFolder>> {
        self.folder.map(|folder| folder.run(run)).transpose()
    }

    /// Writes what the runs ended with, and the page.
    fn finish(&self, comparison: &Comparison) -> Result<()> {
        let folder = self.folder.filter(|_| ranks::is_first());
        folder.map_or(Ok(()), |folder| folder.finish(comparison))
    }

    /// What a run ended with, if it did so before.
    fn ended(&self, folder: Option<&RunFolder>, run: &Options) -> Result<Option<Report>> {
        let report = ranks::agree(folder.map_or(Ok(None), |folder| folder.ended(run, self.data)))?;
        if report.is_some() {
            print(&progress::of_ended(run));
        }
        Ok(report)
    }
}
