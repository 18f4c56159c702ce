//! The crate's random numbers: seeded, the same on every device and for any number of threads.
//!
//! candle's CPU generator cannot be seeded. This one serves initialisation
//! ([`nn::var_builder`](crate::nn::var_builder)) and dropout; the same seed, on one thread, gives
//! the same run.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::sync::Mutex;

use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::Init;
use candle_nn::init::NormalOrUniform;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;

use crate::error::lock::lock;
use crate::kernels;

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
fn with_state<T>(f: impl FnOnce(&mut RandomState) -> T) -> T {
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

/// What a checkpoint has to do with the draws of this thread.
enum Tape {
    /// Notes them.
    Record(Vec<RandomState>),
    /// Gives them again, and counts what was asked for beyond them.
    Replay { draws: VecDeque<RandomState>, beyond: usize },
}

thread_local! {
    /// Innermost last.
    static TAPES: RefCell<Vec<Tape>> = const { RefCell::new(Vec::new()) };
}

/// Runs `f` with `tape` on; what became of it.
fn with_tape<T>(tape: Tape, f: impl FnOnce() -> T) -> (T, Option<Tape>) {
    /// Takes the tape off again, on panic too.
    struct Off;
    impl Drop for Off {
        fn drop(&mut self) {
            TAPES.with_borrow_mut(Vec::pop);
        }
    }
    TAPES.with_borrow_mut(|tapes| tapes.push(tape));
    let off = Off;
    let result = f();
    std::mem::forget(off);
    (result, TAPES.with_borrow_mut(Vec::pop))
}

/// Runs `f`, and notes where its draws on this thread came from.
pub(crate) fn record<T>(f: impl FnOnce() -> T) -> (T, Vec<RandomState>) {
    match with_tape(Tape::Record(Vec::new()), f) {
        (result, Some(Tape::Record(draws))) => (result, draws),
        (result, _) => (result, Vec::new()),
    }
}

/// Runs `f` with the draws of another time, and says how many it took. The process's generator stays where it is.
pub(crate) fn replay<T>(draws: &[RandomState], f: impl FnOnce() -> T) -> (T, usize) {
    let tape = Tape::Replay { draws: draws.iter().copied().collect(), beyond: 0 };
    match with_tape(tape, f) {
        (result, Some(Tape::Replay { draws: left, beyond })) => {
            (result, draws.len() - left.len() + beyond)
        }
        (result, _) => (result, 0),
    }
}

/// A generator of its own for the next tensor.
pub(crate) fn next_stream() -> ChaCha8Rng {
    let drawn = TAPES.with_borrow_mut(|tapes| {
        let replay = tapes.iter().rposition(|tape| matches!(tape, Tape::Replay { .. }));
        let again = match replay.map(|at| &mut tapes[at]) {
            Some(Tape::Replay { draws, beyond }) => {
                let again = draws.pop_front();
                *beyond += usize::from(again.is_none());
                again
            }
            _ => None,
        };
        let drawn = again.unwrap_or_else(|| {
            with_state(|state| {
                let drawn = *state;
                state.draws = state.draws.wrapping_add(1);
                drawn
            })
        });
        // What records below a replay will be replayed by it, not draw again.
        for tape in &mut tapes[replay.map_or(0, |at| at + 1)..] {
            if let Tape::Record(draws) = tape {
                draws.push(drawn);
            }
        }
        drawn
    });
    stream_of(drawn, 0)
}

/// The next `draws` streams, for who draws from them elsewhere: the state before.
pub(crate) fn take(draws: u64) -> RandomState {
    with_state(|state| {
        let before = *state;
        state.draws = state.draws.wrapping_add(draws);
        before
    })
}

/// The generator of the `number`th draw after `state`.
pub(crate) fn stream_of(state: RandomState, number: u64) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(state.seed);
    rng.set_stream(state.draws.wrapping_add(number));
    rng
}

/// A tensor drawn as `init` says: in `F64`, rounded to `F32` and from there to `dtype`.
pub(crate) fn init(init: Init, shape: &Shape, dtype: DType, device: &Device) -> Result<Tensor> {
    let uniform = |lo: f64, up: f64| draw(shape, move |rng| rng.random_range(lo..up));
    let normal =
        |mean, std: f64| draw(shape, move |rng| mean + std * rng.sample::<f64, _>(StandardNormal));
    let values = match init {
        Init::Const(value) => Tensor::full(value, shape, &Device::Cpu)?,
        Init::Uniform { lo, up } if lo >= up => Tensor::full(lo, shape, &Device::Cpu)?,
        Init::Uniform { lo, up } => uniform(lo, up)?,
        Init::Randn { mean, stdev } => normal(mean, stdev)?,
        Init::Kaiming { dist, fan, non_linearity } => {
            let std = non_linearity.gain() / (fan.for_shape(shape).max(1) as f64).sqrt();
            match dist {
                NormalOrUniform::Uniform => uniform(-3f64.sqrt() * std, 3f64.sqrt() * std)?,
                NormalOrUniform::Normal => normal(0.0, std)?,
            }
        }
    };
    kernels::cast(&values, dtype)?.to_device(device)
}

fn draw(shape: &Shape, mut value: impl FnMut(&mut ChaCha8Rng) -> f64) -> Result<Tensor> {
    let mut rng = next_stream();
    let values: Vec<f64> = (0..shape.elem_count()).map(|_| value(&mut rng)).collect();
    Tensor::from_vec(values, shape, &Device::Cpu)
}

/// Which of the elements of `shape` to keep, each with probability `keep`: a `U8` tensor of 0 and 1.
pub(crate) fn keep_mask(shape: &Shape, keep: f64, device: &Device) -> Result<Tensor> {
    // 32 bits of threshold: the probability is exact to 2^-32.
    let threshold = (keep * 4294967296.0).round() as u64;
    kernels::elementwise::keep_mask(next_stream(), threshold, shape, device)
}
