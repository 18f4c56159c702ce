//! Several processes, or threads, that train one model together.

mod communicator;

pub use communicator::{Communicator, Pending, Reduction};
