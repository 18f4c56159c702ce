//! Freeing graphs of any depth: link by link, not by recursion.
//!
//! A node owns what it was computed from, and so on down. Dropped as Rust drops, each link of a chain of 50,000
//! operators would be freed within the drop of the one above it, and the stack would end first.

use std::cell::RefCell;
use std::mem::ManuallyDrop;

use candle_core::Tensor;

use super::node::{Edge, Run};

/// What keeps an earlier part of the graph alive.
#[expect(dead_code, reason = "it is there to be dropped")]
pub(super) enum Link {
    Edge(Edge),
    Tensor(Tensor),
    Run(Box<Run>),
}

thread_local! {
    /// The links that are yet to be dropped, while some are being dropped further up the stack. It has no destructor, so
    /// that it is there until the thread ends; nothing is in it then.
    static QUEUE: RefCell<ManuallyDrop<Option<Vec<Link>>>> =
        const { RefCell::new(ManuallyDrop::new(None)) };
}

/// Drops `links`: at once, or after those that are being dropped further up the stack.
pub(super) fn drop_links(links: impl IntoIterator<Item = Link>) {
    let links: Vec<Link> = links.into_iter().collect();
    if links.is_empty() {
        return;
    }
    let is_first = QUEUE.with_borrow_mut(|queue| {
        let is_first = queue.is_none();
        queue.get_or_insert_default().extend(links);
        is_first
    });
    if !is_first {
        return;
    }
    let _end = End;
    let next = || QUEUE.with_borrow_mut(|queue| queue.as_mut().and_then(Vec::pop));
    while let Some(link) = next() {
        drop(link);
    }
}

/// Takes the queue away, also where dropping a link panics.
struct End;

impl Drop for End {
    fn drop(&mut self) {
        // Not within the borrow: what is left may have links of its own.
        drop(QUEUE.with_borrow_mut(|queue| queue.take()));
    }
}
