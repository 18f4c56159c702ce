//! Several tensors of one shape and any strides, as kernels walk them: dimensions that lie the same
//! way in all of them are one.

use candle_core::Tensor;

/// Dimensions a kernel takes.
const DIMS: usize = 4;

/// The common dimensions of `N` tensors, from the outermost, and where each steps to along them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Strided<const N: usize> {
    pub(crate) dims: [usize; DIMS],
    pub(crate) strides: [[usize; DIMS]; N],
}

impl<const N: usize> Strided<N> {
    /// `None` where there are too many dimensions, which stays so whatever is joined.
    pub(crate) fn of(tensors: [&Tensor; N]) -> Option<Self> {
        let mut joined: Vec<(usize, [usize; N])> = Vec::new();
        for (dim, &size) in tensors[0].dims().iter().enumerate() {
            if size == 1 {
                continue;
            }
            let strides = tensors.map(|tensor| tensor.stride()[dim]);
            match joined.last_mut() {
                Some((outer, steps)) if (0..N).all(|n| steps[n] == size * strides[n]) => {
                    (*outer, *steps) = (*outer * size, strides);
                }
                _ => joined.push((size, strides)),
            }
        }
        let first = DIMS.checked_sub(joined.len())?;
        let mut this = Self { dims: [1; DIMS], strides: [[0; DIMS]; N] };
        for (at, (size, strides)) in (first..).zip(joined) {
            this.dims[at] = size;
            for (all, stride) in this.strides.iter_mut().zip(strides) {
                all[at] = stride;
            }
        }
        Some(this)
    }

    /// Whether `pack` elements along the last dimension can be read at a time: they follow each
    /// other or are one, and start at a multiple of `pack`.
    pub(crate) fn packs(&self, pack: usize) -> bool {
        self.dims[DIMS - 1].is_multiple_of(pack)
            && self.strides.iter().all(|strides| {
                strides[DIMS - 1] <= 1 && strides[..DIMS - 1].iter().all(|s| s.is_multiple_of(pack))
            })
    }

    /// The numbers a kernel takes: the last three dimensions, then the strides of each tensor.
    pub(crate) fn words(&self) -> Vec<usize> {
        self.dims[1..].iter().chain(self.strides.as_flattened()).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Result, Tensor};

    use super::*;

    #[test]
    fn dimensions_are_joined_where_all_tensors_agree() -> Result<()> {
        let x = Tensor::zeros((2, 3, 4, 5), DType::F32, &Device::Cpu)?;
        let all = Strided::of([&x]).unwrap();
        assert_eq!((all.dims, all.strides), ([1, 1, 1, 120], [[0, 0, 0, 1]]));
        // A position for every sample: rows of one, repeated.
        let positions = x.narrow(0, 0, 1)?;
        let both = Strided::of([&x, &positions.broadcast_as(x.shape())?]).unwrap();
        assert_eq!((both.dims, both.strides), ([1, 1, 2, 60], [[0, 0, 60, 1], [0, 0, 0, 1]]));
        assert!(both.packs(4) && !both.packs(8));
        // A channel for every pixel.
        let channel = Tensor::zeros((1, 3, 1, 1), DType::F32, &Device::Cpu)?;
        let both = Strided::of([&x, &channel.broadcast_as(x.shape())?]).unwrap();
        assert_eq!((both.dims, both.strides[1]), ([1, 2, 3, 20], [0, 0, 1, 0]));
        assert!(!both.packs(4), "the channel's stride is 1");
        let turned = x.t()?;
        let one = Strided::of([&turned]).unwrap();
        assert_eq!((one.dims, one.strides), ([1, 6, 5, 4], [[0, 20, 1, 5]]));
        assert_eq!(one.words(), [6, 5, 4, 0, 20, 1, 5]);
        let many = Tensor::zeros((2, 2, 2, 2, 2), DType::F32, &Device::Cpu)?;
        assert_eq!(Strided::of([&many.permute((4, 3, 2, 1, 0))?]), None);
        Ok(())
    }
}
