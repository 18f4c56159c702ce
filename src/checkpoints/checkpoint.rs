//! One checkpoint: the parts of a run, put together and taken apart.

use std::collections::BTreeMap;
use std::path::Path;

use super::file::{self, Entry, Header, Reader, Written};
use super::state::{State, Stateful};
use crate::Result;
use crate::error::CheckpointError;

const FORMAT: &str = "candle-amp checkpoint";
/// Of the layout described at [`Checkpoint`].
const VERSION: u32 = 1;

/// A run to save: a step number and the parts given, each under a name of the caller's.
///
/// # The file
///
/// One safetensors file. Tensors are called `part.name`, so that candle's `VarBuilder` reads the
/// weights of a part `model` at `vb.pp("model")`. Its metadata has `format`, `version`,
/// `candle_amp` (the crate's version), `step`, `metric` if there is one, `parts`, the values of the
/// parts as `part.name`, and `checksum`: CRC-32 of the whole file with zeros in its place.
///
/// It is written beside its place, synced to the disk, and moved there. Whenever the process or the
/// system stops, the old file or the new one is there, whole.
///
/// # Examples
///
/// ```
/// use candle_amp::optim::{Sgd, SgdConfig};
/// use candle_amp::checkpoints::Checkpoint;
/// use candle_amp::{GradScaler, Parameters, ops, random};
/// use candle_core::{Device, Var};
///
/// # let folder = std::env::temp_dir().join(format!("candle-amp-doc-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder)?;
/// # let path = folder.join("run.safetensors");
/// let w = Var::new(&[1f32, 2.0], &Device::Cpu)?;
/// let mut parameters = Parameters::named([("w", w.clone())])?;
/// let config = SgdConfig { lr: 0.5, momentum: 0.9, ..Default::default() };
/// let mut sgd = Sgd::new(&parameters, config)?;
/// let mut scaler = GradScaler::default();
/// let mut step = |sgd: &mut Sgd, scaler: &mut GradScaler| -> candle_amp::Result<Vec<f32>> {
///     scaler.scale(&ops::sum(&w)?)?.backward()?;
///     scaler.step(sgd)?;
///     scaler.update()?;
///     Ok(w.to_vec1()?)
/// };
/// step(&mut sgd, &mut scaler)?;
///
/// Checkpoint::new(1)
///     .with("model", &parameters)?
///     .with("optimizer", &sgd)?
///     .with("scaler", &scaler)?
///     .with("random", &random::Generator)?
///     .save(&path)?;
/// let then = step(&mut sgd, &mut scaler)?;
///
/// let saved = Checkpoint::open(&path)?; // most likely in another process
/// saved.load(&mut [
///     ("model", &mut parameters),
///     ("optimizer", &mut sgd),
///     ("scaler", &mut scaler),
///     ("random", &mut random::Generator),
/// ])?;
/// assert_eq!(saved.step(), 1);
/// assert_eq!(step(&mut sgd, &mut scaler)?, then); // the same, momentum too
/// # std::fs::remove_dir_all(&folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// An optimizer of candle's cannot be a part, as its moments cannot be read:
///
/// ```compile_fail,E0277
/// # fn f(adamw: &candle_nn::AdamW) -> candle_amp::Result<()> {
/// candle_amp::checkpoints::Checkpoint::new(1).with("optimizer", adamw)?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a checkpoint does nothing before `save`"]
pub struct Checkpoint {
    pub(super) step: u64,
    pub(super) metric: Option<f64>,
    parts: BTreeMap<String, State>,
}

impl Checkpoint {
    /// A checkpoint after `step` steps, without parts yet.
    pub fn new(step: u64) -> Self {
        Self { step, metric: None, parts: BTreeMap::new() }
    }

    /// The same with what [`Checkpointer::keep_best`](crate::checkpoints::Checkpointer::keep_best) compares: a
    /// validation loss, an accuracy. NaN is never the best.
    pub fn metric(mut self, metric: f64) -> Self {
        self.metric = Some(metric);
        self
    }

    /// The same with a part more. Weights are not copied: save before they change.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::PartName`] for a name that is empty, taken, or has a dot in it; whatever the part
    /// returns.
    pub fn with<S: Stateful>(mut self, name: &str, part: &S) -> Result<Self> {
        if name.is_empty() || name.contains('.') || self.parts.contains_key(name) {
            return Err(CheckpointError::PartName { name: name.to_owned() }.into());
        }
        self.parts.insert(name.to_owned(), part.save()?);
        Ok(self)
    }

    /// Writes it to `path`, over what is there, in one step. If the folder cannot be synced to the
    /// disk, `tracing` gets a warning. The new file is there, but the old one may come back if the
    /// system stops.
    ///
    /// # Synchronisation
    ///
    /// Waits for the disk, and for the device: tensors are copied to the host one at a time.
    ///
    /// # Errors
    ///
    /// [`Error::File`](crate::Error::File). What was at `path` is untouched then.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        self.write(path.as_ref()).map(|_| ())
    }

    pub(super) fn write(&self, path: &Path) -> Result<Written> {
        let mut header = Header::new();
        let mut put = |name: &str, value: String| header.insert(name.to_owned(), value);
        put("format", FORMAT.to_owned());
        put("version", VERSION.to_string());
        put("candle_amp", env!("CARGO_PKG_VERSION").to_owned());
        put("checksum", "00000000".to_owned());
        put("step", self.step.to_string());
        if let Some(metric) = self.metric {
            put("metric", metric.to_string());
        }
        // No name has a dot, so that one can divide them.
        put("parts", self.parts.keys().map(String::as_str).collect::<Vec<_>>().join("."));
        let mut entries = Vec::new();
        for (part, state) in &self.parts {
            for (name, value) in &state.values {
                header.insert(format!("{part}.{name}"), value.clone());
            }
            for (name, tensor) in &state.tensors {
                let name = format!("{part}.{name}");
                entries.push(Entry { name, tensor, dtype: tensor.dtype() });
            }
        }
        file::write(path, header, entries)
    }

    /// Opens the checkpoint at `path`, and checks it whole: its header, and the checksum of every
    /// byte. Nothing of it is kept in memory.
    ///
    /// # Errors
    ///
    /// [`Error::File`](crate::Error::File); [`CheckpointError::Damaged`](crate::error::CheckpointError::Damaged) for a file that was cut off, changed, is none of this
    /// crate's, or has one name twice; [`CheckpointError::Version`](crate::error::CheckpointError::Version) for one of a later crate.
    pub fn open(path: impl AsRef<Path>) -> Result<SavedCheckpoint> {
        let saved = SavedCheckpoint::peek(path.as_ref())?;
        saved.reader.verify()?;
        Ok(saved)
    }
}

/// A checkpoint on disk, from [`Checkpoint::open`].
#[derive(Debug)]
pub struct SavedCheckpoint {
    reader: Reader,
    step: u64,
    metric: Option<f64>,
    parts: Vec<String>,
}

impl SavedCheckpoint {
    /// Reads the header alone.
    pub(super) fn peek(path: &Path) -> Result<Self> {
        let reader = Reader::open(path)?;
        let get = |name: &str| reader.index.value(name);
        if get("format") != Some(FORMAT) {
            return Err(reader.damaged("it is a safetensors file of something else"));
        }
        let number = |name: &str| {
            let fault = || reader.damaged(format!("its header has no number as `{name}`"));
            get(name).and_then(|text| text.parse::<u64>().ok()).ok_or_else(fault)
        };
        let version = number("version")?;
        if version != u64::from(VERSION) {
            let (path, by) = (path.to_owned(), get("candle_amp").unwrap_or("?").to_owned());
            return Err(
                CheckpointError::Version { path, got: version, by, supported: VERSION }.into()
            );
        }
        let step = number("step")?;
        let metric = match get("metric").map(str::parse) {
            None => None,
            Some(Ok(metric)) => Some(metric),
            Some(Err(_)) => return Err(reader.damaged("its metric is no number")),
        };
        let parts = get("parts").unwrap_or_default().split('.').filter(|name| !name.is_empty());
        let parts = parts.map(str::to_owned).collect();
        Ok(Self { step, metric, parts, reader })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.reader.path
    }

    /// The number of steps it was saved after.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The metric it was saved with.
    pub fn metric(&self) -> Option<f64> {
        self.metric
    }

    /// The names of its parts, sorted.
    pub fn parts(&self) -> impl Iterator<Item = &str> {
        self.parts.iter().map(String::as_str)
    }

    /// Loads the parts named; others in the file are left alone. All are checked first: names,
    /// shapes, dtypes, settings.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NoPart`], [`CheckpointError::Mismatch`] and whatever else does not fit; [`Error::File`](crate::Error::File).
    /// Nothing is changed then. Only a device that fails in the middle of copying leaves a part
    /// loaded and another not.
    pub fn load(&self, parts: &mut [(&str, &mut dyn Stateful)]) -> Result<()> {
        for (name, part) in parts.iter() {
            if !self.parts().any(|found| found == *name) {
                let found = self.parts.clone();
                return Err(CheckpointError::NoPart { name: (*name).to_owned(), found }.into());
            }
            let tensors = self.reader.hollow(&format!("{name}."))?;
            let state = State { tensors, values: self.values(name) };
            part.check(&state).map_err(|error| error.in_part(name))?;
        }
        let mut states = Vec::with_capacity(parts.len());
        for (name, part) in parts.iter() {
            let tensors = self.reader.tensors(&format!("{name}."))?;
            let state = State { tensors, values: self.values(name) };
            part.check(&state).map_err(|error| error.in_part(name))?;
            states.push(state);
        }
        for ((name, part), state) in parts.iter_mut().zip(states) {
            part.load(&state).map_err(|error| error.in_part(name))?;
        }
        Ok(())
    }

    fn values(&self, part: &str) -> BTreeMap<String, String> {
        let prefix = format!("{part}.");
        let values = self.reader.index.values(&prefix);
        values.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    }
}
