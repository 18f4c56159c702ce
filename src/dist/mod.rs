//! Several processes, or threads, that train one model together.
//!
//! ```
//! use candle_amp::dist::{Communicator, ReduceOp, Threads};
//! use candle_core::{Device, Tensor};
//!
//! let sums = Threads::run(4, |communicator| {
//!     let mine = Tensor::new(communicator.rank() as f32, &Device::Cpu)?;
//!     let sum = communicator.all_reduce(&mine, ReduceOp::Sum)?;
//!     Ok(sum.to_scalar::<f32>()?)
//! })?;
//! assert_eq!(sums, [6.0; 4]);
//! # Ok::<(), candle_amp::Error>(())
//! ```

mod arguments;
mod batch_norm;
mod buckets;
mod communicator;
mod config;
mod data_parallel;
mod engine;
mod environment;
mod exchange;
mod host;
#[cfg(feature = "mpi")]
mod mpi;
mod nccl;
mod reducer;
mod rendezvous;
mod sampler;
mod sharded;
mod shards;
mod single;
mod threads;
mod timeout;

pub use batch_norm::sync_batch_norm;
pub use communicator::{Communicator, Pending, ReduceOp};
pub use config::DataParallelConfig;
pub use data_parallel::DataParallel;
pub use engine::from_environment_on;
pub use environment::{from_environment, local_rank};
#[cfg(feature = "mpi")]
pub use mpi::Mpi;
pub use nccl::Nccl;
pub use sampler::{Sampler, Uneven};
pub use sharded::Sharded;
pub use single::Single;
pub use threads::Threads;
