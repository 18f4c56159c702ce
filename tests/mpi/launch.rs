//! This program under `mpirun`.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

/// The environment variable with a folder to save to.
pub(crate) const FOLDER: &str = "CANDLE_AMP_TEST_FOLDER";

/// What to start.
pub(crate) struct Launch(Command);

impl Launch {
    pub(crate) fn new(size: usize, role: &str) -> Self {
        let mut command = Command::new("mpirun");
        // More ranks than cores, as root too, and without waiting for a core each.
        command.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n"]);
        command.arg(size.to_string()).arg(std::env::current_exe().expect("this program's path"));
        command
            .args(["rank", role])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        // A backtrace of a panic that is asked for says nothing.
        command.env("RUST_BACKTRACE", "0").env_remove("CANDLE_AMP_DIST_TIMEOUT");
        Self(command)
    }

    pub(crate) fn timeout(mut self, timeout: Duration) -> Self {
        self.0.env("CANDLE_AMP_DIST_TIMEOUT", timeout.as_secs().to_string());
        self
    }

    /// The folder that ranks save to, [`FOLDER`] in their environment.
    pub(crate) fn folder(mut self, folder: &Path) -> Self {
        self.0.env(FOLDER, folder);
        self
    }

    pub(crate) fn start(mut self) -> Running {
        let mut child = self.0.spawn().expect("mpirun starts: scripts/mpi.sh installs it");
        let (sender, lines) = mpsc::channel();
        let streams: [Box<dyn Read + Send>; 2] = [
            Box::new(child.stdout.take().expect("its output")),
            Box::new(child.stderr.take().expect("its errors")),
        ];
        for stream in streams {
            let sender = sender.clone();
            std::thread::spawn(move || {
                for line in BufReader::new(stream).split(b'\n') {
                    let line = line.map(|line| String::from_utf8_lossy(&line).into_owned());
                    if line.is_err() || line.is_ok_and(|line| sender.send(line).is_err()) {
                        break;
                    }
                }
            });
        }
        Running { child, lines, output: String::new() }
    }
}

/// A started `mpirun`.
pub(crate) struct Running {
    child: Child,
    lines: Receiver<String>,
    output: String,
}

/// A `mpirun` that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) success: bool,
    pub(crate) output: String,
}

impl Running {
    /// The id of `mpirun`.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// The processes' ids, by rank, as soon as all have printed theirs.
    pub(crate) fn pids(&mut self, size: usize) -> Vec<u32> {
        let mut pids = vec![None; size];
        while pids.contains(&None) {
            let Ok(line) = self.lines.recv_timeout(Duration::from_secs(60)) else {
                panic!("no ids: {pids:?}\n{}", self.output);
            };
            if let Some((rank, pid)) =
                line.strip_prefix("pid ").and_then(|rest| rest.split_once(' '))
            {
                pids[rank.parse::<usize>().expect("a rank")] = pid.parse().ok();
            }
            self.output += &(line + "\n");
        }
        pids.into_iter().flatten().collect()
    }

    /// Waits for the end of all processes, which must come in time.
    pub(crate) fn end(mut self, time: Duration) -> Ended {
        let began = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("mpirun can be waited for") {
                break status;
            }
            if began.elapsed() > time {
                self.output.extend(self.lines.try_iter().map(|line| line + "\n"));
                panic!("the processes have not ended in {time:?}:\n{}", self.output);
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        self.output.extend(self.lines.iter().map(|line| line + "\n"));
        Ended { success: status.success(), output: std::mem::take(&mut self.output) }
    }
}

impl Drop for Running {
    /// A test that fails leaves no process: `mpirun` ends its own when it is asked to end.
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            signal("TERM", self.id());
            let _ = self.child.wait();
        }
    }
}

impl Ended {
    #[track_caller]
    pub(crate) fn says(&self, text: &str) {
        assert!(self.output.contains(text), "`{text}` is not in:\n{}", self.output);
    }
}

/// Sends a signal to a process.
pub(crate) fn signal(name: &str, pid: u32) {
    let status = Command::new("kill").args(["-s", name, &pid.to_string()]).status();
    assert!(status.expect("kill starts").success(), "no process {pid}");
}

/// Checks that the processes end soon, if they have not.
pub(crate) fn assert_gone(pids: &[u32]) {
    let began = Instant::now();
    let lives = |pid: &&u32| {
        let state = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat"));
        // One that nobody has waited for is a zombie.
        state.is_ok_and(|state| !state.contains(") Z "))
    };
    while let Some(pid) = pids.iter().find(lives) {
        assert!(began.elapsed() < Duration::from_secs(20), "process {pid} outlives mpirun");
        std::thread::sleep(Duration::from_millis(5));
    }
}
