//! A text as numbers, and windows of it.

use std::{fs, path::Path};

use anyhow::{Context, Result, ensure};
use candle_core::{Device, Tensor};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

/// *Coriolanus* and the first act of *Richard III*, as they stand in Tiny Shakespeare.
const SHAKESPEARE: &str = include_str!("shakespeare.txt");

/// What random numbers are for; no two share numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Stream {
    Windows,
    Sample,
}

/// The generator of item `index`: items can be made in any order.
pub(crate) fn rng(stream: Stream, seed: u64, index: usize) -> ChaCha8Rng {
    crate::common::rng([stream as u64, seed, index as u64, 0])
}

/// A text, of which the last tenth is held out.
#[derive(Debug)]
pub(crate) struct Corpus {
    pub(crate) name: String,
    /// The characters in it, each once, sorted.
    alphabet: Vec<char>,
    pub(crate) train: Part,
    pub(crate) held_out: Part,
}

/// Characters by their place in the alphabet.
#[derive(Debug)]
pub(crate) struct Part(Vec<u32>);

impl Corpus {
    /// The text that comes with the example.
    pub(crate) fn shakespeare(context: usize) -> Result<Self> {
        Self::new("Shakespeare".to_owned(), SHAKESPEARE, context)
    }

    pub(crate) fn read(path: &Path, context: usize) -> Result<Self> {
        let shown = path.display();
        ensure!(!path.is_dir(), "{shown} is a folder, not a text");
        let bytes = fs::read(path).with_context(|| format!("cannot read {shown}"))?;
        let text = String::from_utf8(bytes).map_err(|error| {
            let at = error.utf8_error().valid_up_to();
            anyhow::anyhow!("{shown} is not UTF-8: see byte {at}")
        })?;
        let name = path.file_name().map_or(shown.to_string(), |name| name.display().to_string());
        Self::new(name, &text, context).with_context(|| format!("cannot learn from {shown}"))
    }

    fn new(name: String, text: &str, context: usize) -> Result<Self> {
        let mut alphabet: Vec<char> = text.chars().collect();
        let (len, least) = (alphabet.len(), 10 * (context + 1));
        ensure!(len >= least, "{len} characters, at least {least} are needed with this context");
        alphabet.sort_unstable();
        alphabet.dedup();
        let place = |character| alphabet.binary_search(&character).unwrap_or_default() as u32;
        let mut train: Vec<u32> = text.chars().map(place).collect();
        let held_out = train.split_off(len - len / 10);
        Ok(Self { name, alphabet, train: Part(train), held_out: Part(held_out) })
    }

    /// What tells it from other texts.
    pub(crate) fn fingerprint(&self) -> String {
        let mut checksum = crc32fast::Hasher::new();
        self.alphabet.iter().for_each(|&c| checksum.update(&u32::from(c).to_le_bytes()));
        let tokens = self.train.0.iter().chain(&self.held_out.0);
        tokens.for_each(|token| checksum.update(&token.to_le_bytes()));
        let characters = self.train.len() + self.held_out.len();
        format!("{characters} characters of checksum {:08x}", checksum.finalize())
    }

    /// How many characters there are to choose from.
    pub(crate) fn characters(&self) -> usize {
        self.alphabet.len()
    }

    /// The character a text begins with: after a line break, where there are any.
    pub(crate) fn start(&self) -> u32 {
        self.alphabet.binary_search(&'\n').map_or(self.train.0[0], |at| at as u32)
    }

    /// The characters of `tokens`, in a form that does nothing to a terminal.
    pub(crate) fn show(&self, tokens: &[u32]) -> String {
        let character = |&token: &u32| self.alphabet.get(token as usize).copied();
        let plain =
            |c: char| if c.is_control() && c != '\n' { char::REPLACEMENT_CHARACTER } else { c };
        tokens.iter().filter_map(character).map(plain).collect()
    }
}

impl Part {
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The windows of training step `step`: `count` at random, the same for the same seed.
    pub(crate) fn random(
        &self,
        seed: u64,
        step: usize,
        count: usize,
        context: usize,
    ) -> Vec<&[u32]> {
        let mut rng = rng(Stream::Windows, seed, step);
        let last = self.len() - context - 1;
        (0..count).map(|_| self.window(rng.random_range(0..=last), context)).collect()
    }

    /// At most `count` windows, evenly spaced, that do not overlap.
    pub(crate) fn spread(&self, count: usize, context: usize) -> Vec<&[u32]> {
        let count = count.min((self.len() - 1) / context).max(1);
        let last = self.len() - context - 1;
        (0..count).map(|i| self.window(i * last / (count - 1).max(1), context)).collect()
    }

    /// The characters from `at` on, and the one after them.
    fn window(&self, at: usize, context: usize) -> &[u32] {
        &self.0[at..=at + context]
    }
}

/// Windows as characters seen, `(n, context)`, and characters to foretell, `(n * context)`.
pub(crate) fn batch(windows: &[&[u32]], device: &Device) -> candle_core::Result<(Tensor, Tensor)> {
    let context = windows.first().map_or(0, |window| window.len() - 1);
    let part = |from: usize| -> Vec<u32> {
        windows.iter().flat_map(|window| &window[from..from + context]).copied().collect()
    };
    let x = Tensor::from_vec(part(0), (windows.len(), context), device)?;
    let y = Tensor::from_vec(part(1), windows.len() * context, device)?;
    Ok((x, y))
}

#[cfg(test)]
mod tests;
