//! Images that stay on the device: a batch is a few numbers from the host, and no pixels.

use candle_core::{D, Device, Result, Tensor};

use crate::{
    augment::{Augment, Crop},
    data::{Images, Norm, PIXELS, PLANE, SIDE},
};

/// Labelled images on a device, one byte a value, and what each byte stands for.
#[derive(Debug)]
pub(crate) struct Resident {
    pixels: Tensor,
    labels: Tensor,
    /// The values of every byte, channel after channel, and that of the padding.
    values: Tensor,
    /// Where each channel begins, in an image and among the values: `(1, 3, 1, 1)`.
    planes: Tensor,
    channels: Tensor,
    padding: Tensor,
}

impl Resident {
    /// Sends the images: 3 KiB each, once.
    pub(crate) fn new(images: &Images, norm: &Norm, device: &Device) -> Result<Self> {
        let values: Vec<f32> =
            (0..3).flat_map(|c| norm.channel(c).to_vec()).chain([0f32]).collect();
        let padding = values.len() as u32 - 1;
        let channels = |step: usize| {
            let firsts: Vec<u32> = (0..3).map(|c| (c * step) as u32).collect();
            Tensor::from_vec(firsts, (1, 3, 1, 1), device)
        };
        let labels: Vec<u32> = images.labels().iter().map(|&label| label.into()).collect();
        Ok(Self {
            pixels: Tensor::from_slice(images.pixels(), images.pixels().len(), device)?,
            labels: Tensor::from_vec(labels, images.len(), device)?,
            values: Tensor::from_vec(values, padding as usize + 1, device)?,
            planes: channels(PLANE)?,
            channels: channels(256)?,
            padding: Tensor::from_slice(&[padding], (1, 1, 1, 1), device)?,
        })
    }

    /// As [`Images::batch`], to the bit.
    pub(crate) fn batch(
        &self,
        indices: &[usize],
        augment: Option<Augment>,
    ) -> Result<(Tensor, Tensor)> {
        let (n, device) = (indices.len(), self.pixels.device());
        let crops: Vec<Crop> = indices
            .iter()
            .map(|&index| augment.map_or(Crop::default(), |augment| augment.crop(index)))
            .collect();
        // A crop's rows and columns are all that is sent, and in the padding nothing, as one more.
        let sent = |axis: &dyn Fn(&Crop, usize) -> Option<usize>, step: usize| {
            let places: Vec<Option<usize>> =
                crops.iter().flat_map(|crop| (0..SIDE).map(|i| axis(crop, i))).collect();
            let starts = places.iter().map(|at| (at.unwrap_or(0) * step) as u32).collect();
            let inside = places.iter().map(|at| u8::from(at.is_some())).collect();
            (starts, inside)
        };
        let (rows, rows_inside): (Vec<u32>, Vec<u8>) = sent(&|crop, y| crop.row(y), SIDE);
        let (columns, columns_inside): (Vec<u32>, Vec<u8>) = sent(&|crop, x| crop.column(x), 1);
        let index: Vec<u32> = indices.iter().map(|&index| index as u32).collect();
        let index = Tensor::from_vec(index, n, device)?;
        let (tall, wide) = ((n, 1, SIDE, 1), (n, 1, 1, SIDE));
        let rows = Tensor::from_vec(rows, tall, device)?;
        let columns = Tensor::from_vec(columns, wide, device)?;
        let inside = Tensor::from_vec(rows_inside, tall, device)?
            .broadcast_mul(&Tensor::from_vec(columns_inside, wide, device)?)?;

        let first = (&index * PIXELS as f64)?.reshape((n, 1, 1, 1))?.broadcast_add(&self.planes)?;
        let at = first.broadcast_add(&rows.broadcast_add(&columns)?)?;
        let bytes = self.pixels.index_select(&at.flatten_all()?, 0)?.reshape(at.shape())?;
        let value = bytes.to_dtype(at.dtype())?.broadcast_add(&self.channels)?;
        let value = inside
            .broadcast_as(at.shape())?
            .where_cond(&value, &self.padding.broadcast_as(at.shape())?)?;
        let x = self.values.index_select(&value.flatten_all()?, 0)?.reshape(at.shape())?;
        Ok((x, self.labels.index_select(&index, D::Minus1)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{rng::Stream, synthetic};

    #[test]
    fn a_batch_is_the_hosts_to_the_bit() -> anyhow::Result<()> {
        let images = synthetic::draw(Stream::DrawTrain, 40, 3);
        let norm = Norm::of(&images);
        let mut devices = vec![Device::Cpu];
        devices.extend(Device::new_cuda(0));
        for device in devices {
            let resident = Resident::new(&images, &norm, &device)?;
            let indices: Vec<usize> = (0..40).rev().step_by(3).collect();
            for augment in [None, Some(Augment { seed: 2, epoch: 1, shift: 4, alternate: false })] {
                let (x, y) = images.batch(&indices, &norm, augment, &Device::Cpu)?;
                let (ours, labels) = resident.batch(&indices, augment)?;
                assert_eq!((ours.dims(), ours.dtype()), (x.dims(), x.dtype()));
                let values = |x: Tensor| x.flatten_all()?.to_vec1::<f32>();
                assert_eq!(values(ours)?, values(x)?);
                assert_eq!(labels.to_vec1::<u32>()?, y.to_vec1::<u32>()?);
            }
        }
        Ok(())
    }
}
