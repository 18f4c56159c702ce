//! A value for each key, made once, while others are made on other threads.

use crate::error::lock::lock;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex};

/// Empty until its value is made; whoever makes it holds the lock.
type OnceValue<V> = Arc<Mutex<Option<V>>>;

/// Values that take long to make, and are cheap to clone.
#[derive(Debug)]
pub(super) struct OncePerKey<K, V>(Mutex<HashMap<K, OnceValue<V>>>);

impl<K, V> Default for OncePerKey<K, V> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Eq + Hash, V: Clone> OncePerKey<K, V> {
    /// The value for `key`, which `make` makes if nobody has. Others who want this key wait for that; those who want
    /// another one do not. Nothing is kept of an error: the next call tries again.
    pub(super) fn get_or_make<E>(
        &self,
        key: K,
        make: impl FnOnce() -> Result<V, E>,
    ) -> Result<V, E> {
        let once = lock(&self.0).entry(key).or_default().clone();
        let mut value = lock(&once);
        match &*value {
            Some(value) => Ok(value.clone()),
            None => Ok(value.insert(make()?).clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    use super::*;

    /// Were one made after the other, the first would wait for the second for ever.
    #[test]
    fn two_keys_are_made_at_once() {
        let (values, both) = (OncePerKey::default(), Barrier::new(2));
        thread::scope(|scope| {
            for key in 0..2 {
                let (values, both) = (&values, &both);
                scope.spawn(move || {
                    let made = values.get_or_make(key, || {
                        both.wait();
                        Ok::<_, ()>(key * 10)
                    });
                    assert_eq!(made, Ok(key * 10));
                });
            }
        });
    }

    #[test]
    fn one_key_is_made_once() {
        let (values, made, begin) = (OncePerKey::default(), AtomicUsize::new(0), Barrier::new(4));
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    begin.wait();
                    let value = values
                        .get_or_make("key", || Ok::<_, ()>(made.fetch_add(1, Ordering::Relaxed)));
                    assert_eq!(value, Ok(0));
                });
            }
        });
        assert_eq!(made.into_inner(), 1);
    }

    #[test]
    fn what_failed_is_tried_again() {
        let values = OncePerKey::default();
        assert_eq!(values.get_or_make("key", || Err("no compiler")), Err("no compiler"));
        assert_eq!(values.get_or_make("key", || Ok::<_, ()>(1)), Ok(1));
        assert_eq!(values.get_or_make("key", || Err("asked again")), Ok(1));
    }
}
