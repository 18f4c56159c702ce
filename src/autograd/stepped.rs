//! Variables that an optimizer has written to, and operators that were applied to them before.
//!
//! An operator keeps the tensors it needs for backward, not copies of them: stepped in between, a variable would
//! give gradients of a function that was never computed. PyTorch counts the versions of a tensor; here a step
//! says where it has written.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex};

use candle_core::Tensor;

use super::storage::{lock, place};

/// How many calls there have been.
static CALLS: AtomicU64 = AtomicU64::new(0);

/// The number that the next call gets.
pub(super) fn calls() -> u64 {
    CALLS.load(Ordering::Relaxed)
}

/// The number of a new call.
pub(super) fn next_call() -> u64 {
    CALLS.fetch_add(1, Ordering::Relaxed)
}

/// The last step of each storage.
static STEPPED: LazyLock<Mutex<HashMap<usize, Step>>> = LazyLock::new(Mutex::default);

#[derive(Clone, Copy)]
struct Step {
    /// How many calls there had been.
    calls: u64,
    at: u64,
}

/// How many calls there had been at the last step of any.
static LATEST: AtomicU64 = AtomicU64::new(0);

/// Notes that a step has written to `variables`.
pub(crate) fn note<'a>(variables: impl IntoIterator<Item = &'a Tensor>) {
    let step = Step { calls: calls(), at: now() };
    lock(&STEPPED).extend(variables.into_iter().map(|variable| (place(variable), step)));
    LATEST.fetch_max(step.calls, Ordering::Relaxed);
}

/// A number that is larger each time, for whatever wants to know if a variable has been stepped after it.
pub(super) fn now() -> u64 {
    static NOW: AtomicU64 = AtomicU64::new(0);
    NOW.fetch_add(1, Ordering::Relaxed)
}

/// Whether a variable that lives there has ever been stepped: one that is frozen for a while, say.
pub(super) fn is_known(place: usize) -> bool {
    lock(&STEPPED).contains_key(&place)
}

/// Whether the variable that lives there has been stepped after `at`.
pub(super) fn is_after(at: u64, place: usize) -> bool {
    lock(&STEPPED).get(&place).is_some_and(|step| step.at > at)
}

/// Which of `places`, where tensors live that a call of this number was given, has been stepped since.
pub(super) fn since(number: u64, mut places: impl Iterator<Item = Option<usize>>) -> Option<usize> {
    if LATEST.load(Ordering::Relaxed) <= number {
        return None; // what a training loop has
    }
    let stepped = lock(&STEPPED);
    places.position(|place| {
        place.and_then(|place| stepped.get(&place)).is_some_and(|step| step.calls > number)
    })
}
