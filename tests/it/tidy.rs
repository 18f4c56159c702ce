//! Rules a compiler cannot check.
//!
//! They hold in a checkout and in the unpacked package, which has no history and fewer files.

mod imports;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The project's files, relative to its root: those git tracks, or all where it tracks none, as in
/// an unpacked package.
fn files() -> Vec<PathBuf> {
    let git = Command::new("git").args(["ls-files", "-z"]).current_dir(root()).output();
    let tracked = git.map(|git| git.stdout).unwrap_or_default();
    let mut files: Vec<PathBuf> = String::from_utf8(tracked)
        .expect("paths are UTF-8")
        .split_terminator('\0')
        .map(PathBuf::from)
        .filter(|path| root().join(path).is_file())
        .collect();
    if files.is_empty() {
        walk(root(), &mut files).expect("the project's folder is readable");
    }
    files
}

fn walk(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if !path.is_dir() {
            files.push(path.strip_prefix(root()).expect("a walk stays inside").to_owned());
        } else if !path.ends_with("target") && !path.ends_with(".git") {
            walk(&path, files)?;
        }
    }
    Ok(())
}

/// The library's source files.
fn sources() -> Vec<PathBuf> {
    let mut sources = files();
    sources.retain(|path| path.starts_with("src") && path.extension().is_some_and(|e| e == "rs"));
    assert!(
        sources.iter().any(|path| path.ends_with("lib.rs")),
        "src/lib.rs is not among the files"
    );
    sources
}

/// The lines of `text` with their numbers, line comments cut off.
fn code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines()
        .zip(1..)
        .map(|(line, number)| (number, line.split("//").next().unwrap_or_default()))
}

/// Whether `line` contains `word`, and not as a part of a longer identifier.
fn has_word(line: &str, word: &str) -> bool {
    line.split(|c: char| !c.is_alphanumeric() && c != '_').any(|found| found == word)
}

/// Numbered lines.
type Lines<'a> = Vec<(usize, &'a str)>;

/// Splits what [`code`] gives into what is built into the library, and the items under
/// `#[cfg(test)]`. As rustfmt lays them out, an item ends on the first line of its own indentation
/// that ends as an item does.
fn split_tests(text: &str) -> (Lines<'_>, Lines<'_>) {
    let (mut built, mut tests) = (Lines::new(), Lines::new());
    let mut lines = code(text);
    while let Some((number, line)) = lines.next() {
        if line.trim() != "#[cfg(test)]" {
            built.push((number, line));
            continue;
        }
        let indent = line.len() - line.trim_start().len();
        for (number, line) in lines.by_ref() {
            tests.push((number, line));
            let same = !line.trim().is_empty() && line.len() - line.trim_start().len() == indent;
            if same && line.trim_end().ends_with(['}', ';', ',']) {
                break;
            }
        }
    }
    (built, tests)
}

/// The files and folders of the modules that `path` declares for tests only.
fn test_modules(path: &Path) -> Vec<PathBuf> {
    let is_root = path.ends_with("mod.rs") || path.ends_with("lib.rs");
    let folder = if is_root { path.with_file_name("") } else { path.with_extension("") };
    let text = read(path);
    let (_, tests) = split_tests(&text);
    let names = tests.into_iter().filter_map(|(_, line)| {
        line.trim().strip_suffix(';')?.rsplit_once("mod ").map(|(_, name)| name.to_owned())
    });
    names.flat_map(|name| [folder.join(format!("{name}.rs")), folder.join(name)]).collect()
}

/// Fails with every offence, each a place, and the rule they break.
#[track_caller]
fn assert_none(offences: Vec<String>, rule: &str) {
    assert!(offences.is_empty(), "{rule}:\n  {}", offences.join("\n  "));
}

/// The lines of the library's code that break a rule.
fn offences(breaks: impl Fn(&Path, &str) -> bool) -> Vec<String> {
    let mut offences = Vec::new();
    for path in sources() {
        for (number, line) in code(&read(&path)).filter(|(_, line)| breaks(&path, line)) {
            offences.push(format!("{}:{number}: {}", path.display(), line.trim()));
        }
    }
    offences
}

#[test]
fn the_changelog_has_this_version_once() {
    let heading = format!("## {}", env!("CARGO_PKG_VERSION"));
    let is_heading = |line: &&str| line.split(" - ").next() == Some(heading.as_str());
    let count = read("CHANGELOG.md").lines().filter(is_heading).count();
    assert_eq!(count, 1, "CHANGELOG.md has the heading `{heading}` {count} times, not once");
}

#[test]
fn the_readme_has_the_two_commands() {
    let readme = read("README.md");
    let mut fenced = false;
    let in_fences: Vec<&str> = readme
        .lines()
        .filter(|line| {
            let fence = line.starts_with("```");
            fenced ^= fence;
            fenced && !fence
        })
        .map(|line| line.split(" #").next().unwrap_or_default().trim_end())
        .collect();
    for command in ["cargo run --release --example cifar10", "cargo test"] {
        let found = in_fences.contains(&command);
        assert!(found, "README.md has no line `{command}` in a fenced block");
    }
}

/// The versions of `name` in a lock file.
fn locked(lock: &str, name: &str) -> Vec<String> {
    let heading = format!("[[package]]\nname = \"{name}\"\nversion = \"");
    let version = |(at, _)| {
        let rest: &str = &lock[at + heading.len()..];
        rest.split('"').next().unwrap_or_default().to_owned()
    };
    lock.match_indices(&heading).map(version).collect()
}

/// The version of `dependency` that `package` asks for in its manifest.
fn required(packages: &serde_json::Value, package: &str, dependency: &str) -> String {
    let named = |values: &serde_json::Value, name: &str| {
        let mut all = values.as_array().into_iter().flatten();
        all.find(|value| value["name"] == name && value["kind"].is_null()).cloned()
    };
    let package = named(packages, package).unwrap_or_else(|| panic!("cargo knows no {package}"));
    let found = named(&package["dependencies"], dependency);
    let found = found.unwrap_or_else(|| panic!("{} has no {dependency}", package["name"]));
    found["req"].as_str().expect("a requirement is text").to_owned()
}

/// The kernels work on candle's streams and tensors, and so have to mean the same cudarc as candle.
#[test]
fn cudarc_is_the_one_that_candle_has() {
    for lock in files().iter().filter(|path| path.ends_with("Cargo.lock")) {
        let versions = locked(&read(lock), "cudarc");
        assert!(versions.len() <= 1, "{}: cudarc {versions:?}", lock.display());
    }
    let lock = read("Cargo.lock");
    assert_eq!(locked(&lock, "cudarc").len(), 1, "Cargo.lock has no cudarc");
    assert_eq!(locked(&lock, "candle-core").len(), 1, "Cargo.lock has not one candle-core");

    // For this platform alone, so that cargo downloads nothing that the tests were not built of.
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let rustc = Command::new("rustc").arg("-vV").output().expect("rustc runs").stdout;
    let rustc = String::from_utf8(rustc).expect("rustc writes UTF-8");
    let host = rustc.lines().find_map(|line| line.strip_prefix("host: ")).expect("a host");
    let metadata = Command::new(cargo)
        .args(["metadata", "--locked", "--format-version", "1", "--filter-platform", host])
        .current_dir(root())
        .output()
        .expect("cargo runs");
    let errors = String::from_utf8_lossy(&metadata.stderr);
    assert!(metadata.status.success(), "cargo metadata: {errors}");
    let metadata: serde_json::Value =
        serde_json::from_slice(&metadata.stdout).expect("cargo metadata writes JSON");
    let packages = &metadata["packages"];
    let (ours, candles) =
        (required(packages, "candle-amp", "cudarc"), required(packages, "candle-core", "cudarc"));
    assert_eq!(ours, candles, "Cargo.toml requires another cudarc than candle-core does");
}

#[test]
fn unsafe_is_only_in_the_kernels() {
    let kernels = Path::new("src").join("kernels");
    let offences = offences(|path, line| !path.starts_with(&kernels) && has_word(line, "unsafe"));
    assert_none(offences, "`unsafe` outside src/kernels");
}

#[test]
fn the_cuda_feature_is_only_in_the_kernels_root() {
    let kernels = Path::new("src").join("kernels").join("mod.rs");
    let offences = offences(|path, line| {
        path != kernels && line.replace(char::is_whitespace, "").contains("feature=\"cuda\"")
    });
    assert_none(offences, "`feature = \"cuda\"` outside src/kernels/mod.rs");
}

#[test]
fn the_library_does_not_unwrap() {
    let sources = sources();
    let for_tests: Vec<PathBuf> = sources.iter().flat_map(|path| test_modules(path)).collect();
    let mut offences = Vec::new();
    for path in sources.iter().filter(|path| !for_tests.iter().any(|test| path.starts_with(test))) {
        let text = read(path);
        let (built, _) = split_tests(&text);
        for (number, line) in built.into_iter().filter(|(_, line)| line.contains(".unwrap()")) {
            offences.push(format!("{}:{number}: {}", path.display(), line.trim()));
        }
    }
    assert_none(
        offences,
        "`.unwrap()` outside tests: return the error, or `expect` with the reason",
    );
}

#[test]
fn no_source_file_is_over_600_lines() {
    let is_source = |path: &Path| {
        path.extension().is_some_and(|e| ["rs", "cu", "cuh", "py"].iter().any(|s| e == *s))
    };
    let long = files().into_iter().filter(|path| is_source(path)).filter_map(|path| {
        let lines = read(&path).lines().count();
        (lines > 600).then(|| format!("{}: {lines} lines", path.display()))
    });
    assert_none(long.collect(), "source files over 600 lines");
}

#[test]
fn no_file_names_a_place_on_somebody_s_machine() {
    let places = ["work", "root", "home"].map(|folder| format!("/{folder}/"));
    let mut offences = Vec::new();
    for path in files() {
        let bytes = fs::read(root().join(&path)).expect("a listed file is readable");
        let Ok(text) = String::from_utf8(bytes) else { continue }; // an image, an archive
        for (line, number) in text.lines().zip(1..) {
            if places.iter().any(|place| line.contains(place.as_str())) {
                offences.push(format!("{}:{number}: {}", path.display(), line.trim()));
            }
        }
    }
    assert_none(offences, "absolute paths of one machine");
}

/// candle's `bail!`, `msg` and `wrap` end a message in a backtrace where `RUST_BACKTRACE` is set.
#[test]
fn every_record_is_in_the_list_of_records() {
    let folder = Path::new("benches/record");
    let records = files().into_iter().filter(|path| path.starts_with(folder));
    let records: Vec<_> =
        records.filter(|path| path.extension().is_some_and(|e| e == "tsv")).collect();
    if records.is_empty() {
        return; // the package has none
    }
    let list = read(folder.join("README.md"));
    let missing = records.iter().map(|path| path.display().to_string());
    let missing = missing.filter(|path| {
        let name = path.rsplit('/').next().unwrap_or(path);
        !list.contains(&format!("({name})"))
    });
    assert_none(missing.collect(), "benches/record/README.md lists every record");
}

#[test]
fn errors_are_made_without_backtraces() {
    let breaks = |path: &Path, line: &str| {
        let own = line.contains("crate::error") || path.ends_with("error/mod.rs");
        let imported = has_word(line, "bail") && !line.contains("bail!") && !own;
        let named = ["candle_core::bail!", "Error::msg(", "Error::wrap("];
        imported || named.iter().any(|name| line.contains(name))
    };
    assert_none(offences(breaks), "use `crate::error::bail`, `Error::Msg` and `Error::Wrapped`");
}

/// Each needs a reason why a caller cannot hand on what it holds.
#[test]
fn design_md_explains_the_statics_of_autograd() {
    let mut found = Vec::new();
    for path in sources().iter().filter(|path| path.starts_with("src/autograd")) {
        let file = path.file_name().expect("a file").to_string_lossy().into_owned();
        for (_, line) in code(&read(path)) {
            let declared = line.trim_start().trim_start_matches("pub(super) ");
            if let Some((name, _)) =
                declared.strip_prefix("static ").and_then(|d| d.split_once(':'))
            {
                found.push((file.clone(), name.to_owned()));
            }
        }
    }
    let design = read("docs/design.md");
    let (_, section) = design
        .split_once("### Which thread-locals and statics has `autograd`")
        .expect("the section");
    let rows = section.lines().take_while(|line| !line.starts_with("###"));
    let mut explained: Vec<_> = rows
        .filter_map(|row| row.strip_prefix("| `")?.split_once("`, `"))
        .filter_map(|(file, rest)| Some((file.to_owned(), rest.split_once('`')?.0.to_owned())))
        .collect();
    found.sort();
    explained.sort();
    assert_eq!(found, explained, "statics in src/autograd, and those in docs/design.md");
}
