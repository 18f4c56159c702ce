//! Something owned, or borrowed for a while.

use std::ops::{Deref, DerefMut};

#[derive(Debug)]
pub(crate) enum Held<'a, T> {
    Owned(T),
    Borrowed(&'a mut T),
}

impl<T> Deref for Held<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        match self {
            Self::Owned(owned) => owned,
            Self::Borrowed(borrowed) => borrowed,
        }
    }
}

impl<T> DerefMut for Held<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        match self {
            Self::Owned(owned) => owned,
            Self::Borrowed(borrowed) => borrowed,
        }
    }
}
