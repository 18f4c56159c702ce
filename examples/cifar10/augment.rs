//! Random crop and horizontal flip, reproducible on any number of threads.

use rand::Rng;
use rand_chacha::ChaCha8Rng;

use crate::{
    data::{Norm, PLANE, SIDE},
    rng::{Stream, rng},
};

/// Draws the crops of one epoch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Augment {
    pub(crate) seed: u64,
    pub(crate) epoch: usize,
    /// The largest shift of a crop: the padding on every side of the image.
    pub(crate) shift: u8,
    /// Flips each image in every other epoch, instead of at random.
    pub(crate) alternate: bool,
}

impl Augment {
    /// The crop of image `index`: any shift, flipped or not.
    pub(crate) fn crop(self, index: usize) -> Crop {
        let (mut rng, pad) = (self.rng(self.epoch, index), i32::from(self.shift));
        let (dx, dy) = (rng.random_range(-pad..=pad), rng.random_range(-pad..=pad));
        let flip = match self.alternate {
            true => self.rng(0, index).random::<bool>() ^ !self.epoch.is_multiple_of(2),
            false => rng.random(),
        };
        Crop { dx, dy, flip }
    }

    fn rng(self, epoch: usize, index: usize) -> ChaCha8Rng {
        rng(Stream::Augment, self.seed, epoch, index)
    }
}

/// Where a crop's pixels come from; the default is the image as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Crop {
    dx: i32,
    dy: i32,
    flip: bool,
}

impl Crop {
    /// Writes the crop of `image` into `out`, normalised. Padding is 0, the mean colour.
    pub(crate) fn write(self, image: &[u8], norm: &Norm, out: &mut [f32]) {
        let planes = image.chunks_exact(PLANE).zip(out.chunks_exact_mut(PLANE));
        for (c, (from, to)) in planes.enumerate() {
            let value = norm.channel(c);
            for (y, row) in to.chunks_exact_mut(SIDE).enumerate() {
                for (x, to) in row.iter_mut().enumerate() {
                    *to = self.source(x, y).map_or(0., |i| value[usize::from(from[i])]);
                }
            }
        }
    }

    /// The pixel shown at (`x`, `y`), or `None` in the padding.
    fn source(self, x: usize, y: usize) -> Option<usize> {
        Some(self.row(y)? * SIDE + self.column(x)?)
    }

    /// The row shown in row `y`.
    pub(crate) fn row(self, y: usize) -> Option<usize> {
        shifted(y, self.dy)
    }

    /// The column shown in column `x`.
    pub(crate) fn column(self, x: usize) -> Option<usize> {
        shifted(if self.flip { SIDE - 1 - x } else { x }, self.dx)
    }
}

fn shifted(at: usize, shift: i32) -> Option<usize> {
    at.checked_add_signed(shift as isize).filter(|&shifted| shifted < SIDE)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::{data::PIXELS, synthetic};

    const PAD: i32 = 4;

    fn augment(seed: u64, epoch: usize) -> Augment {
        Augment { seed, epoch, shift: 4, alternate: false }
    }

    /// Every crop that can be drawn.
    fn crops() -> impl Iterator<Item = Crop> {
        let shifts = move || -PAD..=PAD;
        shifts().flat_map(move |dx| {
            shifts().flat_map(move |dy| [false, true].map(|flip| Crop { dx, dy, flip }))
        })
    }

    #[test]
    fn a_flip_twice_is_the_identity() {
        let flip = Crop { flip: true, ..Crop::default() };
        for (x, y) in (0..PLANE).map(|i| (i % SIDE, i / SIDE)) {
            let once = flip.source(x, y).expect("a flip needs no padding");
            assert_eq!(once, y * SIDE + (SIDE - 1 - x));
            assert_eq!(flip.source(once % SIDE, once / SIDE), Some(y * SIDE + x));
        }
    }

    #[test]
    fn crops_stay_inside_the_image_and_pad_the_rest() {
        for crop in crops() {
            let sources: Vec<_> =
                (0..PLANE).filter_map(|i| crop.source(i % SIDE, i / SIDE)).collect();
            let kept = |shift: i32| SIDE - shift.unsigned_abs() as usize;
            assert_eq!(sources.len(), kept(crop.dx) * kept(crop.dy), "{crop:?}");
            assert!(sources.iter().all(|&i| i < PLANE), "{crop:?}");
        }
        let corner = Crop { dx: -PAD, dy: -PAD, flip: false };
        assert_eq!(corner.source(3, 10), None);
        assert_eq!(corner.source(4, 4), Some(0));
        assert_eq!(corner.source(31, 31), Some(27 * SIDE + 27));
    }

    #[test]
    fn padding_is_zero_and_channels_keep_their_own_norm() {
        let norm = Norm::new([0., 0.5, 1.], [1., 0.5, 0.25]);
        let mut out = vec![f32::NAN; PIXELS];
        Crop { dx: 1, dy: 0, flip: false }.write(&[255; PIXELS], &norm, &mut out);
        for (c, value) in [1., 1., 0.].into_iter().enumerate() {
            let row = &out[c * PLANE..][..SIDE];
            assert!(row[..31].iter().all(|&v| v == value), "{row:?}");
            assert_eq!(row[31], 0.);
        }
    }

    #[test]
    fn draws_cover_every_crop() {
        let drawn: Vec<_> = (0..3000).map(|index| augment(3, 5).crop(index)).collect();
        assert_eq!(crops().count(), 162);
        assert!(crops().all(|crop| drawn.contains(&crop)));
    }

    #[test]
    fn alternate_flips_show_each_image_both_ways_in_two_epochs() {
        let crops = |epoch| {
            let augment = Augment { alternate: true, shift: 2, ..augment(3, epoch) };
            (0..1000).map(move |index| augment.crop(index))
        };
        for (first, second) in crops(6).zip(crops(7)) {
            assert_ne!(first.flip, second.flip);
            assert!([first.dx, first.dy].iter().all(|shift| shift.abs() <= 2), "{first:?}");
        }
        let flipped = crops(0).filter(|crop| crop.flip).count();
        assert!((400..600).contains(&flipped), "{flipped} of 1000 in an epoch");
        assert!(crops(0).zip(crops(2)).any(|(a, b)| a.dx != b.dx), "other shifts in each epoch");
    }

    #[test]
    fn a_batch_depends_on_seed_and_epoch_not_on_threads() -> anyhow::Result<()> {
        let images = synthetic::draw(Stream::DrawTrain, 24, 7);
        let norm = Norm::of(&images);
        let batch = |seed, epoch, threads| -> anyhow::Result<Vec<f32>> {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
            let augment = Some(augment(seed, epoch));
            let indices: Vec<usize> = (0..24).rev().collect();
            let (x, _) = pool.install(|| images.batch(&indices, &norm, augment, &Device::Cpu))?;
            Ok(x.flatten_all()?.to_vec1()?)
        };
        let reference = batch(1, 0, 1)?;
        assert_eq!(reference, batch(1, 0, 3)?);
        assert_ne!(reference, batch(2, 0, 1)?);
        assert_ne!(reference, batch(1, 1, 1)?);
        Ok(())
    }
}
