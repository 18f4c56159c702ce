//! The arguments that optimizers are made from: variables, with names or without, in groups.

use candle_core::Var;

use super::config::Config;
use crate::Parameters;

/// Variables for an optimizer: from a `Vec<Var>`, or with names, which a saved state needs, from
/// [`Parameters`].
#[derive(Clone, Debug, Default)]
pub struct Variables(pub(crate) Vec<(Option<String>, Var)>);

impl From<Vec<Var>> for Variables {
    fn from(variables: Vec<Var>) -> Self {
        Self(variables.into_iter().map(|variable| (None, variable)).collect())
    }
}

impl From<&Parameters> for Variables {
    fn from(parameters: &Parameters) -> Self {
        let named = |(name, variable): (&str, &Var)| (Some(name.to_owned()), variable.clone());
        Self(parameters.iter().map(named).collect())
    }
}

impl From<Parameters> for Variables {
    fn from(parameters: Parameters) -> Self {
        Self::from(&parameters)
    }
}

/// Parameters with settings of their own.
#[derive(Clone, Debug)]
pub struct Group<C> {
    /// The parameters. One in two groups is an error.
    pub parameters: Variables,
    /// All of their settings.
    pub config: C,
}

impl<C: Config> Group<C> {
    /// A group of `parameters`, a `Vec<Var>` or [`Parameters`].
    pub fn new(parameters: impl Into<Variables>, config: C) -> Self {
        Self { parameters: parameters.into(), config }
    }
}

/// Two groups: the parameters with two or more dimensions with `config`, and the rest, which are
/// norms and biases, with the same but no weight decay.
///
/// ```
/// use candle_amp::optim::{AdamW, AdamWConfig, decay_groups};
/// use candle_amp::{Parameters, nn};
/// use candle_core::{DType, Device};
/// use candle_nn::VarMap;
///
/// let varmap = VarMap::new();
/// let vb = nn::var_builder(&varmap, DType::F32, &Device::Cpu);
/// nn::linear(3, 5, vb)?;
/// let config = AdamWConfig { weight_decay: 0.1, ..Default::default() };
/// let adamw = AdamW::from_groups(decay_groups(&Parameters::from_varmap(&varmap), config))?;
/// let decays: Vec<f64> = adamw.configs().map(|config| config.weight_decay).collect();
/// assert_eq!(decays, [0.1, 0.0]);
/// # Ok::<(), candle_amp::Error>(())
/// ```
pub fn decay_groups<C: Config>(parameters: &Parameters, config: C) -> Vec<Group<C>> {
    let Variables(all) = parameters.into();
    let (weights, rest) = all.into_iter().partition(|(_, variable)| variable.rank() >= 2);
    vec![
        Group { parameters: Variables(weights), config },
        Group { parameters: Variables(rest), config: config.with("weight_decay", 0.0) },
    ]
}
