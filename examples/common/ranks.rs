//! The ranks that train one model: this process alone, unless `mpirun` has started several.
//!
//! What these functions exchange, all ranks exchange: each calls them in the same order.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::{Context, Result};
use candle_amp::{
    GradScaler, Parameters,
    dist::{self, Communicator, DataParallel, ReduceOp, Single},
};
use candle_core::{Device, Tensor};

use super::{
    exit::{self, PeerFailure},
    options::Usage,
};

/// The communicator of this process, while its program runs.
static COMMUNICATOR: Mutex<Option<Arc<dyn Communicator>>> = Mutex::new(None);

fn set(communicator: Option<Arc<dyn Communicator>>) {
    let mut current = COMMUNICATOR.lock().unwrap_or_else(PoisonError::into_inner);
    let before = std::mem::replace(&mut *current, communicator);
    drop(current);
    drop(before); // which may wait for the other ranks
}

/// Joins the ranks that were started together with this one.
pub(crate) fn join() -> Result<()> {
    set(Some(dist::from_environment()?));
    Ok(())
}

/// Waits until the other ranks leave, too: `mpirun` ends all when one ends without that.
pub(crate) fn leave() {
    set(None);
}

pub(crate) fn communicator() -> Arc<dyn Communicator> {
    let current = COMMUNICATOR.lock().unwrap_or_else(PoisonError::into_inner);
    current.clone().unwrap_or_else(|| Arc::new(Single))
}

pub(crate) fn count() -> usize {
    communicator().size()
}

/// Whether this is the rank that prints and writes.
pub(crate) fn is_first() -> bool {
    communicator().rank() == 0
}

/// The result, if all ranks have one. Otherwise an error on all, which the first rank that failed reports.
pub(crate) fn agree<T>(result: Result<T>) -> Result<T> {
    let ranks = communicator();
    let (rank, size) = (ranks.rank(), ranks.size());
    if size == 1 {
        return result;
    }
    let mine = result.as_ref().err().map_or([0, 0], |error| [1, u32::from(exit::code_of(error))]);
    let all = ranks.all_gather(&Tensor::new(&mine, &Device::Cpu)?)?.to_vec1::<u32>()?;
    match all.chunks(2).position(|theirs| theirs[0] == 1) {
        None => result,
        Some(0) if rank == 0 => result,
        Some(first) if first == rank => result.with_context(|| format!("rank {rank} of {size}")),
        Some(first) => Err(PeerFailure(all[2 * first + 1] as u8).into()),
    }
}

/// Checks that all ranks have the same values by these names.
pub(crate) fn same(values: &BTreeMap<String, String>) -> Result<()> {
    let all = gather(serde_json::to_vec(values)?)?;
    let all = all.iter().map(|bytes| Ok(serde_json::from_slice(bytes)?));
    agree(compare(&all.collect::<Result<Vec<_>>>()?))
}

fn compare(ranks: &[BTreeMap<String, String>]) -> Result<()> {
    for (rank, theirs) in ranks.iter().enumerate().skip(1) {
        let mut names = ranks[0].keys().chain(theirs.keys());
        let Some(name) = names.find(|name| ranks[0].get(*name) != theirs.get(*name)) else {
            continue;
        };
        let has = |values: &BTreeMap<String, String>| {
            values.get(name).map_or("none".to_owned(), |value| format!("`{value}`"))
        };
        let (theirs, first) = (has(theirs), has(&ranks[0]));
        let text = format!(
            "ranks differ in {name}: rank {rank} has {theirs}, and rank 0 has {first}; start all \
             with the same options"
        );
        return Err(Usage(text).into());
    }
    Ok(())
}

/// The bytes of all ranks.
pub(crate) fn gather(mut bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
    let ranks = communicator();
    let len = Tensor::new(&[bytes.len() as u32], &Device::Cpu)?;
    let lens = ranks.all_gather(&len)?.to_vec1::<u32>()?;
    let longest = lens.iter().max().map_or(1, |&len| (len as usize).max(1));
    bytes.resize(longest, 0);
    let all = ranks.all_gather(&Tensor::from_vec(bytes, longest, &Device::Cpu)?)?;
    let all = all.to_vec1::<u8>()?;
    Ok(all.chunks(longest).zip(lens).map(|(bytes, len)| bytes[..len as usize].to_vec()).collect())
}

/// The mean of the ranks' losses, and whether any of them is to `stop`.
pub(crate) fn mean_and_any(loss: &Tensor, stop: bool) -> Result<(Tensor, bool)> {
    let ranks = communicator();
    if ranks.size() == 1 {
        return Ok((loss.clone(), stop));
    }
    let stop = Tensor::new(f32::from(u8::from(stop)), loss.device())?;
    let sums = ranks.all_reduce(&Tensor::stack(&[&loss.detach(), &stop], 0)?, ReduceOp::Sum)?;
    let loss = (sums.get(0)? / ranks.size() as f64)?;
    Ok((loss, sums.get(1)?.to_scalar::<f32>()? > 0.))
}

/// Whether it is so on any rank.
pub(crate) fn any(here: bool) -> Result<bool> {
    let here = Tensor::new(&[u8::from(here)], &Device::Cpu)?;
    Ok(communicator().all_reduce(&here, ReduceOp::Max)?.to_vec1::<u8>()? == [1])
}

/// This rank's part of `items`: all parts have as many, the last ones repeat the last item if need be.
pub(crate) fn part<T: Copy>(items: &[T]) -> Vec<T> {
    let ranks = communicator();
    part_of(items, ranks.rank(), ranks.size())
}

fn part_of<T: Copy>(items: &[T], rank: usize, size: usize) -> Vec<T> {
    let len = items.len().div_ceil(size);
    let at = (rank * len..(rank + 1) * len).map(|at| at.min(items.len().saturating_sub(1)));
    at.map(|at| items[at]).collect()
}

/// Has `scaler` average the gradients of all ranks, if there are several or the optimizer is `sharded`.
pub(crate) fn data_parallel(
    parameters: &Parameters,
    scaler: &mut GradScaler,
    sharded: bool,
) -> Result<Option<DataParallel>> {
    if count() == 1 && !sharded {
        return Ok(None);
    }
    let parallel = DataParallel::new(communicator(), parameters)?;
    parallel.attach(scaler)?;
    Ok(Some(parallel))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_equal_and_leave_nothing_out() {
        let items: Vec<usize> = (0..10).collect();
        for size in [1, 2, 3, 4, 10, 12] {
            let parts: Vec<_> = (0..size).map(|rank| part_of(&items, rank, size)).collect();
            assert!(parts.iter().all(|part| part.len() == parts[0].len()), "{size}");
            assert_eq!(parts.concat()[..10], items, "{size}");
        }
        assert_eq!(part_of(&items, 3, 4), [9, 9, 9]);
        assert_eq!(part_of::<u8>(&[], 0, 2), Vec::<u8>::new());
    }

    #[test]
    fn the_first_difference_is_named_with_its_rank() {
        let of = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
        };
        let same: BTreeMap<_, _> = of(&[("--lr", "0.1"), ("--seed", "0")]);
        assert!(compare(&[same.clone(), same.clone()]).is_ok());
        let message = |other: BTreeMap<_, _>| {
            let error = compare(&[same.clone(), same.clone(), other]).expect_err("differences");
            assert!(error.is::<Usage>());
            error.to_string()
        };
        let end = "; start all with the same options";
        assert_eq!(
            message(of(&[("--lr", "0.2"), ("--seed", "0")])),
            format!("ranks differ in --lr: rank 2 has `0.2`, and rank 0 has `0.1`{end}")
        );
        assert_eq!(
            message(of(&[("--lr", "0.1")])),
            format!("ranks differ in --seed: rank 2 has none, and rank 0 has `0`{end}")
        );
    }

    #[test]
    fn one_rank_exchanges_nothing() -> Result<()> {
        assert_eq!((count(), is_first()), (1, true));
        assert!(!any(false)? && any(true)?);
        assert_eq!((part(&[1, 2, 3]), gather(vec![7])?), (vec![1, 2, 3], vec![vec![7]]));
        let (loss, stop) = mean_and_any(&Tensor::new(3f32, &Device::Cpu)?, true)?;
        assert_eq!((loss.to_scalar::<f32>()?, stop), (3., true));
        Ok(())
    }
}
