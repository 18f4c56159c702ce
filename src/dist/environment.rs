//! How this process was started, and the engine for that.

use std::sync::Arc;

use super::communicator::Communicator;
use super::rendezvous::Rendezvous;
use super::single::Single;
use crate::error::{DistError, Result};

/// The variables by which a launcher tells each process about the others.
#[derive(Debug, PartialEq, Eq)]
struct Launcher {
    size: &'static str,
    rank: &'static str,
    /// The number among the processes of its machine.
    local_rank: &'static str,
    /// Whether the processes can find one another by MPI.
    has_mpi: bool,
}

const fn launcher(
    size: &'static str,
    rank: &'static str,
    local_rank: &'static str,
    has_mpi: bool,
) -> Launcher {
    Launcher { size, rank, local_rank, has_mpi }
}

const OPEN_MPI: Launcher =
    launcher("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", true);
const MVAPICH: Launcher =
    launcher("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", true);
const MPICH: Launcher = launcher("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", true);
/// `srun`; with `--mpi=pmix` MPI knows them.
const SLURM: Launcher = launcher("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", false);
const TORCHRUN: Launcher = launcher("WORLD_SIZE", "RANK", "LOCAL_RANK", false);

/// torchrun comes last, as scripts set its variables too, unless it says that it is torchrun.
const LAUNCHERS: [Launcher; 5] = [OPEN_MPI, MVAPICH, MPICH, SLURM, TORCHRUN];

/// The engine for how this process was started: by `mpirun` `Mpi` (feature `mpi`), and else [`Single`].
///
/// # Errors
///
/// If a launcher has started several processes, and they cannot form one group: each would train alone.
pub fn from_environment() -> Result<Arc<dyn Communicator>> {
    match launched(&variable)? {
        None => Ok(Arc::new(Single)),
        Some((launcher, size)) => by_mpi(launcher, size),
    }
}

/// Whether a launcher has started several processes.
pub(super) fn is_launched() -> Result<bool> {
    Ok(launched(&variable)?.is_some())
}

/// The number of this process among those of its machine, and 0 without a launcher: which GPU to take.
///
/// ```no_run
/// use candle_amp::dist;
/// use candle_core::Device;
///
/// let device = Device::new_cuda(dist::local_rank()?)?;
/// let ranks = dist::from_environment_on(&device)?;
/// # Ok::<(), candle_amp::Error>(())
/// ```
///
/// A launcher that shows each process one GPU alone, as Slurm's `--gpus-per-task=1` does, calls it number 0.
///
/// # Errors
///
/// If a launcher has started several processes and does not number them.
pub fn local_rank() -> Result<usize> {
    local_rank_of(&variable)
}

fn local_rank_of(variable: &Variable<'_>) -> Result<usize> {
    let Some((launcher, _)) = launched(variable)? else { return Ok(0) };
    // Slurm can start processes in the manner of MPICH, and numbers them itself. In a shell of its own, from which other
    // launchers start some, it has numbered the shell.
    let is_set = |launcher: &Launcher| variable(launcher.local_rank).is_some();
    let by_slurm = launcher == &MPICH && !is_set(&MPICH) && is_set(&SLURM);
    number(variable, if by_slurm { SLURM.local_rank } else { launcher.local_rank })
}

type Variable<'a> = dyn Fn(&str) -> Option<String> + 'a;

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// How the processes of `Nccl` find one another.
pub(super) enum Start {
    Communicator(Arc<dyn Communicator>),
    Rendezvous(Rendezvous),
}

pub(super) fn start() -> Result<Start> {
    let Some((launcher, size)) = launched(&variable)? else {
        return Ok(Start::Communicator(Arc::new(Single)));
    };
    let has_mpi = launcher.has_mpi || variable("PMIX_RANK").is_some();
    if cfg!(feature = "mpi") && has_mpi && launcher != &TORCHRUN {
        return Ok(Start::Communicator(by_mpi(launcher, size)?));
    }
    Ok(Start::Rendezvous(place(&variable, launcher, size)?))
}

/// Where rank 0 is, by the variables of torchrun, which scripts set for other launchers too, or by Slurm's.
fn place(variable: &Variable<'_>, launcher: &Launcher, size: usize) -> Result<Rendezvous> {
    let rank = number(variable, launcher.rank)?;
    if rank >= size {
        return Err(error(format!("{} is {rank}, and there are {size} processes", launcher.rank)));
    }
    let nodes = || variable("SLURM_STEP_NODELIST").or_else(|| variable("SLURM_JOB_NODELIST"));
    let address = variable("MASTER_ADDR").or_else(|| first_node(&nodes()?));
    let Some(address) = address else {
        return Err(error(format!(
            "{} says that there are {size} processes, and nothing says where rank 0 is: set MASTER_ADDR and \
             MASTER_PORT for all of them, as torchrun does, or build with the feature `mpi` and start by `mpirun`",
            launcher.size
        )));
    };
    Ok(Rendezvous { rank, size, address, port: port(variable)? })
}

/// The port at which rank 0 listens.
fn port(variable: &Variable<'_>) -> Result<u16> {
    let given = |name| match variable(name) {
        None => Ok(None),
        Some(text) => match text.trim().parse() {
            Ok(port) if port > 0 => Ok(Some(port)),
            _ => Err(error(format!("{name} is `{text}`, expected the number of a port"))),
        },
    };
    if let Some(port) = given("CANDLE_AMP_DIST_PORT")? {
        return Ok(port);
    }
    // torchrun itself listens there.
    let is_taken = variable("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|is| is == "True");
    match given("MASTER_PORT")? {
        Some(port) if is_taken => Ok(port.checked_add(1).unwrap_or(port - 1)),
        Some(port) => Ok(port),
        None => match variable("SLURM_JOB_ID").and_then(|job| job.trim().parse::<u64>().ok()) {
            Some(job) => Ok(10_000 + (job % 20_000) as u16),
            None => Err(error(
                "MASTER_PORT is not set: set a port that is free, the same for all".to_owned(),
            )),
        },
    }
}

/// The first machine of a list such as `gpu[07-09,12],login`.
fn first_node(list: &str) -> Option<String> {
    let end = list.find([',', '[']).unwrap_or(list.len());
    let (name, rest) = list.split_at(end);
    let Some(numbers) = rest.strip_prefix('[') else {
        return Some(name.trim().to_owned()).filter(|name| !name.is_empty());
    };
    let (numbers, after) = numbers.split_once(']')?;
    let first = numbers.split([',', '-']).next()?;
    let after = after.split(',').next().unwrap_or_default();
    Some(format!("{}{first}{after}", name.trim()))
}

fn number(variable: &Variable<'_>, name: &str) -> Result<usize> {
    let text = variable(name);
    match text.as_ref().and_then(|text| text.trim().parse().ok()) {
        Some(number) => Ok(number),
        None => Err(error(match text {
            Some(text) => format!("{name} is `{text}`, expected a number from 0"),
            None => {
                format!("{name} is not set, and a launcher that starts several processes sets it")
            }
        })),
    }
}

fn error(reason: String) -> crate::Error {
    DistError::Start { reason }.into()
}

/// The launcher, and how many processes it has started; `None` for one alone.
fn launched(variable: &Variable<'_>) -> Result<Option<(&'static Launcher, usize)>> {
    static ALL: [Launcher; 5] = LAUNCHERS;
    let is_torchrun = variable("TORCHELASTIC_RUN_ID").is_some();
    for launcher in ALL.iter().filter(|launcher| !is_torchrun || **launcher == TORCHRUN) {
        let Some(text) = variable(launcher.size) else { continue };
        match text.trim().parse() {
            // Alone for this launcher, such as a shell that `srun` has started. Another may have started several in it.
            Ok(1) => {}
            Ok(size) if size > 1 => return Ok(Some((launcher, size))),
            _ => {
                let reason =
                    format!("{} is `{text}`, expected the number of processes", launcher.size);
                return Err(error(reason));
            }
        }
    }
    Ok(None)
}

fn by_mpi(launcher: &Launcher, size: usize) -> Result<Arc<dyn Communicator>> {
    let communicator = join(launcher.size, size)?;
    let found = communicator.size();
    if found == size {
        return Ok(communicator);
    }
    Err(error(format!(
        "{} says that there are {size} processes, and MPI finds {found}: start them by the `mpirun` of the MPI that \
         this program was built with, or exchange tensors on GPUs by `dist::from_environment_on`",
        launcher.size
    )))
}

#[cfg(feature = "mpi")]
fn join(_: &str, _: usize) -> Result<Arc<dyn Communicator>> {
    super::Mpi::init()
}

#[cfg(not(feature = "mpi"))]
fn join(variable: &str, size: usize) -> Result<Arc<dyn Communicator>> {
    Err(error(format!(
        "{variable} says that there are {size} processes, and this program can join none, so that each would train \
         alone: build it with the feature `mpi` of candle-amp, or with `nccl` for tensors on GPUs and \
         `dist::from_environment_on`, or start it once"
    )))
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
        assert_eq!(launched(&of(&[])).unwrap(), None);
        // A batch script's own, which starts one program.
        assert_eq!(launched(&of(&[("SLURM_NTASKS", "4")])).unwrap(), None);
        assert_eq!(launched(&of(&[("OMPI_COMM_WORLD_SIZE", "1")])).unwrap(), None);
        // By hand, in a shell that `srun` has started.
        let by_hand = of(&[("SLURM_STEP_NUM_TASKS", "1"), ("WORLD_SIZE", "4")]);
        assert_eq!(launched(&by_hand).unwrap(), Some((&TORCHRUN, 4)));
        let pmi2 = of(&[("PMI_SIZE", "4"), ("PMI_RANK", "2"), ("SLURM_LOCALID", "1")]);
        assert_eq!(
            (launched(&pmi2).unwrap(), local_rank_of(&pmi2).unwrap()),
            (Some((&MPICH, 4)), 1)
        );
        for launcher in &LAUNCHERS {
            assert_eq!(launched(&of(&[(launcher.size, "4")])).unwrap(), Some((launcher, 4)));
        }
        for wrong in ["0", "", "many", "-2"] {
            let message = launched(&of(&[("PMI_SIZE", wrong)])).unwrap_err().to_string();
            assert!(message.contains(&format!("PMI_SIZE is `{wrong}`")), "{message}");
        }
    }

    #[test]
    fn torchrun_within_a_job_of_slurm_is_torchrun() {
        let job = [("SLURM_STEP_NUM_TASKS", "2"), ("WORLD_SIZE", "16")];
        assert_eq!(launched(&of(&job)).unwrap(), Some((&SLURM, 2)));
        let both = [&job[..], &[("TORCHELASTIC_RUN_ID", "none")]].concat();
        assert_eq!(launched(&of(&both)).unwrap(), Some((&TORCHRUN, 16)));
    }

    #[test]
    fn a_launcher_numbers_the_processes_of_a_machine() {
        assert_eq!(local_rank_of(&of(&[])).unwrap(), 0);
        let slurm = [("SLURM_STEP_NUM_TASKS", "8"), ("SLURM_LOCALID", "3")];
        assert_eq!(local_rank_of(&of(&slurm)).unwrap(), 3);
        for (variables, expected) in [
            (vec![("WORLD_SIZE", "8")], "LOCAL_RANK is not set"),
            (vec![("WORLD_SIZE", "8"), ("SLURM_LOCALID", "0")], "LOCAL_RANK is not set"),
            (vec![("PMI_SIZE", "8"), ("PMI_RANK", "1")], "MPI_LOCALRANKID is not set"),
            (vec![("WORLD_SIZE", "8"), ("LOCAL_RANK", "x")], "LOCAL_RANK is `x`"),
        ] {
            let message = local_rank_of(&of(&variables)).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn rank_0_is_where_torchrun_or_slurm_say() {
        let torchrun = [
            ("WORLD_SIZE", "4"),
            ("RANK", "2"),
            ("MASTER_ADDR", "node7"),
            ("MASTER_PORT", "29500"),
        ];
        let place_of = |launcher, extra: &[_], variables: &[_]| {
            place(&of(&[variables, extra].concat()), launcher, 4)
        };
        let expected = |rank, address: &str, port| Rendezvous {
            rank,
            size: 4,
            address: address.to_owned(),
            port,
        };
        let found = place_of(&TORCHRUN, &[], &torchrun).unwrap();
        assert_eq!(found, expected(2, "node7", 29_500));
        let taken = [("TORCHELASTIC_USE_AGENT_STORE", "True")];
        assert_eq!(place_of(&TORCHRUN, &taken, &torchrun).unwrap().port, 29_501);
        let own = [("CANDLE_AMP_DIST_PORT", "4000"), taken[0]];
        assert_eq!(place_of(&TORCHRUN, &own, &torchrun).unwrap().port, 4000);
        let slurm = [
            ("SLURM_PROCID", "1"),
            ("SLURM_STEP_NODELIST", "gpu[07-09,12],login"),
            ("SLURM_JOB_ID", "1234567"),
        ];
        assert_eq!(place_of(&SLURM, &[], &slurm).unwrap(), expected(1, "gpu07", 24_567));
        assert_eq!(place_of(&SLURM, &torchrun, &slurm).unwrap(), expected(1, "node7", 29_500));
        for (variables, says) in [
            (vec![("RANK", "4"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "1")], "RANK is 4"),
            (vec![("MASTER_ADDR", "a"), ("MASTER_PORT", "1")], "RANK is not set"),
            (vec![("RANK", "0"), ("MASTER_PORT", "1")], "set MASTER_ADDR"),
            (vec![("RANK", "0"), ("MASTER_ADDR", "a")], "MASTER_PORT is not set"),
            (
                vec![("RANK", "0"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "no")],
                "MASTER_PORT is `no`",
            ),
        ] {
            let message = place(&of(&variables), &TORCHRUN, 4).unwrap_err().to_string();
            assert!(message.contains(says), "{message}");
        }
    }

    #[test]
    fn the_first_machine_of_a_list() {
        for (list, expected) in [
            ("gpu1", Some("gpu1")),
            ("gpu1,gpu2", Some("gpu1")),
            ("gpu[007-009,012],login", Some("gpu007")),
            ("rack[2]node,other", Some("rack2node")),
            ("", None),
            ("gpu[1", None),
        ] {
            assert_eq!(first_node(list).as_deref(), expected, "{list}");
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
