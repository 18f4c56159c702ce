//! The file: a safetensors file with a checksum, written beside its place and moved there.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::{DType, Device, Tensor};
use crc32fast::Hasher;
use safetensors::tensor::TensorInfo;

use super::header::{Index, MAX_ENTRIES, Stored};
use super::names;
use super::state::State;
use crate::error::lock::lock;
use crate::error::{ArgumentError, CheckpointError};
use crate::{Error, Result, kernels};

/// Bytes read or written at a time.
const BUFFER: usize = 1 << 20;
/// A header of a million tensors is about this long; a longer one is not ours.
const MAX_HEADER: u64 = 100 << 20;
/// The checksum in the header, eight digits. In a JSON string quotes are escaped, so this, without a backslash before it,
/// cannot be a part of one.
const CHECKSUM: &str = "\"checksum\":\"";
const DIGITS: usize = 8;

/// Metadata of a file, by name.
pub(super) type Header = BTreeMap<String, String>;

/// A tensor to write, and the dtype to write it in.
pub(super) struct Entry<'t> {
    pub(super) name: String,
    pub(super) tensor: &'t Tensor,
    pub(super) dtype: DType,
}

fn io(action: &'static str, path: &Path) -> impl Fn(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::File { action, path: path.clone(), source }
}

/// Whether what was written lasts when the system stops now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Written {
    /// It does, or the file system has no way to ask for that.
    ToLast,
    /// The old file may come back, as whole as it was: the folder could not be synced.
    ForNow,
}

/// Writes `path` in one step: whoever looks finds the old file or the new one, whole, whenever this
/// process or the system stops. After an error the old one is where it was.
pub(super) fn write(path: &Path, header: Header, entries: Vec<Entry<'_>>) -> Result<Written> {
    write_and_sync(path, header, entries, sync)
}

/// The new name of a file lasts when its folder does.
fn sync(folder: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(folder)?.sync_all() } else { Ok(()) }
}

fn write_and_sync(
    path: &Path,
    header: Header,
    entries: Vec<Entry<'_>>,
    sync: impl Fn(&Path) -> io::Result<()>,
) -> Result<Written> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let (Some(name), folder) = (path.file_name(), folder_of(path)) else {
        let source = io::Error::new(io::ErrorKind::InvalidInput, "not the name of a file");
        return Err(io("cannot write", path)(source));
    };
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let name = names::temporary(&name.to_string_lossy(), std::process::id(), number);
    let temporary = folder.join(name);
    let failed = io("cannot write", path);
    let written = write_new(&temporary, path, header, entries)
        .and_then(|()| fs::rename(&temporary, path).map_err(&failed));
    if let Err(error) = written {
        // What is left of it is found by the next `Checkpointer` if this fails too.
        let _ = fs::remove_file(&temporary);
        return Err(error);
    }
    // From here on it is written, and no error may say that the old file is there.
    match sync(&folder) {
        Ok(()) => Ok(Written::ToLast),
        Err(error) => {
            let (file, folder) = (path.display(), folder.display());
            tracing::warn!("wrote {file}, but could not sync {folder} to the disk: {error}");
            let never =
                matches!(error.kind(), io::ErrorKind::Unsupported | io::ErrorKind::InvalidInput);
            Ok(if never { Written::ToLast } else { Written::ForNow })
        }
    }
}

fn folder_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder.to_owned(),
        _ => PathBuf::from("."),
    }
}

fn write_new(
    temporary: &Path,
    path: &Path,
    header: Header,
    mut entries: Vec<Entry<'_>>,
) -> Result<()> {
    let failed = io("cannot write", path);
    // Widest first, so that every tensor is aligned to its elements.
    entries.sort_by_cached_key(|e| (std::cmp::Reverse(e.dtype.size_in_bytes()), e.name.clone()));
    let head = head(&header, &entries).map_err(&failed)?;
    let file = OpenOptions::new().write(true).create_new(true).open(temporary).map_err(&failed)?;
    let mut out = Checked { inner: BufWriter::with_capacity(BUFFER, &file), sum: Hasher::new() };
    out.write_all(&head).map_err(&failed)?;
    for entry in entries {
        let tensor = entry.tensor.detach().to_dtype(entry.dtype)?;
        write_elements(&mut out, &tensor, &failed)?;
    }
    out.flush().map_err(&failed)?;
    let sum = format!("{:0DIGITS$x}", out.sum.finalize());
    if let Some(at) = checksum_at(&head) {
        (&file)
            .seek(SeekFrom::Start(at as u64))
            .and_then(|_| (&file).write_all(sum.as_bytes()))
            .map_err(&failed)?;
    }
    file.sync_all().map_err(&failed)
}

/// Length and header, as they are in the file.
fn head(header: &Header, entries: &[Entry<'_>]) -> io::Result<Vec<u8>> {
    let refused = |what: String| io::Error::new(io::ErrorKind::InvalidInput, what);
    if header.len() > MAX_ENTRIES || entries.len() > MAX_ENTRIES {
        let (values, tensors) = (header.len(), entries.len());
        let most =
            format!("{values} values and {tensors} tensors, and may have {MAX_ENTRIES} each");
        return Err(refused(format!("it would have {most}")));
    }
    let mut all = BTreeMap::new();
    all.insert("__metadata__", serde_json::to_value(header)?);
    let mut end = 0;
    for Entry { name, tensor, dtype } in entries {
        let start = end;
        end += tensor.elem_count() * dtype.size_in_bytes();
        let (shape, data_offsets) = (tensor.dims().to_vec(), (start, end));
        let info = TensorInfo { dtype: (*dtype).into(), shape, data_offsets };
        if all.insert(name, serde_json::to_value(info)?).is_some() {
            return Err(refused(format!("it would have two of the name `{name}`")));
        }
    }
    let mut json = serde_json::to_vec(&all)?;
    json.resize(json.len().next_multiple_of(8), b' ');
    if json.len() as u64 > MAX_HEADER {
        let size = json.len();
        let most = "rename what has long names, or save tensors, not values";
        return Err(refused(format!("its header would have {size} of {MAX_HEADER} bytes: {most}")));
    }
    let mut head = (json.len() as u64).to_le_bytes().to_vec();
    head.append(&mut json);
    Ok(head)
}

/// Where the digits of the checksum start in a header that has one.
fn checksum_at(head: &[u8]) -> Option<usize> {
    let mut windows = head.windows(CHECKSUM.len()).enumerate();
    let (at, _) = windows.find(|(at, window)| {
        let is_escaped = at.checked_sub(1).is_some_and(|before| head[before] == b'\\');
        *window == CHECKSUM.as_bytes() && !is_escaped
    })?;
    Some(at + CHECKSUM.len()).filter(|start| start + DIGITS <= head.len())
}

/// Adds up what is written.
struct Checked<W> {
    inner: W,
    sum: Hasher,
}

impl<W: Write> Write for Checked<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.sum.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// Whether a file may have tensors of that dtype.
fn is_stored(dtype: DType) -> bool {
    let integer = matches!(dtype, DType::U8 | DType::U32 | DType::I16 | DType::I32 | DType::I64);
    integer || matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64)
}

fn write_elements(
    out: &mut impl Write,
    tensor: &Tensor,
    failed: &impl Fn(io::Error) -> Error,
) -> Result<()> {
    macro_rules! elements {
        ($T:ty) => {{
            let elements = tensor.flatten_all()?.to_vec1::<$T>()?;
            for part in elements.chunks(BUFFER / 8) {
                let bytes: Vec<u8> = part.iter().flat_map(|x| x.to_le_bytes()).collect();
                out.write_all(&bytes).map_err(failed)?;
            }
        }};
    }
    match tensor.dtype() {
        DType::U8 => elements!(u8),
        DType::U32 => elements!(u32),
        DType::I16 => elements!(i16),
        DType::I32 => elements!(i32),
        DType::I64 => elements!(i64),
        DType::F16 => elements!(half::f16),
        DType::BF16 => elements!(half::bf16),
        DType::F32 => elements!(f32),
        DType::F64 => elements!(f64),
        got => {
            let expected = "an integer, F16, BF16, F32 or F64".to_owned();
            return Err(
                ArgumentError::DType { op: "checkpoint", name: "a tensor", got, expected }.into()
            );
        }
    }
    Ok(())
}

/// An open checkpoint whose header made sense.
#[derive(Debug)]
pub(super) struct Reader {
    pub(super) path: PathBuf,
    pub(super) index: Index,
    /// Locked from a seek to the end of what is read there: threads share the position.
    file: Mutex<File>,
    /// Where the tensors start.
    start: u64,
}

impl Reader {
    /// Reads the header, and nothing else.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let failed = io("cannot read", path);
        let damaged =
            |fault: String| CheckpointError::Damaged { path: path.to_owned(), fault }.into();
        // Before it is opened: that would wait for the other end of a pipe.
        if !fs::metadata(path).map_err(&failed)?.is_file() {
            return Err(damaged("it is not a file".to_owned()));
        }
        let mut file = File::open(path).map_err(&failed)?;
        let length = file.metadata().map_err(&failed)?.len();
        let mut size = [0; 8];
        if length < 8 {
            return Err(damaged(format!("it has {length} bytes")));
        }
        file.read_exact(&mut size).map_err(&failed)?;
        let size = u64::from_le_bytes(size);
        if size > MAX_HEADER || size > length - 8 {
            return Err(damaged(format!("its header would have {size} bytes, of {length} in all")));
        }
        let mut json = vec![0; size as usize];
        file.read_exact(&mut json).map_err(&failed)?;
        let index = Index::parse(&json)
            .map_err(|fault| damaged(format!("its header makes no sense: {fault}")))?;
        let data = index.data_len();
        let expected = (8 + size).checked_add(data as u64);
        if expected != Some(length) {
            return Err(damaged(format!(
                "it has {length} bytes, and its header tells of 8 + {size} + {data}"
            )));
        }
        Ok(Self { path: path.to_owned(), index, file: Mutex::new(file), start: 8 + size })
    }

    pub(super) fn damaged(&self, fault: impl Into<String>) -> Error {
        CheckpointError::Damaged { path: self.path.clone(), fault: fault.into() }.into()
    }

    /// Reads the whole file, and compares its checksum. Whatever bit has changed, this finds it.
    pub(super) fn verify(&self) -> Result<()> {
        let failed = io("cannot read", &self.path);
        let mut file = lock(&self.file);
        file.rewind().map_err(&failed)?;
        let mut head = vec![0; self.start as usize];
        file.read_exact(&mut head).map_err(&failed)?;
        let Some(at) = checksum_at(&head) else {
            return Err(self.damaged("it has no checksum"));
        };
        let digits = head[at..at + DIGITS].to_vec();
        head[at..at + DIGITS].fill(b'0');
        let mut sum = Hasher::new();
        sum.update(&head);
        let mut buffer = vec![0; BUFFER];
        loop {
            match file.read(&mut buffer).map_err(&failed)? {
                0 => break,
                read => sum.update(&buffer[..read]),
            }
        }
        let sum = format!("{:0DIGITS$x}", sum.finalize());
        if sum.as_bytes() == digits {
            return Ok(());
        }
        let digits = String::from_utf8_lossy(&digits);
        Err(self.damaged(format!("its checksum is {sum}, and its header says {digits}")))
    }

    /// The tensors whose name starts with `prefix`, without it: of their shapes and dtypes, but of
    /// no size in memory.
    pub(super) fn hollow(&self, prefix: &str) -> Result<BTreeMap<String, Tensor>> {
        self.each(prefix, true)
    }

    /// The tensors whose name starts with `prefix`, without it.
    pub(super) fn tensors(&self, prefix: &str) -> Result<BTreeMap<String, Tensor>> {
        self.each(prefix, false)
    }

    /// Those that are hollow, or have no elements, are one tensor where they have one shape.
    fn each(&self, prefix: &str, hollow: bool) -> Result<BTreeMap<String, Tensor>> {
        let (mut tensors, mut alike) = (BTreeMap::new(), HashMap::new());
        for stored in self.index.tensors(prefix) {
            let Stored { name, shape, size, .. } = stored;
            let dtype = DType::try_from(stored.dtype).ok().filter(|dtype| is_stored(*dtype));
            let unknown = || self.damaged(format!("`{name}` is {:?}", stored.dtype));
            let dtype = dtype.ok_or_else(unknown)?;
            let tensor = match hollow || size == 0 {
                false => self.read(&stored, dtype)?,
                true => match alike.get(&(dtype.as_str(), shape)) {
                    Some(tensor) => Tensor::clone(tensor),
                    None => {
                        let tensor = match hollow {
                            true => State::hollow(dtype, shape)?,
                            false => Tensor::zeros(shape, dtype, &Device::Cpu)?,
                        };
                        alike.insert((dtype.as_str(), shape), tensor.clone());
                        tensor
                    }
                },
            };
            tensors.insert(name.to_owned(), tensor);
        }
        Ok(tensors)
    }

    fn read(&self, stored: &Stored<'_>, dtype: DType) -> Result<Tensor> {
        let failed = io("cannot read", &self.path);
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(stored.size).map_err(|error| failed(io::Error::other(error)))?;
        bytes.resize(stored.size, 0);
        let mut file = lock(&self.file);
        file.seek(SeekFrom::Start(self.start + stored.start as u64)).map_err(&failed)?;
        file.read_exact(&mut bytes).map_err(&failed)?;
        drop(file);
        Ok(Tensor::from_raw_buffer(&bytes, dtype, stored.shape, &Device::Cpu)?)
    }
}

/// A file of weights alone, in `dtype` where they are trainable.
pub(crate) fn export(parameters: &crate::Parameters, path: &Path, dtype: DType) -> Result<()> {
    if !(dtype.is_float() && is_stored(dtype)) {
        let expected = "F16, BF16, F32 or F64".to_owned();
        return Err(
            ArgumentError::DType { op: "export", name: "the dtype", got: dtype, expected }.into()
        );
    }
    for (name, var) in parameters.iter().filter(|_| dtype == DType::F16) {
        let fit = kernels::multi_tensor::histogram::exponents(var, 1.0)?;
        let count = crate::scaler::diagnostics::Exponents::of(fit).in_f16(1.0).overflow;
        if count > 0 {
            return Err(CheckpointError::TooLarge { name: name.to_owned(), count }.into());
        }
    }
    let entry = |dtype: Option<DType>| {
        move |(name, var): (&str, &'_ candle_core::Var)| {
            (name.to_owned(), var.as_tensor().clone(), dtype)
        }
    };
    let trainable = parameters.iter().map(entry(Some(dtype)));
    let all: Vec<_> = trainable.chain(parameters.buffers().map(entry(None))).collect();
    let entries = all.iter().map(|(name, tensor, dtype)| Entry {
        name: name.clone(),
        tensor,
        dtype: dtype.unwrap_or(tensor.dtype()),
    });
    let header = Header::from([("format".to_owned(), "pt".to_owned())]);
    write(path, header, entries.collect()).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The folder of a test, which the test removes.
    fn folder(name: &str) -> PathBuf {
        let name = format!("candle-amp-file-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn a_bare_name_lies_in_the_working_folder() {
        assert_eq!(folder_of(Path::new("run.safetensors")), Path::new("."));
        assert_eq!(folder_of(Path::new("a/run.safetensors")), Path::new("a"));
    }

    #[test]
    fn what_is_written_is_written_where_its_folder_cannot_be_synced() {
        let folder = folder("sync");
        let path = folder.join("run");
        let header = |value: &str| Header::from([("a".to_owned(), value.to_owned())]);
        assert_eq!(write(&path, header("old"), Vec::new()).unwrap(), Written::ToLast);
        for (kind, expected) in [
            (io::ErrorKind::PermissionDenied, Written::ForNow),
            (io::ErrorKind::Other, Written::ForNow),
            (io::ErrorKind::InvalidInput, Written::ToLast), // a file system that never syncs folders
        ] {
            let value = format!("{kind:?}");
            let fails = |synced: &Path| {
                assert_eq!(synced, folder);
                Err(io::Error::from(kind))
            };
            let written = write_and_sync(&path, header(&value), Vec::new(), fails);
            assert_eq!(written.unwrap(), expected, "{kind:?}");
            assert_eq!(Reader::open(&path).unwrap().index.value("a"), Some(&*value));
        }
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
        fs::remove_dir_all(folder).unwrap();
    }
}
