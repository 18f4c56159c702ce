//! A training loop on a thread of a pool of its own.

use std::thread::{self, JoinHandle};

/// Of Linux's main thread: graphs are walked by recursion.
const STACK_BYTES: usize = 8 << 20;

/// Runs `f` in a pool of threads of its own, which the CPU's kernels share, and returns what it returns.
///
/// An operator of this crate does its arithmetic on the thread that calls it, and asks free threads to help: the others
/// of its rayon pool. Threads outside of any pool, such as that of `main`, share helpers instead, one fewer than
/// rayon's threads, and a single loop is as fast with them as in here. Put this around a loop that also calls what runs
/// on rayon's pool, such as candle's own operators: a thread outside of it sleeps until the pool has done the work.
///
/// The threads are this call's: `rayon::current_num_threads()` (`RAYON_NUM_THREADS`, or else the
/// processor's), with 8 MiB of stack, and have ended when it returns. So no other work comes between two
/// lines of `f`. What belongs to a thread is to be entered inside: an [`Autocast`](crate::Autocast) scope,
/// [`no_grad_guard`](crate::autograd::no_grad_guard), [`fork_rng_guard`](crate::random::fork_rng_guard). Results are those
/// outside, to the bit.
///
/// On one of rayon's threads, `f` runs where it is called; also where no threads can be started. On a GPU
/// nothing is gained.
///
/// # Panics
///
/// If `f` does.
///
/// # Examples
///
/// ```
/// use candle_amp::{Autocast, ops, backend::on_workers};
/// use candle_core::{DType, Device, Result, Tensor};
///
/// fn train() -> Result<DType> {
///     let x = Tensor::ones((2, 3), DType::F32, &Device::Cpu)?;
///     Ok(Autocast::current().scope(|| ops::matmul(&x, &x.t()?))?.dtype())
/// }
///
/// let amp = Autocast::new(DType::BF16);
/// assert_eq!(on_workers(|| amp.scope(train))?, DType::BF16);
/// // A scope is its thread's.
/// assert_eq!(amp.scope(|| on_workers(train))?, DType::F32);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `rayon::ThreadPool::install`. PyTorch's operators run on the thread that calls them, with others to help.
pub fn on_workers<R: Send>(f: impl FnOnce() -> R + Send) -> R {
    if rayon::current_thread_index().is_some() {
        return f();
    }
    let mut threads = JoinOnDrop(Vec::new());
    let pool = rayon::ThreadPoolBuilder::new().num_threads(rayon::current_num_threads());
    let pool = pool.spawn_handler(|worker| {
        let thread = thread::Builder::new().stack_size(STACK_BYTES);
        let thread = thread.name(format!("candle-amp-{}", worker.index()));
        threads.0.push(thread.spawn(|| worker.run())?);
        Ok(())
    });
    // The pool goes first, so that its threads end.
    match pool.build() {
        Ok(pool) => pool.install(f),
        Err(_) => f(),
    }
}

/// Threads that are waited for: what belongs to them, such as a GPU's memory, is not to be freed while the
/// process exits.
struct JoinOnDrop(Vec<JoinHandle<()>>);

impl Drop for JoinOnDrop {
    fn drop(&mut self) {
        for thread in self.0.drain(..) {
            // Its panic would have been the call's.
            let _ = thread.join();
        }
    }
}
