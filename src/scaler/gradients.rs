//! The gradients a scaler collects between `update`s: accumulate, unscale, clip.

use std::collections::HashSet;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use candle_core::{DType, Tensor, TensorId};

use crate::autograd::{self, ById, GraphMode, Ids, version};
use crate::error::lock::lock;
use crate::error::{GraphError, ScalerError};
use crate::kernels::multi_tensor::{
    self, Clip, DeviceFoundInf, FoundInf, Multiplier, NormOfRanks, Number, ScaledGradient,
};
use crate::scaler::diagnostics::{Exponents, NonFinite};
use crate::scaler::reducer::{self, SharedReducer};
use crate::{Result, kernels};

/// Gradients of variables, in the order backward first reached them.
#[derive(Debug, Default)]
pub(crate) struct Collected {
    entries: Vec<CollectedGradient>,
    index: ById<usize>,
}

#[derive(Debug)]
pub(crate) struct CollectedGradient {
    pub(crate) variable: Tensor,
    /// `F32`, or `F64` for an `F64` variable; contiguous, in storage of its own.
    gradient: Tensor,
    /// What `gradient` is yet to be multiplied by, from [`Stage::Unscaled`] on: an optimizer does
    /// that in its own pass.
    by: Multiplier,
    pub(crate) stage: Stage,
    /// When the first backward pass began whose gradient is in it.
    since: u64,
    /// Whether a later pass saw other values of the variable.
    mixed: bool,
    /// Infinities and NaN of the unscaled gradient, before it was clipped, as far as the host has counted them.
    non_finite: Option<NonFinite>,
    /// Where a GPU counts them.
    flags: Vec<DeviceFoundInf>,
    /// Findings of the gradients clipped by the same norm. If one is not finite, the norm is not, and all skip.
    clipped_with: Vec<Arc<[Finding]>>,
}

/// What was found in the gradient of a variable.
#[derive(Clone, Debug)]
pub(crate) struct Finding {
    pub(crate) variable: TensorId,
    pub(crate) elements: usize,
    /// As far as the host has counted.
    pub(crate) non_finite: Option<NonFinite>,
    /// Where a GPU counts.
    pub(crate) flags: Vec<DeviceFoundInf>,
}

impl Finding {
    fn is_empty(&self) -> bool {
        self.non_finite.is_none() && self.flags.is_empty()
    }

    /// Takes over what an earlier or later finding of the same variable has and this one has not.
    fn extend(&mut self, other: &Self) {
        self.non_finite = self.non_finite.or(other.non_finite);
        for flag in &other.flags {
            if !self.flags.iter().any(|own| own.is(flag)) {
                self.flags.push(flag.clone());
            }
        }
    }

    /// Whether one of `findings` is an infinity or NaN: the verdict on a step.
    pub(crate) fn any(findings: &[Self]) -> Result<FoundInf> {
        let known = findings.iter().any(|finding| finding.non_finite.is_some());
        let flags: Vec<&DeviceFoundInf> =
            findings.iter().flat_map(|finding| &finding.flags).collect();
        match known || flags.is_empty() {
            true => Ok(FoundInf::Host(known)),
            false => Ok(FoundInf::Device(multi_tensor::any(&flags)?)),
        }
    }

    /// Infinities and NaN by variable. Reads what GPUs have counted, and synchronises for it.
    pub(crate) fn count(findings: &[Self]) -> Result<Vec<(TensorId, NonFinite)>> {
        let flags: Vec<&DeviceFoundInf> =
            findings.iter().flat_map(|finding| &finding.flags).collect();
        let mut counts = DeviceFoundInf::read(&flags)?.into_iter();
        let mut found = Vec::new();
        for Self { variable, elements, non_finite, flags } in findings {
            let own = counts.by_ref().take(flags.len());
            let [infinite, nan] = own.fold([0, 0], |[a, b], [c, d]| [a + c, b + d]);
            let on_device = NonFinite { infinite, nan, elements: *elements };
            let counted = (infinite + nan > 0).then_some(on_device);
            found.extend(non_finite.or(counted).map(|non_finite| (*variable, non_finite)));
        }
        Ok(found)
    }
}

impl CollectedGradient {
    /// The gradient as it is in memory, and what it is to be multiplied by.
    pub(crate) fn scaled_gradient(&self) -> ScaledGradient<'_> {
        (&self.gradient, &self.by)
    }

    /// The true gradient, where it is unscaled: a copy.
    pub(crate) fn value(&self) -> Result<Tensor> {
        self.times(&self.by)
    }

    /// A copy of the gradient, multiplied.
    pub(crate) fn times(&self, by: &Multiplier) -> Result<Tensor> {
        let copy = self.gradient.copy()?;
        Ok(multi_tensor::apply_scale(vec![copy.clone()], &[by])?.pop().unwrap_or(copy))
    }

    fn finding(&self) -> Finding {
        Finding {
            variable: self.variable.id(),
            elements: self.gradient.elem_count(),
            non_finite: self.non_finite,
            flags: self.flags.clone(),
        }
    }

    fn found(&mut self, found: FoundInf) -> Result<()> {
        match found {
            FoundInf::Device(flag) => self.flags.push(flag),
            // A pass of its own, which a clean step does without.
            FoundInf::Host(true) if self.non_finite.is_none() => {
                let gradient = multi_tensor::multiplied((&self.gradient, &self.by))?;
                self.non_finite = Some(NonFinite::of(&gradient)?);
            }
            FoundInf::Host(_) => {}
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Scaled,
    Unscaled,
    /// An optimizer was given it, or skipped because of it. Later losses add nothing to it.
    Stepped,
}

/// How gradients are unscaled: by what, and whether anybody asks for overflows.
#[derive(Clone, Debug)]
pub(crate) struct Unscale {
    pub(crate) factor: Number,
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

    /// Drops those of `variables` that no optimizer has had.
    pub(crate) fn remove(&mut self, variables: &Ids) {
        self.entries.retain(|entry| {
            entry.stage == Stage::Stepped || !variables.contains(&entry.variable.id())
        });
        let places = self.entries.iter().enumerate().map(|(at, entry)| (entry.variable.id(), at));
        self.index = places.collect();
    }

    pub(crate) fn entries(&self) -> &[CollectedGradient] {
        &self.entries
    }

    pub(crate) fn variables(&self) -> impl Iterator<Item = TensorId> + '_ {
        self.entries.iter().map(|entry| entry.variable.id())
    }

    pub(crate) fn get(&self, variable: &Tensor) -> Option<&CollectedGradient> {
        self.index.get(&variable.id()).map(|&at| &self.entries[at])
    }

    /// Back-propagates `loss` and adds the gradients of its variables, `F32` from here on.
    ///
    /// A gradient that was unscaled before stays so: what is added to it is unscaled first.
    ///
    /// Returns whether `F16` gradients were among those on the way.
    pub(crate) fn backward(
        &mut self,
        loss: &Tensor,
        graph: GraphMode,
        unscale: &Unscale,
        reducer: Option<&SharedReducer>,
    ) -> Result<bool> {
        let since = version::tick();
        let on_complete = reducer.map(reducer::on_complete);
        let passed = autograd::backward_with(loss, graph, on_complete);
        let (arrived, saw_f16) = match reducer {
            None => {
                let autograd::Gradients { leaves, saw_f16 } = passed?;
                let mut arrived = Vec::new();
                for (variable, gradient) in leaves {
                    arrived.push((variable, gradient.into_owned()?.into_tensor()));
                }
                if arrived.is_empty() {
                    return Err(GraphError::NoGradient.into());
                }
                (arrived, saw_f16)
            }
            Some(reducer) => {
                let mut reducer = lock(reducer);
                let finished = passed.and_then(|autograd::Gradients { leaves, saw_f16 }| {
                    Ok((reducer.finish(leaves)?, saw_f16))
                });
                finished.inspect_err(|_| reducer.abort())?
            }
        };
        let mut arrived = arrived.into_iter();
        let added = arrived
            .try_for_each(|(variable, gradient)| self.add(variable, gradient, since, unscale));
        if let (Err(_), Some(reducer)) = (&added, reducer) {
            lock(reducer).fall_behind();
        }
        added.map(|()| saw_f16)
    }

    fn add(
        &mut self,
        variable: Tensor,
        gradient: Tensor,
        since: u64,
        unscale: &Unscale,
    ) -> Result<()> {
        let Some(&at) = self.index.get(&variable.id()) else {
            self.index.insert(variable.id(), self.entries.len());
            self.entries.push(CollectedGradient {
                variable,
                gradient,
                by: Multiplier::ONE,
                stage: Stage::Scaled,
                since,
                mixed: false,
                non_finite: None,
                flags: Vec::new(),
                clipped_with: Vec::new(),
            });
            return Ok(());
        };
        if self.entries[at].stage == Stage::Unscaled {
            self.apply_scale(&[at])?;
        }
        let entry = &mut self.entries[at];
        entry.mixed |= version::has_changed_since(entry.since, &entry.variable);
        match entry.stage {
            Stage::Stepped => return Ok(()),
            Stage::Scaled => {
                entry.gradient = kernels::add_assign(entry.gradient.clone(), &gradient)?;
            }
            Stage::Unscaled => {
                let by = Multiplier::new(unscale.factor.clone());
                let more = multi_tensor::apply_scale(vec![gradient], &[&by])?;
                entry.gradient = kernels::add_assign(entry.gradient.clone(), &more[0])?;
                if unscale.check {
                    let found = multi_tensor::check(&[entry.scaled_gradient()])?;
                    found.into_iter().try_for_each(|found| entry.found(found))?;
                }
            }
        }
        Ok(())
    }

    /// The entries of `variables`, or of all where those are `None`, that no optimizer has had.
    pub(crate) fn select(&self, variables: Option<&[TensorId]>) -> Vec<usize> {
        let wanted: Option<Ids> = variables.map(|ids| ids.iter().copied().collect());
        let chosen = |entry: &CollectedGradient| {
            entry.stage != Stage::Stepped
                && wanted.as_ref().is_none_or(|ids| ids.contains(&entry.variable.id()))
        };
        (0..self.entries.len()).filter(|&at| chosen(&self.entries[at])).collect()
    }

    /// Fails where one of the variables of `chosen` has been written since its gradient was computed.
    pub(crate) fn check_current(&self, chosen: &[usize]) -> Result<()> {
        let mut entries = chosen.iter().map(|&at| &self.entries[at]);
        let is_stale = |entry: &&CollectedGradient| {
            entry.mixed || version::has_changed_since(entry.since, &entry.variable)
        };
        match entries.find(is_stale) {
            Some(entry) => {
                let shape = entry.variable.shape().clone();
                Err(ScalerError::StaleGradient { shape }.into())
            }
            None => Ok(()),
        }
    }

    /// Unscales those of `chosen` that are not yet, noting which overflowed: one pass that reads.
    pub(crate) fn unscale(&mut self, chosen: &[usize], unscale: &Unscale) -> Result<()> {
        let scaled = self.scaled(chosen);
        let by = Multiplier::new(unscale.factor.clone());
        let scaled_gradients: Vec<ScaledGradient<'_>> =
            scaled.iter().map(|&at| (&self.entries[at].gradient, &by)).collect();
        let found = match unscale.check {
            true if !scaled_gradients.is_empty() => multi_tensor::check(&scaled_gradients)?,
            _ => Vec::new(),
        };
        self.unscaled(&scaled, by, found)
    }

    fn scaled(&self, chosen: &[usize]) -> Vec<usize> {
        let scaled = |at: &usize| self.entries[*at].stage == Stage::Scaled;
        chosen.iter().copied().filter(scaled).collect()
    }

    /// Marks `entries` unscaled, with factor `by`. `found` has one item per entry, or is empty.
    fn unscaled(&mut self, entries: &[usize], by: Multiplier, found: Vec<FoundInf>) -> Result<()> {
        for &at in entries {
            let entry = &mut self.entries[at];
            (entry.by, entry.stage) = (by.clone(), Stage::Unscaled);
            (entry.non_finite, entry.flags) = (None, Vec::new());
        }
        entries.iter().zip(found).try_for_each(|(&at, found)| self.entries[at].found(found))
    }

    /// Multiplies the unscaled gradients of `chosen`, where that is still to be done.
    pub(crate) fn apply_scale(&mut self, chosen: &[usize]) -> Result<()> {
        let due = |at: &usize| !self.entries[*at].by.is_one();
        let due: Vec<usize> = chosen.iter().copied().filter(due).collect();
        let by: Vec<&Multiplier> = due.iter().map(|&at| &self.entries[at].by).collect();
        if due.is_empty() {
            return Ok(());
        }
        let gradients = multi_tensor::apply_scale(self.gradients(&due), &by)?;
        self.put_back(&due, gradients);
        due.iter().for_each(|&at| self.entries[at].by = Multiplier::ONE);
        Ok(())
    }

    /// Notes which of the unscaled gradients of `chosen` would overflow in their variable's dtype.
    pub(crate) fn check_rounding(&mut self, chosen: &[usize]) -> Result<()> {
        let half = chosen.iter().copied().filter(|&at| {
            let CollectedGradient { variable, non_finite, .. } = &self.entries[at];
            variable.dtype() == DType::F16 && non_finite.is_none()
        });
        let half: Vec<usize> = half.collect();
        self.apply_scale(&half)?;
        let gradients = self.gradients(&half);
        let gradients: Vec<&Tensor> = gradients.iter().collect();
        if let Some(gpu) = multi_tensor::gpu_of(&gradients)? {
            let flags = multi_tensor::overflows_f16(gpu, &gradients)?;
            let found = flags.into_iter().map(FoundInf::Device).zip(&half);
            return found.into_iter().try_for_each(|(f, &at)| self.entries[at].found(f));
        }
        for at in half {
            let entry = &mut self.entries[at];
            let counts = kernels::multi_tensor::histogram::exponents(&entry.gradient, 1.0)?;
            let infinite = Exponents::of(counts).in_f16(1.0).overflow as usize;
            let elements = entry.gradient.elem_count();
            let found = (infinite > 0).then_some(NonFinite { infinite, nan: 0, elements });
            entry.non_finite = found;
        }
        Ok(())
    }

    /// Scales the gradients of `chosen` down to `max_norm` together, unscaled; their norm before.
    pub(crate) fn clip_norm(
        &mut self,
        chosen: &[usize],
        max_norm: f64,
        unscale: &Unscale,
        ranks: Option<&dyn NormOfRanks>,
    ) -> Result<Tensor> {
        let clipped = |at: &usize| self.entries[*at].by.clip.is_some();
        let clipped: Vec<usize> = chosen.iter().copied().filter(clipped).collect();
        self.apply_scale(&clipped)?;
        // What nobody has checked is checked by the pass that measures.
        let (scaled, by) = (self.scaled(chosen), Multiplier::new(unscale.factor.clone()));
        let scaled_gradients = chosen.iter().map(|&at| match &self.entries[at] {
            entry if entry.stage == Stage::Scaled => (&entry.gradient, &by),
            entry => entry.scaled_gradient(),
        });
        let (norm, found) = multi_tensor::norm(&scaled_gradients.collect::<Vec<_>>(), ranks)?;
        let fresh = |at: usize| unscale.check && self.entries[at].stage == Stage::Scaled;
        let found = chosen.iter().zip(found).filter(|(at, _)| fresh(**at));
        let found = found.map(|(_, found)| found).collect();
        self.unscaled(&scaled, by, found)?;
        // Else it is only measured.
        if max_norm.is_finite() {
            for &at in chosen {
                self.entries[at].by.clip = Some(Clip { norm: norm.exact.clone(), max_norm });
            }
        }
        let findings: Arc<[Finding]> = self.findings(chosen).into();
        // Without a found_inf the others have nothing to learn.
        if findings.iter().any(|finding| !finding.is_empty()) {
            for &at in chosen {
                self.entries[at].clipped_with.push(findings.clone());
            }
        }
        Ok(norm.rounded)
    }

    /// Of `entries` alone.
    pub(crate) fn findings(&self, entries: &[usize]) -> Vec<Finding> {
        entries.iter().map(|&at| self.entries[at].finding()).collect()
    }

    /// Of `chosen`, and of what they were clipped with: they share one norm, and are skipped together.
    pub(crate) fn concerned(&self, chosen: &[usize]) -> Vec<Finding> {
        let mut all = self.findings(chosen);
        let places = all.iter().enumerate().map(|(place, finding)| (finding.variable, place));
        let mut places: ById<usize> = places.collect();
        // Usually all share one norm: each list once, or n gradients have n² findings.
        let mut seen = HashSet::new();
        let lists = chosen.iter().flat_map(|&at| &self.entries[at].clipped_with);
        let lists = lists.filter(|list| seen.insert(list.as_ptr()));
        for finding in lists.flat_map(|list| list.iter()) {
            match places.entry(finding.variable) {
                Entry::Vacant(place) => {
                    place.insert(all.len());
                    all.push(finding.clone());
                }
                // A later list may have found more: it was made after another backward.
                Entry::Occupied(place) => all[*place.get()].extend(finding),
            }
        }
        all
    }

    /// Limits the elements of the unscaled gradients of `chosen`.
    pub(crate) fn clip_value(&mut self, chosen: &[usize], limit: f64) -> Result<()> {
        self.apply_scale(chosen)?;
        let gradients = multi_tensor::clip_value(self.gradients(chosen), limit)?;
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
