//! Where the time of a step goes, and which operator ran how: `--profile` and `--trace`.

mod chrome;
mod listing;
mod table;
#[cfg(test)]
mod tests;

use std::{
    ops::Range,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::Result;
use candle_amp::{
    Autocast,
    diagnostics::{Profile, Trace, profile},
};
use candle_core::Device;

use crate::{options::Options, ranks, report};

/// Steps that are not measured, while memory and caches fill.
const WARM_UP: usize = 3;
/// Steps that are.
const MEASURED: usize = 10;

/// A part of a step.
#[derive(Clone, Copy, Debug)]
struct Phase {
    name: &'static str,
    start: Instant,
    duration: Duration,
}

/// A step that was looked at.
#[derive(Debug)]
struct Step {
    /// Steps before it in the run.
    number: usize,
    phases: Vec<Phase>,
    profile: Profile,
}

/// Looks at some steps of a run.
#[derive(Debug)]
pub(crate) struct Profiler<'a> {
    device: &'a Device,
    file: Option<PathBuf>,
    measured: Range<usize>,
    traced: Option<usize>,
    steps: Vec<Step>,
    news: Option<String>,
}

impl<'a> Profiler<'a> {
    /// Of a run that takes these `steps`, on the first rank.
    pub(crate) fn new(options: &Options, steps: Range<usize>, device: &'a Device) -> Self {
        let (first, end) = (steps.start, steps.end);
        let begin = (first + WARM_UP).min(end.saturating_sub(1)).max(first);
        let measured = begin..(begin + MEASURED).min(end);
        Self {
            device,
            file: options.profile_file().filter(|_| ranks::is_first()),
            measured: if options.profile.is_some() && ranks::is_first() { measured } else { 0..0 },
            traced: (options.trace && ranks::is_first()).then_some(first),
            steps: Vec::new(),
            news: None,
        }
    }

    /// Takes step `number`, and looks at it if it is one of those.
    pub(crate) fn step<T>(
        &mut self,
        number: usize,
        step: impl FnOnce(&mut Phases<'_>) -> Result<T>,
    ) -> Result<T> {
        let (measured, traced) = (self.measured.contains(&number), self.traced == Some(number));
        let device = (measured || traced).then_some(self.device);
        let mut phases = Phases { device, done: Vec::new(), traced, trace: Trace::default() };
        if device.is_none() {
            return step(&mut phases);
        }
        let (result, profile) = profile(self.device, || step(&mut phases))?;
        let Phases { done, trace, .. } = phases;
        if traced {
            self.news = Some(listing::listing(&trace, profile.rows()));
        }
        if measured {
            self.steps.push(Step { number, phases: done, profile });
            if number + 1 == self.measured.end {
                self.news = Some(self.news.take().unwrap_or_default() + &self.table());
            }
        }
        result
    }

    /// What there is to print after a step.
    pub(crate) fn news(&mut self) -> Option<String> {
        self.news.take()
    }

    /// What there is to print after a run that ended amid the steps to measure.
    pub(crate) fn rest(&self) -> Option<String> {
        let is_amid = !self.steps.is_empty() && self.steps.len() < self.measured.len();
        is_amid.then(|| self.table())
    }

    fn table(&self) -> String {
        table::table(&self.steps, !self.device.is_cpu())
    }

    /// Writes the trace of the steps measured to the file asked for.
    pub(crate) fn write(&self) -> Result<()> {
        match &self.file {
            Some(file) => report::write(file, &report::json(&chrome::trace(&self.steps))?),
            None => Ok(()),
        }
    }
}

/// Notes when the parts of a step run, if the step is looked at.
#[derive(Debug)]
pub(crate) struct Phases<'a> {
    device: Option<&'a Device>,
    done: Vec<Phase>,
    traced: bool,
    trace: Trace,
}

impl Phases<'_> {
    /// Runs a part of the step.
    pub(crate) fn run<T, E>(
        &mut self,
        name: &'static str,
        part: impl FnOnce() -> Result<T, E>,
    ) -> Result<T>
    where
        anyhow::Error: From<E>,
    {
        let Some(device) = self.device else { return Ok(part()?) };
        let start = Instant::now();
        let result = part()?;
        device.synchronize()?;
        self.done.push(Phase { name, start, duration: start.elapsed() });
        Ok(result)
    }

    /// Runs the forward pass in a scope of `amp`.
    pub(crate) fn forward<T>(
        &mut self,
        amp: &Autocast,
        pass: impl FnOnce() -> candle_core::Result<T>,
    ) -> Result<T> {
        if !self.traced {
            return self.run("forward", || amp.scope(pass));
        }
        let mut trace = Trace::default();
        let result = self.run("forward", || {
            let (result, rows) = amp.trace(pass);
            trace = rows;
            result
        });
        self.trace = trace;
        result
    }
}
