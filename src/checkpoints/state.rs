//! The saved form of a part of a run: tensors and short values, by name.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::str::FromStr;

use candle_core::{DType, Device, Shape, Tensor};

use crate::Result;
use crate::error::CheckpointError;

/// What is saved of one part of a run: tensors, and numbers or words as text, by name.
///
/// It is [`Stateful`] itself, for what a loop keeps of its own: an epoch, the order of the data.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// Tensors, in any dtype that safetensors files have.
    pub tensors: BTreeMap<String, Tensor>,
    /// Anything short. Rust's `Display` of a number reads back as the same number.
    pub values: BTreeMap<String, String>,
}

/// A part of a run that can be saved in a [`Checkpoint`](crate::checkpoints::Checkpoint) and loaded from one:
/// [`Parameters`](crate::Parameters), [`MasterVars`](crate::MasterVars),
/// [`GradScaler`](crate::GradScaler), the optimizers of [`optim`](crate::optim),
/// [`random::Generator`](crate::random::Generator), and what you implement it for.
#[diagnostic::on_unimplemented(
    message = "the state of `{Self}` cannot be saved in a checkpoint",
    note = "candle's optimizers, and `MasterWeights` around them, keep their state to themselves: \
            use those in `candle_amp::optim`, made from `Parameters`",
    note = "implement `Stateful` for a type of your own"
)]
pub trait Stateful {
    /// What is to be saved.
    ///
    /// # Errors
    ///
    /// A part that cannot be saved, or not now.
    fn save(&self) -> Result<State>;

    /// Whether [`load`](Self::load) would succeed. It is asked twice: first with tensors of the shapes and dtypes of those
    /// that will be loaded, which have strides and values of 0, and then with those themselves.
    ///
    /// # Errors
    ///
    /// What does not fit: [`State::expect`] finds it.
    fn check(&self, state: &State) -> Result<()>;

    /// Takes the state over. It was checked.
    ///
    /// # Errors
    ///
    /// What copying to a device meets.
    fn load(&mut self, state: &State) -> Result<()>;
}

impl Stateful for State {
    fn save(&self) -> Result<State> {
        Ok(self.clone())
    }

    fn check(&self, _: &State) -> Result<()> {
        Ok(())
    }

    fn load(&mut self, state: &State) -> Result<()> {
        *self = state.clone();
        Ok(())
    }
}

impl State {
    /// The same state with a value more.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, value: impl Display) -> Self {
        self.values.insert(name.into(), value.to_string());
        self
    }

    /// The value of that name.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Mismatch`] where there is none, or it is no `T`.
    pub fn value<T: FromStr>(&self, name: &str) -> Result<T> {
        let wrong = |missing, wrong| {
            CheckpointError::Mismatch { part: String::new(), missing, extra: Vec::new(), wrong }
                .into()
        };
        let Some(text) = self.values.get(name) else {
            return Err(wrong(vec![name.to_owned()], Vec::new()));
        };
        let what = std::any::type_name::<T>();
        text.parse().map_err(|_| wrong(Vec::new(), vec![format!("{name}: {text:?}, not {what}")]))
    }

    /// That there are these tensors and these values, and no others.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Mismatch`], which lists everything that is missing, is too many, or has another
    /// shape or dtype.
    pub fn expect<'n>(
        &self,
        tensors: impl IntoIterator<Item = (&'n str, DType, &'n Shape)>,
        values: &[&str],
    ) -> Result<()> {
        let (mut missing, mut wrong) = (Vec::new(), Vec::new());
        let mut extra: BTreeSet<&str> = self.tensors.keys().map(String::as_str).collect();
        for (name, dtype, shape) in tensors {
            extra.remove(name);
            match self.tensors.get(name) {
                None => missing.push(name.to_owned()),
                Some(found) if found.dtype() == dtype && found.shape() == shape => {}
                Some(found) => {
                    let (got, dims) = (found.dtype(), found.dims());
                    let expected = shape.dims();
                    wrong.push(format!("{name}: {got:?} {dims:?}, not {dtype:?} {expected:?}"));
                }
            }
        }
        let has = |name: &&&str| !self.values.contains_key(**name);
        missing.extend(values.iter().filter(has).map(|name| (*name).to_owned()));
        let mut extra: Vec<&str> = extra.into_iter().collect();
        extra.extend(self.values.keys().map(String::as_str).filter(|name| !values.contains(name)));
        if missing.is_empty() && extra.is_empty() && wrong.is_empty() {
            return Ok(());
        }
        let extra = extra.into_iter().map(str::to_owned).collect();
        Err(CheckpointError::Mismatch { part: String::new(), missing, extra, wrong }.into())
    }

    /// A tensor to check against: of that shape and dtype, and of no size in memory.
    pub(super) fn hollow(dtype: DType, shape: &[usize]) -> Result<Tensor> {
        Ok(Tensor::zeros((), dtype, &Device::Cpu)?.broadcast_as(shape)?)
    }
}
