//! Named variables: what overflow reports, missing gradients and checkpoints speak of.

use std::collections::{BTreeMap, HashSet};

use candle_core::{Tensor, TensorId, Var};
use candle_nn::VarMap;

use crate::Result;
use crate::error::ArgumentError;
use crate::error::lock::lock;

/// The variables of a model by name, in the order of their names, and its other state (running statistics, integers)
/// apart.
///
/// `VarMap::all_vars` comes in another order in every run, and has the running statistics of batch
/// norm among the variables.
///
/// ```
/// use candle_amp::{Parameters, nn};
/// use candle_core::{DType, Device};
/// use candle_nn::VarMap;
///
/// let varmap = VarMap::new();
/// let vb = nn::var_builder(&varmap, DType::F32, &Device::Cpu);
/// nn::batch_norm(4, 1e-5, vb.pp("norm"))?;
/// let parameters = Parameters::from_varmap(&varmap);
/// assert_eq!(parameters.names().collect::<Vec<_>>(), ["norm.bias", "norm.weight"]);
/// assert_eq!(parameters.buffers().count(), 2); // running mean and variance
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Parameters {
    variables: Vec<(String, Var)>,
    buffers: Vec<(String, Var)>,
}

/// What batch norm calls the state that no gradient reaches.
const BUFFERS: [&str; 3] = ["running_mean", "running_var", "num_batches_tracked"];

/// Whether `name` is that of running statistics.
pub(crate) fn is_buffer(name: &str) -> bool {
    BUFFERS.contains(&name.rsplit('.').next().unwrap_or_default())
}

impl Parameters {
    /// The variables of a `VarMap`. Those named `running_mean`, `running_var` or
    /// `num_batches_tracked`, and those that are not floating point, are buffers.
    pub fn from_varmap(varmap: &VarMap) -> Self {
        let data = lock(varmap.data());
        let sorted: BTreeMap<_, _> = data.iter().collect();
        let is_buffer = |(name, var): &(String, Var)| is_buffer(name) || !var.dtype().is_float();
        let (buffers, variables) =
            sorted.into_iter().map(|(k, v)| (k.clone(), v.clone())).partition(is_buffer);
        Self { variables, buffers }
    }

    /// Variables with names of the caller's, none of them buffers. One variable may have several names
    /// (tied weights); it counts once.
    ///
    /// # Errors
    ///
    /// [`ArgumentError::DuplicateName`].
    pub fn named<N: Into<String>>(variables: impl IntoIterator<Item = (N, Var)>) -> Result<Self> {
        let mut sorted = BTreeMap::new();
        for (name, var) in variables {
            let name = name.into();
            if sorted.insert(name.clone(), var).is_some() {
                return Err(ArgumentError::DuplicateName { name }.into());
            }
        }
        Ok(Self { variables: sorted.into_iter().collect(), buffers: Vec::new() })
    }

    /// The parameters whose name `keep` accepts: a group of its own, or the part of one optimizer.
    #[must_use]
    pub fn filter(&self, mut keep: impl FnMut(&str) -> bool) -> Self {
        let mut part = |all: &[(String, Var)]| {
            all.iter().filter(|(name, _)| keep(name)).cloned().collect::<Vec<_>>()
        };
        Self { variables: part(&self.variables), buffers: part(&self.buffers) }
    }

    /// The variables that `keep` accepts, and no buffers.
    pub(crate) fn filter_variables(&self, keep: impl Fn(&Var) -> bool) -> Self {
        let variables = self.variables.iter().filter(|(_, var)| keep(var)).cloned().collect();
        Self { variables, buffers: Vec::new() }
    }

    /// The variables with their names, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Var)> {
        self.variables.iter().map(|(name, var)| (name.as_str(), var))
    }

    /// The rest of the state with its names, by name.
    pub fn buffers(&self) -> impl Iterator<Item = (&str, &Var)> {
        self.buffers.iter().map(|(name, var)| (name.as_str(), var))
    }

    /// The names of the variables, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.iter().map(|(name, _)| name)
    }

    /// The variables, by name, each once: what an optimizer takes. Those that are not frozen are
    /// `trainable().vars()`.
    pub fn vars(&self) -> Vec<Var> {
        let mut seen = HashSet::new();
        self.iter().filter(|(_, var)| seen.insert(var.id())).map(|(_, var)| var.clone()).collect()
    }

    /// How many names there are.
    pub fn len(&self) -> usize {
        self.variables.len()
    }

    /// Whether there is no variable.
    pub fn is_empty(&self) -> bool {
        self.variables.is_empty()
    }

    /// The name of a variable; the first, where it has several.
    pub fn name_of(&self, variable: &Tensor) -> Option<&str> {
        self.name_of_id(variable.id())
    }

    pub(crate) fn name_of_id(&self, id: TensorId) -> Option<&str> {
        self.iter().find(|(_, var)| var.id() == id).map(|(name, _)| name)
    }
}
