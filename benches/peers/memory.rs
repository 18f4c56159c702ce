//! Peak memory of training steps, each in a process of its own.

use std::process::Command;
use std::{env, fs};

use anyhow::{Context, Result, ensure};
use candle_amp_benches::measure::Workload;
use candle_amp_benches::precision::Precision;
use candle_amp_benches::table::{Line, Table, Unit};
use candle_amp_benches::torch::{Request, Torch};
use candle_core::Device;

use crate::list::RESNET20;
use crate::workload::Spec;
use crate::{Allocator, Options, THREADS};

/// After that many, nothing new is taken.
const STEPS: usize = 5;

/// Prints a line for each precision.
pub(crate) fn compare(options: &Options, table: &mut Table) -> Result<()> {
    for precision in [Precision::F32, Precision::Bf16, Precision::Bf16Masters, Precision::F16] {
        let mut spec = RESNET20.at(precision);
        if options.smoke {
            spec.shrink();
        }
        let name = format!("peak memory, resnet20 {precision}");
        if !name.contains(&options.filter) {
            continue;
        }
        let ours = of_a_child(&spec, options.threads)?;
        let has_peer = matches!(precision, Precision::F32 | Precision::Bf16) && !options.smoke;
        let python = options.python.as_ref().filter(|_| has_peer);
        let mut peer: Option<(String, f64)> = None;
        for layout in ["contiguous", "channels-last"] {
            let Some(python) = python else { continue };
            // The allocator's own setting: told to keep everything, it takes more.
            let mut torch = Torch::start(options.torch(python, Allocator::Default))?;
            let bytes = torch.ask(&Request::peak(&spec, STEPS, layout))?;
            let bytes = *bytes.get(layout).context("peers.py left the layout out")?;
            if peer.as_ref().is_none_or(|(_, least)| bytes < *least) {
                peer = Some((layout.to_string(), bytes));
            }
        }
        table.print(Line::new(name, Unit::Bytes, ours, peer, None))?;
    }
    Ok(())
}

fn of_a_child(spec: &Spec, threads: usize) -> Result<f64> {
    let threads = threads.to_string();
    let mut child = Command::new(env::current_exe()?);
    child.args(["--threads", &threads, "--peak-of", &serde_json::to_string(spec)?]);
    let output = child.env(THREADS, &threads).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?.trim().parse()?)
}

/// Runs `spec` here: how far memory has risen since, in bytes.
pub(crate) fn of_this_process(spec: &Spec) -> Result<f64> {
    let before = peak()?;
    let mut runner = spec.runner(&Device::Cpu)?;
    for _ in 0..STEPS {
        runner()?;
    }
    Ok(peak()? - before)
}

/// Not `getrusage`, whose peak is inherited from the process that started this one.
fn peak() -> Result<f64> {
    let status = fs::read_to_string("/proc/self/status").context("peak memory needs Linux")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")).context("no VmHWM")?;
    Ok(kib.trim().parse::<f64>()? * 1024.0)
}
