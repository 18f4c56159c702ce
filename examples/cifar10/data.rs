//! Image sets: the CIFAR-10 binary reader, normalisation and batches.

use std::{fs, path::Path};

use anyhow::{Context, Result, bail, ensure};
use candle_core::{Device, Tensor};
use rand::seq::SliceRandom;
use rayon::prelude::*;

use crate::{
    augment::{Augment, Crop},
    common::progress::count,
    rng::{Stream, rng},
};

/// Width and height of an image.
pub(crate) const SIDE: usize = 32;
/// Pixels of one colour channel.
pub(crate) const PLANE: usize = SIDE * SIDE;
/// Bytes of an image: three channels, red first.
pub(crate) const PIXELS: usize = 3 * PLANE;
/// Number of classes.
pub(crate) const CLASSES: usize = 10;

/// The training images of CIFAR-10, and its test images.
const WHOLE: (usize, usize) = (50_000, 10_000);

/// A record of the binary format: the label, then the image.
const RECORD: usize = 1 + PIXELS;

/// A training and a test set, and what the classes are called.
#[derive(Debug)]
pub(crate) struct Dataset {
    pub(crate) name: String,
    pub(crate) classes: [&'static str; CLASSES],
    pub(crate) train: Images,
    pub(crate) test: Images,
    pub(crate) norm: Norm,
}

/// Labelled images, one byte a value.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Images {
    pixels: Vec<u8>,
    labels: Vec<u8>,
}

impl Images {
    /// Images of `PIXELS` bytes each, one for every label.
    pub(crate) fn new(pixels: Vec<u8>, labels: Vec<u8>) -> Self {
        assert_eq!(pixels.len(), labels.len() * PIXELS, "one image a label");
        Self { pixels, labels }
    }

    pub(crate) fn len(&self) -> usize {
        self.labels.len()
    }

    pub(crate) fn pixels(&self) -> &[u8] {
        &self.pixels
    }

    pub(crate) fn labels(&self) -> &[u8] {
        &self.labels
    }

    pub(crate) fn image(&self, index: usize) -> &[u8] {
        &self.pixels[index * PIXELS..][..PIXELS]
    }

    /// Keeps the first `len` images.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.labels.truncate(len);
        self.pixels.truncate(self.labels.len() * PIXELS);
    }

    /// The images of `indices` as normalised `(n, 3, 32, 32)` F32, and their labels as `(n,)` U32.
    ///
    /// With `augment`, every image is cropped and flipped as its index, the epoch and the seed say:
    /// the batch does not depend on the number of threads.
    pub(crate) fn batch(
        &self,
        indices: &[usize],
        norm: &Norm,
        augment: Option<Augment>,
        device: &Device,
    ) -> candle_core::Result<(Tensor, Tensor)> {
        let mut values = vec![0f32; indices.len() * PIXELS];
        values.par_chunks_mut(PIXELS).zip(indices).for_each(|(out, &index)| {
            let crop = augment.map_or(Crop::default(), |augment| augment.crop(index));
            crop.write(self.image(index), norm, out);
        });
        let labels: Vec<u32> = indices.iter().map(|&index| self.labels[index].into()).collect();
        let x = Tensor::from_vec(values, (indices.len(), 3, SIDE, SIDE), device)?;
        let y = Tensor::from_vec(labels, indices.len(), device)?;
        Ok((x, y))
    }

    /// The indices of all images, in the order of training epoch `epoch`.
    pub(crate) fn shuffled(&self, seed: u64, epoch: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.len()).collect();
        order.shuffle(&mut rng(Stream::Shuffle, seed, epoch, 0));
        order
    }
}

/// Maps bytes to values of mean 0 and deviation 1, channel by channel.
#[derive(Clone, Debug)]
pub(crate) struct Norm([[f32; 256]; 3]);

impl Norm {
    /// For a `mean` and a deviation `std` of pixels between 0 and 1.
    pub(crate) fn new(mean: [f32; 3], std: [f32; 3]) -> Self {
        let value = |c: usize, byte: usize| (byte as f32 / 255. - mean[c]) / std[c].max(1e-3);
        Self(std::array::from_fn(|c| std::array::from_fn(|byte| value(c, byte))))
    }

    /// For CIFAR-10: the mean and deviation of its 50,000 training images.
    pub(crate) fn cifar10() -> Self {
        Self::new([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616])
    }

    /// For the images given.
    pub(crate) fn of(images: &Images) -> Self {
        let (mut sum, mut square) = ([0u64; 3], [0u64; 3]);
        for (i, plane) in images.pixels.chunks_exact(PLANE).enumerate() {
            for &byte in plane {
                sum[i % 3] += u64::from(byte);
                square[i % 3] += u64::from(byte).pow(2);
            }
        }
        let count = (images.len() * PLANE).max(1) as f64;
        let mean = sum.map(|sum| sum as f64 / count);
        let std: [f64; 3] =
            std::array::from_fn(|c| (square[c] as f64 / count - mean[c].powi(2)).sqrt());
        Self::new(mean.map(|m| (m / 255.) as f32), std.map(|s| (s / 255.) as f32))
    }

    /// The value of every byte in channel `channel`.
    pub(crate) fn channel(&self, channel: usize) -> &[f32; 256] {
        &self.0[channel]
    }
}

/// Reads `data_batch_1.bin` to `data_batch_5.bin` and `test_batch.bin` from `dir`: all images or, if `may_lack`,
/// those that are there.
pub(crate) fn read_cifar10(dir: &Path, may_lack: bool) -> Result<Dataset> {
    let shown = dir.display();
    ensure!(dir.exists(), "{shown}: no such folder");
    ensure!(dir.is_dir(), "{shown} is a file, not a folder of CIFAR-10 files");
    let files: Vec<_> = (1..=5).map(|i| dir.join(format!("data_batch_{i}.bin"))).collect();
    let files: Vec<_> = files.into_iter().filter(|file| file.exists()).collect();
    if files.is_empty() {
        let inner = dir.join("cifar-10-batches-bin");
        let hint = if inner.is_dir() {
            format!("; did you mean {}?", inner.display())
        } else if dir.join("data_batch_1").exists() {
            "; these are the files for Python, the binary version is needed".to_owned()
        } else {
            String::new()
        };
        bail!("{shown} has no training file, data_batch_1.bin to data_batch_5.bin{hint}");
    }
    let mut train = Images::default();
    for file in &files {
        read_file(file, &mut train)?;
    }
    let mut test = Images::default();
    let file = dir.join("test_batch.bin");
    ensure!(file.exists(), "{shown} has no test_batch.bin");
    read_file(&file, &mut test)?;
    ensure!(
        may_lack || (train.len(), test.len()) == WHOLE,
        "{shown} has {} of {} training images, in {} of 5 files, and {} of {} test images; to train on a \
         part, give --train-images",
        count(train.len()),
        count(WHOLE.0),
        files.len(),
        count(test.len()),
        count(WHOLE.1)
    );
    let classes =
        ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"];
    Ok(Dataset { name: "CIFAR-10".to_owned(), classes, train, test, norm: Norm::cifar10() })
}

/// Appends the records of `file` to `images`.
fn read_file(file: &Path, images: &mut Images) -> Result<()> {
    let shown = file.display();
    let bytes = fs::read(file).with_context(|| format!("cannot read {shown}"))?;
    ensure!(!bytes.is_empty(), "{shown} is empty");
    let len = bytes.len();
    ensure!(
        len.is_multiple_of(RECORD),
        "{shown} has {len} bytes, expected a multiple of {RECORD} (10000 images are {})",
        10_000 * RECORD
    );
    for (record, bytes) in bytes.chunks_exact(RECORD).enumerate() {
        let label = bytes[0];
        ensure!(
            usize::from(label) < CLASSES,
            "{shown}: the label of record {record} is {label}, expected 0 to 9"
        );
        images.labels.push(label);
        images.pixels.extend_from_slice(&bytes[1..]);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
