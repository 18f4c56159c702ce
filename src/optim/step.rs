//! One step: what is checked before, and what the kernel is given.

use candle_core::{DType, Tensor, TensorId, Var};
use crc32fast::Hasher;
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::config::Config;
use super::masters::Masters;
use super::optimizer::{Optim, dtype};
use super::slot::{Slot, label};
use crate::autograd::version;
use crate::error::{ArgumentError, OptimizerError};
use crate::kernels::multi_tensor::ScaledGradient;
use crate::kernels::{self, capture, multi_tensor::optimizer as kernel};
use crate::scaler::{Internals, OptimizerFacts, Step, UnscaledGradients};
use crate::{autocast, random};

impl<C: Config> Optim<C> {
    /// `flag`, on the GPU of the gradients, decides there whether the step is taken. Where it is `replicated`, other ranks
    /// take it too.
    pub(crate) fn step_with<'a>(
        &mut self,
        gradient: impl Fn(&Tensor) -> Option<ScaledGradient<'a>>,
        flag: Option<&Tensor>,
        replicated: bool,
    ) -> candle_core::Result<()> {
        // A learning rate may have been set since.
        self.groups.iter().try_for_each(|group| group.config.validate())?;
        let mut gradients = Vec::with_capacity(self.slots.len());
        for slot in &self.slots {
            let checked = match gradient(&slot.variable) {
                Some((gradient, by)) => Some((self.checked(gradient, &slot.variable)?, by)),
                None => None,
            };
            gradients.push(checked);
        }
        self.check_masters(&gradients)?;
        let (masters, dtype) = (self.masters, self.state_dtype);
        let mut new = Vec::with_capacity(gradients.len());
        for (slot, gradient) in self.slots.iter_mut().zip(&gradients) {
            let count = self.groups[slot.group].config.states().len();
            // A first step that failed has made states, and left them empty.
            new.push(
                gradient.is_some() && (slot.prepare(masters, count, dtype)? || slot.steps == 0),
            );
        }
        let bits = self.is_random().then(|| match replicated {
            true => self.common_stream(),
            false => random::next_stream(),
        });
        let stream = bits.as_ref().map(|bits| bits.get_stream());
        let seed = bits.map_or(0, |mut bits| bits.random::<u64>());
        // Most variables are at the same step.
        let mut last = None;
        let mut rule = |group: usize, step, new| match last {
            Some((key, rule)) if key == (group, step, new) => rule,
            _ => {
                let rule = self.groups[group].config.rule(step, new);
                last = Some(((group, step, new), rule));
                rule
            }
        };
        if let (Some(flag), None) = (flag, &self.skips) {
            let counts = Tensor::zeros(self.slots.len(), DType::U32, flag.device())?;
            self.skips = Some(counts);
        }
        let (mut slots, mut places) = (Vec::with_capacity(gradients.len()), Vec::new());
        for (number, slot) in self.slots.iter().enumerate() {
            let Some((gradient, by)) = &gradients[number] else { continue };
            places.push(number);
            slots.push(kernel::Slot {
                variable: &slot.variable,
                master: slot.kernel_master(masters),
                states: &slot.states,
                gradient,
                by,
                rule: rule(slot.group, slot.steps + 1, new[number]),
                seed: seed_of(seed, number),
            });
        }
        // Steps that were skipped before stay off the number of this one, which nothing may skip.
        let skip = self.skips.as_ref();
        let skip = skip.map(|counts| kernel::Skip { flag, counts, places: &places });
        capture::stepping(|| capture::OptimizerStep { places: places.clone(), stream })?;
        let done = kernel::step(slots, skip);
        // Where a GPU decides whether to skip, asking would wait: a graph from before is refused either way. On an error
        // too: some may have been written.
        let stepped = self.slots.iter().zip(&gradients).filter(|(_, g)| g.is_some());
        version::written(stepped.map(|(slot, _)| slot.variable.as_tensor()));
        autocast::clear_cast_cache();
        done?;
        if !capture::is_active() {
            self.stepped(&places);
            self.common_draws += u64::from(replicated && self.is_random());
        }
        self.are_current(&places);
        Ok(())
    }

    /// Random bits that all ranks have in common: of the seed, the variables' names and shapes, and a number that grows.
    fn common_stream(&self) -> ChaCha8Rng {
        let mut hasher = Hasher::new();
        for slot in &self.slots {
            hasher.update(slot.name.as_deref().unwrap_or_default().as_bytes());
            hasher.update(&slot.variable.elem_count().to_le_bytes());
        }
        let number = u64::from(hasher.finalize()) << 32 | (self.common_draws & u64::from(u32::MAX));
        random::common_stream(number)
    }

    /// Fails where a variable with a gradient was written, and is not its master, rounded.
    fn check_masters<T>(&self, gradients: &[Option<T>]) -> candle_core::Result<()> {
        if capture::is_active() {
            return Ok(());
        }
        let slots = self.slots.iter().zip(gradients).filter(|(_, g)| g.is_some());
        self.check_masters_of(slots.map(|(slot, _)| slot))
    }

    /// The same, of these.
    pub(super) fn check_masters_of<'a>(
        &self,
        slots: impl Iterator<Item = &'a Slot>,
    ) -> candle_core::Result<()> {
        if self.masters != Masters::F32 {
            return Ok(());
        }
        for slot in slots {
            let Some(master) = &slot.master else { continue };
            let is_written = version::has_changed_since(slot.current, &slot.variable);
            if is_written && !kernels::is_rounded(&slot.variable, master)? {
                let shape = slot.variable.shape().clone();
                return Err(OptimizerError::StaleMaster { shape }.into());
            }
        }
        Ok(())
    }

    /// Notes that these slots' variables are their masters, rounded. Of others, what was written before stays so.
    pub(super) fn are_current(&mut self, places: &[usize]) {
        let now = version::tick();
        places.iter().for_each(|&place| self.slots[place].current = now);
    }

    /// Counts a step of these slots.
    pub(super) fn stepped(&mut self, places: &[usize]) {
        places.iter().for_each(|&place| self.slots[place].steps += 1);
    }

    /// A gradient as the kernel takes it.
    fn checked(&self, gradient: &Tensor, variable: &Var) -> candle_core::Result<Tensor> {
        let (got, expected) = (gradient.shape(), variable.shape());
        if got != expected {
            let expected = format!("{expected:?}, that of its variable");
            let (op, name, got) = (C::NAME, "a gradient", got.clone());
            return Err(ArgumentError::Shape { op, name, got, expected }.into());
        }
        let (got, expected) = (gradient.device().location(), variable.device().location());
        if got != expected {
            return Err(
                ArgumentError::Device { op: C::NAME, name: "a gradient", got, expected }.into()
            );
        }
        if !gradient.dtype().is_float() {
            return Err(dtype::<C>("a gradient", gradient.dtype()).into());
        }
        let wanted = kernels::accumulator(variable.dtype());
        let is_16_bit = matches!(gradient.dtype(), DType::F16 | DType::BF16);
        if gradient.dtype() != wanted && !(is_16_bit && wanted == DType::F32) {
            return kernels::cast(gradient, wanted);
        }
        let gradient = kernels::contiguous(gradient)?;
        match self.addresses.binary_search(&kernels::place(&gradient)) {
            Ok(_) => gradient.copy(),
            Err(_) => Ok(gradient),
        }
    }

    /// Whether a step draws random bits.
    fn is_random(&self) -> bool {
        let rounds = self.masters == Masters::Stochastic && self.slots.iter().any(Slot::is_16_bit);
        rounds || self.state_dtype == DType::BF16
    }
}

/// The seed of the random bits of the slot `number`: tensors are far apart in the seeds.
pub(super) fn seed_of(seed: u64, number: usize) -> u64 {
    seed.wrapping_add((number as u64).wrapping_mul(0xd134_2543_de82_ef95)) // odd
}

impl<C: Config> Step for Optim<C> {
    fn variables(&self) -> Option<Vec<TensorId>> {
        Some(self.slots.iter().map(|slot| slot.variable.id()).collect())
    }

    fn apply(&mut self, gradients: &UnscaledGradients<'_>) -> candle_core::Result<()> {
        let gradient = |variable: &Tensor| gradients.scaled_gradient(variable);
        self.step_with(gradient, gradients.skip(), gradients.is_replicated())
    }

    fn internals(&self) -> Internals {
        Internals { multiplies: true, ..Internals::default() }
    }

    fn common_facts(&self) -> crate::Result<OptimizerFacts> {
        let groups = self.groups.iter().enumerate();
        let settings = groups.map(|(at, group)| {
            (format!("settings of the optimizer's group {at}"), format!("{:?}", group.config))
        });
        let steps = self.steps_taken()?.into_iter().zip(&self.slots).enumerate();
        let steps = steps.map(|(at, (steps, slot))| {
            (format!("steps of {}", label(slot.name.as_deref(), at)), steps.to_string())
        });
        let draws = ("steps rounded alike".to_owned(), self.common_draws.to_string());
        Ok(OptimizerFacts(settings.chain(steps).chain([draws]).collect()))
    }

    fn skips_on_device(&self) -> bool {
        // One launch, one flag: of one device.
        let mut places = self.slots.iter().map(|slot| slot.variable.device().location());
        let first = places.next();
        places.all(|place| Some(place) == first)
    }
}
