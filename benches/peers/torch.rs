//! PyTorch, in a process that stays alive between requests.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::workload::Spec;

/// What PyTorch takes memory from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Allocator {
    /// glibc's, as it is: large buffers go back to the kernel when they are freed.
    Default,
    /// glibc's, told to keep them, as the allocator on this side does.
    Recycling,
}

#[derive(Debug, Serialize)]
pub(crate) struct Request<'a> {
    #[serde(flatten)]
    spec: &'a Spec,
    /// How long to measure.
    #[serde(skip_serializing_if = "Option::is_none")]
    seconds: Option<f64>,
    /// Whether the fastest run is wanted, not the median.
    fastest: bool,
    /// Instead: how many steps, in which memory layout, to give the peak memory of.
    #[serde(skip_serializing_if = "Option::is_none")]
    steps: Option<(usize, &'a str)>,
}

impl<'a> Request<'a> {
    pub(crate) fn time(spec: &'a Spec, seconds: f64, fastest: bool) -> Self {
        Self { spec, seconds: Some(seconds), fastest, steps: None }
    }

    pub(crate) fn peak(spec: &'a Spec, steps: usize, layout: &'a str) -> Self {
        Self { spec, seconds: None, fastest: false, steps: Some((steps, layout)) }
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Reply {
    Error {
        error: String,
    },
    Version {
        version: String,
    },
    /// Milliseconds, or bytes, by memory layout.
    Numbers(BTreeMap<String, f64>),
}

#[derive(Debug)]
pub(crate) struct Torch {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    version: String,
}

impl Torch {
    pub(crate) fn start(python: &Path, threads: usize, allocator: Allocator) -> Result<Self> {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/peers/peers.py");
        let threads = threads.to_string();
        let mut command = Command::new(python);
        command.args([script, &threads]).stdin(Stdio::piped()).stdout(Stdio::piped());
        command.env("OMP_NUM_THREADS", &threads).env("MKL_NUM_THREADS", &threads);
        if allocator == Allocator::Recycling {
            command.env("MALLOC_MMAP_THRESHOLD_", "4294967296");
            command.env("MALLOC_TRIM_THRESHOLD_", "8589934592");
        }
        let mut child =
            command.spawn().with_context(|| format!("starting {}", python.display()))?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            bail!("no pipes to {}", python.display());
        };
        let output = BufReader::new(output);
        let mut torch = Self { child, input, output, version: String::new() };
        match torch.read()? {
            Reply::Version { version } => torch.version = version,
            _ => bail!("peers.py did not begin with its version"),
        }
        Ok(torch)
    }

    pub(crate) fn version(&self) -> &str {
        &self.version
    }

    /// Numbers by memory layout.
    pub(crate) fn ask(&mut self, request: &Request<'_>) -> Result<BTreeMap<String, f64>> {
        self.write(&serde_json::to_string(request)?)?;
        match self.read()? {
            Reply::Numbers(numbers) => Ok(numbers),
            Reply::Error { error } => bail!("PyTorch, asked for {request:?}: {error}"),
            Reply::Version { .. } => bail!("peers.py gave its version, not what it was asked for"),
        }
    }

    /// Lets it drop what it has built.
    pub(crate) fn forget(&mut self) -> Result<()> {
        self.write("null")
    }

    fn write(&mut self, line: &str) -> Result<()> {
        writeln!(self.input, "{line}").context("writing to peers.py")
    }

    fn read(&mut self) -> Result<Reply> {
        let mut line = String::new();
        if self.output.read_line(&mut line).context("reading from peers.py")? == 0 {
            bail!("peers.py ended; is PyTorch installed for that Python?");
        }
        serde_json::from_str(&line).with_context(|| format!("peers.py said {line:?}"))
    }
}

impl Drop for Torch {
    fn drop(&mut self) {
        // It has nothing to save; one that has ended already is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
