//! Variables that an optimizer has written to, and operators that were applied to them before.
//!
//! An operator keeps the tensors it needs for backward, not copies of them: stepped in between, a variable would
//! give gradients of a function that was never computed. PyTorch counts the versions of a tensor; here a step
//! says where it has written.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex};

use candle_core::Tensor;

use super::call::calls;
use super::token::{lock, place};

/// How many calls there had been at the last step of each storage.
static STEPPED: LazyLock<Mutex<HashMap<usize, u64>>> = LazyLock::new(Mutex::default);

/// The same of the last step of any.
static LATEST: AtomicU64 = AtomicU64::new(0);

/// Notes that a step has written to `variables`.
pub(crate) fn note<'a>(variables: impl IntoIterator<Item = &'a Tensor>) {
    let now = calls();
    lock(&STEPPED).extend(variables.into_iter().map(|variable| (place(variable), now)));
    LATEST.fetch_max(now, Ordering::Relaxed);
}

/// Which of `places`, where tensors live that a call of this number was given, has been stepped since.
pub(super) fn since(number: u64, mut places: impl Iterator<Item = Option<usize>>) -> Option<usize> {
    if LATEST.load(Ordering::Relaxed) <= number {
        return None; // what a training loop has
    }
    let stepped = lock(&STEPPED);
    places.position(|place| {
        place.and_then(|place| stepped.get(&place)).is_some_and(|&at| at > number)
    })
}
