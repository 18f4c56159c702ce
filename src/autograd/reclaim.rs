//! Freeing graphs of any depth: link by link, not by recursion.
//!
//! A node owns what it was computed from, and so on down. Dropped as Rust drops, each link of a chain of 50,000
//! operators would be freed within the drop of the one above it, and the stack would end first.

use std::cell::RefCell;

use candle_core::Tensor;

use super::node::Edge;

/// What keeps an earlier part of the graph alive.
#[expect(dead_code, reason = "it is there to be dropped")]
pub(super) enum Link {
    Edge(Edge),
    Tensor(Tensor),
}

thread_local! {
    /// The links that are yet to be dropped, while some are being dropped further up the stack.
    static QUEUE: RefCell<Option<Vec<Link>>> = const { RefCell::new(None) };
}

/// Drops `links`: at once, or after those that are being dropped further up the stack.
pub(super) fn drop_links(links: impl IntoIterator<Item = Link>) {
    let links: Vec<Link> = links.into_iter().collect();
    if links.is_empty() {
        return;
    }
    // Beyond a thread's end there is no queue: what is left then is dropped by recursion.
    let first = QUEUE.try_with(|queue| {
        let mut queue = queue.borrow_mut();
        let first = queue.is_none();
        queue.get_or_insert_default().extend(links);
        first
    });
    if !first.unwrap_or(false) {
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
        QUEUE.set(None);
    }
}
