//! The masters of [`MasterVars`](super::MasterVars), and how they serve a `VarBuilder`.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::{DType, Device, Result, Shape, Tensor, TensorId, Var};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarMap};

use crate::autograd::version;
use crate::error::bail;
use crate::error::lock::lock;
use crate::parameters::is_buffer;
use crate::{autocast, kernels, random};

pub(super) type DTypeRule = dyn Fn(&str, DType) -> DType + Send + Sync;
pub(super) type InitRule = dyn Fn(&str, Init) -> Option<Init> + Send + Sync;

/// The masters, and what was handed out of them.
#[derive(Clone)]
pub(super) struct Store {
    pub(super) varmap: VarMap,
    pub(super) dtypes: Arc<DTypeRule>,
    pub(super) init: Arc<InitRule>,
    pub(super) inventory: Arc<Mutex<Inventory>>,
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.inventory().handed.iter().map(|one| one.name.clone()).collect();
        f.debug_struct("Store").field("handed_out", &names).finish_non_exhaustive()
    }
}

#[derive(Default)]
pub(super) struct Inventory {
    /// In the order they were asked for.
    pub(super) handed: Vec<Handed>,
    /// What the files hold, less what was asked for.
    pub(super) files: HashMap<String, Tensor>,
}

/// A variable as it was handed out: cast, or itself.
pub(super) struct Handed {
    pub(super) name: String,
    pub(super) master: Var,
    pub(super) tensor: Tensor,
}

impl Handed {
    /// Notes that the tensor has just been written.
    pub(super) fn written(&self) {
        version::refreshed(&self.tensor, &self.master, &self.name);
    }
}

impl Drop for Handed {
    fn drop(&mut self) {
        version::forget(&self.tensor);
    }
}

impl Store {
    pub(super) fn new(varmap: VarMap) -> Self {
        let (dtypes, init) =
            (Arc::new(|_: &str, dtype| dtype), Arc::new(|_: &str, init| Some(init)));
        Self { varmap, dtypes, init, inventory: Arc::default() }
    }

    pub(super) fn inventory(&self) -> MutexGuard<'_, Inventory> {
        lock(&self.inventory)
    }

    /// Rewrites the 16-bit tensors of the masters that have `stepped`.
    pub(super) fn refresh_of(&self, stepped: impl Fn(TensorId) -> bool) -> Result<()> {
        autocast::clear_cast_cache();
        let inventory = self.inventory();
        let ours = || inventory.handed.iter().filter(|one| stepped(one.master.id()));
        let copies = ours().filter(|one| one.tensor.id() != one.master.id());
        let copies = copies.filter(|one| one.tensor.dtype().is_float());
        let pairs: Vec<(&Tensor, &Tensor)> =
            copies.map(|one| (&one.tensor, one.master.as_tensor())).collect();
        kernels::cast_all(&pairs)?;
        ours().for_each(Handed::written);
        Ok(())
    }

    /// The variable `name`, made if there is none.
    fn master(
        &self,
        inventory: &mut Inventory,
        name: &str,
        wanted: Option<(&Shape, Init)>,
        init: Option<Init>,
        dtype: DType,
        device: &Device,
    ) -> Result<Var> {
        let mut data = lock(self.varmap.data());
        if let Some(var) = data.get(name) {
            if let Some((shape, _)) = wanted
                && var.shape() != shape
            {
                bail!("`{name}` was asked for as {shape:?}, and is {:?}", var.shape());
            }
            if is_16_bit(var.dtype()) {
                bail!("`{name}` is a {:?} variable: a master must be F32 or F64", var.dtype());
            }
            return Ok(var.clone());
        }
        let dtype = if is_16_bit(dtype) { DType::F32 } else { dtype };
        let value = match (inventory.files.get(name), wanted) {
            (Some(value), _) => {
                let shape = wanted.map_or(value.shape(), |(shape, _)| shape);
                let dtype = if value.dtype().is_float() { dtype } else { value.dtype() };
                converted(name, value, shape, dtype)?
            }
            (None, Some((shape, _))) => match init {
                Some(init) => random::init(init, shape, dtype, device)?,
                None => bail!("no file has `{name}`, and `init` gives it no value"),
            },
            (None, None) => bail!("`{name}` does not exist, and has no shape to be made with"),
        };
        let var = Var::from_tensor(&value.to_device(device)?)?;
        data.insert(name.to_owned(), var.clone());
        inventory.files.remove(name);
        Ok(var)
    }

    /// What the rule for variables that no file has says of `name`, where it is one. The rule may look into the
    /// variables, so nothing is locked meanwhile.
    fn init_of(&self, name: &str, wanted: Option<(&Shape, Init)>) -> Option<Init> {
        let (shape, init) = wanted?;
        let in_file = self.inventory().files.contains_key(name);
        let data = self.varmap.data();
        let made = lock(data).contains_key(name);
        if in_file || made { None } else { (self.init)(name, or_default(init, name, shape)) }
    }

    fn hand_out(
        &self,
        name: &str,
        wanted: Option<(&Shape, Init)>,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let default = if is_buffer(name) && is_16_bit(dtype) { DType::F32 } else { dtype };
        let dtype = (self.dtypes)(name, default);
        let init = self.init_of(name, wanted);
        let inventory = &mut *self.inventory();
        let master = self.master(inventory, name, wanted, init, dtype, device)?;
        if !master.device().same_device(device) {
            let (held, asked) = (master.device().location(), device.location());
            bail!("`{name}` was asked for on {asked:?}, and is on {held:?}");
        }
        let made = |one: &&Handed| one.master.id() == master.id() && one.tensor.dtype() == dtype;
        if let Some(one) = inventory.handed.iter().find(made) {
            return Ok(one.tensor.clone());
        }
        let tensor = master.to_dtype(dtype)?;
        let one = Handed { name: name.to_owned(), master, tensor: tensor.clone() };
        if one.tensor.id() != one.master.id() {
            one.written();
        }
        inventory.handed.push(one);
        Ok(tensor)
    }
}

/// The `VarBuilder`'s side.
pub(super) struct Backend(pub(super) Store);

impl SimpleBackend for Backend {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        self.0.hand_out(name, Some((&shape, init)), dtype, device)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        self.0.hand_out(name, None, dtype, device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        let in_file = self.0.inventory().files.contains_key(name);
        let data = lock(self.0.varmap.data());
        in_file || data.contains_key(name)
    }
}

fn is_16_bit(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

/// See [`MasterVars::new`](super::MasterVars::new).
fn or_default(asked: Init, name: &str, shape: &Shape) -> Init {
    match asked {
        Init::Const(0.0) if shape.rank() >= 2 => Init::Randn { mean: 0.0, stdev: 0.02 },
        Init::Const(0.0) if shape.rank() == 1 && name.rsplit('.').next() == Some("weight") => {
            Init::Const(1.0)
        }
        asked => asked,
    }
}

/// A value from a file, as the variable `name` has it.
pub(super) fn converted(name: &str, value: &Tensor, shape: &Shape, dtype: DType) -> Result<Tensor> {
    if value.shape() != shape {
        bail!("the file has `{name}` as {:?}, and it is asked for as {shape:?}", value.shape());
    }
    match value.dtype() == dtype {
        true => Ok(value.clone()),
        false if value.dtype().is_float() && dtype.is_float() => kernels::cast(value, dtype),
        false => bail!("the file has `{name}` in {:?}, and it is {dtype:?}", value.dtype()),
    }
}
