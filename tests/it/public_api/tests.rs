//! The listing, on a small crate of strings.

use std::collections::BTreeSet;
use std::path::Path;

use super::Crate;

const LIB: &str = "
    //! A crate.
    mod inner;
    pub mod shown;
    pub use inner::{Thing, free as freed, other::Deep};
    pub use outside::Elsewhere;
    pub(crate) use inner::hidden;
    #[doc(hidden)]
    pub mod testing { pub fn internal() {} }
";
const INNER: &str = "
    pub(crate) mod other;
    /// A thing; with a brace { in a comment.
    #[derive(Clone, Debug)]
    pub struct Thing<T> { pub size: usize, secret: Vec<(T, u8)> }
    impl<T: Fn(u8) -> u8> Thing<T> {
        pub const LIMIT: usize = { 3 };
        pub fn new(size: usize, name: &'static str) -> Result<Self, Box<dyn std::error::Error>> { let c = '{'; f(\"}\") }
        pub(crate) fn internal(&self) {}
        fn private(&self) {}
    }
    impl<T> Private for Thing<T> {}
    impl<T> fmt::Display for Thing<T> { fn fmt(&self) {} }
    trait Private {}
    pub fn free<F>(f: F) -> [u8; 2] where F: FnOnce() -> u8 { [f(); 2] }
    pub fn hidden() {}
    #[cfg(test)]
    mod tests { pub fn test() {} }
";
const OTHER: &str = "
    #[non_exhaustive]
    pub enum Deep { #[error(\"{0}, {1}\")] A(u8, u16), B { x: Vec<u8>, y: u8 }, C }
    impl Deep { pub fn get(&self) -> u8 { 0 } }
";
const SHOWN: &str = "
    pub trait Act { const N: usize; fn act(&mut self); fn rest(&self) -> bool { false } #[doc(hidden)] fn not(&self) -> bool { true } }
    impl Act for super::inner::Thing<u8> { fn act(&mut self) {} }
    macro_rules! make { ($($x:ident)*) => { pub const fn made() -> u8 { $($x)* 1 } }; }
    make!();
";

fn listing(change: impl Fn(&str) -> String) -> Vec<String> {
    let files =
        [("lib.rs", LIB), ("inner/mod.rs", INNER), ("inner/other.rs", OTHER), ("shown.rs", SHOWN)];
    let files = files.map(|(name, text)| (name, change(text)));
    listing_of(&files.each_ref().map(|(name, text)| (*name, text.as_str())))
}

#[test]
fn all_that_is_public_is_listed_and_nothing_else() {
    let expected = [
        "#[doc(hidden)] pub fn candle_amp::shown::Act::not(&self) -> bool (provided)",
        "#[doc(hidden)] pub mod candle_amp::testing",
        "#[non_exhaustive] pub enum candle_amp::Deep",
        "impl Clone for candle_amp::Thing",
        "impl Debug for candle_amp::Thing",
        "impl Act for super::inner::Thing<u8> // candle_amp::Thing",
        "impl<T> fmt::Display for Thing<T> // candle_amp::Thing",
        "pub const candle_amp::Thing::LIMIT: usize",
        "pub const candle_amp::shown::Act::N: usize",
        "pub const fn candle_amp::shown::made() -> u8",
        "pub field candle_amp::Thing::size: usize",
        "pub fn candle_amp::Deep::get(&self) -> u8",
        "pub fn candle_amp::Thing::new(size: usize, name: &'static str) -> Result<Self, Box<dyn std::error::Error>>",
        "pub fn candle_amp::freed<F>(f: F) -> [u8; 2] where F: FnOnce() -> u8",
        "pub fn candle_amp::shown::Act::act(&mut self)",
        "pub fn candle_amp::shown::Act::rest(&self) -> bool (provided)",
        "pub fn candle_amp::testing::internal()",
        "pub mod candle_amp::shown",
        "pub struct candle_amp::Thing<T>",
        "pub trait candle_amp::shown::Act",
        "pub use outside::Elsewhere as candle_amp::Elsewhere",
        "pub variant candle_amp::Deep::A(u8, u16)",
        "pub variant candle_amp::Deep::B { x: Vec<u8>, y: u8 }",
        "pub variant candle_amp::Deep::C",
    ];
    let found: BTreeSet<String> = listing(str::to_owned).into_iter().collect();
    let expected: BTreeSet<String> = expected.map(str::to_owned).into();
    assert_eq!(found, expected);
}

#[test]
fn a_new_a_changed_and_a_removed_item_are_seen() {
    let before = listing(str::to_owned);
    let unexported = listing(|text| text.replace("pub fn free", "pub fn more() {} pub fn free"));
    assert_eq!(unexported, before);
    for (from, to, gone, new) in [
        ("pub trait Act", "pub fn more() {} pub trait Act", 0, 1),
        ("fn private", "pub fn private", 0, 1),
        ("secret:", "pub secret:", 0, 1),
        ("size: usize, name", "size: u32, name", 1, 1),
        ("-> u8 { 0 }", "-> u16 { 0 }", 1, 1),
        ("#[non_exhaustive]", "", 1, 1),
        ("A(u8, u16)", "A(u8)", 1, 1),
        (", C }", " }", 1, 0),
        ("derive(Clone, Debug)", "derive(Debug)", 1, 0),
        ("{ false }", ";", 1, 1),
        ("pub mod shown", "mod shown", 8, 0),
        (", other::Deep", "", 5, 0),
        ("#[doc(hidden)]\n    pub mod", "pub mod", 1, 1),
        ("#[doc(hidden)] fn not", "fn not", 1, 1),
    ] {
        let after = listing(|text| text.replace(from, to));
        let missing = before.iter().filter(|line| !after.contains(line)).count();
        let added = after.iter().filter(|line| !before.contains(line)).count();
        assert_eq!((missing, added), (gone, new), "{from} to {to}: {after:#?}");
    }
}

/// The listing of a crate whose files are these.
fn listing_of(files: &[(&str, &str)]) -> Vec<String> {
    let read = |path: &Path| {
        let file = files.iter().find(|(name, _)| Path::new(name) == path);
        file.map(|(_, text)| (*text).to_owned())
    };
    Crate::new(&read).listing()
}
