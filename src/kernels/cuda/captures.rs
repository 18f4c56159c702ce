//! Which thread captures on a device. While one does, no other may synchronise the device: the driver ends the capture then,
//! and fails the other's call. So who has to wait for the device waits for the end of the capture first.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use candle_core::Result;

use super::threads::DEVICES;
use crate::error::bail;
use crate::error::lock::lock;

/// How long a thread waits for another one's capture, which may be waiting for that thread.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Clone, Copy)]
struct Use {
    is_captured: bool,
    /// Threads that synchronise.
    waits: usize,
}

static USES: Mutex<[Use; DEVICES]> = Mutex::new([Use { is_captured: false, waits: 0 }; DEVICES]);
static CHANGED: Condvar = Condvar::new();

thread_local! {
    /// The devices on which this thread captures, a bit each: each launch asks.
    static OWN: Cell<u64> = const { Cell::new(0) };
}

/// Whether this thread captures on the device.
pub(super) fn is_own(ordinal: usize) -> bool {
    OWN.get() >> (ordinal % DEVICES) & 1 == 1
}

/// Holds off captures on a device, or waits for it.
pub(super) struct Held {
    at: usize,
    captures: bool,
    on_its_thread: PhantomData<*const ()>,
}

/// For a capture: until it is dropped, no other thread synchronises the device.
pub(super) fn begin(ordinal: usize) -> Result<Held> {
    hold(ordinal, true)
}

/// For a wait for the device: until it is dropped, no other thread captures there.
pub(super) fn hold_off(ordinal: usize) -> Result<Held> {
    hold(ordinal, false)
}

fn hold(ordinal: usize, captures: bool) -> Result<Held> {
    let (at, since) = (ordinal % DEVICES, Instant::now());
    let mut uses = lock(&USES);
    if is_own(ordinal) {
        bail!("a thread that captures a step cannot wait for the device")
    }
    let later = |uses, what: &str| {
        let Some(left) = PATIENCE.checked_sub(since.elapsed()) else {
            bail!("CUDA device {ordinal}: {what} for {} seconds", PATIENCE.as_secs())
        };
        Ok(match CHANGED.wait_timeout(uses, left) {
            Ok((uses, _)) => uses,
            Err(poisoned) => poisoned.into_inner().0,
        })
    };
    while uses[at].is_captured {
        uses = later(
            uses,
            "another thread has captured a step, which must not wait for this thread,",
        )?;
    }
    if !captures {
        uses[at].waits += 1;
        return Ok(Held { at, captures, on_its_thread: PhantomData });
    }
    // From now on nobody begins to wait. On an error it is dropped.
    uses[at].is_captured = true;
    OWN.set(OWN.get() | 1 << at);
    drop(uses);
    let held = Held { at, captures, on_its_thread: PhantomData };
    let mut uses = lock(&USES);
    while uses[at].waits > 0 {
        uses = later(uses, "another thread has waited for it")?;
    }
    Ok(held)
}

impl Drop for Held {
    fn drop(&mut self) {
        let own = &mut lock(&USES)[self.at];
        match self.captures {
            true => {
                own.is_captured = false;
                OWN.set(OWN.get() & !(1 << self.at));
            }
            false => own.waits -= 1,
        }
        CHANGED.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn who_waits_for_a_device_waits_for_a_capture() -> Result<()> {
        let ordinal = 59; // that no other test has
        let capture = begin(ordinal)?;
        assert!(is_own(ordinal) && hold_off(ordinal).is_err());
        thread::scope(|scope| {
            let waits = scope.spawn(|| {
                assert!(!is_own(ordinal));
                hold_off(ordinal).map(drop)
            });
            thread::sleep(Duration::from_millis(20));
            assert!(!waits.is_finished());
            drop(capture);
            waits.join().expect("no panic")
        })?;
        let (one, two) = (hold_off(ordinal)?, hold_off(ordinal)?);
        drop((one, two));
        drop(begin(ordinal)?);
        Ok(())
    }
}
