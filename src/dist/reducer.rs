//! The gradients of all ranks: averaged in buckets, while backward goes on.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::buckets::{Buckets, Parameter, shard_len};
use super::communicator::{Communicator, Pending, ReduceOp};
use super::config::DataParallelConfig;
use super::exchange::{Facts, compare, on_host};
use crate::autograd::{ById, Gradient, Ids, is_frozen};
use crate::error::ParallelError;
use crate::kernels::multi_tensor::{DeviceFoundInf, FoundInf, NormOfRanks};
use crate::scaler::{OptimizerFacts, Reducer};
use crate::{LossScale, Parameters, Result, kernels, random};

/// Averages gradients over the ranks.
#[derive(Debug)]
pub(super) struct BucketReducer {
    pub(super) communicator: Arc<dyn Communicator>,
    pub(super) config: DataParallelConfig,
    pub(super) parameters: Vec<Parameter>,
    index: ById<usize>,
    buckets: Buckets,
    /// Whether the buckets are in the order in which gradients came.
    ordered: bool,
    /// Whether each rank is given its shard of the gradients alone.
    sharded: bool,
    /// Whether backward only accumulates.
    pub(super) paused: bool,
    /// What passes have accumulated, by the number of the parameter.
    held: HashMap<usize, Tensor>,
    pass: PassState,
    /// Passes whose gradients were averaged.
    passes: u64,
    /// Whether the optimizers of this step are compared.
    comparison: Comparison,
    /// Whether a pass has failed on this rank after some of its gradients had been sent.
    cut_short: bool,
}

/// Of the optimizers of a step, which follows one or more passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Comparison {
    None,
    /// At the next step.
    Due,
    /// Of one optimizer at least; others of the same step follow.
    Made,
}

/// Variables and their averaged gradients.
type Averages = Vec<(Tensor, Tensor)>;

/// One backward pass.
#[derive(Debug, Default)]
struct PassState {
    /// Gradients whose bucket has not started. Their claims keep the pass from writing over shared storage.
    gradients: HashMap<usize, Gradient>,
    /// The parameters that have a gradient, in the order in which it was complete.
    order: Vec<usize>,
    /// How many gradients each bucket waits for.
    left: Vec<usize>,
    started: Vec<Pending>,
}

impl BucketReducer {
    pub(super) fn new(
        communicator: Arc<dyn Communicator>,
        parameters: &Parameters,
        config: DataParallelConfig,
    ) -> Self {
        let name = |id| parameters.name_of_id(id).unwrap_or_default();
        let parameters: Vec<Parameter> = parameters
            .vars()
            .into_iter()
            .filter(|variable| variable.dtype().is_float() && !is_frozen(variable))
            .map(|variable| Parameter::new(name(variable.id()), variable))
            .collect();
        let index = parameters.iter().map(|p| p.variable.id()).zip(0..).collect();
        let last_first: Vec<usize> = (0..parameters.len()).rev().collect();
        let buckets = Buckets::new(&parameters, &last_first, config.limits());
        Self {
            communicator,
            config,
            parameters,
            index,
            buckets,
            ordered: false,
            sharded: false,
            paused: false,
            held: HashMap::new(),
            pass: PassState::default(),
            passes: 0,
            comparison: Comparison::None,
            cut_short: false,
        }
    }

    /// Where the gradients are.
    pub(super) fn device(&self) -> Device {
        self.parameters.first().map_or(Device::Cpu, |first| first.variable.device().clone())
    }

    /// Gives each rank its shard of the gradients alone from here on.
    pub(super) fn shard(&mut self) -> Result<()> {
        if self.passes > 0 && !self.sharded || self.has_unsynchronised() {
            return Err(ParallelError::TooLate { call: "Sharded::new" }.into());
        }
        self.sharded = true;
        Ok(())
    }

    /// The number of a parameter.
    pub(super) fn number(&self, variable: &Tensor) -> Option<usize> {
        self.index.get(&variable.id()).copied()
    }

    /// Checks that the ranks have the same scale, generator and weights.
    pub(super) fn check(&self, scale: Option<LossScale>) -> Result<()> {
        let device = self.device();
        self.communicator.synchronize()?;
        let mut facts = Facts::from([
            ("averaged backward passes".to_owned(), self.passes.to_string()),
            ("seed of the generator".to_owned(), random::state().seed.to_string()),
        ]);
        match scale {
            None => facts.insert("scale".to_owned(), "disabled".to_owned()),
            Some(scale) => {
                let trackers = [scale.growth_tracker(), scale.hysteresis_tracker()];
                facts.insert("scale trackers".to_owned(), format!("{trackers:?}"));
                facts.insert("scale".to_owned(), scale.get().to_string())
            }
        };
        for Parameter { name, variable, .. } in &self.parameters {
            let on_host = variable.as_detached_tensor().to_device(&Device::Cpu)?.contiguous()?;
            let print = kernels::fingerprint(&on_host)?.unwrap_or_default();
            facts.insert(format!("fingerprint of `{name}`"), format!("{print:016x}"));
        }
        compare(&*self.communicator, "the state", &facts, &device)
    }

    /// Starts the buckets that are full, in their order, which is that of all ranks.
    fn start_full(&mut self) -> Result<()> {
        while self.pass.left.get(self.pass.started.len()) == Some(&0) {
            let pending = self.start(self.pass.started.len())?;
            self.pass.started.push(pending);
        }
        Ok(())
    }

    /// Starts to reduce a bucket: its gradients, and for each whether this rank has one, and whether it has none.
    fn start(&mut self, bucket: usize) -> Result<Pending> {
        let members = &self.buckets.members[bucket];
        let size = self.communicator.size();
        let device = self.parameters[members[0]].variable.device().clone();
        let dtype = self.parameters[members[0]].dtype;
        let (mut pieces, mut has) = (Vec::with_capacity(members.len() + 1), Vec::new());
        for &at in members {
            let elements = self.parameters[at].elements();
            let gradient = self.pass.gradients.remove(&at);
            has.push(gradient.is_some());
            let flat = match gradient {
                Some(gradient) => gradient.tensor().flatten_all()?,
                None => Tensor::zeros(elements, dtype, &device)?,
            };
            pieces.push(if self.sharded { in_shards(&flat, size)? } else { flat });
        }
        let flags = has.iter().copied().chain(has.iter().map(|has| !has));
        let flags: Vec<f32> = flags.map(|flag| f32::from(u8::from(flag))).collect();
        let flags = Tensor::new(flags, &device)?.to_dtype(dtype)?;
        let flags = match self.sharded {
            true => flags.unsqueeze(0)?.broadcast_as((size, flags.elem_count()))?.contiguous()?,
            false => flags,
        };
        pieces.push(flags);
        let flat = Tensor::cat(&pieces, usize::from(self.sharded))?;
        drop(pieces);
        let flat = match dtype {
            DType::F32 => kernels::in_dtype(&flat, self.config.wire_dtype)?,
            _ => flat,
        };
        match self.sharded {
            true => self.communicator.start_reduce_scatter(&flat, ReduceOp::Sum),
            false => self.communicator.start_all_reduce(&flat, ReduceOp::Sum),
        }
    }

    /// The averages of a bucket, with the number of the parameter, and how many ranks had one or had none.
    fn averages(
        &self,
        members: &[usize],
        reduced: &Tensor,
    ) -> Result<Vec<(usize, Tensor, [f32; 2])>> {
        let size = self.communicator.size();
        let dtype = self.parameters[members[0]].dtype;
        let reduced = reduced.flatten_all()?;
        // What a reduce-scatter leaves in F32, an all-reduce has rounded to send it: the same bits either way.
        let reduced = match dtype {
            DType::F32 => kernels::in_dtype(&reduced, self.config.wire_dtype)?,
            _ => reduced,
        };
        let reduced = kernels::in_dtype(&reduced, dtype)?;
        let mut start = 0;
        let mut averages = Vec::with_capacity(members.len());
        for &at in members {
            let parameter = &self.parameters[at];
            let elements = parameter.elements();
            let taken = if self.sharded { shard_len(elements, size) } else { elements };
            // A copy: gradients have storage of their own.
            let average = reduced.narrow(0, start, taken)?.affine(1.0 / size as f64, 0.0)?;
            let shape = parameter.variable.shape();
            averages.push(if self.sharded { average } else { average.reshape(shape)? });
            start += taken;
        }
        let flags = reduced.narrow(0, start, 2 * members.len())?.to_dtype(DType::F32)?;
        let flags: Vec<f32> = on_host(&*self.communicator, &flags)?;
        let (with, without) = flags.split_at(members.len());
        let counts = with.iter().zip(without).map(|(&with, &without)| [with, without]);
        let all = members.iter().zip(averages).zip(counts);
        Ok(all.map(|((&at, average), counts)| (at, average, counts)).collect())
    }

    /// Takes the order in which rank 0 completed its gradients.
    fn reorder(&mut self, mut order: Vec<usize>) -> Result<()> {
        let seen: HashSet<usize> = order.iter().copied().collect();
        order.extend((0..self.parameters.len()).rev().filter(|at| !seen.contains(at)));
        let own: Vec<u32> = order.iter().map(|&at| at as u32).collect();
        let agreed = self.communicator.broadcast(&Tensor::new(own, &self.device())?, 0)?;
        let agreed: Vec<u32> = on_host(&*self.communicator, &agreed)?;
        let agreed: Vec<usize> = agreed.into_iter().map(|at| at as usize).collect();
        self.buckets = Buckets::new(&self.parameters, &agreed, self.config.limits());
        self.ordered = true;
        Ok(())
    }

    /// Waits for all buckets: the averages, and the names of what lacks a gradient somewhere.
    fn collect(&mut self) -> Result<(Averages, Vec<String>)> {
        let (mut gradients, mut unused) = (Vec::new(), Vec::new());
        // Until all of it has succeeded: other ranks may have what this one then lacks.
        self.cut_short = true;
        for (bucket, pending) in std::mem::take(&mut self.pass.started).into_iter().enumerate() {
            let reduced = pending.wait()?;
            let averages = self.averages(&self.buckets.members[bucket], &reduced)?;
            for (at, average, [with, without]) in averages {
                let Parameter { name, variable, .. } = &self.parameters[at];
                let nowhere = with == 0.0;
                let expected = self.config.allow_unused || nowhere && is_frozen(variable);
                if without > 0.0 && !expected {
                    unused.push(name.clone());
                } else if !nowhere {
                    gradients.push((variable.as_tensor().clone(), average));
                }
            }
        }
        Ok((gradients, unused))
    }
}

/// A vector, padded, with a row for each rank.
pub(super) fn in_shards(flat: &Tensor, size: usize) -> Result<Tensor> {
    let shard = shard_len(flat.elem_count(), size);
    let padding = shard * size - flat.elem_count();
    let padded = match padding {
        0 => flat.clone(),
        _ => Tensor::cat(&[flat, &Tensor::zeros(padding, flat.dtype(), flat.device())?], 0)?,
    };
    Ok(padded.reshape((size, shard))?)
}

impl Reducer for BucketReducer {
    fn begin(&mut self, scale: &dyn Fn() -> Option<LossScale>) -> Result<()> {
        if self.comparison == Comparison::Made {
            self.comparison = Comparison::None;
        }
        let is_due = self.passes.is_multiple_of(self.config.check_every);
        if !self.paused && (is_due || self.cut_short) {
            // Where one rank alone was cut short, the others' next call is another one, which is an error.
            self.check(scale())?;
            (self.comparison, self.cut_short) = (Comparison::Due, false);
        }
        let left = self.buckets.members.iter().map(Vec::len).collect();
        self.pass = PassState { left, ..PassState::default() };
        Ok(())
    }

    fn complete(&mut self, variable: &Tensor, gradient: Gradient) -> Result<()> {
        let Some(at) = self.number(variable) else {
            let shape = variable.shape().clone();
            return Err(ParallelError::UnknownVariable { shape }.into());
        };
        let gradient = gradient.into_dtype(self.parameters[at].dtype)?;
        self.pass.order.push(at);
        let held = self.held.get(&at).cloned();
        if self.paused {
            let gradient = match held {
                Some(held) => Gradient::owned(kernels::add(&held, gradient.tensor())?),
                None => gradient.into_owned()?,
            };
            self.pass.gradients.insert(at, gradient);
            return Ok(());
        }
        let gradient = match held {
            Some(held) => gradient.add(Gradient::shared(held))?,
            None => gradient,
        };
        self.pass.gradients.insert(at, gradient);
        self.pass.left[self.buckets.of[at]] -= 1;
        self.start_full()
    }

    fn finish(&mut self, rest: Vec<(Tensor, Gradient)>) -> Result<Vec<(Tensor, Tensor)>> {
        let cut_short = self.cut_short;
        for (variable, gradient) in rest {
            self.complete(&variable, gradient)?;
        }
        if self.paused {
            let PassState { gradients, .. } = std::mem::take(&mut self.pass);
            if gradients.is_empty() && !self.config.allow_unused {
                return Err(crate::error::GraphError::NoGradient.into());
            }
            self.held
                .extend(gradients.into_iter().map(|(at, gradient)| (at, gradient.into_tensor())));
            return Ok(Vec::new());
        }
        let seen: HashSet<usize> = self.pass.order.iter().copied().collect();
        for at in (0..self.parameters.len()).rev().filter(|at| !seen.contains(at)) {
            if let Some(held) = self.held.get(&at) {
                self.pass.gradients.insert(at, Gradient::shared(held.clone()));
                self.pass.order.push(at);
            }
            self.pass.left[self.buckets.of[at]] -= 1;
        }
        self.start_full()?;
        let (gradients, names) = self.collect()?;
        if !names.is_empty() {
            return Err(ParallelError::Unused { names }.into());
        }
        if gradients.is_empty() {
            return Err(crate::error::GraphError::NoGradient.into());
        }
        let order = std::mem::take(&mut self.pass).order;
        if !self.ordered {
            self.reorder(order)?;
        }
        self.held.clear();
        self.passes += 1;
        self.cut_short = cut_short;
        Ok(gradients)
    }

    fn fall_behind(&mut self) {
        self.cut_short = true;
    }

    fn abort(&mut self) {
        self.cut_short |= !self.pass.started.is_empty();
        self.pass = PassState::default();
    }

    fn check_synchronised(&self, call: &'static str) -> Result<()> {
        match self.has_unsynchronised() {
            true => Err(ParallelError::NotSynchronised { call }.into()),
            false => Ok(()),
        }
    }

    fn has_unsynchronised(&self) -> bool {
        !self.held.is_empty()
    }

    fn forget(&mut self, variables: Option<&Ids>) {
        let parameters = &self.parameters;
        self.held.retain(|&at, _| {
            variables.is_some_and(|ids| !ids.contains(&parameters[at].variable.id()))
        });
    }

    fn check_optimizer(
        &mut self,
        takes_shards: bool,
        facts: &dyn Fn() -> Result<OptimizerFacts>,
    ) -> Result<()> {
        if self.sharded && !takes_shards {
            return Err(ParallelError::Whole.into());
        }
        if self.comparison == Comparison::None || self.communicator.size() == 1 {
            return Ok(());
        }
        self.comparison = Comparison::Made;
        let facts = facts()?.0.into_iter().collect();
        compare(&*self.communicator, "the optimizer", &facts, &self.device())
    }

    fn agree(&self, found: FoundInf) -> Result<FoundInf> {
        if !self.sharded {
            return Ok(found);
        }
        match found {
            FoundInf::Host(found) => {
                let flag = Tensor::new(&[f32::from(u8::from(found))], &self.device())?;
                let flag = self.communicator.all_reduce(&flag, ReduceOp::Max)?;
                let flag: Vec<f32> = on_host(&*self.communicator, &flag)?;
                Ok(FoundInf::Host(flag.iter().any(|&flag| flag != 0.0)))
            }
            FoundInf::Device(found) => {
                let flag = found.tensor().to_dtype(DType::F32)?;
                let flag = self.communicator.all_reduce(&flag, ReduceOp::Max)?;
                Ok(FoundInf::Device(DeviceFoundInf::of_one(flag.to_dtype(DType::U32)?)))
            }
        }
    }
}

impl NormOfRanks for BucketReducer {
    fn sum_of_squares(&self, squares: f64) -> candle_core::Result<f64> {
        if !self.sharded {
            return Ok(squares);
        }
        let squares = Tensor::new(&[squares], &Device::Cpu)?;
        let sum = self.communicator.all_reduce(&squares, ReduceOp::Sum)?;
        Ok(on_host(&*self.communicator, &sum)?[0])
    }

    fn norm(&self, norm: Tensor) -> candle_core::Result<Tensor> {
        if !self.sharded {
            return Ok(norm);
        }
        // In F64, where no square of an F32 norm overflows.
        let squares = norm.to_dtype(DType::F64)?.sqr()?.reshape(1)?;
        let sum = self.communicator.all_reduce(&squares, ReduceOp::Sum)?;
        sum.sqrt()?.to_dtype(norm.dtype())?.reshape(())
    }
}
