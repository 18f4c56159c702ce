//! Sequences of unequal lengths in one batch.

use candle_core::{Result, Tensor};

use crate::error::{ArgumentError, bail};
use crate::ops;

/// Where sequences end in a padded batch `(b, t, …)`.
pub(super) struct Padding {
    /// 1 for the steps of each sequence, 0 after them, `(b, t, 1)`.
    mask: Tensor,
    /// The last step of each, counted over the whole batch, `(b)`.
    last: Tensor,
    /// Where sequences run backward, the step that takes the place of each, counted likewise, `(b, t)`.
    reversed: Option<Tensor>,
}

impl Padding {
    /// Of the sequences in `x (b, t, in)`, which run backward if `reverse` is set, for the operator `op`.
    pub(super) fn new(
        op: &'static str,
        x: &Tensor,
        lengths: &[usize],
        reverse: bool,
    ) -> Result<Self> {
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
        let last: Vec<i64> = lengths.iter().enumerate().map(|(i, n)| place(i, n - 1)).collect();
        let device = x.device();
        let reversed = reverse.then(|| {
            let reversed = |(i, n, step)| place(i, if step < n { n - 1 - step } else { step });
            Tensor::from_vec(steps().map(reversed).collect(), (b, t), device)
        });
        Ok(Self {
            mask: Tensor::from_vec(mask, (b, t, 1), device)?,
            last: Tensor::from_vec(last, b, device)?,
            reversed: reversed.transpose()?,
        })
    }

    /// `x (b, t, …)` with zeros after the end of each sequence, whatever is there.
    pub(super) fn inside(&self, x: &Tensor) -> Result<Tensor> {
        ops::where_cond(&self.mask, x, &Tensor::zeros((), x.dtype(), x.device())?)
    }

    /// `x (b, t, …)` in the order of the run, or what is in that order as it was: reversing twice changes nothing.
    pub(super) fn reversed(&self, x: &Tensor) -> Result<Tensor> {
        match &self.reversed {
            Some(reversed) => ops::embedding(reversed, &x.flatten(0, 1)?),
            None => Ok(x.clone()),
        }
    }

    /// The last step of each sequence in `x (b, t, n)`, `(b, n)`.
    pub(super) fn last(&self, x: &Tensor) -> Result<Tensor> {
        ops::embedding(&self.last, &x.flatten(0, 1)?)
    }
}
