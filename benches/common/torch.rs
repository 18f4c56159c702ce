//! PyTorch, in a process that stays alive between requests.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::workload::Settings;

/// What PyTorch is asked for: the typical time of a workload, or what it needs at most.
#[derive(Debug, Serialize)]
pub struct Request<'a, W> {
    #[serde(flatten)]
    spec: &'a W,
    /// How long to measure.
    #[serde(skip_serializing_if = "Option::is_none")]
    seconds: Option<f64>,
    /// Whether the fastest run is wanted, not the median.
    fastest: bool,
    /// Instead: how many steps, in which memory layout, to give the peak memory of.
    #[serde(skip_serializing_if = "Option::is_none")]
    peak: Option<(usize, &'a str)>,
    /// Instead: of how many steps, in which memory layout, to give the host's part.
    #[serde(skip_serializing_if = "Option::is_none")]
    host: Option<(usize, &'a str)>,
    /// Instead: after how many steps, in which memory layout, to give numbers that are not of time.
    #[serde(skip_serializing_if = "Option::is_none")]
    check: Option<(usize, &'a str)>,
}

impl<'a, W> Request<'a, W> {
    /// The milliseconds of a run.
    pub fn time(spec: &'a W, settings: Settings) -> Self {
        let Settings { seconds, fastest, .. } = settings;
        Self { seconds: Some(seconds), fastest, ..Self::nothing(spec) }
    }

    /// The most bytes that `steps` runs hold.
    pub fn peak(spec: &'a W, steps: usize, layout: &'a str) -> Self {
        Self { peak: Some((steps, layout)), ..Self::nothing(spec) }
    }

    /// The seconds until a step has been asked for, which then still runs: the median of `steps`.
    pub fn host(spec: &'a W, steps: usize, layout: &'a str) -> Self {
        Self { host: Some((steps, layout)), ..Self::nothing(spec) }
    }

    /// What the work gives in `steps` runs, by which to see that it is the same work.
    pub fn check(spec: &'a W, steps: usize, layout: &'a str) -> Self {
        Self { check: Some((steps, layout)), ..Self::nothing(spec) }
    }

    fn nothing(spec: &'a W) -> Self {
        Self { spec, seconds: None, fastest: false, peak: None, host: None, check: None }
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
    /// Milliseconds, seconds or bytes, as was asked for, by memory layout; or what is checked, by name.
    Numbers(BTreeMap<String, f64>),
}

/// A running PyTorch.
#[derive(Debug)]
pub struct Torch {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    version: String,
}

/// The command that runs `script`, a path in this package, and finds what such scripts share.
pub fn command(python: &Path, script: &str) -> Command {
    // Cargo says where the package is now; where it was built need not be there any more.
    let root = std::env::var_os("CARGO_MANIFEST_DIR");
    let root = PathBuf::from(root.unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into()));
    let mut path = OsString::from(root.join("common"));
    if let Some(more) = std::env::var_os("PYTHONPATH") {
        path.push(":");
        path.push(more);
    }
    let mut command = Command::new(python);
    command.arg(root.join(script)).env("PYTHONPATH", path).env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

impl Torch {
    /// Starts `command`, one of [`command`]'s, and waits until PyTorch is loaded.
    ///
    /// # Errors
    ///
    /// Where it does not start, or has no PyTorch.
    pub fn start(mut command: Command) -> Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child =
            command.spawn().with_context(|| format!("starting {:?}", command.get_program()))?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            bail!("no pipes to {:?}", command.get_program());
        };
        let output = BufReader::new(output);
        let mut torch = Self { child, input, output, version: String::new() };
        match torch.read()? {
            Reply::Version { version } => torch.version = version,
            _ => bail!("PyTorch's side did not begin with its version"),
        }
        Ok(torch)
    }

    /// Of its process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// As PyTorch gives it.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Numbers by memory layout, or by name.
    ///
    /// # Errors
    ///
    /// What PyTorch meets.
    pub fn ask<W: Serialize + std::fmt::Debug>(
        &mut self,
        request: &Request<'_, W>,
    ) -> Result<BTreeMap<String, f64>> {
        self.write(&serde_json::to_string(request)?)?;
        match self.read()? {
            Reply::Numbers(numbers) => Ok(numbers),
            Reply::Error { error } => bail!("PyTorch, asked for {request:?}: {error}"),
            Reply::Version { .. } => bail!("PyTorch's side gave its version again"),
        }
    }

    /// Lets it drop what it has built.
    ///
    /// # Errors
    ///
    /// Where it has ended.
    pub fn forget(&mut self) -> Result<()> {
        self.write("null")
    }

    fn write(&mut self, line: &str) -> Result<()> {
        writeln!(self.input, "{line}").context("writing to PyTorch's side")
    }

    fn read(&mut self) -> Result<Reply> {
        let mut line = String::new();
        if self.output.read_line(&mut line).context("reading from PyTorch's side")? == 0 {
            bail!("PyTorch's side ended; is PyTorch installed for that Python?");
        }
        serde_json::from_str(&line).with_context(|| format!("PyTorch's side said {line:?}"))
    }
}

impl Drop for Torch {
    fn drop(&mut self) {
        // It has nothing to save; one that has ended already is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
