//! Errors of training on several ranks.

use candle_core::Shape;

/// What ranks that train together find wrong. [`Differs`](Self::Differs) and [`Unused`](Self::Unused) are returned on all
/// ranks, the others on each that made the mistake. No weight, and no gradient in the scaler, has changed then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ParallelError {
    /// Something that all ranks must have in common.
    #[error("{what} of rank {rank} differs from that of rank 0:{}", lines(differences))]
    Differs {
        /// What was compared.
        what: &'static str,
        /// The first rank that differs from rank 0.
        rank: usize,
        /// What differs: a sentence each.
        differences: Vec<String>,
    },
    /// Parameters without a gradient on some rank.
    #[error(
        "no gradient on some rank, for {} parameters: {}; freeze those that are not trained, run the same model on \
         all ranks, or set `allow_unused`, which counts a rank without gradient as zero",
        names.len(),
        some(names)
    )]
    Unused {
        /// Their names.
        names: Vec<String>,
    },
    /// A gradient of a variable that is not shared with the other ranks.
    #[error(
        "a loss depends on a variable of shape {shape:?} that is not among the parameters given to `DataParallel`, or \
         was frozen when that was made: ranks would train it apart; give all parameters that are trained, or freeze it"
    )]
    UnknownVariable {
        /// Of the variable.
        shape: Shape,
    },
    /// A call that needs the gradients of all ranks, after passes under `no_sync` alone.
    #[error(
        "`{call}` after backward under `no_sync`: run the last backward before it outside of `no_sync`, which averages \
         what has accumulated"
    )]
    NotSynchronised {
        /// The method called.
        call: &'static str,
    },
    /// An optimizer whose update needs whole tensors.
    #[error(
        "`{optimizer}` takes norms of whole tensors, and cannot step shards: use it with `DataParallel` alone"
    )]
    NotSharded {
        /// Its name.
        optimizer: &'static str,
    },
    /// An optimizer that is not sharded, where each rank has parts of the gradients.
    #[error(
        "`Sharded::new` gives each rank a part of every gradient of this scaler, and this optimizer steps whole \
         variables: give all variables to `Sharded`, in groups if settings differ"
    )]
    Whole,
    /// A variable of a sharded optimizer that is not one of the ranks' parameters, or has no name.
    #[error(
        "a sharded optimizer was given a variable that is not among the parameters of its `DataParallel`"
    )]
    NotAParameter,
    /// A change of how gradients are reduced, with gradients collected.
    #[error("`{call}` with gradients collected: call it before the first backward")]
    TooLate {
        /// The method called.
        call: &'static str,
    },
    /// Shards that are not of one checkpoint, all of them.
    #[error("the shards do not make up a state: {fault}")]
    Shards {
        /// What is missing or does not fit.
        fault: String,
    },
}

/// As many as a terminal shows.
const SHOWN: usize = 20;

fn lines(all: &[String]) -> String {
    let more = all.len().saturating_sub(SHOWN);
    let mut text: String = all.iter().take(SHOWN).map(|line| format!("\n  {line}")).collect();
    if more > 0 {
        text += &format!("\n  and {more} more");
    }
    text
}

fn some(names: &[String]) -> String {
    let shown = names[..names.len().min(SHOWN)].join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}
