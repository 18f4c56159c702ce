//! Imports run downward: there is no circle among files, nor among the modules of a folder.
//!
//! Between modules, what lies within a module counts as that module. Between files, a `mod.rs` is a file like any other: what
//! its children share lies in a file beside them. Imports of tests do not count.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use super::{assert_none, read, sources, split_tests, test_modules};

/// The names from the crate's root: none for the root itself.
type Module = Vec<String>;
/// From one module to another, with the path that says so.
type Imports = BTreeMap<Module, BTreeMap<Module, String>>;

/// `text` without comments, and without what strings hold.
fn without_text(text: &str) -> String {
    let (mut code, mut rest) = (String::new(), text);
    while let Some(next) = rest.chars().next() {
        let end = |closing: &str, from: usize| {
            rest[from..].find(closing).map_or(rest.len(), |at| from + at + closing.len())
        };
        let skipped = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("'\"'") {
            3
        } else if rest.starts_with("'\\") {
            end("'", 3)
        } else if rest.starts_with("r#\"") {
            end("\"#", 3)
        } else if next == '"' {
            let mut escaped = false;
            let closing = |c: char| {
                let closes = c == '"' && !escaped;
                escaped = c == '\\' && !escaped;
                closes
            };
            rest[1..].find(closing).map_or(rest.len(), |at| at + 2)
        } else {
            code.push(next);
            rest = &rest[next.len_utf8()..];
            continue;
        };
        code.extend(rest[..skipped].chars().filter(|c| *c == '\n'));
        rest = &rest[skipped..];
    }
    code
}

/// A module's imports, each a path and the name that it has here, and the other paths in its code.
#[derive(Default)]
struct Names {
    imports: Vec<(Vec<String>, String)>,
    paths: Vec<Vec<String>>,
}

impl Names {
    fn of(text: &str) -> Self {
        let text = without_text(text);
        let (built, _) = split_tests(&text);
        let (mut names, mut lines) = (Self::default(), built.into_iter().map(|(_, line)| line));
        while let Some(line) = lines.next() {
            let visible = line.trim_start().strip_prefix("pub").map_or(line.trim_start(), |rest| {
                let rest = if rest.starts_with('(') { rest.split_once(')') } else { None }
                    .map_or(rest, |(_, rest)| rest);
                rest.trim_start()
            });
            match visible.strip_prefix("use ") {
                Some(tree) => {
                    let mut tree = tree.to_owned();
                    while !tree.contains(';') {
                        tree += lines.next().expect("an import ends");
                    }
                    names.add(tree.split(';').next().unwrap_or_default(), &[]);
                }
                None => names.paths.extend(paths(line)),
            }
        }
        names
    }

    /// Adds what `a::{b, c as d}` imports.
    fn add(&mut self, tree: &str, before: &[String]) {
        let (path, inner) = match tree.split_once('{') {
            Some((path, inner)) => (path, inner.rsplit_once('}').map(|(inner, _)| inner)),
            None => (tree, None),
        };
        let (path, alias) = path.split_once(" as ").unwrap_or((path, ""));
        let segments = path.split("::").map(|name| name.trim().to_owned());
        let mut path = before.to_vec();
        path.extend(
            segments.filter(|name| !name.is_empty() && name != "self" || before.is_empty()),
        );
        path.retain(|name| !name.is_empty());
        let Some(inner) = inner else {
            let name =
                if alias.is_empty() { path.last().cloned() } else { Some(alias.trim().into()) };
            self.imports.extend(name.map(|name| (path, name)));
            return;
        };
        let (mut depth, mut from) = (0, 0);
        for (at, c) in inner.char_indices().chain([(inner.len(), ',')]) {
            match c {
                '{' => depth += 1,
                '}' => depth -= 1,
                ',' if depth == 0 => {
                    if !inner[from..at].trim().is_empty() {
                        self.add(&inner[from..at], &path);
                    }
                    from = (at + 1).min(inner.len());
                }
                _ => {}
            }
        }
    }
}

/// The paths in a line of code, without those that say who may see an item.
fn paths(line: &str) -> Vec<Vec<String>> {
    let (before, after) = line.split_once("(in ").unwrap_or((line, ""));
    let visible = after.split_once(')').map_or(after, |(_, item)| item);
    let words = [before, visible]
        .into_iter()
        .flat_map(|code| code.split(|c: char| !c.is_alphanumeric() && c != '_' && c != ':'));
    let paths = words.map(|word| word.split("::").filter(|name| !name.is_empty()));
    let paths = paths.map(|names| names.map(str::to_owned).collect::<Vec<_>>());
    paths.filter(|path| path.len() > 1).collect()
}

/// The modules of a crate.
struct Modules(BTreeMap<Module, Names>);

impl Modules {
    fn of_the_library() -> Self {
        let sources = sources();
        let of_tests: Vec<PathBuf> = sources.iter().flat_map(|path| test_modules(path)).collect();
        let built = sources.iter().filter(|path| !of_tests.iter().any(|of| path.starts_with(of)));
        Self(built.map(|path| (module(path), Names::of(&read(path)))).collect())
    }

    /// Where `path`, as written in `from`, begins, and what follows; `None` of another crate.
    fn begin<'a>(&self, from: &Module, path: &'a [String]) -> Option<(Module, &'a [String])> {
        let supers = path.iter().take_while(|name| *name == "super").count();
        match path.first()?.as_str() {
            "crate" => Some((Module::new(), &path[1..])),
            "self" => Some((from.clone(), &path[1..])),
            "super" => Some((from[..from.len().saturating_sub(supers)].to_vec(), &path[supers..])),
            child => {
                let is_child = self.0.contains_key(&[&from[..], &[child.to_owned()]].concat());
                is_child.then(|| (from.clone(), path))
            }
        }
    }

    /// The module that has what `path` names, where `within` imports it too; `None` of another crate.
    fn owner(&self, mut within: Module, mut path: &[String], steps: usize) -> Option<Module> {
        while let [name, rest @ ..] = path {
            let child = [&within[..], std::slice::from_ref(name)].concat();
            if !self.0.contains_key(&child) {
                let imports = &self.0.get(&within)?.imports;
                let Some((other, _)) = imports.iter().find(|(_, here)| here == name) else { break };
                let other = [&other[..], rest].concat();
                let (begin, other) = self.begin(&within, &other)?;
                return if steps == 0 { None } else { self.owner(begin, other, steps - 1) };
            }
            (within, path) = (child, rest);
        }
        Some(within)
    }

    /// Who imports whom among the files.
    fn imports_of_files(&self) -> Imports {
        let mut all = Imports::new();
        for (from, names) in &self.0 {
            for path in names.imports.iter().map(|(path, _)| path).chain(&names.paths) {
                let begin = self.begin(from, path);
                let owner = begin.and_then(|(at, path)| self.owner(at, path, 9));
                if let Some(to) = owner.filter(|to| to != from) {
                    let text = format!("{} names {}", from.join("/"), path.join("::"));
                    all.entry(from.clone()).or_default().entry(to).or_insert(text);
                }
            }
        }
        all
    }

    /// Who imports whom among the modules of one folder.
    fn imports(&self) -> Imports {
        let mut all = Imports::new();
        for (from, imported) in self.imports_of_files() {
            for (to, text) in imported {
                let common = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
                if common < from.len() && common < to.len() {
                    let [of, imported] = [&from, &to].map(|module| module[..=common].to_vec());
                    all.entry(of).or_default().entry(imported).or_insert(text);
                }
            }
        }
        all
    }
}

/// `["kernels", "gemm"]` of `src/kernels/gemm/mod.rs`.
fn module(path: &Path) -> Module {
    let path = path.strip_prefix("src").unwrap_or(path).with_extension("");
    let mut names: Module = path.iter().map(|name| name.to_string_lossy().into_owned()).collect();
    if names.last().is_some_and(|name| name == "mod" || name == "lib") {
        names.pop();
    }
    names
}

/// What is imported from `from`, by way of others too.
fn reached<'a>(imports: &'a Imports, from: &'a Module) -> BTreeSet<&'a Module> {
    let (mut found, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(module) = next.pop() {
        let new = imports.get(module).into_iter().flatten().map(|(to, _)| to);
        next.extend(new.filter(|to| found.insert(*to)));
    }
    found
}

/// The groups of modules that import one another, and by what.
fn circles(imports: &Imports) -> BTreeMap<Vec<String>, Vec<String>> {
    let reached: BTreeMap<_, _> =
        imports.keys().map(|from| (from, reached(imports, from))).collect();
    let mut circles = BTreeMap::new();
    for (from, of) in reached.iter().filter(|(from, of)| of.contains(**from)) {
        let back = |to: &&&Module| reached.get(**to).is_some_and(|of| of.contains(*from));
        let members: BTreeSet<&Module> = of.iter().filter(back).copied().collect();
        let among = members.iter().filter_map(|from| imports.get(*from)).flatten();
        let closing = among.filter(|(to, _)| members.contains(to)).map(|(_, text)| text.clone());
        circles.insert(members.iter().map(|one| one.join("/")).collect(), closing.collect());
    }
    circles
}

#[test]
fn imports_run_downward() {
    let library = Modules::of_the_library();
    for (what, imports) in [("files", library.imports_of_files()), ("modules", library.imports())] {
        let found = circles(&imports);
        let text = |(circle, closing): (&Vec<String>, &Vec<String>)| {
            format!("{circle:?}:\n    {}", closing.join("\n    "))
        };
        let rule = format!("{what} that import one another; move down what both need");
        assert_none(found.iter().map(text).collect(), &rule);
    }
}

/// docs/architecture.md lists them from the top down.
#[test]
fn folders_import_those_below_them() {
    let page = read("docs/architecture.md");
    let list = page.lines().skip_while(|line| !line.starts_with("```")).skip(1);
    let list =
        list.take_while(|line| !line.starts_with("```")).filter(|line| !line.starts_with(' '));
    let folders: Vec<&str> = list.filter_map(|line| Some(line.split_once("  ")?.0)).collect();
    assert!(folders.first() == Some(&"dist") && folders.contains(&"kernels"), "{folders:?}");
    let present = |name: &&str| {
        Path::new("src").join(name).is_dir()
            || Path::new("src").join(format!("{name}.rs")).is_file()
    };
    assert!(folders.iter().all(present), "{folders:?}");
    let level = |module: &Module| folders.iter().position(|name| module[..] == [*name]);
    let mut wrong = Vec::new();
    for (from, to) in Modules::of_the_library().imports() {
        for (to, text) in to {
            if let (Some(from), Some(to)) = (level(&from), level(&to))
                && to < from
            {
                wrong.push(text);
            }
        }
    }
    assert_none(wrong, "imports that run upward in the list of docs/architecture.md");
    let files = fs::read_dir("src").unwrap().map(|entry| entry.unwrap());
    let mut files: Vec<_> = files
        .filter(|entry| entry.file_type().unwrap().is_file())
        .map(|entry| entry.file_name())
        .collect();
    files.sort();
    assert_eq!(files, ["lib.rs", "parameters.rs"], "loose files of src");
}

#[test]
fn circles_are_found_through_other_names_and_folders() {
    let modules = |texts: &[(&str, &str)]| {
        let names = texts.iter().map(|(path, text)| (module(Path::new(path)), Names::of(text)));
        Modules(names.collect())
    };
    type Text<'a> = (&'a str, &'a str);
    let names = |imports: Imports| circles(&imports).into_keys().collect::<Vec<_>>();
    let circles_of = |texts: &[Text<'_>]| names(modules(texts).imports());
    let circles_of_files = |texts: &[Text<'_>]| names(modules(texts).imports_of_files());
    let none: [Vec<String>; 0] = [];
    let root = ("src/lib.rs", "mod a;\nmod b;\npub use b::Below as Named;\n");
    let b = ("src/b/mod.rs", "mod c;\npub use c::{\n    Below,\n    Other,\n};\n");
    let c = (
        "src/b/c.rs",
        "use super::Shared;\n// use crate::a::X;\nconst A: &str = \"crate::a::X\";\n",
    );
    let down = ("src/a.rs", "use crate::Named;\nfn f() { crate::b::f() }\n");
    assert_eq!(circles_of(&[root, b, c, down]), none);
    // By an import, by a path in code, and by a child of a folder.
    for up in ["use crate::a;\n", "fn f() { crate::a::f() }\n", "pub(super) use crate::{a::X};\n"] {
        assert_eq!(circles_of(&[root, b, ("src/b/c.rs", up), down]), [["a", "b"]]);
        let test = format!("#[cfg(test)]\nmod tests {{\n    {up}}}\n");
        assert_eq!(circles_of(&[root, b, ("src/b/c.rs", &test), down]), none);
    }
    // Of three, between siblings.
    let three = [
        ("src/x.rs", "use super::y::Y;\n"),
        ("src/y.rs", "use crate::z;\n"),
        ("src/z.rs", "use super::{q, x as w};\n"),
        ("src/q.rs", "\n"),
    ];
    assert_eq!(circles_of(&three), [["x", "y", "z"]]);
    // A folder and what lies in it: by an import, by a path in code, by another's name for it; not by who may see it.
    let up = ("src/b/c.rs", "use super::Y;\n");
    for down in ["use c::X;\n", "fn f() { c::f() }\n", "pub use c::X;\n"] {
        let within = [("src/b/mod.rs", down), up];
        assert_eq!(circles_of(&within), none);
        assert_eq!(circles_of_files(&within), [["b", "b/c"]]);
    }
    let of_a_third = ("src/b/mod.rs", "use c::X;\npub use d::Y;\n");
    assert_eq!(circles_of_files(&[of_a_third, up, ("src/b/d.rs", "pub struct Y;\n")]), none);
    let visible = ("src/b/c.rs", "pub(in crate::b) fn f() {}\n");
    assert_eq!(circles_of_files(&[("src/b/mod.rs", "use c::f;\n"), visible]), none);
}
