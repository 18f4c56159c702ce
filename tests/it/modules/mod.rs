//! Modules of torch.nn, against PyTorch's numbers: `tests/golden/make_modules.py` made the file.

mod adaptive_pool;
mod attention;
mod norms;

use std::collections::HashMap;

use candle_amp::nn::{self, VarBuilder, VarMap};
use candle_amp::{GradScaler, Parameters, ops};
use candle_core::{DType, Device, Result, Tensor, Var};

use crate::util::{assert_close, package};

/// One case of the file.
struct Case {
    name: String,
    tensors: HashMap<String, Tensor>,
}

impl Case {
    fn load(name: &str) -> Self {
        let path = package().join("tests/golden/modules.safetensors");
        let all = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
        let prefix = format!("{name}.");
        let own = all.into_iter().filter_map(|(key, tensor)| {
            key.strip_prefix(&prefix).map(|key| (key.to_owned(), tensor))
        });
        Self { name: name.to_owned(), tensors: own.collect() }
    }

    fn get(&self, name: &str, dtype: DType) -> Result<Tensor> {
        self.tensors[name].to_dtype(dtype)
    }

    /// What is named so before a dot, as variables.
    fn variables(&self, kind: &str, dtype: DType) -> Result<VarMap> {
        let map = VarMap::new();
        let prefix = format!("{kind}.");
        for name in self.tensors.keys().filter_map(|name| name.strip_prefix(&prefix)) {
            let var = Var::from_tensor(&self.get(&format!("{prefix}{name}"), dtype)?)?;
            map.data().lock().unwrap().insert(name.to_owned(), var);
        }
        Ok(map)
    }

    /// `module` is given the builder of PyTorch's state dict and the input variables, and gives what `C.output` is.
    /// Output and gradients are PyTorch's to within `roundings`; no parameter is left out, and none added.
    fn check(
        &self,
        roundings: f64,
        module: impl Fn(VarBuilder, &dyn Fn(&str) -> Tensor) -> Result<Tensor>,
    ) -> candle_amp::Result<()> {
        for dtype in [DType::F64, DType::F32] {
            let name = |what: &str| format!("{}, {dtype:?}, {what}", self.name);
            let (parameters, inputs) =
                (self.variables("parameter", dtype)?, self.variables("input", dtype)?);
            let count = parameters.all_vars().len();
            let vb = nn::var_builder(&parameters, dtype, &Device::Cpu);
            let input = |name: &str| inputs.data().lock().unwrap()[name].as_tensor().clone();
            let y = module(vb, &input)?;
            assert_eq!(parameters.all_vars().len(), count, "{}", name("parameters"));
            let close = |what: &str, ours: &Tensor, theirs: &str| {
                assert_close(&name(what), ours, &self.tensors[theirs], dtype, roundings);
            };
            close("output", &y, "output");
            let mut scaler = GradScaler::disabled();
            scaler.scale(&ops::sum(&ops::mul(&y, &self.get("weigh", dtype)?)?)?)?.backward()?;
            for map in [parameters, inputs] {
                for (key, var) in Parameters::from_varmap(&map).iter() {
                    let gradient = scaler.grad(var)?;
                    let gradient = gradient.unwrap_or_else(|| panic!("{}", name(key)));
                    close(key, &gradient, &format!("gradient.{key}"));
                }
            }
        }
        Ok(())
    }
}
