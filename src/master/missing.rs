//! Variables without a gradient, and what can be said of why.

use std::collections::HashSet;
use std::fmt;

use candle_core::Tensor;

use super::backend::Handed;
use crate::Parameters;
use crate::autograd::with_deep_stack;

/// The variables of [`MasterVars`](crate::MasterVars) that get no gradient from a loss, in the
/// order the model asked for them.
///
/// Printed, it names them and the operators of candle that cut gradients without an error. It
/// cannot say which of these it was, or whether the forward pass uses the variable at all: a cut
/// leaves no trace in candle's graph.
///
/// For the same reason a variable that is cut off on one path and reached on another, such as a
/// residual connection around a norm, is not among them. Its gradient lacks the part that was cut.
///
/// ```
/// use candle_amp::diagnostics::MissingReason;
/// use candle_amp::{MasterVars, ops};
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{LayerNormConfig, Module};
///
/// let masters = MasterVars::new(DType::BF16, &Device::Cpu);
/// let vb = masters.var_builder();
/// let proj = candle_nn::linear_no_bias(4, 4, vb.pp("proj"))?;
/// let norm = candle_nn::layer_norm(4, LayerNormConfig::default(), vb.pp("norm"))?;
/// let head = candle_nn::linear(4, 2, vb.pp("head"))?;
///
/// let x = Tensor::ones((3, 4), DType::BF16, &Device::Cpu)?;
/// let y = Tensor::new(&[0u32, 1, 1], &Device::Cpu)?;
/// let logits = head.forward(&norm.forward(&proj.forward(&x)?)?)?;
/// let missing = masters.missing(&ops::cross_entropy(&logits, &y)?);
/// assert_eq!(missing.names().collect::<Vec<_>>(), ["proj.weight", "norm.weight", "norm.bias"]);
/// assert!(missing.iter().all(|(_, why)| why == MissingReason::NotReached { later: true }));
/// println!("{missing}");
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct MissingGradients {
    missing: Vec<(String, MissingReason)>,
    /// How many variables there are.
    of: usize,
    first_reached: Option<String>,
}

/// Why a variable gets no gradient, as far as it can be known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MissingReason {
    /// The model did not ask for it when it was built.
    NotAskedFor,
    /// It is not in the graph of the loss: this forward pass does not use it, or only in front of
    /// an operator that cuts gradients.
    NotReached {
        /// Whether a variable that the model asked for later is in that graph. Models ask for
        /// their variables in about the order they use them, so a cut is then the likelier cause.
        later: bool,
    },
}

/// What cuts gradients in candle 0.11, and what does not.
const CUTS: [(&str, &str); 6] = [
    ("candle_nn::ops::softmax_last_dim", "candle_nn::ops::softmax, or candle_amp's"),
    ("candle_nn::LayerNorm with a bias, on contiguous input", "candle_amp::nn::LayerNorm"),
    (
        "candle_nn::RmsNorm::forward, on contiguous input",
        "forward_diff, or candle_amp::nn::RmsNorm",
    ),
    ("candle_nn::rotary_emb::rope, rope_i, rope_thd", "rope_slow, or candle_amp::nn::rotary_emb"),
    ("candle_nn::ops::sdpa", "candle_amp::ops::sdpa"),
    ("detach, argmax, comparisons, quantized matmul", "nothing: they have no gradient"),
];

impl MissingGradients {
    pub(super) fn of(loss: &Tensor, handed: &[Handed], parameters: &Parameters) -> Self {
        let nodes = with_deep_stack(|| loss.sorted_nodes());
        let reached: HashSet<_> =
            nodes.iter().filter(|node| node.is_variable()).map(|var| var.id()).collect();
        let parameters = parameters.trainable();
        let trainable: HashSet<_> = parameters.iter().map(|(_, var)| var.id()).collect();
        let reached = |one: &Handed| reached.contains(&one.master.id());
        let trainable = |one: &&Handed| trainable.contains(&one.master.id());

        let mut named = HashSet::new();
        let asked: Vec<&Handed> = handed.iter().filter(trainable).collect();
        let asked: Vec<&Handed> =
            asked.into_iter().filter(|one| named.insert(one.master.id())).collect();
        let last = asked.iter().rposition(|one| reached(one));
        let mut missing: Vec<_> = (asked.iter().enumerate())
            .filter(|(_, one)| !reached(one))
            .map(|(at, one)| {
                let later = last.is_some_and(|last| at < last);
                (one.name.clone(), MissingReason::NotReached { later })
            })
            .collect();
        for (name, var) in parameters.iter() {
            if named.insert(var.id()) {
                missing.push((name.to_owned(), MissingReason::NotAskedFor));
            }
        }
        let first_reached = asked.iter().find(|one| reached(one)).map(|one| one.name.clone());
        Self { missing, of: named.len(), first_reached }
    }

    /// Whether every variable gets a gradient.
    pub fn is_empty(&self) -> bool {
        self.missing.is_empty()
    }

    /// How many variables get none.
    pub fn len(&self) -> usize {
        self.missing.len()
    }

    /// Their names.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.missing.iter().map(|(name, _)| name.as_str())
    }

    /// Their names, and why.
    pub fn iter(&self) -> impl Iterator<Item = (&str, MissingReason)> {
        self.missing.iter().map(|(name, reason)| (name.as_str(), *reason))
    }
}

impl fmt::Display for MissingGradients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return write!(f, "all {} variables get a gradient", self.of);
        }
        writeln!(f, "{} of {} variables get no gradient from this loss.", self.len(), self.of)?;
        let mut list = |title: &str, reason: MissingReason| {
            let mut names = self.iter().filter(|(_, why)| *why == reason).peekable();
            if names.peek().is_some() {
                writeln!(f, "{title}:")?;
            }
            names.try_for_each(|(name, _)| writeln!(f, "  {name}"))
        };
        let not_reached = |later| MissingReason::NotReached { later };
        list(
            "Not in its graph, though some that the model asked for later are",
            not_reached(true),
        )?;
        list("Not in its graph, nor is any that the model asked for later", not_reached(false))?;
        list("Never asked for by the model", MissingReason::NotAskedFor)?;
        if let Some(name) = &self.first_reached {
            writeln!(f, "The first it asked for that gets a gradient is {name}.")?;
        }
        write!(
            f,
            "What is not in the graph was not used, or its gradient was cut. These operators of \
             candle cut gradients without an error, and leave no trace to tell which it was:"
        )?;
        CUTS.iter().try_for_each(|(cut, instead)| write!(f, "\n  {cut}; instead: {instead}"))
    }
}
