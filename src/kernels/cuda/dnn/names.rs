//! Names of algorithms and engines, as traces show them.

use std::collections::BTreeSet;
use std::sync::Mutex;

use crate::error::lock::lock;

/// `name`, kept for as long as the process runs. cuDNN has so many engines, and no more.
pub(super) fn lasting(name: String) -> &'static str {
    static NAMES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let mut names = lock(&NAMES);
    if let Some(known) = names.get(name.as_str()) {
        return known;
    }
    let name: &'static str = name.leak();
    names.insert(name);
    name
}
