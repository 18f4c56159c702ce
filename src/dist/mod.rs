//! Several processes, or threads, that train one model together.

mod batch_norm;
mod buckets;
mod communicator;
mod data_parallel;
mod exchange;
mod reducer;

pub use batch_norm::sync_batch_norm;
pub use communicator::{Communicator, Pending, Reduction};
pub use data_parallel::{DataParallel, DataParallelConfig};
