//! The header of a file that is read: the names of its values and tensors, and where those are.
//!
//! A header may have been made to take memory: a tensor without elements has 60 bytes in the file,
//! and would have 1,000 as maps of strings and shapes. Here it has as many as in the file, about.

use std::ops::Range;

use safetensors::{Dtype, tensor::TensorInfo};
use serde_json::Deserializer;

/// More tensors or values than this no run has, and no file.
pub(super) const MAX_ENTRIES: usize = 1 << 20;

/// Takes one value of a type.
macro_rules! value {
    ($json:expr, $T:ty) => {{
        let mut values = Deserializer::from_slice($json).into_iter::<$T>();
        let value = values.next().ok_or("it ends too early")?.map_err(|error| error.to_string())?;
        *$json = &$json[values.byte_offset()..];
        value
    }};
}

/// A part of [`Index::text`] or [`Index::dims`].
type Span = Range<u32>;

/// Names are sorted, and no two are the same.
#[derive(Debug, Default)]
pub(super) struct Index {
    /// All names, and all values.
    text: String,
    /// All shapes.
    dims: Vec<usize>,
    values: Vec<(Span, Span)>,
    tensors: Vec<Info>,
}

#[derive(Debug)]
struct Info {
    name: Span,
    dims: Span,
    dtype: Dtype,
    data: Range<usize>,
}

/// A tensor of a file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stored<'i> {
    pub(super) name: &'i str,
    pub(super) dtype: Dtype,
    pub(super) shape: &'i [usize],
    /// Its first byte, from the end of the header, and how many there are.
    pub(super) start: usize,
    pub(super) size: usize,
}

/// What is wrong with a header.
type Fault = String;

impl Index {
    /// Reads a header, and checks it: names are unique, and the tensors follow one another without
    /// a gap, each of the size that its shape and dtype give.
    pub(super) fn parse(mut json: &[u8]) -> Result<Self, Fault> {
        let mut index = Self::default();
        index.text.reserve_exact(json.len());
        let mut metadata = false;
        entries(&mut json, |name, json| {
            if name != "__metadata__" {
                let info = value!(json, TensorInfo);
                return index.add_tensor(&name, &info);
            }
            if std::mem::replace(&mut metadata, true) {
                return Err("it has `__metadata__` twice".to_owned());
            }
            entries(json, |name, json| {
                let text = value!(json, String);
                index.add_value(&name, &text)
            })
        })?;
        if !json.trim_ascii().is_empty() {
            return Err("it goes on after its end".to_owned());
        }
        index.sort()?;
        index.text.shrink_to_fit();
        index.dims.shrink_to_fit();
        index.values.shrink_to_fit();
        index.tensors.shrink_to_fit();
        Ok(index)
    }

    fn keep(&mut self, text: &str) -> Span {
        let start = self.text.len() as u32;
        self.text.push_str(text);
        start..self.text.len() as u32
    }

    fn add_value(&mut self, name: &str, value: &str) -> Result<(), Fault> {
        let (name, value) = (self.keep(name), self.keep(value));
        self.values.push((name, value));
        room(self.values.len(), "values")
    }

    fn add_tensor(&mut self, name: &str, info: &TensorInfo) -> Result<(), Fault> {
        let (start, end) = info.data_offsets;
        let fault = |what: &str| format!("`{name}` {what}");
        // Of the dimensions that are not 0 alone, too: strides are products of those.
        let some = info.shape.iter().filter(|dim| **dim > 0);
        some.copied()
            .try_fold(1, usize::checked_mul)
            .ok_or_else(|| fault("has more elements than can be counted"))?;
        let count = info.shape.iter().product::<usize>();
        let bits = count.checked_mul(info.dtype.bitsize());
        let bytes = bits.filter(|bits| bits % 8 == 0).map(|bits| bits / 8);
        if end.checked_sub(start).is_none_or(|size| Some(size) != bytes) {
            return Err(fault("has another size than its shape and dtype give"));
        }
        let dims = self.dims.len() as u32;
        self.dims.extend(&info.shape);
        let dims = dims..self.dims.len() as u32;
        let name = self.keep(name);
        self.tensors.push(Info { name, dims, dtype: info.dtype, data: start..end });
        room(self.tensors.len(), "tensors")
    }

    fn sort(&mut self) -> Result<(), Fault> {
        let Self { text, values, tensors, .. } = self;
        let of = |span: &Span| &text[span.start as usize..span.end as usize];
        tensors.sort_unstable_by_key(|info| (info.data.start, info.data.end));
        let mut end = 0;
        for info in &*tensors {
            if info.data.start != end {
                return Err(format!(
                    "`{}` does not start where the one before ends",
                    of(&info.name)
                ));
            }
            end = info.data.end;
        }
        values.sort_unstable_by(|(a, _), (b, _)| of(a).cmp(of(b)));
        tensors.sort_unstable_by(|a, b| of(&a.name).cmp(of(&b.name)));
        let twice = |name: &Span| format!("it has two of the name `{}`", of(name));
        let values = values.windows(2).find(|pair| of(&pair[0].0) == of(&pair[1].0));
        let tensors = tensors.windows(2).find(|pair| of(&pair[0].name) == of(&pair[1].name));
        match values.map(|pair| &pair[0].0).or(tensors.map(|pair| &pair[0].name)) {
            Some(name) => Err(twice(name)),
            None => Ok(()),
        }
    }

    fn text(&self, span: &Span) -> &str {
        &self.text[span.start as usize..span.end as usize]
    }

    /// Bytes after the header.
    pub(super) fn data_len(&self) -> usize {
        self.tensors.iter().map(|info| info.data.end).max().unwrap_or(0)
    }

    /// The value of that name.
    pub(super) fn value(&self, name: &str) -> Option<&str> {
        let at = self.values.binary_search_by(|(found, _)| self.text(found).cmp(name)).ok()?;
        Some(self.text(&self.values[at].1))
    }

    /// The values whose name starts with `prefix`, with the rest of their names.
    pub(super) fn values(&self, prefix: &str) -> impl Iterator<Item = (&str, &str)> {
        let from = self.values.partition_point(|(name, _)| self.text(name) < prefix);
        let named = self.values[from..].iter().map(|(name, value)| (self.text(name), value));
        named.map_while(move |(name, value)| Some((name.strip_prefix(prefix)?, self.text(value))))
    }

    /// The tensors whose name starts with `prefix`, with the rest of their names.
    pub(super) fn tensors(&self, prefix: &str) -> impl Iterator<Item = Stored<'_>> {
        let from = self.tensors.partition_point(|info| self.text(&info.name) < prefix);
        self.tensors[from..].iter().map_while(move |info| {
            let name = self.text(&info.name).strip_prefix(prefix)?;
            let shape = &self.dims[info.dims.start as usize..info.dims.end as usize];
            let (start, size) = (info.data.start, info.data.len());
            Some(Stored { name, dtype: info.dtype, shape, start, size })
        })
    }
}

fn room(count: usize, what: &str) -> Result<(), Fault> {
    match count <= MAX_ENTRIES {
        true => Ok(()),
        false => Err(format!("it has more than {MAX_ENTRIES} {what}")),
    }
}

/// Calls `each` with the name of each entry of the object that `json` starts with, and with `json`
/// where the value starts, which `each` has to take. Takes the whole object.
fn entries<'j>(
    json: &mut &'j [u8],
    mut each: impl FnMut(String, &mut &'j [u8]) -> Result<(), Fault>,
) -> Result<(), Fault> {
    take(json, b'{')?;
    if take(json, b'}').is_ok() {
        return Ok(());
    }
    loop {
        let name = value!(json, String);
        take(json, b':')?;
        each(name, json)?;
        if take(json, b',').is_err() {
            return take(json, b'}');
        }
    }
}

/// Takes one sign, and the white space before it.
fn take(json: &mut &[u8], sign: u8) -> Result<(), Fault> {
    let rest = json.trim_ascii_start();
    match rest.split_first() {
        Some((&found, after)) if found == sign => *json = after,
        _ => {
            let found = String::from_utf8_lossy(&rest[..rest.len().min(20)]).into_owned();
            return Err(format!("it has {found:?} where {:?} belongs", char::from(sign)));
        }
    }
    Ok(())
}
