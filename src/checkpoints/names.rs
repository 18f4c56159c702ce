//! The names of the files in a folder of checkpoints.

use std::path::{Path, PathBuf};

/// The name of the checkpoint of a step.
pub(super) fn file(step: u64) -> String {
    format!("step-{step:08}.safetensors")
}

/// The step whose checkpoint has that name: no name but the one that [`file`] gives it.
pub(super) fn step(name: &str) -> Option<u64> {
    let step = name.strip_prefix("step-")?.strip_suffix(".safetensors")?.parse().ok()?;
    (file(step) == name).then_some(step)
}

/// The name that a file has while it is written, by that process, as its `number`th.
pub(super) fn temporary(name: &str, process: u32, number: u64) -> String {
    format!(".{name}.{process}.{number}.tmp")
}

/// Whether a checkpoint had that name while it was written.
pub(super) fn is_temporary(name: &str) -> bool {
    let parts = || {
        let rest = name.strip_prefix('.')?.strip_suffix(".tmp")?;
        let (rest, number) = rest.rsplit_once('.')?;
        let (file, process) = rest.rsplit_once('.')?;
        step(file)?;
        Some((file, process.parse().ok()?, number.parse().ok()?))
    };
    parts().is_some_and(|(file, process, number)| temporary(file, process, number) == name)
}

/// A name that is free for a damaged file: what was set aside before stays.
pub(super) fn aside(path: &Path) -> PathBuf {
    let name = |number: u32| {
        let mut name = path.as_os_str().to_owned();
        name.push(".damaged");
        if number > 1 {
            name.push(format!("-{number}"));
        }
        PathBuf::from(name)
    };
    let free = |path: &PathBuf| path.symlink_metadata().is_err();
    (1..1000).map(name).find(free).unwrap_or_else(|| name(1000))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_names_that_are_given_are_read() {
        for at in [0, 5, 99_999_999, 100_000_000, u64::MAX] {
            assert_eq!(step(&file(at)), Some(at));
            assert!(is_temporary(&temporary(&file(at), 17, 3)));
        }
        for name in ["step-5", "step-+0000005", "step-000000005", "step- 0000005", "step-"] {
            assert_eq!(step(&format!("{name}.safetensors")), None, "{name}");
            assert!(!is_temporary(&temporary(&format!("{name}.safetensors"), 1, 1)), "{name}");
        }
        let huge = "step-99999999999999999999.safetensors";
        assert_eq!((step(huge), step("step-00000005.safetensors.damaged")), (None, None));
        for name in [".step-notes.tmp", ".step-00000005.safetensors.tmp", ".step-.1.1.tmp"] {
            assert!(!is_temporary(name), "{name}");
        }
    }
}
