//! A variable of an optimizer and what belongs to it.

use candle_core::{DType, Result, Tensor, Var};

use super::masters::Masters;
use crate::kernels::{self, multi_tensor::optimizer as kernel};

#[derive(Debug)]
pub(super) struct Slot {
    pub(super) name: Option<String>,
    pub(super) variable: Var,
    pub(super) group: usize,
    /// Steps taken. Master and states are there from the first on.
    pub(super) steps: u64,
    /// The `F32` master of a 16-bit variable, or its remainder.
    pub(super) master: Option<Tensor>,
    pub(super) states: Vec<Tensor>,
    /// When variable and master were last the same.
    pub(super) current: u64,
}

impl Slot {
    pub(super) fn is_16_bit(&self) -> bool {
        matches!(self.variable.dtype(), DType::F16 | DType::BF16)
    }

    /// The dtype of the tensor beside the variable, and what it is called, if there is one.
    pub(super) fn master_dtype(&self, masters: Masters) -> Option<(&'static str, DType)> {
        match masters {
            Masters::F32 if self.is_16_bit() => Some(("master", DType::F32)),
            Masters::Remainder if self.is_16_bit() => Some(("remainder", DType::I16)),
            _ => None,
        }
    }

    /// The dtype of its states, where 16-bit variables are given `dtype`.
    pub(super) fn state_dtype(&self, dtype: DType) -> DType {
        if self.variable.dtype() == DType::F64 { DType::F64 } else { dtype }
    }

    /// Makes the master and states that are missing. `true` where a state was.
    pub(super) fn prepare(&mut self, masters: Masters, count: usize, dtype: DType) -> Result<bool> {
        if self.master.is_none() {
            self.master = self.new_master(masters)?;
        }
        self.states.truncate(count);
        let missing = self.states.len() < count;
        while self.states.len() < count {
            self.states.push(self.zeros(self.state_dtype(dtype))?);
        }
        Ok(missing)
    }

    /// The master that the variable alone gives.
    pub(super) fn new_master(&self, masters: Masters) -> Result<Option<Tensor>> {
        Ok(match self.master_dtype(masters) {
            Some((_, DType::F32)) => Some(kernels::cast(&self.variable, DType::F32)?),
            Some(_) => Some(self.zeros(DType::I16)?),
            None => None,
        })
    }

    fn zeros(&self, dtype: DType) -> Result<Tensor> {
        Tensor::zeros(self.variable.shape(), dtype, self.variable.device())
    }

    pub(super) fn kernel_master(&self, masters: Masters) -> kernel::Master<'_> {
        match (&self.master, masters) {
            (Some(master), Masters::F32) => kernel::Master::Full(master),
            (Some(rest), Masters::Remainder) => kernel::Master::Remainder(rest),
            _ if self.is_16_bit() => kernel::Master::Stochastic,
            _ => kernel::Master::Itself,
        }
    }

    /// The variable's exact value: `F32`, or `F64` for an `F64` variable.
    pub(super) fn exact(&self, masters: Masters) -> Result<Tensor> {
        match self.kernel_master(masters) {
            kernel::Master::Full(master) => master.copy(),
            kernel::Master::Remainder(rest) => kernel::rebuild(&self.variable, rest),
            _ => kernels::cast(&self.variable, kernels::accumulator(self.variable.dtype())),
        }
    }
}

/// A variable in errors.
pub(super) fn label(name: Option<&str>, number: usize) -> String {
    match name {
        Some(name) => format!("`{name}`"),
        None => format!("variable {number} (they have no names)"),
    }
}
