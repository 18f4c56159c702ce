//! A file of `make_golden.py`, and the same training here.

use std::collections::{BTreeMap, HashMap};

use candle_amp::optim::{Sgd, SgdConfig, Step};
use candle_amp::{Autocast, GradScaler, MasterWeights, Parameters, Policy, ScaleConfig, nn, ops};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{AdamW, ParamsAdamW, VarMap};

use super::models::{Build, Model};
use crate::util::{package, to_vec};

const STEPS: usize = 50;
const BATCHES: usize = 5;

/// A step whose inputs are beyond F16 in one of the files: skipped there, left out in other dtypes.
const POISONED: usize = 30;
const POISON: f64 = 1e6;

/// The tensors of a file.
pub(crate) struct Golden(HashMap<String, Tensor>);

impl Golden {
    pub(crate) fn load(name: &str) -> Self {
        let path = package().join(format!("tests/golden/{name}.safetensors"));
        let tensors = candle_core::safetensors::load(&path, &Device::Cpu);
        Self(tensors.unwrap_or_else(|error| panic!("{}: {error}", path.display())))
    }

    #[track_caller]
    pub(crate) fn get(&self, name: &str) -> &Tensor {
        self.0.get(name).unwrap_or_else(|| panic!("no tensor `{name}`"))
    }

    /// The tensors whose names start with `prefix`, without it.
    pub(crate) fn under<'g>(
        &'g self,
        prefix: &'g str,
    ) -> impl Iterator<Item = (&'g str, &'g Tensor)> {
        self.0.iter().filter_map(move |(name, tensor)| Some((name.strip_prefix(prefix)?, tensor)))
    }

    fn poisoned(&self, step: usize) -> bool {
        step == POISONED && to_vec(self.get("f64.losses"))[step].is_nan()
    }
}

/// What the optimizer of a file is.
#[derive(Clone)]
pub(crate) enum Optimizer {
    Sgd(SgdConfig),
    AdamW(ParamsAdamW),
}

/// How to train.
#[derive(Clone)]
pub(crate) struct Recipe {
    pub(crate) model: Build,
    pub(crate) optimizer: Optimizer,
    /// What the gradients' norm is clipped to.
    pub(crate) limit: Option<f64>,
}

/// What was seen on the way, under the names of the files: `losses`, `final.fc1.weight`.
pub(crate) type Run = BTreeMap<String, Tensor>;

impl Recipe {
    /// Trains in `dtype` (unless that is F32, under `amp`) from the file's initial weights on the
    /// file's batches.
    pub(crate) fn follow(
        &self,
        golden: &Golden,
        dtype: DType,
        amp: &Autocast,
    ) -> candle_amp::Result<Run> {
        let varmap = VarMap::new();
        for (name, tensor) in golden.under("initial.") {
            let mut data = varmap.data().lock().expect("nobody else has it");
            data.insert(name.to_owned(), Var::from_tensor(tensor)?);
        }
        let model = (self.model)(nn::var_builder(&varmap, DType::F32, &Device::Cpu))?;
        let parameters = Parameters::from_varmap(&varmap);
        let vars = parameters.vars();
        assert_eq!(
            parameters.len() + parameters.buffers().count(),
            golden.under("initial.").count()
        );
        let mut run = match &self.optimizer {
            Optimizer::Sgd(config) => {
                self.steps(golden, dtype, amp, &model, &parameters, Sgd::new(vars, *config)?)
            }
            Optimizer::AdamW(config) => {
                let adamw = MasterWeights::<AdamW>::new(vars, config.clone())?;
                self.steps(golden, dtype, amp, &model, &parameters, adamw)
            }
        }?;
        for (name, var) in parameters.iter().chain(parameters.buffers()) {
            run.insert(format!("final.{name}"), var.as_detached_tensor());
        }
        Ok(run)
    }

    fn steps<S: Step>(
        &self,
        golden: &Golden,
        dtype: DType,
        amp: &Autocast,
        model: &Model,
        parameters: &Parameters,
        mut optimizer: S,
    ) -> candle_amp::Result<Run> {
        let (x, y) = (golden.get("x"), golden.get("y"));
        let amp = if dtype == DType::F32 { &Autocast::disabled() } else { amp };
        let mut scaler = match dtype {
            DType::F16 => GradScaler::new(ScaleConfig {
                init_scale: 1024.0,
                growth_interval: 15,
                ..Default::default()
            })?,
            _ => GradScaler::disabled(),
        };
        let mut run = Run::new();
        let (mut losses, mut norms, mut scales) = (Vec::new(), Vec::new(), Vec::new());
        for step in 0..STEPS {
            let poison = golden.poisoned(step);
            let mut inputs = x.get(step % BATCHES)?;
            if poison {
                inputs = (inputs * POISON)?;
            }
            let targets = y.get(step % BATCHES)?.flatten_all()?;
            let (logits, loss) = amp.scope(|| {
                let logits = model(&inputs)?;
                let rows = logits.flatten_to(logits.rank() - 2)?;
                Ok::<_, candle_core::Error>((logits, ops::cross_entropy(&rows, &targets)?))
            })?;
            assert_eq!((logits.dtype(), loss.dtype()), (dtype, DType::F32));
            if poison && dtype != DType::F16 {
                losses.push(f64::NAN);
                norms.push(f64::NAN);
                continue;
            }
            scaler.scale(&loss)?.backward()?;
            assert!(scaler.missing(parameters).is_empty());
            if step == 0 {
                run.insert("loss".into(), loss.detach().reshape(1)?);
                run.insert("logits".into(), logits.detach());
                for (name, var) in parameters.iter() {
                    let gradient = scaler.grad(var)?.expect("none is missing");
                    run.insert(format!("first.{name}"), gradient);
                }
            }
            let norm = scaler.clip_grad_norm(self.limit.unwrap_or(f64::INFINITY))?;
            let outcome = scaler.step(&mut optimizer)?;
            assert_eq!(outcome.skipped()?, poison, "step {step} skipped");
            scaler.update()?;
            losses.push(loss.to_scalar::<f32>()?.into());
            norms.push(norm.to_scalar::<f32>()?.into());
            scales.push(scaler.current_scale().into());
        }
        for (name, values) in [("losses", losses), ("norms", norms), ("scales", scales)] {
            run.insert(name.into(), Tensor::new(values, &Device::Cpu)?);
        }
        Ok(run)
    }
}

/// PyTorch's lists, to `dtype`.
pub(crate) fn pytorch(dtype: DType) -> Autocast {
    Autocast::new(dtype).with_policy(Policy::pytorch())
}
