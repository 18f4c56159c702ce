//! The gradients a scaler collects between `update`s: accumulate, unscale, clip.

use std::collections::{HashMap, HashSet};

use candle_core::{DType, Tensor, TensorId};

use crate::operator::{self, Gradient};
use crate::overflow::NonFinite;
use crate::{Error, Exponents, Result, kernels, watch};

/// Gradients of variables, in the order backward first reached them.
#[derive(Debug, Default)]
pub(crate) struct Collected {
    entries: Vec<Entry>,
    index: HashMap<TensorId, usize>,
}

#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) variable: Tensor,
    /// `F32`, or `F64` for an `F64` variable; contiguous, in storage of its own.
    pub(crate) gradient: Tensor,
    pub(crate) stage: Stage,
    /// What the unscaled gradient has of infinities and NaN, if any, before it was clipped; known
    /// from [`Stage::Unscaled`] on.
    pub(crate) overflow: Option<NonFinite>,
    /// It was clipped by a norm that is infinite or NaN because of it, or of another.
    pub(crate) spoiled: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Scaled,
    Unscaled,
    /// An optimizer was given it, or skipped because of it. Later losses add nothing to it.
    Stepped,
}

/// How gradients are unscaled: by what, and whether anybody asks for overflows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unscale {
    pub(crate) inverse: f32,
    pub(crate) check: bool,
}

impl Collected {
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(crate) fn clear(&mut self) {
        self.entries.clear();
        self.index.clear();
    }

    pub(crate) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    pub(crate) fn get(&self, variable: &Tensor) -> Option<&Entry> {
        self.index.get(&variable.id()).map(|&at| &self.entries[at])
    }

    /// Back-propagates `loss` and adds the gradients of its variables, `F32` from here on.
    ///
    /// A gradient that was unscaled before stays so: what is added to it is unscaled first.
    ///
    /// Returns whether `F16` gradients were among those on the way.
    pub(crate) fn backward(&mut self, loss: &Tensor, unscale: Unscale) -> Result<bool> {
        let nodes = loss.sorted_nodes();
        operator::stale::check(&nodes)?;
        let f16_nodes = nodes.iter().any(|node| node.dtype() == DType::F16);
        let variables: Vec<Tensor> =
            nodes.into_iter().filter(|t| t.is_variable()).cloned().collect();
        watch::saw_f16();
        let (mut store, mut sink) = operator::backward_into(loss)?;
        let f16 = watch::saw_f16() || f16_nodes;
        let mut arrived = Vec::new();
        for variable in variables {
            let dtype = if variable.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
            // What candle's own operators have for the variable, and what the crate's have.
            let from_candle = match store.remove(&variable) {
                Some(g) => Some(Gradient::shared(g.detach()).into_dtype(dtype)?),
                None => None,
            };
            let gradient = match (from_candle, sink.remove(&variable.id())) {
                (None, None) => continue,
                (Some(one), None) | (None, Some(one)) => one,
                (Some(one), Some(other)) => one.add(other)?,
            };
            arrived.push((variable, gradient.into_owned()?.into_tensor()));
        }
        if arrived.is_empty() {
            return Err(Error::NoGradient);
        }
        for (variable, gradient) in arrived {
            self.add(variable, gradient, unscale)?;
        }
        Ok(f16)
    }

    fn add(&mut self, variable: Tensor, gradient: Tensor, unscale: Unscale) -> Result<()> {
        let Some(&at) = self.index.get(&variable.id()) else {
            self.index.insert(variable.id(), self.entries.len());
            let stage = Stage::Scaled;
            self.entries.push(Entry { variable, gradient, stage, overflow: None, spoiled: false });
            return Ok(());
        };
        let entry = &mut self.entries[at];
        match entry.stage {
            Stage::Stepped => return Ok(()),
            Stage::Scaled => {
                entry.gradient = kernels::add_assign(entry.gradient.clone(), &gradient)?;
            }
            Stage::Unscaled => {
                let (gradients, _) = kernels::update::unscale(vec![gradient], unscale.inverse)?;
                let sum = kernels::add_assign(entry.gradient.clone(), &gradients[0])?;
                let (sum, overflowed) = kernels::update::unscale(vec![sum], 1.0)?;
                if unscale.check && overflowed[0] && entry.overflow.is_none() {
                    entry.overflow = Some(NonFinite::of(&sum[0])?);
                }
                entry.gradient = sum.into_iter().next().unwrap_or(entry.gradient.clone());
            }
        }
        Ok(())
    }

    /// The entries of `variables`, or of all where those are `None`, that no optimizer has had.
    pub(crate) fn select(&self, variables: Option<&[TensorId]>) -> Vec<usize> {
        let wanted: Option<HashSet<_>> = variables.map(|ids| ids.iter().collect());
        let chosen = |entry: &Entry| {
            entry.stage != Stage::Stepped
                && wanted.as_ref().is_none_or(|ids| ids.contains(&entry.variable.id()))
        };
        (0..self.entries.len()).filter(|&at| chosen(&self.entries[at])).collect()
    }

    /// Unscales those of `chosen` that are not yet, noting which overflowed.
    pub(crate) fn unscale(&mut self, chosen: &[usize], unscale: Unscale) -> Result<()> {
        let scaled: Vec<usize> =
            chosen.iter().copied().filter(|&at| self.entries[at].stage == Stage::Scaled).collect();
        if scaled.is_empty() {
            return Ok(());
        }
        let (gradients, overflowed) = if unscale.check {
            kernels::update::unscale(self.gradients(&scaled), unscale.inverse)?
        } else {
            (self.gradients(&scaled), vec![false; scaled.len()])
        };
        self.put_back(&scaled, gradients);
        for (&at, overflowed) in scaled.iter().zip(overflowed) {
            let entry = &mut self.entries[at];
            entry.stage = Stage::Unscaled;
            // A pass of its own, which a clean step does without.
            entry.overflow = overflowed.then(|| NonFinite::of(&entry.gradient)).transpose()?;
        }
        Ok(())
    }

    /// Notes which of the unscaled gradients of `chosen` would overflow in their variable's dtype.
    pub(crate) fn check_rounding(&mut self, chosen: &[usize]) -> Result<()> {
        for &at in chosen {
            let entry = &mut self.entries[at];
            if entry.variable.dtype() != DType::F16 || entry.overflow.is_some() {
                continue;
            }
            let counts = kernels::exponents::exponents(&entry.gradient, 1.0)?;
            let infinite = Exponents::of(counts).in_f16(1.0).overflow as usize;
            let elements = entry.gradient.elem_count();
            entry.overflow = (infinite > 0).then_some(NonFinite { infinite, nan: 0, elements });
        }
        Ok(())
    }

    /// Scales the unscaled gradients of `chosen` down to `max_norm` together; their norm before.
    pub(crate) fn clip_norm(&mut self, chosen: &[usize], max_norm: f64) -> Result<Tensor> {
        let gradients = self.gradients(chosen);
        let norm = kernels::update::norm(&gradients.iter().collect::<Vec<_>>())?;
        let gradients = kernels::update::clip_norm(gradients, &norm, max_norm)?;
        self.put_back(chosen, gradients);
        // One norm, one fate: what is finite would be NaN or zero by now.
        if chosen.iter().any(|&at| self.entries[at].overflow.is_some()) {
            chosen.iter().for_each(|&at| self.entries[at].spoiled = true);
        }
        Ok(norm)
    }

    /// Limits the elements of the unscaled gradients of `chosen`.
    pub(crate) fn clip_value(&mut self, chosen: &[usize], limit: f64) -> Result<()> {
        let gradients = kernels::update::clip_value(self.gradients(chosen), limit)?;
        self.put_back(chosen, gradients);
        Ok(())
    }

    pub(crate) fn mark_stepped(&mut self, chosen: &[usize]) {
        for &at in chosen {
            self.entries[at].stage = Stage::Stepped;
        }
    }

    fn gradients(&self, chosen: &[usize]) -> Vec<Tensor> {
        chosen.iter().map(|&at| self.entries[at].gradient.clone()).collect()
    }

    fn put_back(&mut self, chosen: &[usize], gradients: Vec<Tensor>) {
        for (&at, gradient) in chosen.iter().zip(gradients) {
            self.entries[at].gradient = gradient;
        }
    }
}
