//! Files that are cut off, changed, foreign or hostile: an error each, no panic, no memory taken.

use std::fs;
use std::path::Path;
use std::process::Command;

use candle_amp::checkpoints::{Checkpoint, Stateful};
use candle_amp::error::CheckpointError;
use candle_amp::{Error, Result, random};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::small::Run;
use super::{Folder, elsewhere, signed, workplace};

fn write(path: &Path, bytes: &[u8]) {
    fs::write(path, bytes).unwrap();
}

#[test]
fn no_file_that_was_cut_off_is_taken() -> Result<()> {
    let folder = Folder::new();
    let path = folder.file("run");
    let bytes = Run::new()?.save(&path)?;
    for length in 0..bytes.len() {
        write(&path, &bytes[..length]);
        let opened = Checkpoint::open(&path);
        assert!(
            matches!(opened, Err(Error::Checkpoint(CheckpointError::Damaged { .. }))),
            "{length} bytes: {opened:?}"
        );
    }
    for more in [1, 8, 1000] {
        write(&path, &[&bytes[..], &vec![0; more]].concat());
        assert!(
            matches!(
                Checkpoint::open(&path),
                Err(Error::Checkpoint(CheckpointError::Damaged { .. }))
            ),
            "{more} more"
        );
    }
    write(&path, &bytes);
    Checkpoint::open(&path).map(|_| ())
}

#[test]
fn no_flipped_bit_goes_unseen() -> Result<()> {
    let folder = Folder::new();
    let path = folder.file("run");
    let mut bytes = Run::new()?.save(&path)?;
    for at in 0..bytes.len() {
        for bit in 0..8 {
            bytes[at] ^= 1 << bit;
            write(&path, &bytes);
            let opened = Checkpoint::open(&path);
            let seen = matches!(
                opened,
                Err(Error::Checkpoint(CheckpointError::Damaged { .. })
                    | Error::Checkpoint(CheckpointError::Version { .. }))
            );
            assert!(seen, "byte {at}, bit {bit}: {opened:?}");
            bytes[at] ^= 1 << bit;
        }
    }
    Ok(())
}

/// A file with this header, its length right, and so many bytes of data.
pub(super) fn with_header(json: &str, data: usize) -> Vec<u8> {
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    signed(bytes)
}

/// A checkpoint's header with these tensors.
pub(super) fn with_tensors(tensors: &str, data: usize) -> Vec<u8> {
    let metadata = r#""checksum":"00000000","format":"candle-amp checkpoint","version":"1""#;
    let rest = r#""step":"9","parts":"model","candle_amp":"0.1.0""#;
    with_header(&format!("{{\"__metadata__\":{{{metadata},{rest}}}{tensors}}}"), data)
}

/// The file with another header.
fn map_header(file: Vec<u8>, change: impl Fn(&str) -> String) -> Vec<u8> {
    let (length, rest) = file.split_first_chunk::<8>().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    with_header(&change(std::str::from_utf8(header).unwrap()), data.len())
}

pub(super) fn hostile() -> Vec<(&'static str, Vec<u8>)> {
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    let tensor = |shape: &str, from: &str, to: &str| {
        format!(r#","model.a":{{"dtype":"F32","shape":[{shape}],"data_offsets":[{from},{to}]}}"#)
    };
    let two = |a: [&str; 2], b: [&str; 2]| {
        tensor("1", a[0], a[1]) + &tensor("1", b[0], b[1]).replace("model.a", "model.b")
    };
    let one_name = |tensors: String| tensors.replace("model.b", "model.a");
    let with_value = |value: &str| {
        map_header(with_tensors("", 0), |header| {
            header.replacen("\"step\"", &format!("{value},\"step\""), 1)
        })
    };
    let header = |length: u64| [&length.to_le_bytes()[..], b"{}"].concat();
    vec![
        ("nothing", vec![]),
        ("text", b"#!/bin/sh\necho this is no checkpoint at all\n".to_vec()),
        ("a zip file", [&b"PK\x03\x04"[..], &[7; 500]].concat()),
        ("a pickle", b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00}\x94(K\x01K\x02u.".to_vec()),
        ("zeros", vec![0; 4096]),
        ("a header of all there is", header(u64::MAX)),
        ("a header of half of that", header(1 << 63)),
        ("a header past the end", header(3)),
        ("a long header past the end", header(100 << 20)),
        ("no header", header(0)),
        ("an empty header", with_header("{}", 0)),
        ("no metadata", with_header(&format!("{{{}}}", &tensor("1", "0", "4")[1..]), 4)),
        ("a list", with_header("[1, 2]", 0)),
        ("a deep header", with_header(&deep, 0)),
        ("no text", with_header("\u{0}\u{1}", 0)),
        ("a number for metadata", with_header(r#"{"__metadata__":3}"#, 0)),
        (
            "a checksum cut off",
            with_header(
                r#"{"__metadata__":{"format":"candle-amp checkpoint","version":"1","step":"1","checksum":""}}"#,
                0,
            ),
        ),
        ("the format of another", with_header(r#"{"__metadata__":{"format":"pt"}}"#, 0)),
        ("a gap", with_tensors(&tensor("1", "4", "8"), 8)),
        ("an overlap", with_tensors(&two(["0", "4"], ["2", "6"]), 6)),
        ("the same place twice", with_tensors(&two(["0", "4"], ["0", "4"]), 4)),
        ("a tensor past the end", with_tensors(&tensor("1000", "0", "4000"), 4)),
        ("the end before the start", with_tensors(&tensor("1", "4", "0"), 4)),
        ("offsets that overflow", with_tensors(&tensor("1", "0", "18446744073709551615"), 4)),
        ("offsets that are too large", with_tensors(&tensor("1", "0", "99999999999999999999"), 4)),
        ("negative offsets", with_tensors(&tensor("1", "-4", "0"), 4)),
        ("a count that overflows", with_tensors(&tensor("4294967296,4294967296", "0", "4"), 4)),
        ("a size that overflows", with_tensors(&tensor("4611686018427387904", "0", "0"), 0)),
        ("a negative count", with_tensors(&tensor("-1", "0", "4"), 4)),
        ("a shape of another size", with_tensors(&tensor("3", "0", "4"), 4)),
        ("bytes of no tensor", with_tensors(&tensor("1", "0", "4"), 400)),
        ("one tensor twice", with_tensors(&one_name(two(["0", "4"], ["4", "8"])), 8)),
        ("one tensor twice, in one place", with_tensors(&one_name(two(["0", "4"], ["0", "4"])), 4)),
        ("strides that overflow", with_tensors(&tensor("0,4294967296,4294967296", "0", "0"), 0)),
        ("one value twice", with_value(r#""step":"10""#)),
        ("one value twice, escaped", with_value(r#""st\u0065p":"10""#)),
        ("metadata twice", with_tensors(r#","__metadata__":{}"#, 0)),
        ("something after the header", with_header(r#"{"__metadata__":{}}{}"#, 0)),
        ("no comma", with_header(r#"{"__metadata__":{"format":"pt" "a":"b"}}"#, 0)),
        ("a comma too many", with_header(r#"{"__metadata__":{"format":"pt",}}"#, 0)),
        ("a dtype of its own", with_tensors(&tensor("1", "0", "4").replace("F32", "F77"), 4)),
        ("a count of letters", with_tensors(&tensor("\"one\"", "0", "4"), 4)),
    ]
}

/// Those that are whole, and only do not fit.
pub(super) fn misfits() -> Vec<(&'static str, Vec<u8>)> {
    let tensor = |dtype: &str, shape: &str, to: usize| {
        let a = format!(
            r#","model.a":{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[0,{to}]}}"#
        );
        with_tensors(&a, to)
    };
    let many: Vec<String> = (0..20_000)
        .map(|i| format!(r#","model.{i}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#))
        .collect();
    let long = vec!["1"; 10_000].join(",");
    vec![
        ("no tensors", with_tensors("", 0)),
        ("another dtype", tensor("F64", "3", 24)),
        ("a dtype that candle has not", tensor("BOOL", "3", 3)),
        ("no elements of a great shape", tensor("F32", "0,4611686018427387904", 0)),
        ("a long shape", tensor("F32", &long, 4)),
        ("many tensors", with_tensors(&many.concat(), 0)),
    ]
}

#[test]
fn foreign_and_hostile_files_are_errors() -> Result<()> {
    let folder = Folder::new();
    let path = folder.file("run");
    let mut run = Run::new()?;
    let before = run.weights();
    for (what, bytes) in hostile() {
        write(&path, &bytes);
        let opened = Checkpoint::open(&path);
        assert!(
            matches!(opened, Err(Error::Checkpoint(CheckpointError::Damaged { .. }))),
            "{what}: {opened:?}"
        );
    }
    for (what, bytes) in misfits() {
        write(&path, &bytes);
        assert!(Checkpoint::open(&path).is_ok(), "{what}");
        let mut parts: [(&str, &mut dyn Stateful); 1] = [("model", &mut run.parameters)];
        let refused = Checkpoint::open(&path)?.load(&mut parts);
        assert!(
            matches!(
                refused,
                Err(Error::Checkpoint(CheckpointError::Mismatch { .. })
                    | Error::Checkpoint(CheckpointError::Damaged { .. }))
            ),
            "{what}"
        );
    }
    assert_eq!(run.weights(), before);
    Ok(())
}

/// Random changes with the checksum made right, as no accident makes it: an error or a checkpoint,
/// and never half of one.
#[test]
fn changes_that_the_checksum_covers_up_do_not_panic() -> Result<()> {
    let _fork = random::fork_rng_guard();
    let folder = Folder::new();
    let path = folder.file("run");
    let mut run = Run::new()?;
    let bytes = run.save(&path)?;
    let header = 8 + usize::from(bytes[0]) + 256 * usize::from(bytes[1]);
    let mut loaded = 0;
    for seed in 0..3000 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut changed = bytes.clone();
        for _ in 0..rng.random_range(1..4) {
            let end = if rng.random_bool(0.9) { header } else { changed.len() };
            let at = rng.random_range(0..end.min(changed.len()));
            match rng.random_range(0..4) {
                0 => changed[at] = rng.random(),
                1 => changed[at] = b"0123456789-.,:{}[]\"eEN"[rng.random_range(0..22)],
                2 => drop(changed.remove(at)),
                _ => changed.insert(at, b"09-\",.]}"[rng.random_range(0..8)]),
            }
        }
        if rng.random_bool(0.5) && changed.len() != bytes.len() {
            // The length of the header as it is now.
            let length = (header - 8 + changed.len()).saturating_sub(bytes.len()) as u64;
            changed.splice(0..8, length.to_le_bytes());
        }
        write(&path, &signed(changed));
        let (before, scale) = (run.weights(), run.scaler.state());
        match run.load(&path) {
            Ok(()) => loaded += 1,
            Err(_) => {
                assert_eq!((run.weights(), run.scaler.state()), (before, scale), "seed {seed}")
            }
        }
    }
    assert!(loaded < 1500, "{loaded} of 3000 were loaded");
    Ok(())
}

/// The tests above in a process that may not have more than a gigabyte and a half of addresses, besides those of libraries:
/// CUDA's are large.
#[test]
#[cfg(target_os = "linux")]
fn hostile_files_take_no_memory() {
    let folder = Folder::new();
    let inner = elsewhere("saving::damage::in_little_memory", &folder.0);
    let mut shell = std::process::Command::new("sh");
    let kibibytes = 1_500_000 + mapped_libraries() / 1024;
    shell.args(["-c", &format!("ulimit -v {kibibytes} && exec \"$@\""), "sh"]);
    shell.arg(inner.get_program()).args(inner.get_args());
    shell.env(super::WORKPLACE, &folder.0).env("RAYON_NUM_THREADS", "1");
    let output = shell.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// The bytes of addresses that this process has for its libraries.
#[cfg(target_os = "linux")]
fn mapped_libraries() -> u64 {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let bytes = maps.lines().filter(|line| line.contains(".so")).map(|line| {
        let (from, to) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        u64::from_str_radix(to, 16).unwrap() - u64::from_str_radix(from, 16).unwrap()
    });
    bytes.sum()
}

#[test]
#[ignore = "the other half of the test above, which runs it"]
fn in_little_memory() -> Result<()> {
    let path = workplace().join("sparse");
    foreign_and_hostile_files_are_errors()?;
    // A file that claims to be far larger than memory, and is, and has nothing in it.
    let tensor = r#","model.a":{"dtype":"U8","shape":[2147483648],"data_offsets":[0,2147483648]}"#;
    write(&path, &with_tensors(tensor, 0));
    let length = fs::metadata(&path).unwrap().len() + (1 << 31);
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(length).unwrap();
    assert!(
        matches!(Checkpoint::open(&path), Err(Error::Checkpoint(CheckpointError::Damaged { .. }))),
        "its checksum is wrong"
    );
    Ok(())
}

#[test]
fn a_generator_s_state_is_a_number() -> Result<()> {
    let folder = Folder::new();
    let path = folder.file("run");
    let state = candle_amp::checkpoints::State::default().with("seed", "-1").with("draws", 3);
    Checkpoint::new(1).with("random", &state)?.save(&path)?;
    let refused = Checkpoint::open(&path)?.load(&mut [("random", &mut random::Generator)]);
    assert!(
        matches!(refused, Err(Error::Checkpoint(CheckpointError::Mismatch { .. }))),
        "{refused:?}"
    );
    Ok(())
}

/// Opening a pipe would wait for somebody to write to it.
#[cfg(unix)]
#[test]
fn what_is_no_regular_file_is_refused_without_opening_it() {
    let folder = Folder::new();
    let (pipe, inner) = (folder.file("pipe"), folder.file("folder"));
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    fs::create_dir(&inner).unwrap();
    for path in [pipe, inner] {
        let opened = Checkpoint::open(&path);
        assert!(
            matches!(opened, Err(Error::Checkpoint(CheckpointError::Damaged { .. }))),
            "{opened:?}"
        );
    }
}

/// A quote in a name is escaped, so that what follows it is not taken for the checksum.
#[test]
fn a_name_may_end_like_the_key_of_the_checksum() -> Result<()> {
    use candle_amp::checkpoints::State;
    let folder = Folder::new();
    let path = folder.file("run");
    let state = State::default().with("a\"checksum", "12345678 and more");
    Checkpoint::new(1).with("a", &state)?.save(&path)?;
    let mut loaded = State::default();
    Checkpoint::open(&path)?.load(&mut [("a", &mut loaded)])?;
    assert_eq!(loaded.values, state.values);
    Ok(())
}
