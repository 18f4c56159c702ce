//! The public surface of the crate, as a file that a test compares: `docs/public-api.txt`.
//!
//! The listing reads the sources, not the compiler's output: rustdoc's JSON needs a nightly compiler. It starts at
//! `src/lib.rs` and follows public modules and re-exports. The functions that a macro makes from the table of pointwise
//! operators are read from there. Variants of `Op`, which a macro makes too, are in `docs/operators.md`, which another
//! test compares.

mod source;
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::{env, fs};

use source::{Item, clean, closing, items, pointed, split, without_attributes};

use crate::util::package;

/// A crate's modules by path, such as `["ops"]`, and whether each is in a file of its own.
#[derive(Default)]
struct Crate {
    modules: BTreeMap<Vec<String>, Vec<Item>>,
}

impl Crate {
    /// Reads the modules; `read` gives the text of a file relative to `src`.
    fn new(read: &dyn Fn(&Path) -> Option<String>) -> Self {
        let mut krate = Self::default();
        let text = read(Path::new("lib.rs")).expect("src/lib.rs");
        krate.add(Vec::new(), &clean(&text), read);
        krate
    }

    fn add(&mut self, path: Vec<String>, text: &str, read: &dyn Fn(&Path) -> Option<String>) {
        let items: Vec<Item> = items(text);
        for item in items.iter().filter(|item| !item.attributes.contains("cfg(test)")) {
            let Some(("mod", name)) = item.name() else { continue };
            let mut inner = path.clone();
            inner.push(name.to_owned());
            if !item.body.is_empty() {
                self.add(inner, &item.body.clone(), read);
                continue;
            }
            let file: PathBuf = inner.iter().collect();
            let text = read(&file.with_extension("rs")).or_else(|| read(&file.join("mod.rs")));
            if let Some(text) = text {
                self.add(inner, &clean(&text), read);
            }
        }
        self.modules.insert(path, items);
    }

    /// What `use` declarations of a module bring in: names and where from, as written.
    fn imports(item: &Item) -> Vec<(String, Vec<String>)> {
        fn flatten(prefix: &[String], tree: &str, out: &mut Vec<(String, Vec<String>)>) {
            let (path, list) = match tree.find('{') {
                Some(open) => (&tree[..open], Some(&tree[open + 1..tree.len() - 1])),
                None => (tree, None),
            };
            let (path, alias) = path.split_once(" as ").unwrap_or((path, ""));
            let segments = path.split("::").map(str::trim).filter(|part| !part.is_empty());
            let full: Vec<String> =
                prefix.iter().cloned().chain(segments.map(str::to_owned)).collect();
            match list {
                Some(list) => split(list, ',').iter().for_each(|one| flatten(&full, one, out)),
                None => {
                    let mut full = full;
                    if full.last().is_some_and(|last| last == "self") {
                        full.pop();
                    }
                    let name = if alias.is_empty() { full.last().cloned() } else { None };
                    out.push((name.unwrap_or_else(|| alias.trim().to_owned()), full));
                }
            }
        }
        let mut out = Vec::new();
        let tree = item.head.split_once("use ").map(|(_, tree)| tree.trim());
        flatten(&[], tree.unwrap_or_default(), &mut out);
        out
    }

    fn is_use(item: &Item) -> bool {
        let head = item.head.trim_start_matches("pub");
        let head = if head.starts_with('(') { &head[closing(head)..] } else { head };
        head.trim_start().starts_with("use ")
    }

    /// Where `path`, as written in `module`, leads: the module that defines it and the item's name there.
    fn resolve(&self, module: &[String], path: &[String]) -> Option<(Vec<String>, Item)> {
        let (mut at, mut rest) = match path.first()?.as_str() {
            "crate" => (Vec::new(), &path[1..]),
            _ => (module.to_vec(), path),
        };
        while let Some(first) =
            rest.first().filter(|first| ["self", "super"].contains(&first.as_str()))
        {
            if first == "super" {
                at.pop();
            }
            rest = &rest[1..];
        }
        let (name, modules) = rest.split_last()?;
        for step in modules {
            at.push(step.clone());
        }
        let items = self.modules.get(&at)?;
        let named =
            |item: &&Item| !Self::is_use(item) && item.name().is_some_and(|(_, own)| own == name);
        let is_module = |item: &Item| item.name().is_some_and(|(kind, _)| kind == "mod");
        // A function may have the name of its module.
        if let Some(item) = items.iter().find(|item| named(item) && !is_module(item)) {
            return Some((at, item.clone()));
        }
        let imported = items.iter().filter(|item| Self::is_use(item)).find_map(|item| {
            let mut imports = Self::imports(item).into_iter();
            let (_, from) = imports.find(|(own, from)| own == name && from != path)?;
            self.resolve(&at, &from)
        });
        imported.or_else(|| Some((at, items.iter().find(named)?.clone())))
    }

    /// The listing: a line for each thing that another crate can name, sorted.
    fn listing(&self) -> Vec<String> {
        let mut listing = Listing { krate: self, lines: BTreeSet::new(), types: Vec::new() };
        listing.module(&[], "candle_amp");
        listing.impls();
        // However a signature is wrapped.
        let lines = listing.lines.iter();
        lines.map(|line| line.replace("( ", "(").replace(", )", ")").replace(", >", ">")).collect()
    }

    /// The items of every module, those of `cfg(test)` left out.
    fn all(&self) -> impl Iterator<Item = (&Vec<String>, &Item)> {
        let modules = self.modules.iter();
        let items = modules.flat_map(|(path, items)| items.iter().map(move |item| (path, item)));
        items.filter(|(_, item)| !item.attributes.contains("cfg(test)"))
    }
}

struct Listing<'a> {
    krate: &'a Crate,
    lines: BTreeSet<String>,
    /// The public types and traits: where each is defined, its name, and its public path.
    types: Vec<(Vec<String>, String, String)>,
}

impl Listing<'_> {
    fn module(&mut self, path: &[String], public: &str) {
        let items = self.krate.modules.get(path).cloned().unwrap_or_default();
        for item in items.iter().filter(|item| item.is_public() && !item.is_for_tests()) {
            if !Crate::is_use(item) {
                let name = item.name().map(|(_, name)| name.to_owned()).unwrap_or_default();
                self.item(path, item, &format!("{public}::{name}"));
                continue;
            }
            for (name, from) in Crate::imports(item) {
                let public = format!("{public}::{name}");
                match self.krate.resolve(path, &from) {
                    Some((module, item)) => self.item(&module, &item, &public),
                    None => {
                        _ = self.lines.insert(format!("pub use {} as {public}", from.join("::")))
                    }
                }
            }
        }
    }

    fn item(&mut self, module: &[String], item: &Item, public: &str) {
        let Some((kind, name)) = item.name() else { return };
        if kind == "mod" {
            let mut path = module.to_vec();
            path.push(name.to_owned());
            self.lines.insert(format!("{}pub mod {public}", item.mark()));
            return self.module(&path, public);
        }
        if self.types.iter().any(|(at, own, _)| at == module && own == name) {
            self.lines.insert(format!("pub use {public}, again"));
            return;
        }
        let head = item.head.strip_prefix("pub ").unwrap_or(&item.head);
        let head = head.replacen(&format!("{kind} {name}"), &format!("{kind} {public}"), 1);
        let head = match kind {
            "const" | "static" => head.split('=').next().unwrap_or_default().trim().to_owned(),
            // A tuple's private fields are nobody's business.
            "struct" => head.split('(').next().unwrap_or_default().trim().to_owned(),
            _ => head,
        };
        let exhaustive =
            if item.attributes.contains("non_exhaustive") { "#[non_exhaustive] " } else { "" };
        self.lines.insert(format!("{}{exhaustive}pub {head}", item.mark()));
        if !["struct", "enum", "trait"].contains(&kind) {
            return;
        }
        self.types.push((module.to_vec(), name.to_owned(), public.to_owned()));
        self.derives(&item.attributes, public);
        match kind {
            "struct" => self.fields(item, public),
            "enum" => self.variants(&item.body, public),
            _ => self.members(&item.body, public, true),
        }
    }

    fn derives(&mut self, attributes: &str, public: &str) {
        for list in attributes.split("#[derive(").skip(1) {
            let list = list.split(')').next().unwrap_or_default();
            for name in split(list, ',') {
                self.lines.insert(format!("impl {name} for {public}"));
            }
        }
    }

    fn fields(&mut self, item: &Item, public: &str) {
        for field in split(&item.body, ',') {
            if let Some(field) = without_attributes(&field).strip_prefix("pub ") {
                self.lines.insert(format!("pub field {public}::{field}"));
            }
        }
        let Some(open) = item.head.find('(') else { return };
        let tuple = &item.head[open + 1..open + closing(&item.head[open..]) - 1];
        for (at, field) in split(tuple, ',').iter().enumerate() {
            if let Some(field) = without_attributes(field).strip_prefix("pub ") {
                self.lines.insert(format!("pub field {public}::{at}: {field}"));
            }
        }
    }

    fn variants(&mut self, body: &str, public: &str) {
        for variant in split(body, ',') {
            let variant = without_attributes(&variant).to_owned();
            let (name, fields) = match variant.find(['{', '(']) {
                Some(open) => variant.split_at(open),
                None => (variant.as_str(), ""),
            };
            let inner = fields.get(1..fields.len().max(1) - 1).unwrap_or_default();
            let inner: Vec<String> =
                split(inner, ',').iter().map(|f| without_attributes(f).to_owned()).collect();
            let fields = match fields.chars().next() {
                Some('{') => format!(" {{ {} }}", inner.join(", ")),
                Some('(') => format!("({})", inner.join(", ")),
                _ => String::new(),
            };
            self.lines.insert(format!("pub variant {public}::{}{fields}", name.trim()));
        }
    }

    /// The members of an impl or, where `all`, of a trait.
    fn members(&mut self, body: &str, public: &str, all: bool) {
        let listed = |item: &&Item| (all || item.is_public()) && !item.is_for_tests();
        for member in items(body).iter().filter(listed) {
            let Some((kind, name)) = member.name() else { continue };
            let head = member.head.strip_prefix("pub ").unwrap_or(&member.head);
            let head =
                head.replacen(&format!("{kind} {name}"), &format!("{kind} {public}::{name}"), 1);
            let head =
                if kind == "const" { head.split('=').next().unwrap_or_default() } else { &head };
            let provided = if all && !member.body.is_empty() { " (provided)" } else { "" };
            self.lines.insert(format!("{}pub {}{provided}", member.mark(), head.trim()));
        }
    }

    /// The impls of public types, and of public traits or of those of other crates.
    fn impls(&mut self) {
        let mut found = Vec::new();
        for (module, item) in self.krate.all().filter(|(_, item)| item.head.starts_with("impl")) {
            let rest = item.head["impl".len()..].trim_start();
            let generics = if rest.starts_with('<') { pointed(rest) } else { 0 };
            let target = rest[generics..].trim();
            let target = target.split(" where ").next().unwrap_or_default();
            let (of, of_type) = match target.rsplit_once(" for ") {
                Some((of, of_type)) => (Some(of.trim()), of_type.trim()),
                None => (None, target),
            };
            let Some(public) = self.public(module, of_type) else { continue };
            match of {
                None => found.push((public, Some(item.body.clone()), String::new())),
                Some(of) => {
                    let own = self.public(module, of).is_some();
                    let ours = self.krate.resolve(module, &[last(of).to_owned()]).is_some();
                    if own || !ours {
                        found.push((public.clone(), None, format!("{} {public}", item.head)));
                    }
                }
            }
        }
        for (public, body, line) in found {
            match body {
                Some(body) => self.members(&body, &public, false),
                None => {
                    _ = self
                        .lines
                        .insert(line.replace(&format!(" {public}"), &format!(" // {public}")))
                }
            }
        }
    }

    /// The public path of a type or trait, as written in `module`.
    fn public(&self, module: &[String], written: &str) -> Option<String> {
        let path: Vec<String> = written
            .split('<')
            .next()?
            .split("::")
            .map(|part| part.trim_start_matches('&').trim().to_owned())
            .collect();
        let (at, item) = self.krate.resolve(module, &path)?;
        let (_, name) = item.name()?;
        let known = self.types.iter().find(|(own, type_name, _)| *own == at && type_name == name);
        known.map(|(_, _, public)| public.clone())
    }
}

/// The functions of the table of pointwise operators, whose rows begin as `name => Variant (parameter: type = value),`.
fn pointwise(table: &str) -> Vec<String> {
    let function = |line: &str| {
        let (name, row) = line.strip_prefix("    ")?.split_once(" => ")?;
        let parameters = row.split_once('(')?.1.strip_suffix("),")?;
        let parameters = split(parameters, ',');
        let parameters = parameters.iter().filter_map(|one| one.split_once(" = "));
        let parameters: String =
            parameters.map(|(parameter, _)| format!(", {parameter}")).collect();
        Some(format!("pub fn candle_amp::ops::{name}(x: &Tensor{parameters}) -> Result<Tensor>"))
    };
    table.lines().filter_map(function).collect()
}

/// `Optimizer` of `candle_nn::Optimizer<T>`.
fn last(path: &str) -> &str {
    path.split('<').next().unwrap_or_default().rsplit("::").next().unwrap_or_default().trim()
}

#[test]
fn the_public_surface_changes_on_purpose() {
    let root = package();
    let read = |path: &Path| fs::read_to_string(root.join("src").join(path)).ok();
    let mut found = Crate::new(&read).listing();
    let table = read(Path::new("kernels/activation/table.rs")).expect("the pointwise operators");
    found.extend(pointwise(&table));
    assert!(
        found.iter().any(|line| line.contains("ops::leaky_relu(x: &Tensor, negative_slope: f64)"))
    );
    found.sort();
    let found = found.join("\n") + "\n";
    let file = root.join("docs").join("public-api.txt");
    if env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&file, &found).expect("docs/public-api.txt is writable");
    }
    let listed = fs::read_to_string(&file).expect("docs/public-api.txt");
    let (listed, found): (BTreeSet<_>, BTreeSet<_>) =
        (listed.lines().collect(), found.lines().collect());
    let gone: Vec<_> = listed.difference(&found).map(|line| format!("- {line}")).collect();
    let new: Vec<_> = found.difference(&listed).map(|line| format!("+ {line}")).collect();
    assert!(
        gone.is_empty() && new.is_empty(),
        "the public surface differs from docs/public-api.txt; if that is meant, \
         `UPDATE_DOCS=1 cargo test public_api`:\n{}\n{}",
        gone.join("\n"),
        new.join("\n")
    );
}
