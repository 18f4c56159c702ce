//! A parallel loop that may be run under a lock, and that never runs a stranger's task.
//!
//! [`for_each`] and its forms are what kernels have instead of rayon's parallel iterators. The calling thread
//! takes tasks itself. The other threads of its rayon pool are offered a part, and those that are free come and help. A
//! caller outside of any pool is helped by threads of this crate's own ([`helpers`]). When no task is left, the caller waits
//! only for the helpers that are inside.
//!
//! - **A lock may be held across the loop.** Tasks are arithmetic: they take no locks, and wait for nothing but loops
//!   of their own and tasks that run. The caller waits for tasks that have begun, so it waits for running code alone.
//!   rayon's iterators wait for tasks in queues, behind tasks that may want the caller's lock.
//! - **The caller runs nothing but its tasks.** A thread that waits in rayon takes other tasks meanwhile, and
//!   runs them inside its own autocast scope, `no_grad`, pass and random state.
//! - **Helpers look at no thread's state.** rayon may run one anywhere, also on a thread that waits inside of
//!   someone's scope or holds someone's lock.
//!
//! Which thread takes a task changes no result: results are kept by number, and added up in that order. Tasks are taken in no
//! order; a thread begins with those of its own share ([`Shares`]).
#![allow(unsafe_code)]

mod gate;
mod helpers;
mod shares;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, Thread};

use crate::error::lock::lock;
use gate::Gate;
use shares::Shares;

/// Threads that share a loop that is run from here.
pub(in crate::kernels) fn threads() -> usize {
    rayon::current_num_threads()
}

/// Calls `f` with every number below `tasks`, each once.
///
/// `f` takes no lock and looks at no state of its thread.
///
/// # Panics
/// If `f` does. Most tasks that have not begun by then are left out.
pub(in crate::kernels) fn for_each(tasks: usize, f: impl Fn(usize) + Sync) {
    run(tasks, &f);
}

/// What `f` returns for every number below `tasks`, in order. See [`for_each`].
pub(in crate::kernels) fn map<R: Send>(tasks: usize, f: impl Fn(usize) -> R + Sync) -> Vec<R> {
    // Here and below, all but `f` is compiled once for a type, and not for every `f`.
    fn all<R: Send>(tasks: usize, f: &(dyn Fn(usize) -> R + Sync)) -> Vec<R> {
        let mut results = Vec::new();
        results.resize_with(tasks, || TaskCell::new(None));
        run(tasks, &|task| {
            let result = f(task);
            // SAFETY: each task is run once, and its cell is its own.
            unsafe { *results[task].0.get() = Some(result) };
        });
        let mut all = Vec::with_capacity(tasks);
        for cell in results {
            all.extend(cell.0.into_inner());
        }
        all
    }
    all(tasks, &f)
}

/// Calls `f` with each of `items`. See [`for_each`].
pub(in crate::kernels) fn for_each_item<T: Send>(
    items: impl IntoIterator<Item = T>,
    f: impl Fn(T) + Sync,
) {
    fn all<T: Send>(items: &[TaskCell<T>], f: &(dyn Fn(T) + Sync)) {
        run(items.len(), &|task| {
            if let Some(item) = items[task].take() {
                f(item);
            }
        });
    }
    all(&TaskCell::all(items), &f);
}

/// What `f` returns for each of `items`, in order. See [`for_each`].
pub(in crate::kernels) fn map_items<T: Send, R: Send>(
    items: impl IntoIterator<Item = T>,
    f: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    let items = TaskCell::all(items);
    map(items.len(), |task| items[task].take().map(&f)).into_iter().flatten().collect()
}

/// Calls `f` with the number and the elements of each chunk of `size` elements. See [`for_each`].
pub(in crate::kernels) fn for_each_chunk<T: Send>(
    data: &mut [T],
    size: usize,
    f: impl Fn(usize, &mut [T]) + Sync,
) {
    fn all<T: Send>(data: &mut [T], size: usize, f: &(dyn Fn(usize, &mut [T]) + Sync)) {
        let (size, len) = (size.max(1), data.len());
        let data = Chunks(data.as_mut_ptr());
        run(len.div_ceil(size), &|chunk| {
            let (start, data) = (chunk * size, &data);
            // SAFETY: from `start`, below `len`, to the next chunk or the end: elements of `data`, which is
            // borrowed mutably for the whole loop, and no other chunk's. Each task is run once.
            let part =
                unsafe { std::slice::from_raw_parts_mut(data.0.add(start), size.min(len - start)) };
            f(chunk, part);
        });
    }
    all(data, size, &f);
}

/// As [`for_each_chunk`], with the same chunk of `other`, of chunks of `other_size`.
///
/// # Panics
/// If one has more chunks than the other.
pub(in crate::kernels) fn for_each_chunk_zipped<T: Send, U: Sync>(
    data: &mut [T],
    size: usize,
    other: &[U],
    other_size: usize,
    f: impl Fn(usize, &mut [T], &[U]) + Sync,
) {
    let (size, other_size) = (size.max(1), other_size.max(1));
    assert_eq!(data.len().div_ceil(size), other.len().div_ceil(other_size), "chunks are pairs");
    for_each_chunk(data, size, |chunk, part| {
        let start = chunk * other_size;
        f(chunk, part, &other[start..other.len().min(start + other_size)]);
    });
}

/// Elements a task, of loops over many tensors.
pub(in crate::kernels) const TASK: usize = 1 << 16;
/// What an item costs at least, in elements.
const ITEM: usize = 1 << 8;

/// As [`map_items`], of items of so many elements: neighbours that are small are a task together.
pub(in crate::kernels) fn map_sized<T: Send, R: Send>(
    items: impl IntoIterator<Item = T>,
    elements: impl Fn(&T) -> usize,
    f: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    let mut items = items.into_iter().peekable();
    let tasks = std::iter::from_fn(|| {
        let first = items.next()?;
        let (mut size, mut task) = (elements(&first).max(ITEM), vec![first]);
        while let Some(item) = items.next_if(|item| {
            size += elements(item).max(ITEM);
            size <= TASK
        }) {
            task.push(item);
        }
        Some(task)
    });
    let run = |task: Vec<T>| task.into_iter().map(&f).collect::<Vec<R>>();
    map_items(tasks, run).into_iter().flatten().collect()
}

/// Where chunks of a slice are, which tasks write.
struct Chunks<T>(*mut T);

// SAFETY: see `for_each_chunk`: every task is given other elements.
unsafe impl<T: Send> Sync for Chunks<T> {}

/// What one task reads or writes.
struct TaskCell<T>(UnsafeCell<Option<T>>);

impl<T> TaskCell<T> {
    fn new(value: Option<T>) -> Self {
        Self(UnsafeCell::new(value))
    }

    fn all(values: impl IntoIterator<Item = T>) -> Vec<Self> {
        values.into_iter().map(|value| Self::new(Some(value))).collect()
    }

    /// What the task of this cell's number reads, which is run once.
    fn take(&self) -> Option<T> {
        // SAFETY: each task is run once, and its cell is its own.
        unsafe { (*self.0.get()).take() }
    }
}

// SAFETY: a cell is used by the task of its number alone, and by the caller before and after the loop.
unsafe impl<T: Send> Sync for TaskCell<T> {}

type Body<'a> = dyn Fn(usize) + Sync + 'a;

/// Threads that a caller or helper offers a part at once: these offer it to more.
const FAN: usize = 4;
/// Offers of a thread that have not begun, for each thread of the pool: where the pool is busy with something
/// else, they would pile up.
const PENDING: usize = 16;
/// Looks before a caller sleeps: some microseconds.
const SPINS: usize = 1 << 9;

/// What a caller and its helpers share.
struct Loop {
    gate: Gate,
    shares: Shares,
    threads: usize,
    /// The caller's number in the pool, if it is one of its threads.
    place: Option<usize>,
    /// Helpers that may still be asked.
    wanted: AtomicUsize,
    /// The caller's, whose frame may be gone where the gate is closed.
    body: *const Body<'static>,
    caller: Thread,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: all but `body` are `Send` and `Sync`. `body` points to something `Sync`, and is followed only inside
// of the gate; see `help`.
unsafe impl Send for Loop {}
// SAFETY: as above.
unsafe impl Sync for Loop {}

fn run(tasks: usize, f: &Body<'_>) {
    let threads = if tasks > 1 { threads() } else { 1 };
    if threads == 1 {
        return (0..tasks).for_each(f);
    }
    let body: *const Body<'_> = f;
    // SAFETY: only the lifetime changes. The pointer is followed while the gate is open or a helper inside,
    // and `_open` closes it and waits for helpers before this frame, and so the borrow of `f`, ends.
    let body = unsafe { std::mem::transmute::<*const Body<'_>, *const Body<'static>>(body) };
    let shared = Arc::new(Loop {
        gate: Gate::default(),
        shares: Shares::new(tasks, threads.min(tasks)),
        threads,
        place: rayon::current_thread_index(),
        wanted: AtomicUsize::new(threads.min(tasks) - 1),
        body,
        caller: thread::current(),
        panic: Mutex::new(None),
    });
    {
        let _open = Open(&shared);
        shared.offer();
        shared.work(f, shared.place.unwrap_or(0));
    }
    let panic = lock(&shared.panic).take();
    if let Some(panic) = panic {
        resume_unwind(panic);
    }
}

/// A loop whose helpers may enter; none is inside once this is dropped.
struct Open<'a>(&'a Loop);

impl Drop for Open<'_> {
    fn drop(&mut self) {
        let mut left = self.0.gate.close();
        for _ in 0..SPINS {
            if left {
                return;
            }
            std::hint::spin_loop();
            left = self.0.gate.is_left();
        }
        while !self.0.gate.is_left() {
            thread::park();
        }
    }
}

impl Loop {
    /// Takes tasks until there is none.
    fn work(&self, body: &Body<'_>, own: usize) {
        let run = || {
            while let Some(tasks) = self.shares.take(own) {
                tasks.for_each(body);
            }
        };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(run)) {
            self.shares.clear();
            let mut first = lock(&self.panic);
            match &*first {
                None => *first = Some(panic),
                // Dropping it might panic again, and helpers must not.
                Some(_) => std::mem::forget(panic),
            }
        }
    }

    /// Asks some threads to help.
    fn offer(self: &Arc<Self>) {
        for _ in 0..FAN {
            let one_less = |wanted: usize| wanted.checked_sub(1);
            if self.shares.are_empty()
                || self.wanted.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_err()
            {
                return;
            }
            let Some(ticket) = Ticket::take(PENDING * self.threads) else { return };
            let shared = self.clone();
            helpers::spawn(move || {
                drop(ticket);
                shared.help();
            });
        }
    }

    fn help(self: Arc<Self>) {
        if !self.gate.enter() {
            return;
        }
        self.offer();
        let place = rayon::current_thread_index().unwrap_or(0);
        // Of a caller that is none of the pool's threads, the share is the first.
        let own = if self.place.is_some() { place } else { 1 + place % (self.threads - 1) };
        // SAFETY: inside of the gate: the caller is in `run`, which has not dropped `_open`, so that its
        // borrow of the closure lasts until `leave`. `work` does not unwind.
        self.work(unsafe { &*self.body }, own);
        if self.gate.leave() {
            // The caller may be gone by now: its handle is this loop's, not the frame's.
            self.caller.unpark();
        }
    }
}

/// An offer that has not begun.
struct Ticket(Arc<AtomicUsize>);

impl Ticket {
    /// `None` where `most` offers of this thread wait already.
    fn take(most: usize) -> Option<Self> {
        thread_local!(static WAITING: Arc<AtomicUsize> = Arc::default());
        let waiting = WAITING.try_with(Arc::clone).ok()?;
        // This thread alone adds to it.
        (waiting.load(Ordering::Relaxed) < most).then(|| {
            waiting.fetch_add(1, Ordering::Relaxed);
            Self(waiting)
        })
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
