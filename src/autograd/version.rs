//! Versions: when each tensor's storage was last written, on the clock that numbers the nodes of a graph.
//!
//! An operator keeps the tensors that backward needs, not copies of them. Once one is written in place, backward would
//! differentiate a function that was never computed. PyTorch gives each tensor a version counter and compares it in
//! backward. Here whatever of this crate writes in place (an optimizer's step, an average put in place of the weights,
//! batch norm's running statistics, a checkpoint that is loaded) calls [`written`]. A node that reads a storage whose
//! last write is later than the node itself refuses to run.

use std::collections::HashSet;
use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex};

use candle_core::{DType, Device, Shape, Tensor, TensorId, Var};

use super::maps::{ById, ByPlace, Ids};
use super::storage::{place, share_storage};
use crate::error::GraphError;
use crate::error::lock::lock;
use crate::kernels::capture;

/// Counts nodes and writes.
static CLOCK: AtomicU64 = AtomicU64::new(0);

/// The time of the last write of any. A training loop has none between forward and backward.
static LATEST: AtomicU64 = AtomicU64::new(0);

static VERSIONS: LazyLock<Mutex<Versions>> = LazyLock::new(Mutex::default);

#[derive(Default)]
struct Versions {
    /// The last write, by where the storage is.
    writes: ByPlace<Write>,
    /// Tensors that are rewritten from another after each step, by their id.
    copies: ById<MasterCopy>,
}

struct Write {
    at: u64,
    /// What candle had numbered by then: tensors with lower numbers existed before.
    newest: u64,
    /// candle's number of the tensor that was written, which its views exceed. A tensor in this place with a lower
    /// number had an earlier storage, which is gone.
    tensor: u64,
    /// What it wrote, and what was there before.
    value: Value,
    before: Value,
}

/// When a storage has had the value that it has.
#[derive(Clone, Default)]
struct Value {
    /// The time from which on, except for some spans of time.
    since: u64,
    /// From a write to its undoing, in order.
    away: Vec<[u64; 2]>,
}

impl Value {
    /// The spans that are kept. A time in an older one counts as before the value: an error too many, not one too few.
    const SPANS: usize = 64;

    /// Whether another one was there at `time`.
    fn is_other_than_at(&self, time: u64) -> bool {
        self.since > time || self.away.iter().any(|&[from, to]| from <= time && time < to)
    }

    /// Put back at `now`, after a write at `from`.
    fn restored(mut self, from: u64, now: u64) -> Self {
        if self.away.len() == Self::SPANS {
            self.since = self.away.remove(0)[1];
        }
        self.away.push([from, now]);
        self
    }
}

/// A 16-bit tensor and the master that it is rewritten from.
struct MasterCopy {
    name: String,
    at: u64,
    newest: u64,
    /// The master.
    of: TensorId,
    /// Where the master's storage is, if it has one of its own.
    master: Option<usize>,
}

/// A storage that an operator read.
#[derive(Clone, Copy)]
pub(super) struct Read {
    place: usize,
    tensor: u64,
}

/// What a node was computed from, unless an operator of this crate has made it.
pub(super) struct Dependency {
    pub(super) read: Read,
    /// The number of the input; those that the operator captured follow.
    pub(super) input: usize,
    /// Of what the operator captured.
    pub(super) shape: Option<Shape>,
    /// Whether backward reads it too. A checkpoint that recomputes the node reads all.
    pub(super) in_backward: bool,
}

impl Read {
    pub(super) fn of(tensor: &Tensor) -> Self {
        Self { place: place(tensor), tensor: number(tensor) }
    }
}

/// The next time of the clock, for a node or a write.
pub(crate) fn tick() -> u64 {
    CLOCK.fetch_add(1, Ordering::Relaxed)
}

/// The time that the next node gets, or a later one.
pub(crate) fn now() -> u64 {
    CLOCK.load(Ordering::Relaxed)
}

/// Notes that each of `tensors` has just been written in place, and returns the time. They have to be the variables
/// themselves, not views.
pub(crate) fn written<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> u64 {
    note(tensors, None)
}

/// Notes that each of `tensors` has just got back the value that it had before `time`, when it was last written.
pub(crate) fn put_back<'a>(tensors: impl IntoIterator<Item = &'a Tensor>, time: u64) {
    note(tensors, Some(time));
}

fn note<'a>(tensors: impl IntoIterator<Item = &'a Tensor>, undone: Option<u64>) -> u64 {
    // Each tensor's lock before that of the versions, never within it.
    let tensors: Vec<&Tensor> = tensors.into_iter().collect();
    capture::writes(tensors.iter().copied());
    let reads: Vec<Read> = tensors.into_iter().map(Read::of).collect();
    let (at, newest) = (tick(), newest());
    let writes = &mut lock(&VERSIONS).writes;
    for Read { place, tensor } in reads {
        let earlier = writes.get(&place).filter(|earlier| earlier.tensor <= tensor);
        let (value, before) = match (earlier, undone) {
            (Some(earlier), Some(time)) if earlier.at == time => {
                (earlier.before.clone().restored(time, at), Value::default())
            }
            (earlier, _) => {
                let before = earlier.map(|earlier| earlier.value.clone()).unwrap_or_default();
                (Value { since: at, away: Vec::new() }, before)
            }
        };
        writes.insert(place, Write { at, newest, tensor, value, before });
    }
    LATEST.fetch_max(at, Ordering::Relaxed);
    at
}

/// Notes that `copy` has just been written, or rewritten, from `master`; `name` is for errors.
pub(crate) fn refreshed(copy: &Tensor, master: &Tensor, name: &str) {
    let of = master.id();
    let master = (!share_storage(copy, master)).then(|| place(master));
    let note = MasterCopy { name: name.to_owned(), at: tick(), newest: newest(), of, master };
    lock(&VERSIONS).copies.insert(copy.id(), note);
}

/// The master that `copy` is rewritten from, if it is a copy.
pub(super) fn master_of(copy: &Tensor) -> Option<TensorId> {
    lock(&VERSIONS).copies.get(&copy.id()).map(|copy| copy.of)
}

/// The variables that a copy elsewhere is rewritten from.
pub(crate) fn masters() -> Ids {
    let versions = lock(&VERSIONS);
    versions.copies.values().filter(|copy| copy.master.is_some()).map(|copy| copy.of).collect()
}

/// Forgets `copy`, which is not rewritten any more.
pub(crate) fn forget(copy: &Tensor) {
    lock(&VERSIONS).copies.remove(&copy.id());
}

/// candle numbers tensors in the order it makes them. The number is private; hashing gives it.
pub(crate) fn number(tensor: &Tensor) -> u64 {
    #[derive(Default)]
    struct Number(u64);
    impl Hasher for Number {
        fn write(&mut self, bytes: &[u8]) {
            self.0 = bytes.iter().fold(self.0, |number, byte| (number << 8) | u64::from(*byte));
        }
        fn write_usize(&mut self, number: usize) {
            self.0 = number as u64;
        }
        fn finish(&self) -> u64 {
            self.0
        }
    }
    let mut number = Number::default();
    tensor.id().hash(&mut number);
    number.finish()
}

/// candle's number for a tensor that is made now.
fn newest() -> u64 {
    // A view of it is a new tensor, and no new memory.
    static ANY: LazyLock<Option<Var>> =
        LazyLock::new(|| Var::zeros((), DType::U8, &Device::Cpu).ok());
    // Should there be none, every tensor counts as older: an error too many, not one too few.
    ANY.as_ref().map_or(u64::MAX, |any| number(&any.as_detached_tensor()))
}

/// Which of `reads`, storages that a node of this time reads, has been written since.
pub(super) fn written_since(time: u64, mut reads: impl Iterator<Item = Read>) -> Option<usize> {
    if LATEST.load(Ordering::Relaxed) <= time {
        return None;
    }
    let versions = lock(&VERSIONS);
    reads.position(|Read { place, tensor }| {
        versions.writes.get(&place).is_some_and(|w| w.at > time && w.tensor <= tensor)
    })
}

/// Whether `tensor` has other values than at `time`: writes that were undone do not count.
pub(crate) fn has_changed_since(time: u64, tensor: &Tensor) -> bool {
    let Read { place, tensor } = Read::of(tensor);
    LATEST.load(Ordering::Relaxed) > time
        && lock(&VERSIONS)
            .writes
            .get(&place)
            .is_some_and(|write| write.value.is_other_than_at(time) && write.tensor <= tensor)
}

/// Fails where a node of candle's among `nodes`, those of a loss, was computed from what has been written since;
/// nodes of this crate [see for themselves](written_since).
///
/// Not seen are operands that are not tracked, and one that also lies [below another operand](arguments). candle does
/// not say which operands an operator's backward reads: all count.
pub(super) fn check(nodes: &[&Tensor], is_of_this_crate: fn(&Tensor) -> bool) -> crate::Result<()> {
    let versions = lock(&VERSIONS);
    versions.check_copies(nodes)?;
    let variables = nodes.iter().filter(|node| node.is_variable());
    let writes = variables.filter_map(|variable| versions.writes.get(&place(variable)));
    let Some(latest) = writes.map(|write| write.newest).max() else { return Ok(()) };
    // Without the lock: that may drop what a graph has kept, such as copies of masters, which take it too.
    drop(versions);
    let older = nodes.iter().filter(|node| number(node) < latest && !node.is_variable());
    let candles: Vec<_> = older.filter(|node| !is_of_this_crate(node)).collect();
    let versions = lock(&VERSIONS);
    // A copy was computed from its master too, and is checked above.
    for node in candles.into_iter().filter(|node| !versions.copies.contains_key(&node.id())) {
        let (made, args) = (number(node), arguments(node));
        let changed = args.iter().position(|arg| {
            let write = versions.writes.get(&place(arg));
            let write = write.filter(|w| w.newest > made && w.tensor <= number(arg));
            write.is_some() && !share_storage(node, arg)
        });
        if let Some(input) = changed {
            let (op, shape) = ("an operator of candle's", args[input].shape().clone());
            return Err(GraphError::Modified { op, input, shape }.into());
        }
    }
    Ok(())
}

impl Versions {
    /// Fails where a copy was not rewritten after its master's last step, and where a tensor was computed from a copy
    /// that has been rewritten since. Views are fine: they are rewritten with it.
    fn check_copies(&self, nodes: &[&Tensor]) -> crate::Result<()> {
        let mut latest = None;
        for copy in nodes.iter().filter_map(|node| self.copies.get(&node.id())) {
            let write = copy.master.and_then(|master| self.writes.get(&master));
            if write.is_some_and(|write| write.at > copy.at) {
                return Err(GraphError::NotRefreshed { name: copy.name.clone() }.into());
            }
            latest = latest.max(Some(copy.newest));
        }
        let Some(latest) = latest else { return Ok(()) };
        let computed =
            |node: &&&Tensor| !node.is_variable() && !self.copies.contains_key(&node.id());
        for node in nodes.iter().filter(|node| number(node) <= latest).filter(computed) {
            for source in node.sorted_nodes() {
                if let Some(copy) = self.copies.get(&source.id())
                    && copy.newest > number(node)
                    && !share_storage(node, source)
                {
                    return Err(GraphError::Stale { name: copy.name.clone() }.into());
                }
            }
        }
        Ok(())
    }
}

/// The tracked arguments of candle's operator that made `node`, except for those that are also below another argument.
///
/// candle keeps an operator's arguments private. `sorted_nodes` lists what is below them argument by argument, each
/// argument before what is below it. So an argument is what no argument listed before it has below itself.
fn arguments(node: &Tensor) -> Vec<&Tensor> {
    let (mut below, mut arguments) = (HashSet::from([node.id()]), Vec::new());
    for candidate in node.sorted_nodes() {
        if !below.contains(&candidate.id()) {
            below.extend(candidate.sorted_nodes().into_iter().map(Tensor::id));
            below.insert(candidate.id());
            arguments.push(candidate);
        }
    }
    arguments
}

#[cfg(test)]
mod tests {
    use candle_core::{Result, Var};

    use super::*;

    /// What all of this rests on.
    #[test]
    fn candle_numbers_tensors_in_the_order_it_makes_them() -> Result<()> {
        let mut last = 0;
        for _ in 0..3 {
            let made = Tensor::zeros(1, DType::F32, &Device::Cpu)?;
            let computed = made.affine(2.0, 0.0)?;
            assert!(last < number(&made) && number(&made) < number(&computed));
            last = number(&computed);
        }
        Ok(())
    }

    #[test]
    fn arguments_are_found_again() -> Result<()> {
        let v = |x: f32| Var::new(&[[x, 1.0], [2.0, 3.0]], &Device::Cpu);
        let (a, b, c) = (v(1.0)?, v(2.0)?, v(3.0)?);
        let deep = (a.as_tensor() * b.as_tensor())?.relu()?;
        let ids = |t: &Tensor| arguments(t).into_iter().map(Tensor::id).collect::<HashSet<_>>();
        let product = deep.matmul(&c.t()?)?;
        let found = arguments(&product);
        assert!(found.iter().any(|t| t.id() == deep.id()) && found.len() == 2);
        assert!(found.iter().any(|t| share_storage(t, &c)));
        assert_eq!(ids(&(a.as_tensor() * c.as_tensor())?), HashSet::from([a.id(), c.id()]));
        assert_eq!(ids(&(c.as_tensor() + &deep)?), HashSet::from([c.id(), deep.id()]));
        assert_eq!(ids(&deep.relu()?), HashSet::from([deep.id()]));
        let chosen = deep.ge(0f32)?.where_cond(&c, &deep)?;
        assert_eq!(ids(&chosen), HashSet::from([c.id(), deep.id()]));
        Ok(())
    }

    /// What was read before the averages came is there again once they have gone, and what was read meanwhile is not.
    #[test]
    fn a_write_that_is_undone_counts_for_those_who_saw_it() -> Result<()> {
        let x = Tensor::zeros(1, DType::F32, &Device::Cpu)?;
        let first = tick();
        let step = written([&x]);
        let before = tick();
        let swap = written([&x]);
        let between = tick();
        put_back([&x], swap);
        let after = tick();
        assert!(step < swap);
        let has_changed = |time| has_changed_since(time, &x);
        assert_eq!([first, before, between, after].map(has_changed), [true, false, true, false]);
        assert!(written_since(before, std::iter::once(Read::of(&x))).is_some());
        // As often as one likes, if not for ever.
        let mut swaps = Vec::new();
        for _ in 1..Value::SPANS {
            let swap = written([&x]);
            swaps.push(tick());
            put_back([&x], swap);
        }
        assert_eq!([first, before, between, after].map(has_changed), [true, false, true, false]);
        assert!(swaps.iter().all(|&time| has_changed(time)));
        let swap = written([&x]);
        put_back([&x], swap);
        assert_eq!([before, between, after].map(has_changed), [true, true, false]);
        written([&x]);
        assert_eq!([before, after].map(has_changed), [true; 2]);
        Ok(())
    }

    /// A storage in the place of one that is gone is another one.
    #[test]
    fn a_place_that_is_used_again_is_another_storage() -> Result<()> {
        let x = Tensor::zeros(1, DType::F32, &Device::Cpu)?;
        let (read, time) = (Read::of(&x), tick());
        let at = tick();
        LATEST.fetch_max(at, Ordering::Relaxed);
        let (value, before) = (Value { since: at, away: Vec::new() }, Value::default());
        let later = Write { at, newest: newest(), tensor: newest(), value, before };
        lock(&VERSIONS).writes.insert(read.place, later);
        assert_eq!(written_since(time, [read].into_iter()), None);
        written([&x]);
        let other = Read::of(&Tensor::zeros(1, DType::F32, &Device::Cpu)?);
        assert_eq!(written_since(time, [other, read].into_iter()), Some(1));
        assert_eq!(written_since(tick(), [read].into_iter()), None);
        Ok(())
    }
}
