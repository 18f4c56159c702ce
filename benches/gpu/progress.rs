//! Where a run is, so that another process can go on with it.
//!
//! An illegal access spoils the device for the whole process, and some errors end it. What comes after must not be lost.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::Duration;

use anyhow::{Context, Result};

/// What the file says when nothing is left.
const END: &str = "end";

/// How many groups of rows have begun, in a file if there is one.
#[derive(Debug)]
pub(crate) struct Progress {
    file: Option<PathBuf>,
    next: usize,
    begun: bool,
}

impl Progress {
    /// As an earlier process left it in `file`, or at the beginning.
    pub(crate) fn of(file: Option<&Path>) -> Result<Self> {
        let text = file.and_then(|file| fs::read_to_string(file).ok());
        let next = match text.as_deref() {
            None => 0,
            Some(END) => usize::MAX,
            Some(text) => {
                text.parse().with_context(|| format!("--progress: {text:?} is no number"))?
            }
        };
        let this = Self { file: file.map(Path::to_path_buf), next, begun: text.is_some() };
        if !this.begun {
            this.write("0")?;
        }
        Ok(this)
    }

    /// Whether an earlier process has begun.
    pub(crate) fn has_begun(&self) -> bool {
        self.begun
    }

    /// The first group that no process has begun.
    pub(crate) fn next(&self) -> usize {
        self.next
    }

    /// Group `number` is begun: a process that goes on goes on after it.
    pub(crate) fn begin(&mut self, number: usize) -> Result<()> {
        self.next = number + 1;
        self.write(&self.next.to_string())
    }

    /// Nothing is left.
    pub(crate) fn end(&self) -> Result<()> {
        self.write(END)
    }

    fn write(&self, text: &str) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        fs::write(file, text).with_context(|| format!("--progress {}", file.display()))
    }
}

/// Ends the process when a group of rows takes too long: a kernel that hangs cannot be stopped in another way. Those of
/// PyTorch end with it, so that none is left beside what is measured next.
#[derive(Debug)]
pub(crate) struct Watch(Option<Sender<()>>);

impl Watch {
    pub(crate) fn new(seconds: Option<u64>, torch: Vec<u32>) -> Self {
        let watch = |seconds| {
            let torch: Vec<String> = torch.iter().map(u32::to_string).collect();
            let (sender, receiver) = mpsc::channel();
            let limit = Duration::from_secs(seconds);
            std::thread::spawn(move || {
                loop {
                    match receiver.recv_timeout(limit) {
                        Ok(()) => {}
                        Err(RecvTimeoutError::Disconnected) => return,
                        Err(RecvTimeoutError::Timeout) => {
                            eprintln!("error: a group of rows took more than {seconds} seconds");
                            if !torch.is_empty() {
                                // One that has ended already is as good.
                                let _ = Command::new("kill").arg("-9").args(&torch).status();
                            }
                            std::process::exit(124);
                        }
                    }
                }
            });
            sender
        };
        Self(seconds.map(watch))
    }

    /// Another group begins.
    pub(crate) fn group(&self) {
        if let Some(sender) = &self.0 {
            let _ = sender.send(()); // the thread outlives all groups
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A group that ends the process is not begun again, and those before it are not repeated.
    #[test]
    fn a_process_goes_on_after_the_last_group_that_was_begun() -> Result<()> {
        let file = std::env::temp_dir().join(format!("candle-amp-progress-{}", std::process::id()));
        let _ = fs::remove_file(&file);
        let mut first = Progress::of(Some(&file))?;
        assert_eq!((first.has_begun(), first.next()), (false, 0));
        // Ended before any group: all of them are left.
        let mut again = Progress::of(Some(&file))?;
        assert_eq!((again.has_begun(), again.next()), (true, 0));
        first.begin(0)?;
        again.begin(1)?;
        let third = Progress::of(Some(&file))?;
        assert_eq!((third.has_begun(), third.next()), (true, 2));
        third.end()?;
        assert_eq!(Progress::of(Some(&file))?.next(), usize::MAX);
        fs::write(&file, "what")?;
        let error = Progress::of(Some(&file)).expect_err("no number").to_string();
        assert_eq!(error, "--progress: \"what\" is no number");
        fs::remove_file(&file)?;
        Ok(())
    }
}
