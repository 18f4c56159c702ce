//! Where the generators stand: the process's, and those that threads forked off.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::Mutex;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use crate::error::lock::lock;

/// Where the generator stands: what to save to draw the same numbers again.
///
/// Every tensor is drawn from a stream of its own, numbered in the order of drawing, so that two
/// numbers say it all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct RandomState {
    /// The seed given.
    pub seed: u64,
    /// How many tensors were drawn since.
    pub draws: u64,
}

/// The generator that this thread draws from, as a part of a [`Checkpoint`](crate::checkpoints::Checkpoint): the
/// process's, or within [`fork_rng`] the fork. What was saved within a fork is not loaded outside of one: that is
/// [`CheckpointError::State`](crate::error::CheckpointError::State).
#[derive(Clone, Copy, Debug, Default)]
pub struct Generator;

static STATE: Mutex<RandomState> = Mutex::new(RandomState { seed: 0, draws: 0 });

thread_local! {
    /// The generator that this thread forked off.
    static FORK: Cell<Option<RandomState>> = const { Cell::new(None) };
}

/// What `f` makes of the generator that this thread draws from.
pub(super) fn with_state<T>(f: impl FnOnce(&mut RandomState) -> T) -> T {
    match FORK.get() {
        Some(mut forked) => {
            let result = f(&mut forked);
            FORK.set(Some(forked));
            result
        }
        None => f(&mut lock(&STATE)),
    }
}

/// Whether this thread draws from a fork.
pub(crate) fn is_forked() -> bool {
    FORK.get().is_some()
}

/// Starts the process's generator, or [the thread's own](fork_rng), over from `seed`. Without it the seed
/// is 0, in every run.
///
/// ```standalone_crate
/// use candle_amp::{ops, random};
/// use candle_core::{DType, Device, Tensor};
///
/// let x = Tensor::ones(64, DType::F32, &Device::Cpu)?;
/// random::manual_seed(7);
/// let first = ops::dropout(&x, 0.5)?.to_vec1::<f32>()?;
/// let second = ops::dropout(&x, 0.5)?.to_vec1::<f32>()?;
/// random::manual_seed(7);
/// assert_eq!(ops::dropout(&x, 0.5)?.to_vec1::<f32>()?, first);
/// assert_ne!(first, second);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.manual_seed`.
pub fn manual_seed(seed: u64) {
    set_state(RandomState { seed, draws: 0 });
}

/// Where the generator stands.
pub fn state() -> RandomState {
    with_state(|state| *state)
}

/// Goes on from where a generator stood.
pub fn set_state(state: RandomState) {
    with_state(|current| *current = state);
}

/// Runs `f` with a generator of this thread's own, from where the generator stands now. What `f` draws or seeds
/// does not disturb the process's generator, and what others draw meanwhile does not disturb `f`.
///
/// For samples and evaluations in the middle of a training, and for tests, which run side by side.
///
/// PyTorch's `torch.random.fork_rng`.
///
/// ```standalone_crate
/// use candle_amp::random;
///
/// random::manual_seed(7);
/// random::fork_rng(|| random::manual_seed(1)); // for this thread alone
/// assert_eq!(random::state().seed, 7);
/// ```
pub fn fork_rng<T>(f: impl FnOnce() -> T) -> T {
    let _guard = fork_rng_guard();
    f()
}

/// As [`fork_rng`], for the block that the returned guard lives in: a generator of this thread's own until the guard is
/// dropped, from where it stands now. What is drawn or seeded meanwhile, on this thread or another, does not disturb the
/// other side.
///
/// Guards are dropped in the reverse order of their making.
///
/// ```standalone_crate
/// use candle_amp::random;
///
/// random::manual_seed(7);
/// {
///     let _fork = random::fork_rng_guard();
///     random::manual_seed(1); // for this thread alone
/// }
/// assert_eq!(random::state().seed, 7);
/// ```
pub fn fork_rng_guard() -> ForkRngGuard {
    let outer = FORK.get();
    FORK.set(Some(state()));
    ForkRngGuard { outer, on_its_thread: PhantomData }
}

/// Keeps a generator of its own on the thread that made it; see [`fork_rng_guard`].
#[must_use = "the fork ends when this is dropped"]
#[derive(Debug)]
pub struct ForkRngGuard {
    outer: Option<RandomState>,
    on_its_thread: PhantomData<*const ()>,
}

impl Drop for ForkRngGuard {
    fn drop(&mut self) {
        FORK.set(self.outer);
    }
}

/// The next `draws` streams, for who draws from them elsewhere: the state before.
pub(crate) fn take(draws: u64) -> RandomState {
    with_state(|state| {
        let before = *state;
        state.draws = state.draws.wrapping_add(draws);
        before
    })
}

/// A stream that depends on the seed and this number alone, not on what was drawn: the same on ranks that have one seed,
/// which start their draws 2^40 apart and may draw in other orders.
pub(crate) fn common_stream(number: u64) -> ChaCha8Rng {
    const APART: u64 = 1 << 63;
    stream_of(RandomState { seed: state().seed, draws: APART }, number & !APART)
}

/// The generator of the `number`th draw after `state`.
pub(crate) fn stream_of(state: RandomState, number: u64) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(state.seed);
    rng.set_stream(state.draws.wrapping_add(number));
    rng
}
