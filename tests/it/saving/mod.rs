//! Checkpoints: resumed bit for bit, never half written, never trusted.

mod corpus;
mod crash;
mod damage;
mod every;
mod folder;
mod header;
mod parts;
mod ranked;
mod recovery;
mod resume;
mod signed;
mod small;
mod stray;
mod values;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use signed::signed;

/// A folder of a test's own, gone when the test is.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("candle-amp-test-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Tells a test that is one half of another where to work.
const WORKPLACE: &str = "CANDLE_AMP_TEST_WORKPLACE";

/// The ignored test `name` of this binary, to run in a process of its own.
fn elsewhere(name: &str, folder: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", name]).env(WORKPLACE, folder);
    command
}

fn workplace() -> PathBuf {
    std::env::var(WORKPLACE).expect("this is the other half of a test, which runs it").into()
}

/// Bytes that this process has, by a line of its `/proc/self/status`; none where there is no such
/// file.
fn memory(line: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let found = status.lines().find_map(|found| found.strip_prefix(line));
    let kib = found.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}
