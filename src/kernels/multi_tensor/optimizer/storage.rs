//! The storage of a weight, its states and its gradient, and their conversions to and from the arithmetic's type.
//!
//! An optimizer step is bound by memory, so each tensor is read and written once. A block of 1024 elements is widened
//! into buffers in the first-level cache, updated there, and narrowed back. Tensors already in the arithmetic's
//! type are updated where they are, without a buffer.
//!
//! A weight in F16 or BF16 needs more bits than it has, because an update is often smaller than half its last place.
//! There are three ways to keep them. An F32 master has all of them. For BF16 a remainder has the 16 bits of an F32
//! that BF16 lacks ([`split`]). The third way keeps no bits, and rounds up or down at random so that the mean is
//! right. States may be BF16 too, and are then rounded at random.

use candle_core::Result;
use half::{bf16, f16};

use super::rounding::{Key, Stochastic, rebuild, split};
use super::rule::{Rule, Squares};
use crate::error::bail;
use crate::kernels::cpu::dtype::Real;
use crate::kernels::cpu::in_place::SliceMut;
use crate::kernels::cpu::lane::Lane;

/// Elements at a time: five buffers of these stay in the first-level cache.
const BLOCK: usize = 1024;

/// The type of the arithmetic, `f32` or `f64`.
pub(super) trait FromSlice: Real {
    /// The elements of a slice of this type, or what it was.
    fn own(slice: SliceMut<'_>) -> std::result::Result<&mut [Self], SliceMut<'_>>;
}

impl FromSlice for f32 {
    fn own(slice: SliceMut<'_>) -> std::result::Result<&mut [f32], SliceMut<'_>> {
        if let SliceMut::F32(x) = slice { Ok(x) } else { Err(slice) }
    }
}

impl FromSlice for f64 {
    fn own(slice: SliceMut<'_>) -> std::result::Result<&mut [f64], SliceMut<'_>> {
        if let SliceMut::F64(x) = slice { Ok(x) } else { Err(slice) }
    }
}

// `Real` converts from f64 only. For f32, the compiler sees that f32 → f64 → f32 is exact, and removes it.
#[inline(always)]
fn widen_into<T: Real, H: Lane<Acc = f32>>(src: &[H], dst: &mut [T]) {
    for (d, s) in dst.iter_mut().zip(src) {
        *d = T::of(s.widened().to_double());
    }
}

#[inline(always)]
fn single<T: Real>(x: T) -> f32 {
    f32::of(x.to_double())
}

/// A weight in 16 bits: F16 or BF16.
#[derive(Debug)]
enum ReducedWeight<'a> {
    F16(&'a mut [f16]),
    BF16(&'a mut [bf16]),
}

/// How a weight is stored.
#[derive(Debug)]
enum Weight<'a, T> {
    /// In the arithmetic's type.
    Own(&'a mut [T]),
    /// In 16 bits, beside a master in the arithmetic's type.
    Master(&'a mut [T], ReducedWeight<'a>),
    /// In BF16, with the remainder that makes it an F32.
    Remainder(&'a mut [bf16], &'a mut [i16]),
    /// In 16 bits, rounded at random.
    Stochastic(ReducedWeight<'a>, Key),
}

impl<'a, T: FromSlice> Weight<'a, T> {
    fn new(weight: SliceMut<'a>, master: SliceMut<'a>, key: Key) -> Result<Self> {
        let reduced = match T::own(weight) {
            Ok(own) => return Ok(Self::Own(own)),
            Err(SliceMut::F16(x)) => ReducedWeight::F16(x),
            Err(SliceMut::BF16(x)) => ReducedWeight::BF16(x),
            Err(other) => bail!("no weight of an optimizer: {other:?}"),
        };
        match (reduced, T::own(master)) {
            (reduced, Ok(master)) => Ok(Self::Master(master, reduced)),
            (ReducedWeight::BF16(reduced), Err(SliceMut::I16(remainder))) => {
                Ok(Self::Remainder(reduced, remainder))
            }
            (reduced, Err(SliceMut::None)) => Ok(Self::Stochastic(reduced, key)),
            (reduced, Err(other)) => bail!("no master of {reduced:?}: {other:?}"),
        }
    }

    #[inline(always)]
    fn load<'b>(&'b mut self, start: usize, block: &'b mut [T]) -> &'b mut [T] {
        let range = start..start + block.len();
        match self {
            Self::Own(x) | Self::Master(x, _) => return &mut x[range],
            Self::Remainder(reduced, remainder) => {
                for ((d, h), r) in
                    block.iter_mut().zip(&reduced[range.clone()]).zip(&remainder[range])
                {
                    *d = T::of(rebuild(*h, *r).to_double());
                }
            }
            Self::Stochastic(ReducedWeight::F16(x), _) => widen_into(&x[range], block),
            Self::Stochastic(ReducedWeight::BF16(x), _) => widen_into(&x[range], block),
        }
        block
    }

    /// `first` is the number, in its tensor, of the first element of this part.
    #[inline(always)]
    fn save(&mut self, start: usize, block: &[T], first: usize) {
        let range = start..start + block.len();
        match self {
            Self::Own(_) => {}
            Self::Master(x, ReducedWeight::F16(reduced)) => {
                narrow_into(&x[range.clone()], &mut reduced[range])
            }
            Self::Master(x, ReducedWeight::BF16(reduced)) => {
                narrow_into(&x[range.clone()], &mut reduced[range])
            }
            Self::Remainder(reduced, remainder) => {
                let pairs = reduced[range.clone()].iter_mut().zip(&mut remainder[range]);
                for ((h, r), x) in pairs.zip(block) {
                    (*h, *r) = split(single(*x));
                }
            }
            Self::Stochastic(ReducedWeight::F16(x), key) => {
                at_random(block, &mut x[range], *key, first + start);
            }
            Self::Stochastic(ReducedWeight::BF16(x), key) => {
                at_random(block, &mut x[range], *key, first + start);
            }
        }
    }

    fn split_at(self, mid: usize) -> (Self, Self) {
        let split_reduced = |reduced: ReducedWeight<'a>| match reduced {
            ReducedWeight::F16(x) => {
                let (a, b) = x.split_at_mut(mid);
                (ReducedWeight::F16(a), ReducedWeight::F16(b))
            }
            ReducedWeight::BF16(x) => {
                let (a, b) = x.split_at_mut(mid);
                (ReducedWeight::BF16(a), ReducedWeight::BF16(b))
            }
        };
        match self {
            Self::Own(x) => {
                let (a, b) = x.split_at_mut(mid);
                (Self::Own(a), Self::Own(b))
            }
            Self::Master(x, reduced) => {
                let ((a, b), (c, d)) = (x.split_at_mut(mid), split_reduced(reduced));
                (Self::Master(a, c), Self::Master(b, d))
            }
            Self::Remainder(reduced, remainder) => {
                let ((a, b), (c, d)) = (reduced.split_at_mut(mid), remainder.split_at_mut(mid));
                (Self::Remainder(a, c), Self::Remainder(b, d))
            }
            Self::Stochastic(reduced, key) => {
                let (a, b) = split_reduced(reduced);
                (Self::Stochastic(a, key), Self::Stochastic(b, key))
            }
        }
    }
}

#[inline(always)]
fn narrow_into<T: Real, H: Lane<Acc = f32>>(src: &[T], dst: &mut [H]) {
    for (d, s) in dst.iter_mut().zip(src) {
        *d = H::narrowed(single(*s));
    }
}

#[inline(always)]
fn at_random<T: Real, H: Stochastic>(src: &[T], dst: &mut [H], key: Key, start: usize) {
    let mut block = [0f32; BLOCK];
    let block = &mut block[..src.len()];
    for (d, s) in block.iter_mut().zip(src) {
        *d = single(*s);
    }
    H::round_all(block, dst, key, start);
}

/// One state of an optimizer, as it is stored.
#[derive(Debug)]
enum StateSlice<'a, T> {
    None,
    Own(&'a mut [T]),
    BF16(&'a mut [bf16], Key),
}

impl<'a, T: FromSlice> StateSlice<'a, T> {
    fn new(slice: SliceMut<'a>, key: Key) -> Result<Self> {
        match T::own(slice) {
            Ok(own) => Ok(Self::Own(own)),
            Err(SliceMut::None) => Ok(Self::None),
            Err(SliceMut::BF16(x)) => Ok(Self::BF16(x, key)),
            Err(other) => bail!("no state of an optimizer: {other:?}"),
        }
    }

    #[inline(always)]
    fn load<'b>(&'b mut self, start: usize, block: &'b mut [T]) -> &'b mut [T] {
        let range = start..start + block.len();
        match self {
            Self::None => &mut [],
            Self::Own(x) => &mut x[range],
            Self::BF16(x, _) => {
                widen_into(&x[range], block);
                block
            }
        }
    }

    #[inline(always)]
    fn save(&mut self, start: usize, block: &[T], first: usize) {
        if let Self::BF16(x, key) = self {
            at_random(block, &mut x[start..start + block.len()], *key, first + start);
        }
    }

    fn split_at(self, mid: usize) -> (Self, Self) {
        match self {
            Self::None => (Self::None, Self::None),
            Self::Own(x) => {
                let (a, b) = x.split_at_mut(mid);
                (Self::Own(a), Self::Own(b))
            }
            Self::BF16(x, key) => {
                let (a, b) = x.split_at_mut(mid);
                (Self::BF16(a, key), Self::BF16(b, key))
            }
        }
    }
}

/// A gradient, in the dtype it came in.
#[derive(Clone, Copy, Debug)]
pub(super) enum GradientSlice<'a, T> {
    Own(&'a [T]),
    F16(&'a [f16]),
    BF16(&'a [bf16]),
}

impl<T> GradientSlice<'_, T> {
    fn split_at(self, mid: usize) -> (Self, Self) {
        match self {
            Self::Own(x) => (Self::Own(&x[..mid]), Self::Own(&x[mid..])),
            Self::F16(x) => (Self::F16(&x[..mid]), Self::F16(&x[mid..])),
            Self::BF16(x) => (Self::BF16(&x[..mid]), Self::BF16(&x[mid..])),
        }
    }
}

/// A gradient, and the two factors it is multiplied by.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gradient<'a, T> {
    pub(super) source: GradientSlice<'a, T>,
    pub(super) by: [T; 2],
}

impl<T: FromSlice> Gradient<'_, T> {
    #[inline(always)]
    fn load<'b>(&'b self, start: usize, block: &'b mut [T]) -> &'b [T] {
        let range = start..start + block.len();
        match self.source {
            GradientSlice::Own(x) => return &x[range],
            GradientSlice::F16(x) => widen_into(&x[range], block),
            GradientSlice::BF16(x) => widen_into(&x[range], block),
        }
        block
    }

    fn split_at(self, mid: usize) -> (Self, Self) {
        let (a, b) = self.source.split_at(mid);
        (Self { source: a, ..self }, Self { source: b, ..self })
    }
}

/// A range of a tensor's elements: weight, states and gradient.
#[derive(Debug)]
pub(super) struct Chunk<'a, T> {
    weight: Weight<'a, T>,
    states: [StateSlice<'a, T>; 3],
    gradient: Gradient<'a, T>,
    /// Where in its tensor it starts.
    first: usize,
    len: usize,
}

impl<'a, T: FromSlice> Chunk<'a, T> {
    /// Of `slices`: the weight, its master or remainder or nothing, and the states.
    pub(super) fn new(
        slices: [SliceMut<'a>; 5],
        gradient: Gradient<'a, T>,
        len: usize,
        seed: u64,
    ) -> Result<Self> {
        let [weight, master, a, b, c] = slices;
        let key = |number| Key::new(seed, number);
        Ok(Self {
            weight: Weight::new(weight, master, key(0))?,
            states: [
                StateSlice::new(a, key(1))?,
                StateSlice::new(b, key(2))?,
                StateSlice::new(c, key(3))?,
            ],
            gradient,
            first: 0,
            len,
        })
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn split_at(self, mid: usize) -> (Self, Self) {
        let (weight, gradient) = (self.weight.split_at(mid), self.gradient.split_at(mid));
        let [a, b, c] = self.states.map(|state| state.split_at(mid));
        let (first, len) = (self.first, self.len);
        (
            Self {
                weight: weight.0,
                states: [a.0, b.0, c.0],
                gradient: gradient.0,
                first,
                len: mid,
            },
            Self {
                weight: weight.1,
                states: [a.1, b.1, c.1],
                gradient: gradient.1,
                first: first + mid,
                len: len - mid,
            },
        )
    }

    #[inline(always)]
    pub(super) fn run(mut self, rule: Rule) -> Squares {
        let mut blocks = [[T::zero(); BLOCK]; 5];
        let [w, g, blocks @ ..] = &mut blocks;
        let mut squares = [0.0; 2];
        for start in (0..self.len).step_by(BLOCK) {
            let len = BLOCK.min(self.len - start);
            let (w, g) = (&mut w[..len], &mut g[..len]);
            let [a, b, c] = &mut *blocks;
            let [sa, sb, sc] = &mut self.states;
            let states = [
                sa.load(start, &mut a[..len]),
                sb.load(start, &mut b[..len]),
                sc.load(start, &mut c[..len]),
            ];
            let (weight, gradient) = (self.weight.load(start, w), self.gradient.load(start, g));
            let sums = rule.run(weight, gradient, self.gradient.by, states);
            squares = [squares[0] + sums[0], squares[1] + sums[1]];
            if rule.writes_weight() {
                self.weight.save(start, w, self.first);
            }
            if rule.reads_gradient() {
                for (state, block) in self.states.iter_mut().zip(&*blocks) {
                    state.save(start, &block[..len], self.first);
                }
            }
        }
        squares
    }
}
