//! What a header may have, and what it may cost.

use std::fs;

use candle_amp::checkpoints::{Checkpoint, State};
use candle_amp::{Error, Parameters, Result};
use candle_core::{DType, Device, Var};

use super::damage::{with_header, with_tensors};
use super::{Folder, elsewhere, workplace};
use crate::bad_input::assert_says;
use crate::util::random;

#[test]
fn names_are_found_whatever_signs_they_have() -> Result<()> {
    let folder = Folder::new();
    let path = folder.file("run");
    let names = ["", ".", "a", "a.b", "a\"b\\c\u{0}\n", "\u{1F980}", "__metadata__", "aa"];
    let mut state = names
        .iter()
        .fold(State::default(), |state, name| state.with(*name, format!("value of {name}")));
    for (name, value) in names.iter().zip(0u32..) {
        state.tensors.insert((*name).to_owned(), candle_core::Tensor::new(value, &Device::Cpu)?);
    }
    // Neither is a part of the other.
    let parts = ["a", "a b", "aa", "ab"];
    let checkpoint =
        parts.iter().try_fold(Checkpoint::new(3), |all, part| all.with(part, &state))?;
    checkpoint.save(&path)?;
    let saved = Checkpoint::open(&path)?;
    assert_eq!(saved.parts().collect::<Vec<_>>(), parts);
    for part in parts {
        let mut loaded = State::default();
        saved.load(&mut [(part, &mut loaded)])?;
        assert_eq!(loaded.values, state.values, "{part}");
        assert!(loaded.tensors.keys().eq(state.tensors.keys()), "{part}");
        for (name, tensor) in &loaded.tensors {
            assert_eq!(tensor.to_scalar::<u32>()?, state.tensors[name].to_scalar::<u32>()?);
        }
    }
    Ok(())
}

#[test]
fn a_name_that_a_file_has_already_is_refused() -> Result<()> {
    let folder = Folder::new();
    let path = folder.file("x");
    let var = Var::ones(2, DType::F32, &Device::Cpu)?;
    let refused = Parameters::named([("__metadata__", var)])?.export(&path, DType::F32);
    assert_says(refused, &["cannot write", "two of the name `__metadata__`"]);
    assert!(folder.names().is_empty());
    Ok(())
}

#[test]
fn more_entries_than_any_run_has_are_refused() -> Result<()> {
    let folder = Folder::new();
    let path = folder.file("x");
    let values: Vec<String> = (0..=1 << 20).map(|i| format!("\"{i}\":\"\"")).collect();
    let header = format!("{{\"__metadata__\":{{{}}}}}", values.join(","));
    fs::write(&path, with_header(&header, 0)).unwrap();
    assert_says(Checkpoint::open(&path), &["more than 1048576 values"]);
    // Nor is a file written that could not be read.
    let state = (0..=1 << 20).fold(State::default(), |mut state, i: u32| {
        state.values.insert(i.to_string(), String::new());
        state
    });
    let refused = Checkpoint::new(1).with("loop", &state)?.save(folder.file("y"));
    assert!(matches!(refused, Err(Error::File { .. })), "{refused:?}");
    assert_eq!(folder.names(), ["x"]);
    Ok(())
}

/// Bytes of the longest header.
const LONGEST: usize = 100 << 20;

#[test]
fn a_header_is_read_up_to_the_longest() -> Result<()> {
    let folder = Folder::new();
    let path = folder.file("x");
    let short = with_tensors("", 0);
    let json = std::str::from_utf8(&short[8..]).unwrap();
    let padded = |len: usize| with_header(&format!("{json}{}", " ".repeat(len - json.len())), 0);
    fs::write(&path, padded(LONGEST)).unwrap();
    assert_eq!(Checkpoint::open(&path)?.step(), 9);
    fs::write(&path, padded(LONGEST + 8)).unwrap();
    assert_says(Checkpoint::open(&path), &["its header would have 104857608 bytes"]);
    Ok(())
}

#[test]
fn no_header_is_written_that_is_too_long_to_read() -> Result<()> {
    let folder = Folder::new();
    let state = State::default().with("long", "y".repeat(LONGEST));
    let refused = Checkpoint::new(1).with("loop", &state)?.save(folder.file("x"));
    assert_says(refused, &["cannot write", "of 104857600 bytes"]);
    assert!(folder.names().is_empty());
    Ok(())
}

#[test]
fn a_dtype_that_is_never_written_is_not_read() -> Result<()> {
    let folder = Folder::new();
    let path = folder.file("run");
    let tensor = r#","model.a":{"dtype":"F8_E4M3","shape":[3],"data_offsets":[0,3]}"#;
    fs::write(&path, with_tensors(tensor, 3)).unwrap();
    let mut state = State::default();
    let refused = Checkpoint::open(&path)?.load(&mut [("model", &mut state)]);
    assert_says(refused, &["`a` is F8_E4M3"]);
    Ok(())
}

#[test]
fn weights_are_not_exported_in_a_dtype_that_is_not_read() -> Result<()> {
    let folder = Folder::new();
    let w = Var::from_tensor(&random(1, 3, DType::F32))?;
    let refused = Parameters::named([("w", w)])?.export(folder.file("x"), DType::F8E4M3);
    assert_says(refused, &["export", "F16, BF16, F32 or F64"]);
    assert!(folder.names().is_empty());
    Ok(())
}

/// 300,000 tensors without elements, in 18 MiB.
#[cfg(target_os = "linux")]
#[test]
fn tensors_without_elements_take_little_memory() {
    let folder = Folder::new();
    let tensors: String = (0..300_000)
        .map(|i| format!(r#","model.{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}"#))
        .collect();
    fs::write(folder.file("run"), with_tensors(&tensors, 0)).unwrap();
    let output = elsewhere("saving::header::opening_them", &folder.0).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

#[cfg(target_os = "linux")]
#[test]
#[ignore = "the other half of the test above, which runs it"]
fn opening_them() -> Result<()> {
    let path = workplace().join("run");
    let mib = |bytes: u64| bytes >> 20;
    let size = fs::metadata(&path).unwrap().len();
    let before = super::memory("VmRSS:");
    let saved = Checkpoint::open(&path)?;
    let opened = super::memory("VmHWM:") - before;
    assert!(opened < 4 * size, "{} MiB take {} MiB", mib(size), mib(opened));
    let mut state = State::default();
    saved.load(&mut [("model", &mut state)])?;
    assert_eq!(state.tensors.len(), 300_000);
    let loaded = super::memory("VmHWM:") - before;
    assert!(loaded < 8 * size, "{} MiB take {} MiB in a part", mib(size), mib(loaded));
    eprintln!("{} MiB: {} MiB to open, {} to load", mib(size), mib(opened), mib(loaded));
    Ok(())
}
