//! Writes to existing CPU tensors: all CPU kernels that write in place go through here.
//!
//! candle keeps a tensor's elements behind a reader-writer lock. [`write`] locks one tensor, such as a result that
//! nobody else has. [`lock_sets`] locks sets of tensors, some to read and some to write, such as an optimizer's
//! variables, moments and gradients.
//!
//! Threads may lock the same tensors in any order. So that none waits for another in a circle, a thread that has a lock
//! never waits for one. If a lock is taken, it gives back its own, waits for that one alone, and tries again. It waits
//! for the first set only; of the others it takes those that are free, and the caller comes back for the rest.
//!
//! A thread that waits for itself would hang. Where a set writes a storage that it also names otherwise, or that the
//! thread reads, the answer is an error instead.

use candle_core::{
    CpuStorage, DType, InplaceOp1, Layout, Result, Storage, StorageMutRef, StorageRef, Tensor,
};
use half::{bf16, f16};

use crate::error::bail;
use crate::kernels::cpu::dtype::{Element, contiguous};
use crate::kernels::cpu::guard::held;

struct Write<F>(F);

impl<F: Fn(&mut CpuStorage, &Layout) -> Result<()>> InplaceOp1 for Write<F> {
    fn name(&self) -> &'static str {
        "write"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        (self.0)(storage, layout)
    }
}

/// Calls `f` with the elements of `dst`, a contiguous CPU tensor of dtype `T`.
///
/// The storage is locked meanwhile: `f` must not read it through another tensor. The caller may read others:
/// `dst` is one that nobody else has, such as a result.
///
/// # Errors
/// If this thread reads the storage.
pub(crate) fn write<T: Element>(dst: &Tensor, f: impl FnOnce(&mut [T])) -> Result<()> {
    let mut f = Some(f);
    with_storage(dst, &mut |storage, start, end| {
        let dst = &mut T::slice_mut(storage)?[start..end];
        if let Some(f) = f.take() {
            f(dst);
        }
        Ok(())
    })
}

/// The elements of a tensor that an optimizer writes; nothing by default.
#[derive(Debug, Default)]
pub(crate) enum SliceMut<'a> {
    #[default]
    None,
    F16(&'a mut [f16]),
    BF16(&'a mut [bf16]),
    F32(&'a mut [f32]),
    F64(&'a mut [f64]),
    I16(&'a mut [i16]),
}

/// A tensor that something reads or writes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Access<'a> {
    Read(&'a Tensor),
    /// Contiguous, in a storage that nothing else in its set is in.
    Write(&'a Tensor),
}

impl<'a> Access<'a> {
    fn tensor(self) -> &'a Tensor {
        match self {
            Self::Read(tensor) | Self::Write(tensor) => tensor,
        }
    }
}

/// A tensor whose storage is locked.
pub(crate) enum Locked<'a> {
    Read(&'a Tensor, StorageRef<'a>),
    Write(&'a Tensor, StorageMutRef<'a>),
}

impl Locked<'_> {
    /// The elements, to read.
    pub(crate) fn slice<T: Element>(&self) -> Result<&[T]> {
        match self {
            Self::Read(tensor, storage) => contiguous::<T>(storage, tensor),
            Self::Write(tensor, storage) => contiguous::<T>(storage, tensor),
        }
    }

    /// The elements, to write, of dtype `T`.
    pub(crate) fn elements_mut<T: Element>(&mut self) -> Result<&mut [T]> {
        let Self::Write(tensor, storage) = self else { bail!("locked to be read, not written") };
        let layout = tensor.layout();
        match (&mut **storage, layout.contiguous_offsets()) {
            (Storage::Cpu(cpu), Some((start, end))) => Ok(&mut T::slice_mut(cpu)?[start..end]),
            _ => bail!("expected a contiguous tensor on the CPU to write to, found {layout:?}"),
        }
    }

    /// The elements, to write, of whatever dtype.
    pub(crate) fn slice_mut(&mut self) -> Result<SliceMut<'_>> {
        let Self::Write(tensor, storage) = self else { bail!("locked to be read, not written") };
        let layout = tensor.layout();
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("expected a contiguous tensor to write to, found {layout:?}")
        };
        Ok(match &mut **storage {
            Storage::Cpu(CpuStorage::F16(x)) => SliceMut::F16(&mut x[start..end]),
            Storage::Cpu(CpuStorage::BF16(x)) => SliceMut::BF16(&mut x[start..end]),
            Storage::Cpu(CpuStorage::F32(x)) => SliceMut::F32(&mut x[start..end]),
            Storage::Cpu(CpuStorage::F64(x)) => SliceMut::F64(&mut x[start..end]),
            Storage::Cpu(CpuStorage::I16(x)) => SliceMut::I16(&mut x[start..end]),
            _ => bail!("expected floats or I16 on the CPU to write to, found {:?}", tensor.dtype()),
        })
    }
}

/// Locks the tensors of the first set, and of as many of the following as are free.
///
/// While it has a lock it waits for none: where a tensor of the first set is taken, it gives back what it
/// has, and waits for that one alone. So nobody waits for a thread that waits
/// ([rule 3](super::guard)), whatever the others have and want.
///
/// # Errors
/// If a set writes a storage that it also names otherwise, or that this thread reads.
pub(crate) fn lock_sets<'a>(sets: &[Vec<Access<'a>>]) -> Result<Vec<Vec<Locked<'a>>>> {
    let mut found: Vec<Vec<_>> = Vec::with_capacity(sets.len());
    for set in sets {
        let mut locks = Vec::with_capacity(set.len());
        for &access in set {
            let tensor = access.tensor();
            let writes = matches!(access, Access::Write(_));
            if writes && held(tensor).is_some() {
                bail!("a tensor of {:?} is written while the same thread reads it", tensor.shape());
            }
            // The guard that shows where the lock is ends here.
            let lock = StorageRef::rwlock(&tensor.storage_and_layout().0);
            locks.push((access, lock));
        }
        let writes = locks.iter().filter(|(access, _)| matches!(access, Access::Write(_)));
        for (access, lock) in writes {
            if locks.iter().filter(|(_, other)| std::ptr::eq(*other, *lock)).count() > 1 {
                let shape = access.tensor().shape();
                bail!("a tensor of {shape:?} is written, and shares its storage with another");
            }
        }
        found.push(locks);
    }
    let mut all = Vec::with_capacity(found.len());
    for (number, locks) in found.iter().enumerate() {
        let mut first = 0;
        let set = loop {
            let mut set: Vec<Option<Locked<'a>>> = locks.iter().map(|_| None).collect();
            let taken = (first..locks.len()).chain(0..first).find(|&at| {
                let (access, lock) = locks[at];
                let wait = number == 0 && at == first;
                set[at] = match access {
                    Access::Read(tensor) if wait => Some(Locked::Read(tensor, lock.read())),
                    Access::Write(tensor) if wait => Some(Locked::Write(tensor, lock.write())),
                    Access::Read(tensor) => {
                        lock.try_read_recursive().map(|guard| Locked::Read(tensor, guard))
                    }
                    Access::Write(tensor) => {
                        lock.try_write().map(|guard| Locked::Write(tensor, guard))
                    }
                };
                set[at].is_none()
            });
            match taken {
                None => break set,
                Some(_) if number > 0 => return Ok(all),
                Some(at) => first = at,
            }
        };
        all.push(set.into_iter().flatten().collect());
    }
    Ok(all)
}

/// Calls `f` once, with the storage of `dst`, and where in it `dst` starts and ends.
fn with_storage(
    dst: &Tensor,
    f: &mut dyn FnMut(&mut CpuStorage, usize, usize) -> Result<()>,
) -> Result<()> {
    if dst.elem_count() == 0 {
        // candle takes strides of 0, which dimensions before an empty one have, for repeats.
        let mut nothing = match dst.dtype() {
            DType::F16 => CpuStorage::F16(Vec::new()),
            DType::BF16 => CpuStorage::BF16(Vec::new()),
            DType::F32 => CpuStorage::F32(Vec::new()),
            DType::F64 => CpuStorage::F64(Vec::new()),
            DType::I16 => CpuStorage::I16(Vec::new()),
            other => bail!("expected floats or I16 to write to, found {other:?}"),
        };
        return f(&mut nothing, 0, 0);
    }
    if held(dst).is_some() {
        bail!("a tensor of {:?} is written while the same thread reads it", dst.shape());
    }
    let f = std::cell::RefCell::new(f);
    dst.inplace_op1(&Write(|storage: &mut CpuStorage, layout: &Layout| {
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("expected a contiguous tensor to write to, found {layout:?}")
        };
        (f.borrow_mut())(storage, start, end)
    }))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use candle_core::{Device, Var};

    use super::*;
    use crate::kernels::cpu::guard::{guard, hold};
    use crate::kernels::cpu::testing::{unless_miri, watched};

    fn var(value: f32) -> Var {
        Var::from_tensor(&Tensor::full(value, 9, &Device::Cpu).unwrap()).unwrap()
    }

    #[test]
    fn sets_are_locked_as_far_as_they_are_free() -> Result<()> {
        let [a, b, c] = [var(1.0), var(2.0), var(3.0)];
        let sets = [
            vec![Access::Write(&a), Access::Read(&b)],
            vec![Access::Read(&b), Access::Write(&c)],
            // Taken by the first.
            vec![Access::Write(&a)],
        ];
        let mut locked = lock_sets(&sets)?;
        assert_eq!(locked.iter().map(Vec::len).collect::<Vec<_>>(), [2, 2]);
        locked[0][0].elements_mut::<f32>()?.fill(5.0);
        assert_eq!(locked[1][0].slice::<f32>()?, [2.0; 9]);
        assert!(locked[0][1].slice_mut().is_err(), "it is locked to be read");
        assert!(
            locked[0][0].slice::<f64>().is_err() && locked[0][0].elements_mut::<f64>().is_err()
        );
        drop(locked);
        assert_eq!(a.to_vec1::<f32>()?, [5.0; 9]);
        assert_eq!(lock_sets(&sets[2..])?.len(), 1);
        Ok(())
    }

    #[test]
    fn what_would_wait_for_itself_is_an_error() -> Result<()> {
        let a = var(1.0);
        let view = a.narrow(0, 0, 3)?;
        let message = |sets: &[Vec<Access<'_>>]| lock_sets(sets).err().map(|e| e.to_string());
        let shares = message(&[vec![Access::Write(&a), Access::Read(&view)]]).unwrap();
        assert!(shares.contains("shares its storage"), "{shares}");
        let guard = guard(&view);
        let reads = message(&[vec![Access::Write(&a)]]).unwrap();
        assert!(reads.contains("while the same thread reads it"), "{reads}");
        assert!(write::<f32>(&a, |_| ()).is_err());
        drop(guard);
        write::<f32>(&a, |x| x.fill(0.0))
    }

    /// Sets that name each other's tensors the other way round, and readers of both.
    #[test]
    fn sets_in_any_order_end() {
        watched("sets in any order", || {
            let (a, b, times) = (var(0.0), var(0.0), unless_miri(500, 20));
            let writes = |sets: [Access<'_>; 2]| {
                let mut locked = lock_sets(&[sets.to_vec()]).unwrap();
                let [first, second] = locked[0].as_mut_slice() else { panic!("two") };
                for locked in [first, second] {
                    if let Ok(elements) = locked.elements_mut::<f32>() {
                        elements.iter_mut().for_each(|x| *x += 1.0);
                    }
                }
            };
            thread::scope(|scope| {
                for (x, y) in [(&a, &b), (&b, &a)] {
                    scope.spawn(move || {
                        for _ in 0..times {
                            writes([Access::Write(x), Access::Read(y)]);
                            writes([Access::Write(x), Access::Write(y)]);
                        }
                    });
                    scope.spawn(move || {
                        for _ in 0..times {
                            let held = hold([x.as_tensor(), y.as_tensor()]);
                            let seen = contiguous::<f32>(held[0].storage(), x).unwrap();
                            assert!(seen.iter().all(|value| *value == seen[0]));
                        }
                    });
                }
            });
            // Each thread adds to its own so many times, and so many to both.
            let sums = [(3 * times) as f32; 9];
            assert_eq!(a.to_vec1::<f32>().unwrap(), sums);
            assert_eq!(b.to_vec1::<f32>().unwrap(), sums);
        });
    }
}
