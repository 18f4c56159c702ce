//! Small things that ranks tell one another: bytes, and facts that must agree.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor, WithDType};

use super::communicator::Communicator;
use crate::Result;
use crate::error::ParallelError;
use crate::kernels::cuda::Gpu;

/// The elements of what ranks have exchanged, on the host.
pub(super) fn on_host<T: WithDType>(communicator: &dyn Communicator, x: &Tensor) -> Result<Vec<T>> {
    // Else a call that has failed would keep the host waiting.
    communicator.synchronize()?;
    if x.device().is_cpu() {
        return Ok(x.flatten_all()?.to_vec1()?);
    }
    Ok(Gpu::to_host(x)?)
}

/// The bytes that each rank gave, in the order of the ranks. They travel on `device`.
pub(super) fn gather_bytes(
    communicator: &dyn Communicator,
    bytes: &[u8],
    device: &Device,
) -> Result<Vec<Vec<u8>>> {
    let length = Tensor::new(&[bytes.len() as u32], device)?;
    let lengths: Vec<u32> = on_host(communicator, &communicator.all_gather(&length)?)?;
    let longest = lengths.iter().copied().max().unwrap_or(0).max(1) as usize;
    let mut padded = bytes.to_vec();
    padded.resize(longest, 0);
    let all = communicator.all_gather(&Tensor::from_vec(padded, longest, device)?)?;
    let all: Vec<u8> = on_host(communicator, &all)?;
    let each = all.chunks(longest).zip(lengths);
    Ok(each.map(|(bytes, length)| bytes[..length as usize].to_vec()).collect())
}

/// What a rank is to have in common with the others: values by name.
pub(super) type Facts = BTreeMap<String, String>;

/// Checks that all ranks have the same facts about `what`.
pub(super) fn compare(
    communicator: &dyn Communicator,
    what: &'static str,
    facts: &Facts,
    device: &Device,
) -> Result<()> {
    if communicator.size() == 1 {
        return Ok(());
    }
    let bytes = serde_json::to_vec(facts).unwrap_or_default();
    let all: Vec<Facts> = gather_bytes(communicator, &bytes, device)?
        .iter()
        .map(|bytes| serde_json::from_slice(bytes).unwrap_or_default())
        .collect();
    let Some((first, others)) = all.split_first() else { return Ok(()) };
    for (other, rank) in others.iter().zip(1..) {
        let differences = differences(first, other);
        if !differences.is_empty() {
            return Err(ParallelError::Differs { what, rank, differences }.into());
        }
    }
    Ok(())
}

fn differences(first: &Facts, other: &Facts) -> Vec<String> {
    let mut names: Vec<&String> = first.keys().chain(other.keys()).collect();
    names.sort_unstable();
    names.dedup();
    let value = |facts: &Facts, name: &String| {
        facts.get(name).cloned().unwrap_or_else(|| "missing".to_owned())
    };
    let differing = names.into_iter().filter(|name| first.get(*name) != other.get(*name));
    differing
        .map(|name| format!("{name}: {}, on rank 0 {}", value(other, name), value(first, name)))
        .collect()
}
