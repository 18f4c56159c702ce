//! An operator without its types: what applies it and links it into the graph is compiled once, not for each.

use std::sync::{Arc, OnceLock};

use candle_core::{DType, Result, Tensor};

use super::gradient::Gradient;
use super::operator::{Backward, Operator};
use crate::autocast::Op;
use crate::error::bail;

/// [`Operator`], with what its forward saved inside. The methods are the operator's.
pub(super) trait AnyOperator: Send + Sync {
    fn keeps_output(&self) -> bool;
    fn op(&self) -> Op;
    fn widens(&self, inputs: &[DType]) -> bool;
    fn reads(&self, input: usize, wanted: &[bool]) -> bool;
    fn captured(&self, in_backward: bool) -> Vec<&Tensor>;
    fn forward(&mut self, inputs: &[Tensor]) -> Result<Tensor>;
    fn trim(&mut self, wanted: &[bool]) -> Result<()>;
    fn backward(&self, ctx: Backward<'_, ()>) -> Result<Vec<Option<Gradient>>>;
}

/// A node's backward.
pub(super) enum GradFn {
    /// Of a leaf: hands its gradient on.
    Leaf,
    Operator {
        operator: Box<dyn AnyOperator>,
        /// Set once it exists, of an operator that keeps it.
        output: Option<Arc<OnceLock<Tensor>>>,
        /// Whether nobody else holds the gradients that it calls owned.
        owned: bool,
    },
}

impl GradFn {
    pub(super) fn is_user(&self) -> bool {
        matches!(self, Self::Operator { operator, .. } if operator.op().is_user())
    }

    /// The gradients of the inputs, from that of the output, which `ctx` has too.
    pub(super) fn call(
        &self,
        gradient: &Gradient,
        ctx: Backward<'_, ()>,
    ) -> Result<Vec<Option<Gradient>>> {
        let Self::Operator { operator, output, owned } = self else {
            return Ok(vec![Some(gradient.clone())]);
        };
        let output = output.as_ref().and_then(|output| output.get());
        let mut gradients = operator.backward(Backward { output, ..ctx })?;
        if !owned {
            gradients.iter_mut().flatten().for_each(Gradient::share);
        }
        Ok(gradients)
    }
}

pub(super) struct Applied<O: Operator> {
    operator: O,
    /// `None` before forward.
    saved: Option<O::Saved>,
}

impl<O: Operator> Applied<O> {
    pub(super) fn new(operator: O) -> Self {
        Self { operator, saved: None }
    }
}

impl<O: Operator> AnyOperator for Applied<O> {
    fn keeps_output(&self) -> bool {
        O::KEEPS_OUTPUT
    }

    fn op(&self) -> Op {
        self.operator.op()
    }

    fn widens(&self, inputs: &[DType]) -> bool {
        self.operator.widens(inputs)
    }

    fn reads(&self, input: usize, wanted: &[bool]) -> bool {
        self.operator.reads(input, wanted)
    }

    fn captured(&self, in_backward: bool) -> Vec<&Tensor> {
        self.operator.captured(in_backward)
    }

    fn forward(&mut self, inputs: &[Tensor]) -> Result<Tensor> {
        let (output, saved) = self.operator.forward(inputs)?;
        self.saved = Some(saved);
        Ok(output)
    }

    fn trim(&mut self, wanted: &[bool]) -> Result<()> {
        self.saved.as_mut().map_or(Ok(()), |saved| self.operator.trim(saved, wanted))
    }

    fn backward(&self, ctx: Backward<'_, ()>) -> Result<Vec<Option<Gradient>>> {
        let Some(saved) = &self.saved else { bail!("backward of an operator before its forward") };
        let Backward { output, gradient, owns_gradient, last, wants, arrivals, saved: () } = ctx;
        self.operator.backward(&Backward {
            saved,
            output,
            gradient,
            owns_gradient,
            last,
            wants,
            arrivals,
        })
    }
}
