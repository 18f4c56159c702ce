//! Times of a group of rows: in turns, so that what else the machine does hits both sides.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::Options;
use crate::list::{Group, Peer};
use crate::torch::{Request, Torch};
use crate::workload::{Runner, Spec};

/// What is known of one workload: medians over the rounds, or the fastest, in seconds.
#[derive(Clone, Debug)]
pub(crate) struct Times {
    pub(crate) spec: Spec,
    pub(crate) ours: f64,
    /// Of each PyTorch process.
    pub(crate) torch: Vec<TorchTime>,
}

#[derive(Clone, Debug)]
pub(crate) struct TorchTime {
    pub(crate) seconds: f64,
    /// How it was got, as far as there was a choice.
    pub(crate) how: String,
}

/// The medians of each round.
struct Subject {
    spec: Spec,
    with_torch: bool,
    runner: Runner,
    ours: Vec<f64>,
    /// By process, then memory layout.
    torch: Vec<Vec<(String, Vec<f64>)>>,
}

pub(crate) fn group(group: &Group, options: &Options, peers: &mut [Torch]) -> Result<Vec<Times>> {
    let mut subjects: Vec<Subject> = Vec::new();
    for row in &group.rows {
        let other = if let Peer::Own(spec, _) = row.peer { Some(spec) } else { None };
        for spec in [Some(row.ours), other].into_iter().flatten() {
            if subjects.iter().all(|subject| subject.spec != spec) {
                let (ours, torch) = (Vec::new(), vec![Vec::new(); peers.len()]);
                let runner = spec.runner()?;
                subjects.push(Subject { spec, with_torch: false, runner, ours, torch });
            }
        }
        let subject = subjects.iter_mut().find(|subject| subject.spec == row.ours);
        if let Some(subject) = subject {
            subject.with_torch |= matches!(row.peer, Peer::Torch);
        }
    }
    let rounds = if options.smoke { 1 } else { options.rounds.max(1) };
    for _ in 0..rounds {
        for subject in &mut subjects {
            subject.round(options, peers)?;
        }
    }
    for peer in peers {
        peer.forget()?;
    }
    Ok(subjects.into_iter().map(|subject| subject.times(options)).collect())
}

impl Subject {
    fn round(&mut self, options: &Options, peers: &mut [Torch]) -> Result<()> {
        if !self.spec.is_slow() {
            let warm_up = if options.smoke { 0.0 } else { options.seconds / 5.0 };
            let seconds = if options.smoke { 0.0 } else { options.seconds };
            self.ours.push(typical_of(&mut self.runner, warm_up, seconds, options)?);
        } else if self.ours.is_empty() {
            self.ours = vec![(self.runner)()?, (self.runner)()?];
        }
        if self.with_torch {
            for (peer, rounds) in peers.iter_mut().zip(&mut self.torch) {
                let request = Request::time(&self.spec, options.seconds, options.fastest);
                for (layout, milliseconds) in peer.ask(&request)? {
                    match rounds.iter_mut().find(|(name, _)| *name == layout) {
                        Some((_, times)) => times.push(milliseconds * 1e-3),
                        None => rounds.push((layout, vec![milliseconds * 1e-3])),
                    }
                }
            }
        }
        Ok(())
    }

    fn times(self, options: &Options) -> Times {
        let mut torch = Vec::new();
        for layouts in self.torch {
            let choice = layouts.len() > 1;
            let medians = layouts.into_iter().map(|(how, times)| (typical(times, options), how));
            if let Some((seconds, how)) = medians.min_by(|a, b| a.0.total_cmp(&b.0)) {
                torch.push(TorchTime { seconds, how: if choice { how } else { String::new() } });
            }
        }
        Times { spec: self.spec, ours: typical(self.ours, options), torch }
    }
}

/// The median time of the runs that fit into `seconds`, at least three, after a warm-up. PyTorch's
/// side does exactly this too.
fn typical_of(runner: &mut Runner, warm_up: f64, seconds: f64, options: &Options) -> Result<f64> {
    ensure!(seconds.is_finite() && seconds >= 0.0, "seconds must be a number, not below zero");
    if seconds == 0.0 {
        return runner();
    }
    let warm = Instant::now() + Duration::from_secs_f64(warm_up);
    let mut runs = 0;
    while runs < 2 || Instant::now() < warm {
        runner()?;
        runs += 1;
    }
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    let mut times = Vec::new();
    while times.len() < 3 || Instant::now() < end {
        times.push(runner()?);
    }
    Ok(typical(times, options))
}

/// The median, or the fastest where that is asked for.
fn typical(times: Vec<f64>, options: &Options) -> f64 {
    if options.fastest { times.into_iter().fold(f64::INFINITY, f64::min) } else { median(times) }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    let middle = times.len() / 2;
    match times.len() {
        0 => f64::NAN,
        even if even % 2 == 0 => 0.5 * (times[middle - 1] + times[middle]),
        _ => times[middle],
    }
}

/// The seconds that `f` takes.
pub(crate) fn seconds(f: impl FnOnce() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    f()?;
    Ok(start.elapsed().as_secs_f64())
}
