//! Where batches come from.

use candle_core::{Device, Result, Tensor};

use crate::{
    augment::Augment,
    data::{Dataset, Images, Norm},
    resident::Resident,
};

/// Images of a set: on the host, or where they are trained on.
#[derive(Debug)]
pub(crate) enum Feed<'a> {
    Host(&'a Images, &'a Norm),
    Device(Resident),
}

impl<'a> Feed<'a> {
    pub(crate) fn new(images: &'a Images, data: &'a Dataset, device: &Device) -> Result<Self> {
        Ok(match device {
            Device::Cpu => Self::Host(images, &data.norm),
            device => Self::Device(Resident::new(images, &data.norm, device)?),
        })
    }

    pub(crate) fn batch(
        &self,
        indices: &[usize],
        augment: Option<Augment>,
    ) -> Result<(Tensor, Tensor)> {
        match self {
            Self::Host(images, norm) => images.batch(indices, norm, augment, &Device::Cpu),
            Self::Device(resident) => resident.batch(indices, augment),
        }
    }
}
