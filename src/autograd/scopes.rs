//! The scopes that a thread is in.

use std::cell::Cell;

/// How many scopes of each kind, one within another.
#[derive(Clone, Copy)]
pub(super) struct Scopes {
    /// Less than 0 while a pass, which starts anew, has dropped a guard of its caller.
    pub(super) no_grad: isize,
    /// Functions of checkpoints that backward computes again.
    pub(super) recomputing: usize,
}

thread_local! {
    /// Without a destructor, so that guards which other thread-locals hold can be dropped at the thread's end.
    static SCOPES: Cell<Scopes> = const { Cell::new(Scopes { no_grad: 0, recomputing: 0 }) };
}

pub(super) fn current() -> Scopes {
    SCOPES.get()
}

pub(super) fn change(change: impl FnOnce(&mut Scopes)) {
    let mut scopes = SCOPES.get();
    change(&mut scopes);
    SCOPES.set(scopes);
}
