//! Read access to the storage of tensors: one guard per storage and thread.
//!
//! candle keeps a tensor's elements behind a lock for readers and writers, and hands its guard out. Two
//! facts of that lock make a rule necessary.
//!
//! - While a writer waits, new readers wait behind it. A thread that reads a storage and asks for it once more,
//!   because an operator was given one tensor twice, would wait for the writer, which waits for the thread.
//! - So would two threads that read two storages in opposite orders, if each has a writer waiting.
//!
//! Therefore:
//!
//! 1. **A thread has one guard per storage.** [`guard`] finds those that its thread has, by where the storage
//!    is, and shares them.
//! 2. **A kernel that reads several tensors takes all guards first, by [`hold`].** That waits in line for each, holding
//!    nothing. Then it takes all but the first past writers that wait meanwhile (`read_recursive`, which candle's own operators
//!    use for all). So a thread that holds a guard waits only for a writer that *has* a lock, not for one that wants it.
//! 3. **A writer that has a lock waits for nothing.** It took all its locks without waiting while it had one
//!    ([`in_place::lock_sets`](super::in_place::lock_sets)). It computes meanwhile: loops under a lock wait for
//!    running code alone ([`parallel`](super::parallel)).
//!
//! Each wait of a thread that has a lock is therefore for one that goes on, and ends. Tensors that a kernel has
//! made itself are outside of the rule: nobody else has them, so nobody waits.
//!
//! candle's `Var::set(source)` waits for `source` while it has the variable's lock. With a `source` that another
//! thread writes at that time, rule 3 does not hold, and nothing here can change it.
#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use candle_core::{
    CpuStorage, CustomOp1, Error, Layout, Result, Shape, Storage, StorageRef, Tensor, TensorId,
};

/// Keeps a storage readable, and the tensor alive.
pub(in crate::kernels) struct Guard {
    // Fields are dropped in this order.
    storage: StorageRef<'static>,
    _tensor: Tensor,
    /// Where the thread's list has it; 0 if it has not.
    place: usize,
}

impl Guard {
    pub(in crate::kernels) fn storage(&self) -> &Storage {
        &self.storage
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.place != 0 {
            let forget = |held: &RefCell<Vec<Held>>| {
                held.borrow_mut().retain(|held| held.place != self.place);
            };
            // Where the thread is ending, so is the list.
            let _ = HELD.try_with(forget);
        }
    }
}

/// A guard that this thread has.
struct Held {
    place: usize,
    id: TensorId,
    guard: Weak<Guard>,
}

thread_local!(static HELD: RefCell<Vec<Held>> = const { RefCell::new(Vec::new()) });

/// This thread's guard of the storage of `tensor`: the one it has, or else a new one.
pub(in crate::kernels) fn guard(tensor: &Tensor) -> Rc<Guard> {
    held(tensor).unwrap_or_else(|| register(tensor, tensor.storage_and_layout().0))
}

/// Guards of all `tensors`, which [`guard`] finds as long as these live. See the module's rules.
pub(in crate::kernels) fn hold<'a>(
    tensors: impl IntoIterator<Item = &'a Tensor>,
) -> Vec<Rc<Guard>> {
    let free = HELD.try_with(|held| held.borrow().is_empty()).unwrap_or(true);
    // Locks are found without keeping any. This waits in line, behind writers that wait: they get their turn
    // however many readers there are.
    let find = |tensor: &'a Tensor| match held(tensor) {
        Some(guard) => (tensor, Err(guard)),
        None => (tensor, Ok(StorageRef::rwlock(&tensor.storage_and_layout().0))),
    };
    let found: Vec<_> = tensors.into_iter().map(find).collect();
    let mut guards: Vec<Rc<Guard>> = Vec::with_capacity(found.len());
    let mut first = free;
    for (index, (tensor, lock)) in found.iter().enumerate() {
        let lock = match lock {
            Ok(lock) => lock,
            Err(guard) => {
                guards.push(guard.clone());
                continue;
            }
        };
        let same = found[..index]
            .iter()
            .position(|(_, other)| matches!(other, Ok(other) if std::ptr::eq(*other, *lock)));
        let guard = match same {
            Some(before) => guards[before].clone(),
            None if first => register(tensor, lock.read()),
            None => register(tensor, lock.read_recursive()),
        };
        first = false;
        guards.push(guard);
    }
    guards
}

/// The guard of the storage of `tensor` that this thread has.
pub(super) fn held(tensor: &Tensor) -> Option<Rc<Guard>> {
    let find = |wanted: &dyn Fn(&Held) -> bool| {
        let find = |held: &RefCell<Vec<Held>>| {
            held.borrow().iter().find(|held| wanted(held)).and_then(|held| held.guard.upgrade())
        };
        HELD.try_with(find).ok().flatten()
    };
    if HELD.try_with(|held| held.borrow().is_empty()).unwrap_or(true) {
        return None;
    }
    // Most are asked for by the tensor they were taken of; others are views of it.
    find(&|held| held.id == tensor.id()).or_else(|| {
        let place = seen(tensor)?;
        find(&|held| held.place == place)
    })
}

fn register(tensor: &Tensor, storage: StorageRef<'_>) -> Rc<Guard> {
    // SAFETY: the lock is behind an `Arc` of the tensor, and stays where it is as long as the tensor lives. The
    // guard has a clone of that, which is dropped after it. The longer lifetime is seen by nobody: `storage`
    // lends for as long as the guard is borrowed.
    let storage = unsafe { std::mem::transmute::<StorageRef<'_>, StorageRef<'static>>(storage) };
    let place = if let Storage::Cpu(cpu) = &*storage { std::ptr::from_ref(cpu).addr() } else { 0 };
    let guard = Rc::new(Guard { storage, _tensor: tensor.clone(), place });
    if place != 0 {
        let entry = Held { place, id: tensor.id(), guard: Rc::downgrade(&guard) };
        let _ = HELD.try_with(|held| held.borrow_mut().push(entry));
    }
    guard
}

/// Where the storage of a CPU tensor is, without waiting for writers that wait: candle's operators read past
/// them.
fn seen(tensor: &Tensor) -> Option<usize> {
    struct Look(Cell<usize>);
    impl CustomOp1 for Look {
        fn name(&self) -> &'static str {
            "look"
        }
        fn cpu_fwd(&self, storage: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
            self.0.set(std::ptr::from_ref(storage).addr());
            // No result is wanted, and an error is cheaper.
            Err(Error::Msg(String::new()))
        }
    }
    if !tensor.device().is_cpu() {
        return None;
    }
    let look = Look(Cell::new(0));
    let _ = tensor.apply_op1_no_bwd(&look);
    Some(look.0.get()).filter(|place| *place != 0)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use candle_core::{DType, Device, Var};

    use super::*;
    use crate::kernels::cpu::testing::watched;

    fn count() -> usize {
        HELD.with_borrow(Vec::len)
    }

    #[test]
    fn a_storage_has_one_guard_however_it_is_named() -> Result<()> {
        let x = Var::ones((4, 6), DType::F32, &Device::Cpu)?;
        let y = Tensor::ones(24, DType::F32, &Device::Cpu)?;
        let first = guard(&x);
        for view in [x.detach(), x.t()?, x.narrow(0, 1, 2)?, x.flatten_all()?] {
            assert!(Rc::ptr_eq(&guard(&view), &first));
        }
        assert!(!Rc::ptr_eq(&guard(&y), &first));
        assert_eq!(count(), 1);
        let all = hold([&y, &x.detach(), &y, &x.t()?]);
        assert!(Rc::ptr_eq(&all[0], &all[2]) && Rc::ptr_eq(&all[1], &first));
        assert_eq!((all.len(), count()), (4, 2));
        drop((first, all));
        assert_eq!(count(), 0);
        Ok(())
    }

    /// A guard keeps its storage from writers, and alive.
    #[test]
    fn a_guard_outlives_its_tensor_and_keeps_writers_out() -> Result<()> {
        let x = Var::ones(8, DType::F32, &Device::Cpu)?;
        let held = hold([&x.narrow(0, 2, 3)?]);
        let (wrote, written) = mpsc::channel();
        let twos = Tensor::full(2f32, 8, &Device::Cpu)?;
        let writer = thread::spawn({
            let x = x.clone();
            move || {
                x.set(&twos).unwrap();
                wrote.send(()).unwrap();
            }
        });
        assert!(
            written.recv_timeout(Duration::from_millis(50)).is_err(),
            "written while it is read"
        );
        drop(x);
        let Storage::Cpu(CpuStorage::F32(data)) = held[0].storage() else { panic!("F32") };
        assert_eq!(data, &[1.0; 8]);
        drop(held);
        written.recv().unwrap();
        writer.join().unwrap();
        Ok(())
    }

    /// With a writer waiting for each storage, a thread that has one still gets the other.
    #[test]
    fn waiting_writers_do_not_stop_a_second_guard() -> Result<()> {
        watched("a second guard", || {
            let [a, b] =
                [1f32, 2.0].map(|x| Var::from_tensor(&Tensor::new(x, &Device::Cpu).unwrap()));
            let (a, b) = (a?, b?);
            let locks = [&a, &b].map(|x| StorageRef::rwlock(&x.storage_and_layout().0));
            let zero = Tensor::new(0f32, &Device::Cpu)?;
            thread::scope(|scope| {
                let first = register(&a, locks[0].read());
                let other = locks[1].read();
                for x in [&a, &b] {
                    scope.spawn(|| x.set(&zero).unwrap());
                }
                // Until both wait: then no new reader gets in.
                while locks.iter().any(|lock| lock.try_read().is_some()) {
                    thread::yield_now();
                }
                assert!(Rc::ptr_eq(&guard(&a.detach()), &first));
                let second = register(&b, locks[1].read_recursive());
                assert!(Rc::ptr_eq(&hold([b.as_tensor(), a.as_tensor()])[0], &second));
                drop((first, second, other));
            });
            assert_eq!(a.to_scalar::<f32>()? + b.to_scalar::<f32>()?, 0.0);
            Ok(())
        })
    }
}
