//! Records draws and replays them, for recomputation.

use std::cell::RefCell;
use std::collections::VecDeque;

use rand_chacha::ChaCha8Rng;

use super::state::{RandomState, stream_of, with_state};

/// What a checkpoint has to do with the draws of this thread.
enum Tape {
    /// Notes them.
    Record(Vec<RandomState>),
    /// Gives them again, and counts what was asked for beyond them.
    Replay { draws: VecDeque<RandomState>, beyond: usize },
}

thread_local! {
    /// Innermost last.
    static TAPES: RefCell<Vec<Tape>> = const { RefCell::new(Vec::new()) };
}

/// Runs `f` with `tape` on; what became of it.
fn with_tape<T>(tape: Tape, f: impl FnOnce() -> T) -> (T, Option<Tape>) {
    /// Takes the tape off again, on panic too.
    struct Off;
    impl Drop for Off {
        fn drop(&mut self) {
            TAPES.with_borrow_mut(Vec::pop);
        }
    }
    TAPES.with_borrow_mut(|tapes| tapes.push(tape));
    let off = Off;
    let result = f();
    std::mem::forget(off);
    (result, TAPES.with_borrow_mut(Vec::pop))
}

/// Runs `f`, and notes where its draws on this thread came from.
pub(crate) fn record<T>(f: impl FnOnce() -> T) -> (T, Vec<RandomState>) {
    match with_tape(Tape::Record(Vec::new()), f) {
        (result, Some(Tape::Record(draws))) => (result, draws),
        (result, _) => (result, Vec::new()),
    }
}

/// Runs `f` with the draws of another time, and says how many it took. The process's generator stays where it is.
pub(crate) fn replay<T>(draws: &[RandomState], f: impl FnOnce() -> T) -> (T, usize) {
    let tape = Tape::Replay { draws: draws.iter().copied().collect(), beyond: 0 };
    match with_tape(tape, f) {
        (result, Some(Tape::Replay { draws: left, beyond })) => {
            (result, draws.len() - left.len() + beyond)
        }
        (result, _) => (result, 0),
    }
}

/// A generator of its own for the next tensor.
pub(crate) fn next_stream() -> ChaCha8Rng {
    let drawn = TAPES.with_borrow_mut(|tapes| {
        let replay = tapes.iter().rposition(|tape| matches!(tape, Tape::Replay { .. }));
        let again = match replay.map(|at| &mut tapes[at]) {
            Some(Tape::Replay { draws, beyond }) => {
                let again = draws.pop_front();
                *beyond += usize::from(again.is_none());
                again
            }
            _ => None,
        };
        let drawn = again.unwrap_or_else(|| {
            with_state(|state| {
                let drawn = *state;
                state.draws = state.draws.wrapping_add(1);
                drawn
            })
        });
        // What records below a replay will be replayed by it, not draw again.
        for tape in &mut tapes[replay.map_or(0, |at| at + 1)..] {
            if let Tape::Record(draws) = tape {
                draws.push(drawn);
            }
        }
        drawn
    });
    stream_of(drawn, 0)
}
