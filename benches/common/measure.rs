//! Times of a group of rows: in turns, so that what else the machine does hits both sides.

use std::fmt::Debug;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use candle_core::Device;

use crate::list::{Group, Peer};
use crate::torch::{Request, Torch};
pub use crate::workload::{Runner, Settings, Workload};

/// What is known of one workload: medians over the rounds, or the fastest, in seconds.
#[derive(Clone, Debug)]
pub struct Times<W> {
    /// Which.
    pub spec: W,
    /// The crate's.
    pub ours: f64,
    /// Of each PyTorch process.
    pub torch: Vec<TorchTime>,
}

/// What PyTorch took.
#[derive(Clone, Debug)]
pub struct TorchTime {
    /// In the best of the layouts it was tried in.
    pub seconds: f64,
    /// How that was got, as far as there was a choice.
    pub how: String,
}

/// The medians of each round.
struct Subject<W> {
    spec: W,
    with_torch: bool,
    runner: Runner,
    ours: Vec<f64>,
    /// By process, then memory layout.
    torch: Vec<Vec<(String, Vec<f64>)>>,
}

/// Measures all that the rows of `group` name, once each however many rows name it.
///
/// # Errors
///
/// What the work meets, here or in PyTorch.
pub fn group<W: Workload>(
    group: &Group<W>,
    device: &Device,
    settings: Settings,
    peers: &mut [Torch],
) -> Result<Vec<Times<W>>> {
    let mut subjects: Vec<Subject<W>> = Vec::new();
    for row in &group.rows {
        let other = if let Peer::Own(spec, _) = row.peer { Some(spec) } else { None };
        for spec in [Some(row.ours), other].into_iter().flatten() {
            if subjects.iter().all(|subject| subject.spec != spec) {
                let (ours, torch) = (Vec::new(), vec![Vec::new(); peers.len()]);
                let runner = spec.runner(device)?;
                subjects.push(Subject { spec, with_torch: false, runner, ours, torch });
            }
        }
        let subject = subjects.iter_mut().find(|subject| subject.spec == row.ours);
        if let Some(subject) = subject {
            subject.with_torch |= matches!(row.peer, Peer::Torch);
        }
    }
    for _ in 0..settings.rounds.max(1) {
        for subject in &mut subjects {
            subject.round(settings, peers)?;
        }
    }
    for peer in peers {
        peer.forget()?;
    }
    Ok(subjects.into_iter().map(|subject| subject.times(settings)).collect())
}

impl<W: Workload> Subject<W> {
    fn round(&mut self, settings: Settings, peers: &mut [Torch]) -> Result<()> {
        if !self.spec.is_slow() {
            self.ours.push(typical_of(&mut self.runner, settings)?);
        } else if self.ours.is_empty() {
            self.ours = vec![(self.runner)()?, (self.runner)()?];
        }
        if self.with_torch {
            for (peer, rounds) in peers.iter_mut().zip(&mut self.torch) {
                for (layout, milliseconds) in peer.ask(&Request::time(&self.spec, settings))? {
                    match rounds.iter_mut().find(|(name, _)| *name == layout) {
                        Some((_, times)) => times.push(milliseconds * 1e-3),
                        None => rounds.push((layout, vec![milliseconds * 1e-3])),
                    }
                }
            }
        }
        Ok(())
    }

    fn times(self, settings: Settings) -> Times<W> {
        let mut torch = Vec::new();
        for layouts in self.torch {
            let choice = layouts.len() > 1;
            let medians = layouts.into_iter().map(|(how, times)| (typical(times, settings), how));
            if let Some((seconds, how)) = medians.min_by(|a, b| a.0.total_cmp(&b.0)) {
                torch.push(TorchTime { seconds, how: if choice { how } else { String::new() } });
            }
        }
        Times { spec: self.spec, ours: typical(self.ours, settings), torch }
    }
}

/// The median time of the runs that fit into the seconds, at least three, after a warm-up. PyTorch's
/// side does exactly this too.
fn typical_of(runner: &mut Runner, settings: Settings) -> Result<f64> {
    let seconds = settings.seconds;
    ensure!(seconds.is_finite() && seconds >= 0.0, "seconds must be a number, not below zero");
    if seconds == 0.0 {
        return runner();
    }
    let warm = Instant::now() + Duration::from_secs_f64(seconds / 5.0);
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
    Ok(typical(times, settings))
}

/// The median, or the fastest where that is asked for.
fn typical(times: Vec<f64>, settings: Settings) -> f64 {
    if settings.fastest { times.into_iter().fold(f64::INFINITY, f64::min) } else { median(times) }
}

/// The middle of `times`.
pub fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    let middle = times.len() / 2;
    match times.len() {
        0 => f64::NAN,
        even if even % 2 == 0 => 0.5 * (times[middle - 1] + times[middle]),
        _ => times[middle],
    }
}

/// The seconds that `f` takes.
///
/// # Errors
///
/// Those of `f`.
pub fn seconds(f: impl FnOnce() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    f()?;
    Ok(start.elapsed().as_secs_f64())
}
