//! The engine for how this process was started.

use std::sync::Arc;

use super::communicator::Communicator;
use super::single::Single;
use crate::error::{DistError, Result};

/// What launchers tell each process of how many there are. `WORLD_SIZE` is torchrun's.
const SIZES: [&str; 5] = [
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "SLURM_STEP_NUM_TASKS",
    "WORLD_SIZE",
];

/// The engine for how this process was started: by `mpirun` `Mpi` (feature `mpi`), and else [`Single`].
///
/// # Errors
///
/// If a launcher has started several processes, and they cannot form one group: each would train alone.
pub fn from_environment() -> Result<Arc<dyn Communicator>> {
    let Some((variable, size)) = launched(|name| std::env::var(name).ok())? else {
        return Ok(Arc::new(Single));
    };
    let communicator = join(variable, size)?;
    if communicator.size() == size {
        return Ok(communicator);
    }
    let found = communicator.size();
    let reason = format!(
        "{variable} says that there are {size} processes, and MPI finds {found}: start them by the `mpirun` of the \
         MPI that this program was built with"
    );
    Err(DistError::Start { reason }.into())
}

/// The number of processes that a launcher has started, and the variable that says so; `None` without a launcher.
fn launched(variable: impl Fn(&str) -> Option<String>) -> Result<Option<(&'static str, usize)>> {
    let Some((name, text)) = SIZES.iter().find_map(|name| Some((*name, variable(name)?))) else {
        return Ok(None);
    };
    match text.trim().parse() {
        // A task of Slurm or torchrun alone; mpirun's would be a group of one all the same.
        Ok(1) => Ok(None),
        Ok(size) if size > 1 => Ok(Some((name, size))),
        _ => {
            let reason = format!("{name} is `{text}`, expected the number of processes");
            Err(DistError::Start { reason }.into())
        }
    }
}

#[cfg(feature = "mpi")]
fn join(_: &str, _: usize) -> Result<Arc<dyn Communicator>> {
    super::Mpi::init()
}

#[cfg(not(feature = "mpi"))]
fn join(variable: &str, size: usize) -> Result<Arc<dyn Communicator>> {
    let reason = format!(
        "{variable} says that there are {size} processes, and this program can join none, so that each would train \
         alone: build it with the feature `mpi` of candle-amp, or start it once"
    );
    Err(DistError::Start { reason }.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of<'a>(variables: &'a [(&str, &str)]) -> impl Fn(&str) -> Option<String> + use<'a> {
        move |name| {
            variables.iter().find(|(other, _)| *other == name).map(|(_, value)| (*value).to_owned())
        }
    }

    #[test]
    fn a_launcher_says_how_many_processes_there_are() {
        assert_eq!(launched(of(&[])).unwrap(), None);
        // A batch script's own, which starts one program.
        assert_eq!(launched(of(&[("SLURM_NTASKS", "4")])).unwrap(), None);
        assert_eq!(launched(of(&[("OMPI_COMM_WORLD_SIZE", "1")])).unwrap(), None);
        for name in SIZES {
            assert_eq!(launched(of(&[(name, "4")])).unwrap(), Some((name, 4)));
        }
        for wrong in ["0", "", "many", "-2"] {
            let message = launched(of(&[("PMI_SIZE", wrong)])).unwrap_err().to_string();
            assert!(message.contains(&format!("PMI_SIZE is `{wrong}`")), "{message}");
        }
    }

    #[test]
    #[cfg(not(feature = "mpi"))]
    fn several_processes_without_an_engine_are_an_error() {
        let message = join("OMPI_COMM_WORLD_SIZE", 4).unwrap_err().to_string();
        assert!(message.contains("says that there are 4 processes"), "{message}");
        assert!(message.contains("the feature `mpi`"), "{message}");
    }
}
