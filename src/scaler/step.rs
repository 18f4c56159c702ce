//! The trait by which the scaler steps an optimizer, and the gradients that it hands over.

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, TensorId};
use candle_nn::Optimizer;

use crate::autograd::{ById, version};
use crate::kernels::multi_tensor::{self, ScaledGradient};
use crate::{Parameters, kernels};

/// An optimizer that [`GradScaler::step`](crate::GradScaler::step) can drive.
///
/// Every `candle_nn::Optimizer` is one, and [`MasterWeights`](crate::MasterWeights), the
/// optimizers of this crate, and [`Bound`]. Implement it for an optimizer that wants `F32`
/// gradients of 16-bit variables; implement candle's trait otherwise.
pub trait Step {
    /// The variables it updates, or `None` where it keeps them to itself, as candle's do. Then it
    /// is given every gradient, and can be the only such optimizer in an iteration.
    fn variables(&self) -> Option<Vec<TensorId>>;

    /// Whether it rounds gradients to the dtype of their variable, as candle's optimizers do. What
    /// is finite in `F32` may then overflow in `F16`, and the scaler skips the step. `false` unless
    /// said otherwise.
    fn rounds_gradients(&self) -> bool {
        false
    }

    /// Whether [`apply`](Self::apply) heeds [`UnscaledGradients::skip`]. Then a step on a GPU costs no wait;
    /// otherwise the scaler reads the flag first, and calls `apply` where the step is taken. `false`
    /// unless said otherwise.
    fn skips_on_device(&self) -> bool {
        false
    }

    /// For a wrapper whose [`apply`](Self::apply) hands the gradients on as they are: the optimizer that gets them. If that
    /// is one of this crate's, it then multiplies them as it reads them, may be [sharded](crate::dist::Sharded), and is
    /// compared over ranks. `None` unless said otherwise; the methods above are not taken from it.
    fn inner(&self) -> Option<&dyn Step> {
        None
    }

    /// For this crate's optimizers alone: no other crate can name what it returns, and so override it.
    #[doc(hidden)]
    fn internals(&self) -> Internals {
        self.inner().map_or_else(Internals::default, Step::internals)
    }

    /// What the optimizers of all ranks have in common. Like [`internals`](Self::internals), no other crate overrides it.
    #[doc(hidden)]
    fn common_facts(&self) -> crate::Result<OptimizerFacts> {
        self.inner().map_or_else(|| Ok(OptimizerFacts::default()), Step::common_facts)
    }

    /// Updates the variables from unscaled, finite gradients; or not, where
    /// [`skip`](UnscaledGradients::skip) says so.
    ///
    /// # Errors
    ///
    /// Whatever the update meets.
    fn apply(&mut self, gradients: &UnscaledGradients<'_>) -> candle_core::Result<()>;
}

/// How one of this crate's optimizers steps.
// Public in a private module, so that `Step` can return it and nobody else can name it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Internals {
    /// Whether [`Step::apply`] multiplies by what [`UnscaledGradients::scaled_gradient`] gives.
    pub(crate) multiplies: bool,
    /// Whether it steps the part of each variable that its rank has, as [`Sharded`](crate::dist::Sharded) does.
    pub(crate) takes_shards: bool,
}

/// Settings of an optimizer and steps taken, by name.
#[derive(Debug, Default)]
pub struct OptimizerFacts(pub(crate) Vec<(String, String)>);

/// Unscaled gradients by variable, as an optimizer gets them: `F32`, whatever the dtype of the
/// variable (`F64` for `F64` ones), contiguous.
#[derive(Debug)]
pub struct UnscaledGradients<'a> {
    by_variable: ById<(&'a Tensor, ScaledGradient<'a>)>,
    skip: Option<&'a Tensor>,
    /// Whether the same step is taken elsewhere, by ranks that have the same weights.
    replicated: bool,
}

impl<'a> UnscaledGradients<'a> {
    pub(crate) fn new(
        pairs: impl Iterator<Item = (&'a Tensor, ScaledGradient<'a>)>,
        skip: Option<&'a Tensor>,
        replicated: bool,
    ) -> Self {
        let by_variable = pairs.map(|(var, due)| (var.id(), (var, due))).collect();
        Self { by_variable, skip, replicated }
    }

    /// Whether other ranks take the same step, and have to draw the same random bits for it.
    pub(crate) fn is_replicated(&self) -> bool {
        self.replicated
    }

    /// The gradient of `variable`, and what it is to be multiplied by: for an optimizer that
    /// [does so](Internals::multiplies) in the pass that reads it. For others it is multiplied already.
    pub(crate) fn scaled_gradient(&self, variable: &Tensor) -> Option<ScaledGradient<'a>> {
        self.by_variable.get(&variable.id()).map(|(_, due)| *due)
    }

    /// A flag on the GPU of the gradients, one `U32`: unless it is 0, a gradient is not finite, and
    /// nothing may be written. `None` if the step is taken, and for optimizers whose
    /// [`skips_on_device`](Step::skips_on_device) is false.
    pub fn skip(&self) -> Option<&'a Tensor> {
        self.skip
    }

    /// The gradient of `variable`, or `None` where backward did not reach it.
    ///
    /// For an optimizer that names an [`inner`](Step::inner) one, which multiplies as it reads, it is multiplied here: a copy.
    ///
    /// # Errors
    ///
    /// What the copy meets.
    pub fn get(&self, variable: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let gradient = self.scaled_gradient(variable);
        gradient.map(multi_tensor::unscaled).transpose()
    }

    /// Whether backward reached `variable`.
    pub(crate) fn has(&self, variable: &Tensor) -> bool {
        self.scaled_gradient(variable).is_some()
    }

    /// The gradients in the dtypes of their variables, as candle's optimizers expect them.
    fn to_store(&self) -> candle_core::Result<GradStore> {
        let mut store = GradStore::default();
        for (variable, gradient) in self.by_variable.values() {
            store.insert(variable, cast(&multi_tensor::unscaled(*gradient)?, variable.dtype())?);
        }
        Ok(store)
    }
}

fn cast(gradient: &Tensor, dtype: DType) -> candle_core::Result<Tensor> {
    if gradient.dtype() == dtype { Ok(gradient.clone()) } else { kernels::cast(gradient, dtype) }
}

/// What can be known of an optimizer of candle's.
pub(crate) fn facts_of_candles(optimizer: &impl Optimizer) -> OptimizerFacts {
    OptimizerFacts(vec![("learning rate".to_owned(), optimizer.learning_rate().to_string())])
}

impl<O: Optimizer> Step for O {
    fn variables(&self) -> Option<Vec<TensorId>> {
        None
    }

    fn rounds_gradients(&self) -> bool {
        true
    }

    fn common_facts(&self) -> crate::Result<OptimizerFacts> {
        Ok(facts_of_candles(self))
    }

    fn apply(&mut self, gradients: &UnscaledGradients<'_>) -> candle_core::Result<()> {
        // It tells nobody which variables it has: those that change. Also after an error, some may have.
        let variables: Vec<&Tensor> = gradients.by_variable.values().map(|(var, _)| *var).collect();
        let print = |variables: &[&Tensor]| -> candle_core::Result<Vec<Option<u64>>> {
            variables.iter().map(|variable| kernels::fingerprint(variable)).collect()
        };
        let (store, before) = (gradients.to_store()?, print(&variables)?);
        let stepped = self.step(&store);
        let changed = before.into_iter().zip(print(&variables)?).zip(variables);
        version::written(changed.filter(|((a, b), _)| a != b).map(|(_, variable)| variable));
        stepped
    }
}

/// A candle optimizer and the variables it has; see [`Parameters::bind`].
#[derive(Debug)]
pub struct Bound<'a, O> {
    parameters: &'a Parameters,
    optimizer: &'a mut O,
}

impl Parameters {
    /// A candle optimizer together with the variables it has, so that the scaler can tell its
    /// gradients from those of another optimizer in the same iteration.
    ///
    /// ```no_run
    /// # fn f(scaler: &mut candle_amp::GradScaler, generator: candle_amp::Parameters,
    /// #     critic: candle_amp::Parameters, mut g: candle_nn::AdamW, mut c: candle_nn::AdamW)
    /// # -> candle_amp::Result<()> {
    /// scaler.step(&mut generator.bind(&mut g))?;
    /// scaler.step(&mut critic.bind(&mut c))?; // skipped or not on its own account
    /// scaler.update()?;
    /// # Ok(()) }
    /// ```
    pub fn bind<'a, O: Optimizer>(&'a self, optimizer: &'a mut O) -> Bound<'a, O> {
        Bound { parameters: self, optimizer }
    }
}

impl<O: Optimizer> Step for Bound<'_, O> {
    fn variables(&self) -> Option<Vec<TensorId>> {
        Some(self.parameters.vars().iter().map(|var| var.id()).collect())
    }

    fn rounds_gradients(&self) -> bool {
        true
    }

    fn common_facts(&self) -> crate::Result<OptimizerFacts> {
        Ok(facts_of_candles(self.optimizer))
    }

    fn apply(&mut self, gradients: &UnscaledGradients<'_>) -> candle_core::Result<()> {
        let stepped = self.optimizer.step(&gradients.to_store()?);
        // Known, so not compared. Also after an error, some may have been written.
        let vars = self.parameters.vars();
        version::written(vars.iter().map(|var| var.as_tensor()).filter(|var| gradients.has(var)));
        stepped
    }
}
