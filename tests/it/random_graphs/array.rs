//! Arrays of the oracle's scalars: indices, and nothing that rounds.

use super::tape::{Scalar, Tape};

#[derive(Clone, Debug)]
pub(super) struct Array {
    pub(super) dims: Vec<usize>,
    pub(super) at: Vec<Scalar>,
}

/// Every index of an array of `dims`, the last dimension fastest.
pub(super) fn indices(dims: &[usize]) -> Vec<Vec<usize>> {
    let mut all = vec![vec![]];
    for size in dims {
        let longer = |index: Vec<usize>| (0..*size).map(move |i| [&index[..], &[i]].concat());
        all = all.into_iter().flat_map(longer).collect();
    }
    all
}

impl Array {
    pub(super) fn new(dims: impl Into<Vec<usize>>, at: Vec<Scalar>) -> Self {
        let dims = dims.into();
        assert_eq!(dims.iter().product::<usize>(), at.len());
        Self { dims, at }
    }

    pub(super) fn from_fn(
        dims: impl Into<Vec<usize>>,
        f: impl FnMut(Vec<usize>) -> Scalar,
    ) -> Self {
        let dims = dims.into();
        let at = indices(&dims).into_iter().map(f).collect();
        Self::new(dims, at)
    }

    pub(super) fn get(&self, index: &[usize]) -> Scalar {
        let place = index.iter().zip(&self.dims).fold(0, |place, (i, size)| {
            assert!(i < size);
            place * size + i
        });
        self.at[place]
    }

    pub(super) fn reshape(&self, dims: &[usize]) -> Self {
        Self::new(dims, self.at.clone())
    }

    pub(super) fn permute(&self, order: &[usize]) -> Self {
        let dims: Vec<usize> = order.iter().map(|&dim| self.dims[dim]).collect();
        Self::from_fn(dims, |index| {
            let mut from = vec![0; index.len()];
            order.iter().zip(&index).for_each(|(&dim, &i)| from[dim] = i);
            self.get(&from)
        })
    }

    pub(super) fn transpose(&self, a: usize, b: usize) -> Self {
        let mut order: Vec<usize> = (0..self.dims.len()).collect();
        order.swap(a, b);
        self.permute(&order)
    }

    pub(super) fn narrow(&self, dim: usize, start: usize, len: usize) -> Self {
        let mut dims = self.dims.clone();
        dims[dim] = len;
        Self::from_fn(dims, |mut index| {
            index[dim] += start;
            self.get(&index)
        })
    }

    /// Repeated to `dims`, aligned at the last.
    pub(super) fn broadcast(&self, dims: &[usize]) -> Self {
        let lead = dims.len() - self.dims.len();
        Self::from_fn(dims, |index| {
            let sizes = self.dims.iter().zip(&index[lead..]);
            self.get(&sizes.map(|(&size, &i)| if size == 1 { 0 } else { i }).collect::<Vec<_>>())
        })
    }

    pub(super) fn cat(parts: &[&Array], dim: usize) -> Self {
        let mut dims = parts[0].dims.clone();
        dims[dim] = parts.iter().map(|part| part.dims[dim]).sum();
        Self::from_fn(dims, |mut index| {
            for part in parts {
                if index[dim] < part.dims[dim] {
                    return part.get(&index);
                }
                index[dim] -= part.dims[dim];
            }
            unreachable!("an index within the sum of the sizes")
        })
    }

    pub(super) fn map(&self, tape: &mut Tape, f: impl Fn(f64) -> (f64, f64) + Copy) -> Self {
        self.each(|x| tape.map(x, f))
    }

    pub(super) fn each(&self, f: impl FnMut(Scalar) -> Scalar) -> Self {
        Self::new(self.dims.clone(), self.at.iter().copied().map(f).collect())
    }

    /// Pair by pair, each repeated to the other's size.
    pub(super) fn zip(&self, other: &Self, mut f: impl FnMut(Scalar, Scalar) -> Scalar) -> Self {
        let dims = broadcast_dims(&self.dims, &other.dims).expect("operands that fit");
        let (a, b) = (self.broadcast(&dims), other.broadcast(&dims));
        let at = a.at.iter().zip(&b.at).map(|(a, b)| f(*a, *b)).collect();
        Self::new(dims, at)
    }

    /// One of each group of elements that differ only in `dims`, kept with a size of 1.
    pub(super) fn reduce(&self, dims: &[usize], mut f: impl FnMut(Vec<Scalar>) -> Scalar) -> Self {
        let kept = |(dim, &size): (usize, &usize)| if dims.contains(&dim) { 1 } else { size };
        let out: Vec<usize> = self.dims.iter().enumerate().map(kept).collect();
        let group: Vec<usize> = (0..self.dims.len())
            .map(|dim| if dims.contains(&dim) { self.dims[dim] } else { 1 })
            .collect();
        Self::from_fn(out, |index| {
            let member = |within: &Vec<usize>| {
                let place: Vec<usize> = index.iter().zip(within).map(|(i, j)| i + j).collect();
                self.get(&place)
            };
            f(indices(&group).iter().map(member).collect())
        })
    }
}

pub(super) fn broadcast_dims(a: &[usize], b: &[usize]) -> Option<Vec<usize>> {
    let rank = a.len().max(b.len());
    let size =
        |dims: &[usize], at: usize| (at + dims.len()).checked_sub(rank).map_or(1, |i| dims[i]);
    let one = |at| match (size(a, at), size(b, at)) {
        (x, y) if x == y || y == 1 => Some(x),
        (1, y) => Some(y),
        _ => None,
    };
    (0..rank).map(one).collect()
}
