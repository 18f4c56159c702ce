//! The mask of the CUDA kernels.

use candle_core::{DType, Result, Tensor};

use super::repeated::unrepeated;
use super::settings::Settings;
use crate::kernels::cast;
use crate::kernels::cuda::Launch;

/// A mask as kernels take it: of the shape of the scores, in their dtype or U8.
pub(super) struct Mask(Option<Tensor>);

impl Mask {
    pub(super) fn of(mask: Option<&Tensor>, shape: [usize; 4], dtype: DType) -> Result<Self> {
        let Some(mask) = mask else { return Ok(Self(None)) };
        let once = unrepeated(mask)?;
        let once = if mask.dtype() == DType::U8 { once } else { cast(&once, dtype)? };
        once.broadcast_as(&shape).map(Some).map(Self)
    }

    /// Adds what kernels take of settings and mask.
    pub(super) fn settings(&self, launch: Launch, settings: Settings) -> Result<Launch> {
        let launch = launch.double(settings.scale).double(settings.softcap.unwrap_or(0.0));
        Ok(match &self.0 {
            None => launch.read_or_null(None)?.sizes(&[0; 4]).int(0),
            Some(mask) => {
                let kind = if mask.dtype() == DType::U8 { 1 } else { 2 };
                launch.read_strided(mask)?.sizes(mask.stride()).int(kind)
            }
        })
    }
}
