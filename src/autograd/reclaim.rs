//! Freeing graphs of any depth: link by link, not by recursion.
//!
//! A node owns what it was computed from, and so on down. Dropped as Rust drops, each link of a chain of 50,000
//! operators would be freed within the drop of the one above it, and the stack would end first.

use std::any::Any;
use std::cell::RefCell;
use std::mem::ManuallyDrop;

/// What nodes owned, and nobody needs any more.
type Links = Vec<Box<dyn Any>>;

thread_local! {
    /// What is yet to be dropped, while something is being dropped further up the stack. It has no destructor, so that it
    /// is there until the thread ends; nothing is in it then.
    static QUEUE: RefCell<ManuallyDrop<Option<Links>>> = const { RefCell::new(ManuallyDrop::new(None)) };
}

/// Drops `links`, which keep earlier parts of the graph alive: at once, or after what is being dropped further up the
/// stack.
pub(super) fn drop_later(links: impl Any) {
    let links: Box<dyn Any> = Box::new(links);
    let is_first = QUEUE.with_borrow_mut(|queue| {
        let is_first = queue.is_none();
        queue.get_or_insert_default().push(links);
        is_first
    });
    if !is_first {
        return;
    }
    let _end = End;
    let next = || QUEUE.with_borrow_mut(|queue| queue.as_mut().and_then(Vec::pop));
    while let Some(links) = next() {
        drop(links);
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
