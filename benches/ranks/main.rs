//! A step of data parallel training beside PyTorch's `DistributedDataParallel` on gloo: two ranks of one thread each, and
//! either side alone on two threads. See docs/distributed.md.
//!
//! ```text
//! cargo build --release --manifest-path benches/Cargo.toml --features mpi --bin ranks
//! benches/target/release/ranks --python python3
//! ```

mod step;

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use candle_amp_benches::measure::median;
use clap::Parser;

use step::Network;

/// Times steps in turns: this crate and PyTorch, as two ranks and alone.
#[derive(Debug, Parser)]
struct Options {
    /// Which network [default: all]
    #[arg(long, value_enum)]
    network: Vec<Network>,

    /// Steps of each process that are measured, after a fifth as many that are not
    #[arg(long, default_value_t = 30)]
    steps: usize,

    /// How often each is started
    #[arg(long, default_value_t = 1)]
    rounds: usize,

    /// A Python with PyTorch [default: this crate alone]
    #[arg(long)]
    python: Option<PathBuf>,

    /// Threads of either side alone, and ranks of one thread
    #[arg(long, default_value_t = 2)]
    threads: usize,

    /// Be one of the processes that are measured
    #[arg(long, hide = true)]
    measure: bool,
}

/// What is measured, in the order of a row.
const COLUMNS: [&str; 4] = ["ours, ranks", "ours, alone", "DDP, ranks", "PyTorch, alone"];

fn main() -> Result<()> {
    let options = Options::parse();
    let networks = match options.network.as_slice() {
        [] => vec![Network::Resnet20, Network::Mlp],
        chosen => chosen.to_vec(),
    };
    if options.measure {
        return step::measure(networks[0], options.steps);
    }
    println!("network\t{}\tranks, ratio\talone, ratio", COLUMNS.join("\t"));
    for network in networks {
        let mut times = [const { Vec::new() }; 4];
        for _ in 0..options.rounds.max(1) {
            for (column, times) in times.iter_mut().enumerate() {
                if let Some(command) = options.command(network, column)? {
                    times.push(milliseconds(command)?);
                }
            }
        }
        let [ranks, alone, ddp, torch] = times.map(median);
        println!(
            "{}\t{ranks:.1}\t{alone:.1}\t{ddp:.1}\t{torch:.1}\t{:.2}\t{:.2}",
            network.name(),
            ranks / ddp,
            alone / torch
        );
    }
    Ok(())
}

impl Options {
    /// What measures this column, unless there is no PyTorch.
    fn command(&self, network: Network, column: usize) -> Result<Option<Command>> {
        let (is_ours, is_alone) = (column < 2, column % 2 == 1);
        let ranks = self.threads.to_string();
        let mut command = match (&self.python, is_ours, is_alone) {
            (_, true, true) => Command::new(std::env::current_exe()?),
            (_, true, false) => {
                let mut command = Command::new("mpirun");
                command.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]);
                command.args(["-n", &ranks]).arg(std::env::current_exe()?);
                command
            }
            (None, false, _) => return Ok(None),
            (Some(python), false, is_alone) => {
                let mut command = Command::new(python);
                if !is_alone {
                    command.args(["-m", "torch.distributed.run", "--standalone"]);
                    command.args(["--nproc-per-node", &ranks]);
                }
                let script = concat!(env!("CARGO_MANIFEST_DIR"), "/ranks/ddp.py");
                command.arg(script);
                command
            }
        };
        let threads = if is_alone { &ranks } else { "1" };
        command.env("RAYON_NUM_THREADS", threads).env("OMP_NUM_THREADS", threads);
        command.args(["--measure", "--network", network.name()]);
        command.args(["--steps", &self.steps.to_string()]);
        Ok(Some(command))
    }
}

/// The time of a step that the processes print.
fn milliseconds(mut command: Command) -> Result<f64> {
    let output = command.stderr(Stdio::inherit()).output().context("a process to measure")?;
    ensure!(output.status.success(), "{command:?}: {}", output.status);
    let text = String::from_utf8_lossy(&output.stdout);
    let time = text.lines().find_map(|line| line.strip_prefix("milliseconds "));
    Ok(time.with_context(|| format!("no time in {text}"))?.parse()?)
}
