//! Who helps a caller.

use std::sync::LazyLock;

use rayon::{ThreadPool, ThreadPoolBuilder};

/// For callers outside of any pool: one thread fewer than rayon's global pool has, for the caller works, too. Threads that look
/// for work take time from those that have some. `None` where they cannot be started.
static OUTSIDE: LazyLock<Option<ThreadPool>> = LazyLock::new(|| {
    let threads = rayon::current_num_threads().saturating_sub(1).max(1);
    let name = |thread| format!("candle-amp-helper-{thread}");
    ThreadPoolBuilder::new().num_threads(threads).thread_name(name).build().ok()
});

/// Runs `f` on another thread of the calling thread's pool, or of [`OUTSIDE`] where it has none.
pub(super) fn spawn(f: impl FnOnce() + Send + 'static) {
    let outside = rayon::current_thread_index().is_none();
    match outside.then(|| OUTSIDE.as_ref()).flatten() {
        Some(pool) => pool.spawn(f),
        None => rayon::spawn(f),
    }
}
