//! The crate's random numbers: seeded, the same on every device and for any number of threads.
//!
//! candle's CPU generator cannot be seeded. This one serves initialisation
//! ([`nn::var_builder`](crate::nn::var_builder)), dropout, [`randn`] and [`rand()`]; the same seed, on one thread, gives
//! the same run.

mod draw;
mod state;
mod tape;

pub use draw::{rand, randn};
pub use state::{
    ForkRngGuard, Generator, RandomState, fork_rng, fork_rng_guard, manual_seed, set_state, state,
};

pub(crate) use draw::{init, keep_mask};
pub(crate) use state::{common_stream, is_forked, stream_of, take};
pub(crate) use tape::{next_stream, record, replay};
