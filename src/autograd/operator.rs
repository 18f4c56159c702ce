//! What an operator is: its forward, its backward, and what it is given.

use std::fmt;

use candle_core::{DType, Result, Tensor};

use super::gradient::Gradient;
use crate::autocast::Op;

/// A differentiable operator: its forward, its backward, and what one hands to the other.
///
/// [`apply`](super::apply()) casts the inputs as the active [`Autocast`](crate::Autocast) says, calls `forward`,
/// and links the result into candle's graph, so that `loss.backward()` calls `backward`, alone or
/// among candle's own operators. Every operator of this crate is one of these, and so can yours be.
///
/// # Precision
///
/// `forward` sees inputs already cast and chooses the dtype it returns. `backward` gets the gradient of the
/// output in the output's dtype, and for each input the dtype in which its gradient is wanted. That is the
/// dtype of the input *before* the cast, so that an `F32` variable gets an `F32` gradient, straight from the
/// accumulator, of a product computed in 16 bits.
///
/// Within both, autocast is off, whatever scope is active: an operator says by [`op`](Self::op) what it is
/// computed in. PyTorch has `custom_fwd(cast_inputs=…)` and `custom_bwd` for that.
///
/// # Examples
///
/// ```
/// use candle_amp::autograd::{Backward, Gradient, Operator, apply};
/// use candle_amp::{Autocast, Cast, Op};
/// use candle_core::{DType, Device, Result, Tensor, Var};
///
/// /// `x²`, in `F32` inside autocast.
/// struct Square;
///
/// impl Operator for Square {
///     type Saved = Tensor;
///
///     fn op(&self) -> Op {
///         Op::user("square", Cast::Full)
///     }
///
///     fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Tensor)> {
///         Ok((inputs[0].sqr()?, inputs[0].clone()))
///     }
///
///     fn backward(&self, ctx: &Backward<'_, Tensor>) -> Result<Vec<Option<Gradient>>> {
///         let derivative = ctx.saved.affine(2.0, 0.0)?;
///         Ok(vec![Some(Gradient::owned((derivative * ctx.gradient)?))])
///     }
/// }
///
/// let x = Var::new(&[3f32, -1.0], &Device::Cpu)?;
/// let y = Autocast::new(DType::F16).scope(|| apply(Square, &[&x]))?;
/// let grads = y.sum_all()?.backward()?; // `sum_all` is candle's
/// assert_eq!(grads.get(&x).unwrap().to_vec1::<f32>()?, [6.0, -2.0]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub trait Operator: Send + Sync + 'static {
    /// What `backward` needs from `forward`: detached tensors and plain data. Dropped with the graph, or once
    /// a scaler's backward has gone through.
    type Saved: Send + Sync + 'static;

    /// Whether `backward` needs the output. In [`Saved`](Self::Saved) it would be kept twice.
    const KEEPS_OUTPUT: bool = false;

    /// The row of the policy table it follows.
    fn op(&self) -> Op;

    /// Whether `forward` takes inputs of these dtypes, 16-bit ones too, where the policy says `F32`, and returns `F32`.
    /// Autocast then makes no `F32` copy of them, and backward keeps none.
    fn widens(&self, _inputs: &[DType]) -> bool {
        false
    }

    /// Whether `backward` may read the value of input number `input`, where `wanted` says which inputs need a
    /// gradient. Writing to an input that it reads, between forward and backward, is an error; writing to
    /// another is not.
    ///
    /// By default it reads all of them, which is always safe.
    fn reads(&self, _input: usize, _wanted: &[bool]) -> bool {
        true
    }

    /// The tensors besides its inputs that `forward` reads, or, where `in_backward` is set, that `backward` reads. Writing
    /// to one of the latter between forward and backward is an error, as with an input, and so is writing to one of
    /// either before a [`checkpoint`](super::checkpoint) recomputes.
    ///
    /// By default there are none.
    fn captured(&self, _in_backward: bool) -> Vec<&Tensor> {
        Vec::new()
    }

    /// Computes the output from detached inputs, and what backward needs of them. Where a graph is made, the output is
    /// copied: it may be an input, a view of one, or a tensor that the operator keeps.
    ///
    /// # Errors
    ///
    /// Inputs that do not fit, before anything is computed.
    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Self::Saved)>;

    /// Drops from what `forward` has saved what `backward` will not use, where `wanted` says which inputs need a
    /// gradient: the input of a [frozen](crate::Parameters::freeze) layer, for instance. Called once, where a graph is
    /// made. By default everything is kept.
    ///
    /// # Errors
    ///
    /// Of what is put in its place.
    fn trim(&self, _saved: &mut Self::Saved, _wanted: &[bool]) -> Result<()> {
        Ok(())
    }

    /// Computes the gradient of each input, in order; `None` where none is wanted or none exists.
    ///
    /// # Errors
    ///
    /// Whatever computing it meets. Gradients in flight are then forgotten.
    fn backward(&self, ctx: &Backward<'_, Self::Saved>) -> Result<Vec<Option<Gradient>>>;
}

/// What [`Operator::backward`] is given.
#[derive(Debug)]
pub struct Backward<'a, S> {
    /// What `forward` saved.
    pub saved: &'a S,
    /// The output, where [`Operator::KEEPS_OUTPUT`] is set.
    pub output: Option<&'a Tensor>,
    /// The gradient of the output: its shape, its dtype, contiguous.
    pub gradient: &'a Tensor,
    /// Whether nobody else holds the storage of `gradient`, so that it may be written over.
    pub owns_gradient: bool,
    /// Whether this is the operator's last backward, so that it may write over what it saved and has never
    /// shared.
    pub last: bool,
    /// For each input, the dtype its gradient is wanted in, or `None` where none is wanted.
    pub wants: &'a [Option<DType>],
    pub(super) arrivals: Arrivals<'a>,
}

/// What the pass has for the inputs of an operator that is running backward.
pub(super) trait Arrive {
    /// Takes what other consumers of an input have sent so far.
    fn take_pending(&self, input: usize) -> Result<Option<Gradient>>;
    /// Notes that a pass within this one met a gradient in F16.
    fn note_f16(&self);
}

#[derive(Clone, Copy)]
pub(super) struct Arrivals<'a>(pub(super) &'a dyn Arrive);

impl fmt::Debug for Arrivals<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Arrivals")
    }
}

impl Arrive for () {
    fn take_pending(&self, _: usize) -> Result<Option<Gradient>> {
        Ok(None)
    }

    fn note_f16(&self) {}
}

impl<S> Backward<'_, S> {
    /// The output.
    ///
    /// # Errors
    ///
    /// The operator does not set [`Operator::KEEPS_OUTPUT`].
    pub fn kept_output(&self) -> Result<&Tensor> {
        self.output.ok_or_else(|| candle_core::Error::Msg("this operator keeps no output".into()))
    }

    /// The sum of the gradients that other operators have already sent for an input. It is contiguous, in the
    /// input's shape and the dtype it is wanted in. Add it to the one that [`Operator::backward`] returns for
    /// that input, where that costs less than another pass over both. `None` where there is none, and for a
    /// variable.
    ///
    /// Whoever takes it has to return it within the input's gradient.
    ///
    /// # Errors
    ///
    /// candle's, where it has to be copied to be contiguous.
    pub fn take_pending(&self, input: usize) -> Result<Option<Gradient>> {
        self.arrivals.0.take_pending(input)
    }

    /// The same for an operator within this one, that has another gradient and other inputs.
    pub(crate) fn within<'b>(
        &'b self,
        gradient: &'b Tensor,
        wants: &'b [Option<DType>],
    ) -> Backward<'b, S> {
        let arrivals = Arrivals(&());
        Backward { gradient, owns_gradient: false, output: None, wants, arrivals, ..*self }
    }
}

/// Whether the floating-point ones are all F16, or all BF16.
pub(crate) fn of_one_16_bit_dtype(dtypes: &[DType]) -> bool {
    let mut floats = dtypes.iter().filter(|dtype| dtype.is_float());
    match floats.next() {
        Some(first @ (DType::F16 | DType::BF16)) => floats.all(|dtype| dtype == first),
        _ => false,
    }
}
