//! Whether both sides of the zoo's rows do the same work: as many parameters, the same losses step by
//! step from the same values on, outputs and gradients of the same sizes.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use candle_amp::backend::on_workers;
use candle_amp_benches::measure::Workload;
use candle_amp_benches::precision::Precision;
use candle_amp_benches::torch::{Request, Torch};
use candle_amp_benches::zoo::Training;
use candle_core::Device;

use crate::list;
use crate::operators::{self, Operator};
use crate::workload::{Spec, Work};
use crate::{Allocator, Options, zoo};

/// The first loss is one of forward; the others are of backward and of the optimizer too.
const STEPS: usize = 3;

/// Compares every row of the zoo with PyTorch's: made small, and of networks the parameters at full size.
///
/// # Errors
///
/// Where a number differs.
pub(crate) fn compare(options: &Options, python: &Path) -> Result<()> {
    let mut torch = Torch::start(options.torch(python, Allocator::Default))?;
    let mut wrong = 0;
    for mut group in list::zoo() {
        group.retain(&options.filter);
        for row in group.rows {
            println!("{}", row.name);
            if let Work::ZooNetwork { .. } = row.ours.work {
                wrong += differences(&row.ours, 0, &mut torch)?;
            }
            let mut small = row.ours;
            small.shrink();
            let steps = match small.work {
                Work::ZooNetwork { network } if network.is_random() => 0,
                _ => STEPS,
            };
            wrong += differences(&small, steps, &mut torch)?;
        }
    }
    ensure!(wrong == 0, "{wrong} numbers differ from PyTorch's");
    Ok(())
}

/// Whether the networks have as many parameters as PyTorch counted when they were listed.
///
/// # Errors
///
/// Where one has not.
pub(crate) fn parameters(options: &Options) -> Result<()> {
    for (name, network, count) in list::zoo_networks().into_iter().chain(list::families()) {
        if name.contains(&options.filter) {
            let ours = Training::new(network, Precision::F32, &Device::Cpu)?.parameter_count();
            ensure!(ours == count, "{name} has {ours} parameters, in PyTorch {count}");
        }
    }
    Ok(())
}

/// Prints the numbers of both sides; how many differ.
fn differences(spec: &Spec, steps: usize, torch: &mut Torch) -> Result<usize> {
    let numbers = on_workers(|| numbers(spec, steps))?;
    let peers = torch.ask(&Request::check(spec, steps, "contiguous"))?;
    ensure!(peers.len() == numbers.len(), "PyTorch has other numbers: {peers:?}");
    let mut wrong = 0;
    for (name, ours) in numbers {
        let peer = *peers.get(&name).with_context(|| format!("PyTorch has no {name}"))?;
        let error = (ours - peer).abs() / peer.abs();
        let tolerance = if name == "parameters" { 0.0 } else { tolerance(spec) };
        // Not the other way round: NaN is no agreement.
        let verdict = if error <= tolerance { "" } else { "differs" };
        wrong += usize::from(!verdict.is_empty());
        let line = format!("  {name:<12} {ours:>14.6} {peer:>14.6} {error:>8.0e} {verdict}");
        println!("{}", line.trim_end());
    }
    Ok(wrong)
}

fn numbers(spec: &Spec, steps: usize) -> Result<Vec<(String, f64)>> {
    match spec.work {
        Work::ZooNetwork { network } => zoo::check(network, spec.precision, steps),
        Work::ZooOperator { operator, batch } => operators::check(operator, batch, spec.precision),
        _ => Ok(Vec::new()),
    }
}

/// How far a number may be from PyTorch's, relative to it.
fn tolerance(spec: &Spec) -> f64 {
    match (spec.work, spec.precision) {
        // Either side draws for itself.
        (Work::ZooOperator { operator: Operator::Dropout { .. }, .. }, _) => 0.02,
        (_, Precision::F32) => 2e-4,
        // Batch norms of a small batch make much of how either side rounds; F32 says whether it is the same
        // network.
        (Work::ZooNetwork { .. }, _) => 0.05,
        _ => 0.02,
    }
}
