//! Who helps a caller.

use std::sync::LazyLock;

use rayon::{ThreadPool, ThreadPoolBuilder};

/// For callers outside of any pool: one thread fewer than rayon's global pool has, for the caller works, too. Threads that look
/// for work take time from those that have some. `None` where they cannot be started.
static OUTSIDE: LazyLock<Option<ThreadPool>> = LazyLock::new(|| {
    // No loop of one thread asks for help.
    let threads = rayon::current_num_threads().max(2) - 1;
    let pool = ThreadPoolBuilder::new().num_threads(threads);
    pool.thread_name(|thread| format!("amp-helper-{thread}")).build().ok()
});

/// Runs `f` on another thread of the calling thread's pool, or of [`OUTSIDE`] where it has none.
pub(super) fn spawn(f: impl FnOnce() + Send + 'static) {
    let pool = match rayon::current_thread_index() {
        // Asked for here alone: in a pool, its size would be that pool's.
        None => OUTSIDE.as_ref(),
        Some(_) => None,
    };
    match pool {
        Some(pool) => pool.spawn(f),
        None => rayon::spawn(f),
    }
}
