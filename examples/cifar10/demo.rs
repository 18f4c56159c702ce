//! What the command trains if it is given no options.

use std::{
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use crate::{common::options::Precision, options::Options, ranks};

/// True if `arguments` choose nothing: there is none, or only `--smoke`.
pub(crate) fn chooses_nothing(arguments: &[OsString]) -> bool {
    arguments.iter().all(|argument| argument == "--smoke")
}

/// Compares F32 with BF16, and writes a new folder in cargo's.
pub(crate) fn options(options: &Options) -> Result<Options> {
    let out = ranks::from_first(|| {
        let program = std::env::current_exe().context("cannot tell where cargo's folder is")?;
        let folder = new_folder(&target_folder(&program).join("cifar10"))?;
        folder.into_os_string().into_string().ok().context("cargo's folder is not UTF-8")
    })?;
    let out = Some(out.into());
    Ok(Options { compare: vec![Precision::F32, Precision::Bf16], out, ..options.clone() })
}

/// The folder that cargo built `program` in, which it marks; the system's for temporary files if
/// cargo did not.
fn target_folder(program: &Path) -> PathBuf {
    let marked = program.ancestors().find(|folder| folder.join("CACHEDIR.TAG").is_file());
    marked.map_or_else(std::env::temp_dir, Path::to_owned)
}

/// Makes the first of `run-1`, `run-2` ... in `parent` that is not there.
fn new_folder(parent: &Path) -> Result<PathBuf> {
    fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
    for number in 1u64.. {
        let folder = parent.join(format!("run-{number}"));
        match fs::create_dir(&folder) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => {
                made.with_context(|| format!("cannot make {}", folder.display()))?;
                return Ok(folder);
            }
        }
    }
    anyhow::bail!("{}: no number is left for a run", parent.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_option_but_smoke_chooses() {
        let chooses_nothing = |arguments: &str| {
            let arguments = arguments.split_whitespace().map(OsString::from);
            super::chooses_nothing(&arguments.collect::<Vec<_>>())
        };
        assert!(chooses_nothing("") && chooses_nothing("--smoke"));
        assert!(!chooses_nothing("--precision bf16") && !chooses_nothing("--smoke --seed 0"));
    }

    #[test]
    fn the_demo_goes_to_a_new_folder_of_cargo_s() -> Result<()> {
        let target = std::env::temp_dir().join(format!("candle-amp-demo-{}", std::process::id()));
        let program = target.join("release").join("examples").join("cifar10");
        assert_eq!(target_folder(&program), std::env::temp_dir(), "not marked");
        fs::create_dir_all(&target)?;
        fs::write(target.join("CACHEDIR.TAG"), "")?;
        assert_eq!(target_folder(&program), target);
        let parent = target.join("cifar10");
        assert_eq!(new_folder(&parent)?, parent.join("run-1"));
        assert_eq!(new_folder(&parent)?, parent.join("run-2"));
        fs::remove_dir_all(&target)?;
        Ok(())
    }
}
