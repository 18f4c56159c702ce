//! Helpers that the tests of several files here share.

use std::panic::resume_unwind;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Runs `f` and returns what it returns. Fails, instead of hanging, where it takes longer than anything here does: the
/// threads that are stuck are left behind.
pub(super) fn watched<R: Send + 'static>(what: &str, f: impl FnOnce() -> R + Send + 'static) -> R {
    let (done, ended) = mpsc::channel();
    let thread = thread::spawn(move || {
        let result = f();
        done.send(()).ok();
        result
    });
    match ended.recv_timeout(Duration::from_secs(60)) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("{what}: stuck"),
        _ => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
    }
}

/// What a test goes through: `some` under Miri, which takes some thousand times as long, and `all` elsewhere.
pub(in crate::kernels) const fn unless_miri<T: Copy>(all: T, some: T) -> T {
    if cfg!(miri) { some } else { all }
}
