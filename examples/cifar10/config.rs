//! Options from a TOML file, and to one.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};
use clap::{
    Arg, ArgAction, ArgMatches, Command, CommandFactory, FromArgMatches, error::ErrorKind,
    parser::ValueSource, value_parser,
};
use toml::{Table, Value};

use crate::{
    common::{exit::one_line, options::Usage},
    options::Options,
    report,
};

/// Those that say what to do with a run, not what it is.
const NOT_IN_FILES: [&str; 8] =
    ["list-models", "out", "resume", "profile", "trace", "config", "save-config", "help"];

/// Those that a run may go on with differently. Images in another place are compared with the old ones.
const FREE: [&str; 2] = ["data", "report"];

/// What follows the options in the folder of a run: their checksum.
const SEAL: &str =
    "# CRC-32 of the lines above, by which --resume knows that they are those it began with: ";

/// Where the folder of `--out` has the options.
pub(crate) fn file_in(dir: &Path) -> PathBuf {
    dir.join("options.toml")
}

/// The options of a command line, the program's name first, and of the files that it names.
pub(crate) fn parse(line: impl IntoIterator<Item = OsString>) -> Result<Options> {
    let line: Vec<OsString> = line.into_iter().collect();
    let given = matches(&line)?;
    let alone = Options::from_arg_matches(&given)?;
    let path = match (&alone.config, &alone.resume) {
        (Some(path), _) => path.clone(),
        (None, Some(dir)) => file_in(dir),
        (None, None) => return Ok(alone),
    };
    let file = read(&path, alone.resume.as_deref())?;
    // By itself first: what is wrong with it is not the command line's fault.
    let of_file = arguments(&file, &path, |_| true)?;
    let old = matches(&[vec![OsString::from("cifar10")], of_file].concat())
        .and_then(|found| Options::from_arg_matches(&found));
    let old = old.map_err(|error| Usage(format!("{}: {}", path.display(), one_line(&error))))?;

    let mut all: Vec<OsString> = line.first().cloned().into_iter().collect();
    let command = Options::command();
    all.extend(arguments(&file, &path, |arg| !is_overridden(&command, arg, &given))?);
    all.extend(line.into_iter().skip(1));
    let mut options = Options::from_arg_matches(&matches(&all)?)?;
    if let Some(dir) = &alone.resume {
        check_same_run(dir, &table(&old)?, &table(&options)?)?;
        options.out = Some(dir.clone());
    }
    Ok(options)
}

/// What clap finds, where `--smoke=false` says no as `--smoke` says yes.
fn matches(line: &[OsString]) -> clap::error::Result<ArgMatches> {
    let yes_or_no = |arg: Arg| match arg.get_action() {
        ArgAction::SetTrue => arg
            .action(ArgAction::Set)
            .num_args(0..=1)
            .require_equals(true)
            .default_value("false")
            .default_missing_value("true")
            .value_parser(value_parser!(bool)),
        _ => arg,
    };
    let found = Options::command().mut_args(yes_or_no).try_get_matches_from(line);
    match found {
        // Help shows them without a value, as they are meant.
        Err(error) if error.kind() == ErrorKind::DisplayHelp => {
            Options::command().try_get_matches_from(line)
        }
        found => found,
    }
}

/// Whether the command line has an option, or one that it does not go with.
fn is_overridden(command: &Command, arg: &Arg, given: &ArgMatches) -> bool {
    let conflict = |a: &Arg, b: &Arg| {
        command.get_arg_conflicts_with(a).iter().any(|other| other.get_id() == b.get_id())
    };
    let mut all = command.get_arguments().filter(|other| {
        given.value_source(other.get_id().as_str()) == Some(ValueSource::CommandLine)
    });
    all.any(|other| other == arg || conflict(other, arg) || conflict(arg, other))
}

fn read(path: &Path, resumed: Option<&Path>) -> Result<Table> {
    let text = match (fs::read_to_string(path), resumed) {
        (Ok(text), _) => text,
        (Err(error), Some(dir)) => {
            let why = match error.kind() {
                io::ErrorKind::NotFound if !dir.exists() => "no such folder".to_owned(),
                io::ErrorKind::NotFound => {
                    "no folder of --out, for it has no options.toml".to_owned()
                }
                _ if dir.is_file() => "this is a file, no folder of --out".to_owned(),
                _ => format!("cannot read options.toml: {error}"),
            };
            bail!(Usage(format!("--resume {}: {why}", dir.display())))
        }
        (Err(error), None) => bail!(Usage(format!("--config {}: {error}", path.display()))),
    };
    if let Some(dir) = resumed.filter(|_| !is_sealed(&text)) {
        bail!(Usage(format!(
            "--resume {}: options.toml was changed, and a run goes on with the options it began with; to train with \
             others, give the file to --config and another folder to --out",
            dir.display()
        )));
    }
    text.parse().map_err(|error: toml::de::Error| {
        let number = error.span().map(|span| 1 + text[..span.start].matches('\n').count());
        let place = number.map_or(String::new(), |number| format!("line {number}: "));
        let line = number.and_then(|number| text.lines().nth(number - 1)).unwrap_or_default();
        // The parser takes a value that is missing for a text without quotes.
        let what = match line.split('#').next().and_then(|line| line.split_once('=')) {
            Some((key, value)) if value.trim().is_empty() => format!("{} has no value", key.trim()),
            _ => error.message().replace('\n', ", "),
        };
        Usage(format!("{}: {place}{what}", path.display())).into()
    })
}

/// The options of a file as those of a command line, those that `wanted` says.
fn arguments(file: &Table, path: &Path, wanted: impl Fn(&Arg) -> bool) -> Result<Vec<OsString>> {
    let (command, shown) = (Options::command(), path.display());
    let mut arguments = Vec::new();
    for (key, value) in file {
        let known = || command.get_arguments().filter_map(|arg| Some((arg.get_long()?, arg)));
        let known = || known().filter(|(name, _)| !NOT_IN_FILES.contains(name));
        ensure!(
            !NOT_IN_FILES.contains(&key.as_str()),
            Usage(format!("{shown}: {key} belongs on the command line"))
        );
        let Some((_, arg)) = known().find(|(name, _)| name == key) else {
            let near =
                known().map(|(name, _)| (strsim::damerau_levenshtein(name, key), name)).min();
            let near = near.map_or("", |(_, name)| name);
            bail!(Usage(format!("{shown}: no option is called {key}; the nearest is {near}")));
        };
        let text = text(value).ok_or_else(|| {
            let kind = value.type_str();
            Usage(format!("{shown}: {key} is of type {kind}, expected a text, number or yes or no"))
        })?;
        ensure!(
            !text.is_empty() || value.is_array(),
            Usage(format!("{shown}: {key} is empty; leave it out for its default"))
        );
        if wanted(arg) && !text.is_empty() {
            arguments.push(format!("--{key}={text}").into());
        }
    }
    Ok(arguments)
}

/// A value as it is spelt on a command line.
fn text(value: &Value) -> Option<String> {
    Some(match value {
        Value::String(text) => text.clone(),
        Value::Integer(number) => number.to_string(),
        Value::Float(number) => number.to_string(),
        Value::Boolean(yes) => yes.to_string(),
        Value::Array(list) => list.iter().map(text).collect::<Option<Vec<_>>>()?.join(","),
        Value::Datetime(_) | Value::Table(_) => return None,
    })
}

/// The options that make a run what it is, by name: those of a file.
pub(crate) fn table(options: &Options) -> Result<Table> {
    let mut table = Table::try_from(options)?;
    // What does not go together: the default of one with the other.
    table.remove(if options.compare.is_empty() { "compare" } else { "precision" });
    Ok(table)
}

/// What ranks that train one model must have in common. Images in another place are compared themselves.
pub(crate) fn facts(options: &Options) -> Result<BTreeMap<String, String>> {
    let Options { list_models, out, resume, profile, trace, save_config, .. } = options;
    let named = table(options)?.into_iter();
    let named = named.filter(|(key, _)| !FREE.contains(&key.as_str()));
    let mut facts: BTreeMap<_, _> =
        named.map(|(key, value)| (format!("--{key}"), text(&value).unwrap_or_default())).collect();
    let path = |path: &Option<PathBuf>| {
        path.as_ref().map_or("none".to_owned(), |path| path.display().to_string())
    };
    for (key, value) in [
        ("list-models", list_models.to_string()),
        ("out", path(out)),
        ("resume", path(resume)),
        ("profile", profile.is_some().to_string()),
        ("trace", trace.to_string()),
        ("save-config", save_config.is_some().to_string()),
    ] {
        facts.insert(format!("--{key}"), value);
    }
    Ok(facts)
}

/// Whether a file of [`save_sealed`] is as it was written.
fn is_sealed(text: &str) -> bool {
    text.rsplit_once(SEAL).is_some_and(|(text, sum)| sum.trim_end() == checksum(text))
}

fn checksum(text: &str) -> String {
    format!("{:08x}", crc32fast::hash(text.as_bytes()))
}

/// Writes them to `path`.
pub(crate) fn save(options: &Options, path: &Path) -> Result<()> {
    report::write(path, to_toml(options)?)
}

/// Writes them to the folder of a run, which goes on with these and no others.
pub(crate) fn save_sealed(options: &Options, path: &Path) -> Result<()> {
    let text = to_toml(options)?;
    report::write(path, format!("{text}{SEAL}{}\n", checksum(&text)))
}

fn to_toml(options: &Options) -> Result<String> {
    let mut table = table(options)?;
    if let Some(data) = options.data.as_ref().filter(|data| data.exists() && !options.downloads()) {
        // Whoever reads the file may be elsewhere.
        let data = std::path::absolute(data)?.into_os_string().into_string().ok();
        let data = data.context("--data: a TOML file needs a path in UTF-8")?;
        table.insert("data".to_owned(), data.into());
    }
    Ok(toml::to_string(&table)?)
}

/// Checks that a run goes on as it began.
fn check_same_run(dir: &Path, old: &Table, new: &Table) -> Result<()> {
    let spelt = |key: &str, table: &Table| match table.get(key).and_then(text) {
        Some(value) => format!("--{key} {value}"),
        None => format!("no --{key}"),
    };
    let keys = new.keys().chain(old.keys()).filter(|key| !FREE.contains(&key.as_str()));
    for key in keys {
        if old.get(key) == new.get(key) {
            continue;
        }
        let (asked, had, dir) = (spelt(key, new), spelt(key, old), dir.display());
        let why = match key.as_str() {
            "epochs" | "steps" | "batch-size" => {
                "; its learning rate follows a schedule of that length, so a longer or shorter run is \
                 another one, from its first step on"
            }
            _ => "",
        };
        bail!(Usage(format!("{asked} does not go with --resume {dir}: that run has {had}{why}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
