//! Sequences of unequal lengths in one batch.

use candle_core::{Result, Tensor};

use crate::error::{ArgumentError, bail};
use crate::ops;

/// Where sequences end in a padded batch `(b, t, …)`.
pub(super) struct Padding {
    /// 1 for the steps of each sequence, 0 after them, `(b, t, 1)`.
    mask: Tensor,
    /// For each step the one that takes its place where sequences run backward, `(b, t)`, counted over the whole batch.
    turned: Tensor,
    /// The last step of each, counted likewise, `(b)`.
    last: Tensor,
}

impl Padding {
    /// Of the sequences in `x (b, t, in)`, for the operator `op`.
    pub(super) fn new(op: &'static str, x: &Tensor, lengths: &[usize]) -> Result<Self> {
        let &[b, t, _] = x.dims() else {
            let (got, expected) = (x.shape().clone(), "(b, t, in)".into());
            return Err(ArgumentError::Shape { op, name: "x", got, expected }.into());
        };
        if lengths.len() != b {
            bail!("{op}: {} lengths were given for a batch of {b} sequences", lengths.len())
        }
        if let Some((i, length)) =
            lengths.iter().enumerate().find(|(_, length)| !(1..=t).contains(*length))
        {
            bail!("{op}: the length of sequence {i} is {length}, expected 1 to {t}, the steps of x")
        }
        let steps =
            || lengths.iter().enumerate().flat_map(|(i, &n)| (0..t).map(move |s| (i, n, s)));
        let mask: Vec<u8> = steps().map(|(_, n, step)| u8::from(step < n)).collect();
        let place = |i: usize, step: usize| (i * t + step) as i64;
        let turned = |(i, n, step)| place(i, if step < n { n - 1 - step } else { step });
        let turned: Vec<i64> = steps().map(turned).collect();
        let last: Vec<i64> = lengths.iter().enumerate().map(|(i, n)| place(i, n - 1)).collect();
        let device = x.device();
        Ok(Self {
            mask: Tensor::from_vec(mask, (b, t, 1), device)?,
            turned: Tensor::from_vec(turned, (b, t), device)?,
            last: Tensor::from_vec(last, b, device)?,
        })
    }

    /// `x (b, t, …)` with zeros after the end of each sequence, whatever is there.
    pub(super) fn inside(&self, x: &Tensor) -> Result<Tensor> {
        ops::where_cond(&self.mask, x, &Tensor::zeros((), x.dtype(), x.device())?)
    }

    /// `x (b, t, …)` with each sequence turned around, where `reverse` is set.
    pub(super) fn turned(&self, x: &Tensor, reverse: bool) -> Result<Tensor> {
        if reverse { ops::embedding(&self.turned, &x.flatten(0, 1)?) } else { Ok(x.clone()) }
    }

    /// The last step of each sequence in `x (b, t, n)`, `(b, n)`.
    pub(super) fn last(&self, x: &Tensor) -> Result<Tensor> {
        ops::embedding(&self.last, &x.flatten(0, 1)?)
    }
}
