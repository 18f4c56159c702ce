//! Seeded initial values.

use candle_core::{DType, Device, Result, Shape, Tensor, Var};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder, VarMap};

use crate::error::bail;
use crate::error::lock::lock;
use crate::random;

/// As `VarBuilder::from_varmap`, with initial values from the crate's generator: after the same
/// [`random::manual_seed`], the same model.
///
/// A variable that is already in the map is handed out as it is. One of another shape or dtype is
/// an error, where candle's builder would ignore the dtype asked for.
///
/// ```standalone_crate
/// use candle_amp::{nn, random};
/// use candle_core::{DType, Device};
/// use candle_nn::VarMap;
///
/// let weight = || {
///     random::manual_seed(3);
///     let vb = nn::var_builder(&VarMap::new(), DType::F32, &Device::Cpu);
///     nn::linear(4, 2, vb)?.weight().to_vec2::<f32>()
/// };
/// assert_eq!(weight()?, weight()?);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn var_builder(varmap: &VarMap, dtype: DType, device: &Device) -> VarBuilder<'static> {
    VarBuilder::from_backend(Box::new(Seeded(varmap.clone())), dtype, device.clone())
}

struct Seeded(VarMap);

impl SimpleBackend for Seeded {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let mut data = lock(self.0.data());
        if let Some(var) = data.get(name) {
            if var.shape() != &shape || var.dtype() != dtype {
                let (held, held_dtype) = (var.shape(), var.dtype());
                bail!(
                    "variable `{name}` was asked for as {dtype:?} {shape:?}, \
                     the map holds {held_dtype:?} {held:?}"
                );
            }
            return Ok(var.as_tensor().clone());
        }
        let var = Var::from_tensor(&random::init(init, &shape, dtype, device)?)?;
        let tensor = var.as_tensor().clone();
        data.insert(name.to_string(), var);
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let data = lock(self.0.data());
        match data.get(name) {
            Some(var) => var.to_dtype(dtype)?.to_device(device),
            None => bail!("variable `{name}` is not in the map, and has no shape to be made with"),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        lock(self.0.data()).contains_key(name)
    }
}
