//! Autocast: scopes, the policy that they follow, and traces of what ran in them.

mod cache;
mod policy;
mod scope;
pub(crate) mod trace;

pub use policy::{Cast, Op, Policy};
pub use scope::{Autocast, AutocastGuard};
pub(crate) use scope::{cast, clear_cast_cache, drop_cast_cache, forget_casts, suspend, target};
pub use trace::{Trace, TraceRow};
