//! The values that a captured step reads anew at each replay.
//!
//! A CUDA graph repeats launches with the arguments that they had. What differs from step to step goes through words in
//! a buffer on the device, which the host rewrites before each replay. They are the key and stream of a random draw,
//! and the settings of each row of an optimizer's launch. Kernels take the address of their words, or null, where they
//! read their arguments.
//!
//! A thread *rehearses* a step before it captures one: the step runs as always, and its words are counted.

use std::cell::RefCell;

use candle_core::{Result, Tensor};
use rand_chacha::ChaCha8Rng;

use crate::error::CaptureError;

/// Words of a random draw: the key, and the number of the stream.
pub(crate) const DRAW: usize = 5;

/// Words of a row of an optimizer: seed, step and settings.
pub(crate) const ROW: usize = 12;

/// What a step has asked for, in order. `at` is a place among the words.
#[derive(Debug, Default)]
pub(crate) struct Recording {
    /// The words as the step had them.
    pub(crate) words: Vec<u64>,
    /// The places of draws, each of [`DRAW`] words.
    pub(crate) draws: Vec<usize>,
    /// The places of rows, each of [`ROW`] words, and their numbers among the slots of the step.
    pub(crate) rows: Vec<(usize, usize)>,
    /// The optimizer's step.
    pub(crate) stepped: Option<OptimizerStep>,
    /// What was written in place.
    pub(crate) written: Vec<Tensor>,
}

/// What an optimizer says before its launch.
#[derive(Clone, Debug)]
pub(crate) struct OptimizerStep {
    /// Where each slot of the step is among those of the optimizer.
    pub(crate) places: Vec<usize>,
    /// The stream that the seed of its random bits was drawn from, if it has any.
    pub(crate) stream: Option<u64>,
}

struct Recorder {
    /// Where the words are on the device; 0 in a rehearsal.
    buffer: u64,
    capacity: usize,
    recording: Recording,
}

thread_local! {
    static RECORDER: RefCell<Option<Recorder>> = const { RefCell::new(None) };
}

/// Runs `f`, and records what it asks for. With `buffer`, an address and the words there, it is being captured.
pub(crate) fn record<T>(buffer: Option<(u64, usize)>, f: impl FnOnce() -> T) -> (T, Recording) {
    /// On a panic too.
    struct Off(Option<Recorder>);
    impl Drop for Off {
        fn drop(&mut self) {
            RECORDER.replace(self.0.take());
        }
    }
    let (buffer, capacity) = buffer.unwrap_or((0, usize::MAX));
    let recorder = Recorder { buffer, capacity, recording: Recording::default() };
    let _off = Off(RECORDER.replace(Some(recorder)));
    let result = f();
    let recorder = RECORDER.take();
    (result, recorder.map(|recorder| recorder.recording).unwrap_or_default())
}

fn with_recorder<T>(f: impl FnOnce(&mut Recorder) -> Result<T>, otherwise: T) -> Result<T> {
    RECORDER.with_borrow_mut(|recorder| recorder.as_mut().map_or(Ok(otherwise), f))
}

/// Whether this thread captures: what it launches does not run now.
pub(crate) fn is_active() -> bool {
    RECORDER.with_borrow(|recorder| recorder.as_ref().is_some_and(|recorder| recorder.buffer != 0))
}

impl Recorder {
    /// The address of `words`, from now on in the buffer; 0 in a rehearsal.
    fn add(&mut self, words: impl Iterator<Item = u64>) -> Result<u64> {
        let at = self.recording.words.len();
        self.recording.words.extend(words);
        if self.recording.words.len() > self.capacity {
            return Err(CaptureError::Differs.into());
        }
        Ok(if self.buffer == 0 { 0 } else { self.buffer + 8 * at as u64 })
    }
}

/// Key and stream of a generator, as its kernel takes them.
pub(crate) fn draw_words(rng: &ChaCha8Rng) -> [u64; DRAW] {
    let mut words = [0; DRAW];
    for (word, bytes) in words.iter_mut().zip(rng.get_seed().as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    words[DRAW - 1] = rng.get_stream();
    words
}

/// The device address of a captured draw's words; 0 if the launch passes them as arguments.
pub(crate) fn draw(words: [u64; DRAW]) -> Result<u64> {
    with_recorder(
        |recorder| {
            recorder.recording.draws.push(recorder.recording.words.len());
            recorder.add(words.into_iter())
        },
        0,
    )
}

/// The same for the rows of a launch, which are these slots of the step.
pub(crate) fn rows(slots: Vec<usize>, words: impl Iterator<Item = u64>) -> Result<u64> {
    with_recorder(
        |recorder| {
            if recorder.buffer != 0 && recorder.recording.stepped.is_none() {
                return Err(CaptureError::Average.into());
            }
            let first = recorder.recording.words.len();
            let places = slots.into_iter().enumerate().map(|(row, slot)| (first + ROW * row, slot));
            recorder.recording.rows.extend(places);
            recorder.add(words)
        },
        0,
    )
}

/// Notes the step of an optimizer: once in a capture.
pub(crate) fn stepping(stepped: impl FnOnce() -> OptimizerStep) -> Result<()> {
    with_recorder(
        |recorder| match recorder.recording.stepped {
            Some(_) if recorder.buffer != 0 => Err(CaptureError::SecondStep.into()),
            _ => {
                recorder.recording.stepped = Some(stepped());
                Ok(())
            }
        },
        (),
    )
}

/// Notes what a captured step writes in place: each replay does it again.
pub(crate) fn writes<'a>(tensors: impl Iterator<Item = &'a Tensor>) {
    RECORDER.with_borrow_mut(|recorder| {
        if let Some(recorder) = recorder.as_mut().filter(|recorder| recorder.buffer != 0) {
            recorder.recording.written.extend(tensors.cloned());
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_counted_in_a_rehearsal_and_have_addresses_in_a_capture() -> Result<()> {
        assert_eq!(draw([7; DRAW])?, 0);
        let step = || -> Result<[u64; 3]> {
            let first = draw([1, 2, 3, 4, 5])?;
            stepping(|| OptimizerStep { places: vec![4, 6], stream: None })?;
            let rows = rows(vec![0, 1], 0..2 * ROW as u64)?;
            Ok([first, rows, draw([9; DRAW])?])
        };
        let (addresses, rehearsed) = record(None, step);
        assert_eq!(addresses?, [0; 3]);
        assert_eq!(rehearsed.words.len(), 2 * DRAW + 2 * ROW);
        let (addresses, captured) = record(Some((1000, rehearsed.words.len())), step);
        assert_eq!(addresses?, [1000, 1000 + 5 * 8, 1000 + 29 * 8]);
        assert_eq!(captured.words, rehearsed.words);
        assert_eq!((captured.draws, captured.rows), (vec![0, 29], vec![(5, 0), (17, 1)]));
        assert_eq!(captured.stepped.map(|stepped| stepped.places), Some(vec![4, 6]));
        assert!(!is_active());
        Ok(())
    }

    #[test]
    fn a_capture_refuses_more_than_was_rehearsed_and_a_second_optimizer() {
        let capture = |f: fn() -> Result<()>| record(Some((8, DRAW)), f).0.unwrap_err().to_string();
        let more = capture(|| draw([0; DRAW]).and_then(|_| draw([0; DRAW])).map(drop));
        assert!(more.contains("than in the rehearsal"), "{more}");
        let second = capture(|| {
            let stepped = || OptimizerStep { places: Vec::new(), stream: None };
            stepping(stepped).and_then(|()| stepping(stepped))
        });
        assert!(second.contains("a second step"), "{second}");
        let average = capture(|| rows(vec![0], 0..0).map(drop));
        assert!(average.contains("moving average"), "{average}");
    }
}
