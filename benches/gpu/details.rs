//! Further numbers of a row, besides its time. On a GPU only.

use anyhow::Result;
use candle_amp_benches::measure::{median, seconds};
use candle_amp_benches::table::{Line, Unit};
use candle_amp_benches::torch::{Request, Torch};
use candle_core::Device;

use crate::algorithms::{self, Chosen};
use crate::device;
use crate::host::HostPart;
use crate::operators::Pass;
use crate::passes::Passes;
use crate::steps::TrainingStep;
use crate::workload::{Spec, Work};

/// Repetitions for each detail.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Repeats {
    /// Steps, after the last of which nothing new is allocated.
    warm: usize,
    /// Steps or passes, of which the host's part is the median.
    host: usize,
    /// Seconds of an operator's own passes, at least.
    seconds: f64,
}

impl Repeats {
    pub(crate) const FULL: Self = Self { warm: 3, host: 20, seconds: 0.1 };
    /// To see that it works.
    pub(crate) const ONCE: Self = Self { warm: 1, host: 1, seconds: 0.0 };
}

/// The details of a row, a line each.
///
/// Of a training step: the algorithms that it runs by, the share of its convolutions that fell back, how often the crate waits
/// for the device, its peak memory and the host's part, both beside PyTorch's. Of an operator: the algorithms, that share, and
/// the host's part of all and of its own passes. Of a pass over all parameters: the host's part.
pub(crate) fn of(
    name: &str,
    spec: &Spec,
    repeats: Repeats,
    device: &Device,
    torch: &mut [Torch],
) -> Result<Vec<Line>> {
    if !device.is_cuda() {
        return Ok(Vec::new());
    }
    // PyTorch's step as a graph is timed only.
    let torch = torch.first_mut().filter(|_| !spec.is_graphed());
    let mut row = Details { name, spec, repeats, device, torch, lines: Vec::new() };
    if let Some(passes) = spec.passes(device)? {
        row.of_passes(passes)?;
    } else {
        row.of_step()?;
    }
    if let Work::Operator { operator, pass } = spec.work
        && pass != Pass::Forward
    {
        let own =
            HostPart::of(operator, pass, spec.precision, device, repeats.host, repeats.seconds)?;
        row.line("host's part of its own forward", Unit::Seconds, own.forward, None);
        row.line("host's part of its own backward", Unit::Seconds, own.backward, None);
    }
    Ok(row.lines)
}

struct Details<'a> {
    name: &'a str,
    spec: &'a Spec,
    repeats: Repeats,
    device: &'a Device,
    torch: Option<&'a mut Torch>,
    lines: Vec<Line>,
}

impl Details<'_> {
    fn line(&mut self, what: &str, unit: Unit, ours: f64, torch: Option<f64>) {
        let peer = torch.map(|torch| (String::new(), torch));
        self.lines.push(Line::new(format!("{what}, {}", self.name), unit, ours, peer, None));
    }

    /// PyTorch's number, if PyTorch is there.
    fn ask(&mut self, request: &Request<'_, Spec>) -> Result<Option<f64>> {
        let Some(torch) = &mut self.torch else {
            return Ok(None);
        };
        let numbers = torch.ask(request)?;
        torch.forget()?;
        Ok(numbers.get(self.spec.layout()).copied())
    }

    fn host(&mut self, ours: Vec<f64>) -> Result<()> {
        let request = Request::host(self.spec, self.repeats.host, self.spec.layout());
        let torch = if self.spec.work.has_torch() { self.ask(&request)? } else { None };
        self.line("host's part", Unit::Seconds, median(ours), torch);
        Ok(())
    }

    fn of_passes(&mut self, mut passes: Passes) -> Result<()> {
        passes()?; // the first allocates an optimizer's state
        let run = |_| Ok(passes()?.host);
        let host = (0..self.repeats.host).map(run).collect::<Result<Vec<_>>>()?;
        drop(passes);
        self.host(host)
    }

    fn of_step(&mut self) -> Result<()> {
        let (spec, device) = (self.spec, self.device);
        let counted = device::peak_from_here(device)?;
        let Some(mut step) = spec.step(device)? else {
            return Ok(());
        };
        let mut reads = 0;
        for _ in 0..self.repeats.warm {
            let before = candle_amp::backend::device_reads();
            step()?;
            reads = candle_amp::backend::device_reads() - before;
        }
        let mut host = Vec::new();
        for _ in 0..self.repeats.host {
            device.synchronize()?;
            host.push(seconds(&mut step)?);
        }
        device.synchronize()?;
        let (chosen, fallen) = chosen(&mut step, device)?;
        drop(step);
        for ([pass, algorithm], count) in chosen {
            self.line(&format!("{pass} by {algorithm}"), Unit::Count, count as f64, None);
        }
        if let Some(share) = fallen {
            self.line("share of convolutions that fell back", Unit::Count, share, None);
        }
        if !matches!(spec.work, Work::Operator { .. }) {
            self.line("reads a step", Unit::Count, reads as f64, None);
            if let Some(ours) = device::peak(device)?.filter(|_| counted) {
                let torch = self.ask(&Request::peak(spec, self.repeats.warm, spec.layout()))?;
                self.line("peak memory", Unit::Bytes, ours, torch);
            }
        }
        self.host(host)
    }
}

/// The algorithms that a step runs by, and the share of its convolutions, forward and backward, that ran by a slower one
/// than was meant for them; `None` without any.
fn chosen(step: &mut TrainingStep, device: &Device) -> Result<(Chosen, Option<f64>)> {
    let is_convolution = |pass: &str| pass.starts_with("conv");
    let fallen = || -> u64 {
        let all = candle_amp::backend::fallbacks();
        all.iter().filter(|f| is_convolution(f.pass)).map(|f| f.count).sum()
    };
    let before = fallen();
    // In a profile, a step that is a graph runs operator by operator.
    let (done, chosen) = algorithms::chosen(|| candle_amp::diagnostics::profile(device, step));
    done?.0?;
    let convolutions = chosen.iter().filter(|([pass, _], _)| is_convolution(pass));
    let all: u64 = convolutions.map(|(_, count)| count).sum();
    let share = (all > 0).then(|| (fallen() - before) as f64 / all as f64);
    Ok((chosen, share))
}
