//! The files of `tests/fuzz/corpus`, as they are and changed: an error or a run, never a panic, half
//! of a run, or memory that the file does not have.
//!
//! `CANDLE_AMP_FUZZ=100000` for more changes. `cargo test corpus_is_written -- --ignored` writes the
//! files anew, when a part saves something else: a checkpoint of all parts, one of each, and those
//! that are hostile.

use std::fs;
use std::path::{Path, PathBuf};

use candle_amp::checkpoints::Checkpoint;
use candle_amp::{Result, random};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::every::Every;
use super::{Folder, damage, elsewhere, signed, workplace};
use crate::util::package;

fn folder() -> PathBuf {
    package().join("tests/fuzz/corpus")
}

/// The names and the bytes of all files.
fn corpus() -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap());
    let read = |entry: fs::DirEntry| {
        (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())
    };
    let mut files: Vec<_> = entries.map(read).collect();
    files.sort();
    files
}

/// Files that are longer than this test little that shorter ones do not.
const LONGEST: usize = 16 << 10;

#[test]
#[ignore = "writes the files that the tests below read"]
fn the_corpus_is_written() -> Result<()> {
    let _fork = random::fork_rng_guard();
    random::manual_seed(7);
    let (scratch, folder) = (Folder::new(), folder());
    fs::create_dir_all(&folder).unwrap();
    let write = |name: &str, bytes: &[u8]| fs::write(folder.join(name), bytes).unwrap();
    let mut every = Every::new()?;
    write("every", &every.save(&scratch.file("x"))?);
    for (name, part) in every.parts() {
        let path = scratch.file("x");
        Checkpoint::new(9).with(name, &part.save()?)?.save(&path)?;
        write(&format!("part-{name}"), &fs::read(&path).unwrap());
        // Counts that cannot go on.
        let mut state = part.save()?;
        let last = |value: &mut String| match value.parse::<u64>() {
            Ok(_) => std::mem::replace(value, u64::MAX.to_string()) != *value,
            Err(_) => false,
        };
        if state.values.values_mut().map(last).filter(|changed| *changed).count() > 0 {
            Checkpoint::new(9).with(name, &state)?.save(&path)?;
            write(&format!("counts-{name}"), &fs::read(&path).unwrap());
        }
    }
    for (name, bytes) in damage::hostile().into_iter().chain(damage::misfits()) {
        if bytes.len() <= LONGEST {
            let name = name.replace(|sign: char| !sign.is_ascii_alphanumeric(), "-");
            write(&format!("hostile-{name}"), &bytes);
        }
    }
    Ok(())
}

#[test]
fn the_corpus_is_small_and_has_every_part() -> Result<()> {
    let _fork = random::fork_rng_guard();
    let files = corpus();
    let size: usize = files.iter().map(|(_, bytes)| bytes.len()).sum();
    assert!(size < 200 << 10, "{size} bytes");
    let mut every = Every::new()?;
    for (part, _) in every.parts() {
        let name = format!("part-{part}");
        assert!(files.iter().any(|(file, _)| *file == name), "no {name}");
    }
    let all = folder().join("every");
    every.load(&all)?;
    every.step()?;
    // Nor do parts go into others that only look like them.
    for name in Checkpoint::open(&all)?.parts() {
        for (kind, _) in Every::new()?.parts() {
            let before = every.bits()?;
            let part = every.parts().into_iter().find(|(found, _)| *found == kind);
            let mut part = [part.map(|(_, part)| (name, part)).unwrap()];
            let loaded = Checkpoint::open(&all)?.load(&mut part).is_ok();
            let fits = name == kind || kind == "own";
            assert!(loaded == fits, "{name} into {kind}: {loaded}");
            assert!(loaded || every.bits()? == before, "{name} into {kind}: it has changed");
        }
    }
    Ok(())
}

/// In a process of its own, whose memory is that of this test.
#[test]
fn no_file_of_the_corpus_panics_or_takes_memory() {
    let folder = Folder::new();
    let output = elsewhere("saving::corpus::reading_the_corpus", &folder.0).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// A run that goes back to what it was after each file.
struct Target {
    every: Every,
    path: PathBuf,
    whole: PathBuf,
    bits: Vec<(String, Vec<u64>)>,
    loaded: usize,
}

impl Target {
    fn new(folder: &Path) -> Result<Self> {
        let mut every = Every::new()?;
        let (path, whole) = (folder.join("file"), folder.join("whole"));
        every.save(&whole)?;
        let bits = every.bits()?;
        Ok(Self { every, path, whole, bits, loaded: 0 })
    }

    fn read(&mut self, what: &str, bytes: &[u8]) -> Result<()> {
        fs::write(&self.path, bytes).unwrap();
        if self.every.load(&self.path).is_err() {
            assert!(self.every.bits()? == self.bits, "{what}: an error, and something has changed");
            return Ok(());
        }
        self.loaded += 1;
        // It may be an error to go on, but no more than that.
        let _ = self.every.step();
        self.every.load(&self.whole)?;
        assert!(self.every.bits()? == self.bits, "{what}: something of it stays");
        Ok(())
    }
}

#[test]
#[ignore = "the other half of the test above, which runs it"]
fn reading_the_corpus() -> Result<()> {
    let _fork = random::fork_rng_guard();
    let files = corpus();
    let mut target = Target::new(&workplace())?;
    target.read("all", &fs::read(folder().join("every")).unwrap())?;
    let before = super::memory("VmHWM:");
    for (name, bytes) in &files {
        target.read(name, bytes)?;
        target.read(name, &signed(bytes.clone()))?;
    }
    let (whole, changes) = (target.loaded, std::env::var("CANDLE_AMP_FUZZ"));
    let changes = changes.ok().and_then(|changes| changes.parse().ok()).unwrap_or(2000);
    for seed in 0..changes {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let (name, bytes) = &files[rng.random_range(0..files.len())];
        target.read(&format!("{name}, seed {seed}"), &changed(bytes, &files, &mut rng))?;
    }
    let loaded = target.loaded - whole;
    assert!(loaded > 0 && loaded < changes as usize * 9 / 10, "{loaded} of {changes} were loaded");
    let taken = super::memory("VmHWM:") - before;
    assert!(taken < 32 << 20, "{} MiB for files of {LONGEST} bytes", taken >> 20);
    eprintln!("{loaded} of {changes} were loaded, {} MiB", taken >> 20);
    Ok(())
}

/// The file with some changes, most of them in its header, of a length and a checksum that fit.
fn changed(file: &[u8], files: &[(String, Vec<u8>)], rng: &mut ChaCha8Rng) -> Vec<u8> {
    const WORDS: [&str; 14] = [
        "NaN",
        "inf",
        "-1",
        "0",
        "1e300",
        "18446744073709551615",
        "4294967296",
        "4503599627370497",
        "true",
        "none",
        "\"F16\"",
        "\"BF16\"",
        "[]",
        "null",
    ];
    let length = file.first_chunk::<8>().map_or(0, |length| u64::from_le_bytes(*length)) as usize;
    if file.len() < 16 || length > file.len() - 8 {
        return file.iter().map(|byte| byte ^ u8::from(rng.random_bool(0.01))).collect();
    }
    let (mut header, mut data) = (file[8..8 + length].to_vec(), file[8 + length..].to_vec());
    for _ in 0..rng.random_range(1..4) {
        let at = rng.random_range(0..=header.len().saturating_sub(1));
        // A number or a word, from its start to its end.
        let end = |from: usize| {
            let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || b".-_".contains(byte);
            from + header[from..].iter().take_while(|byte| is_word(byte)).count()
        };
        match rng.random_range(0..6) {
            _ if header.is_empty() => header.push(b'{'),
            0 => header[at] = rng.random(),
            1 => header[at] = b"0123456789-.,:{}[]\"eEN"[rng.random_range(0..22)],
            2 => drop(header.remove(at)),
            3 => {
                let (to, word) = (end(at), WORDS[rng.random_range(0..WORDS.len())]);
                header.splice(at..to, word.bytes());
            }
            4 => {
                // A piece of another file.
                let other = &files[rng.random_range(0..files.len())].1;
                let from = rng.random_range(0..=other.len());
                let piece = &other[from..other.len().min(from + rng.random_range(0..80))];
                header.splice(at..at, piece.iter().copied());
            }
            _ if data.is_empty() => data.push(0),
            _ => {
                let at = rng.random_range(0..data.len());
                data[at] = rng.random();
            }
        }
    }
    signed([&(header.len() as u64).to_le_bytes()[..], &header, &data].concat())
}
