//! The steps out of candle's operators.

use candle_core::{Result, Tensor};

use super::gradients::{GateGradients, Saved};
use super::sequence::{Dims, Sequence};
use crate::kernels::elementwise::portable::upcast;

/// See [`super::lstm`]; `gates` are the projected inputs, `(b, t, 4 n)`.
pub(super) fn lstm(of: &Sequence, c0: &Tensor, gates: &Tensor) -> Result<(Tensor, Tensor)> {
    let (dims, weight) = (of.dims()?, upcast(&of.w_hh)?.t()?.contiguous()?);
    let (mut h, mut c) = (upcast(&of.h0)?.contiguous()?, upcast(c0)?.contiguous()?);
    let mut steps = Steps::new(dims);
    for step in dims.order() {
        let gates = (at(gates, step)? + h.matmul(&weight)?)?;
        let [i, f, g, o] = chunks(&gates)?;
        c = ((sigmoid(&f)? * c)? + (sigmoid(&i)? * g.tanh()?)?)?;
        h = (sigmoid(&o)? * c.tanh()?)?;
        steps.put(step, [h.clone(), c.clone(), gates]);
    }
    let like = Dims::shapes(dims, &[1, 1, 4], gates)?;
    let [h, c, gates] = steps.stack(like)?.map(|part| part.to_dtype(of.x.dtype()));
    Ok((Tensor::stack(&[h?, c?], 0)?, gates?))
}

/// See [`super::lstm_backward`].
pub(super) fn lstm_backward(
    of: &Sequence,
    c0: &Tensor,
    gates: &Tensor,
    y: &Tensor,
    grad: &Tensor,
) -> Result<(GateGradients, Tensor)> {
    let (dims, weight) = (of.dims()?, upcast(&of.w_hh)?.contiguous()?);
    let (gates, y, grad) = (upcast(gates)?, upcast(y)?, upcast(grad)?);
    let (y_c, grad_h, grad_c) = (y.get(1)?, grad.get(0)?, grad.get(1)?);
    let mut dh = upcast(&of.h0)?.zeros_like()?;
    let mut dc = dh.clone();
    let mut steps = Steps::new(dims);
    for step in dims.order().rev() {
        let [i, f, g, o] = chunks(&at(&gates, step)?)?;
        let (i, f, g, o) = (sigmoid(&i)?, sigmoid(&f)?, g.tanh()?, sigmoid(&o)?);
        let before = match dims.before(step) {
            Some(before) => at(&y_c, before)?,
            None => upcast(c0)?,
        };
        let tangent = at(&y_c, step)?.tanh()?;
        dh = (dh + at(&grad_h, step)?)?;
        let cell = ((dc + at(&grad_c, step)?)? + (&dh * (&o * derivative(&tangent)?)?)?)?;
        let gate_gradients = [
            ((&cell * &g)? * logistic(&i)?)?,
            ((&cell * before)? * logistic(&f)?)?,
            ((&cell * &i)? * derivative(&g)?)?,
            ((&dh * tangent)? * logistic(&o)?)?,
        ];
        dc = (cell * f)?;
        let gate_gradients = Tensor::cat(&gate_gradients, 1)?;
        dh = gate_gradients.matmul(&weight)?;
        steps.put(step, [gate_gradients]);
    }
    let [gate_gradients] = steps.stack(Dims::shapes(dims, &[4], &gates)?)?;
    let gate_gradients = gate_gradients.reshape((dims.batch * dims.steps, 4 * dims.hidden))?;
    Ok((GateGradients { of_h: gate_gradients.clone(), of_x: gate_gradients, h0: dh }, dc))
}

/// See [`super::gru`]; `gates` are the projected inputs, `(b, t, 3 n)`.
pub(super) fn gru(of: &Sequence, gates: &Tensor) -> Result<(Tensor, Saved)> {
    let (dims, weight) = (of.dims()?, upcast(&of.w_hh)?.t()?.contiguous()?);
    let mut h = upcast(&of.h0)?.contiguous()?;
    let bias = of.b_hh.as_ref().map(|bias| bias.to_dtype(of.wide())).transpose()?;
    let mut steps = Steps::new(dims);
    for step in dims.order() {
        let of_h = h.matmul(&weight)?;
        let of_h = match &bias {
            Some(bias) => of_h.broadcast_add(bias)?,
            None => of_h,
        };
        let ([r, z, n], [r_h, z_h, inner]) = (chunks(&at(gates, step)?)?, chunks(&of_h)?);
        let (r, z) = ((r + r_h)?, (z + z_h)?);
        let n = (n + (sigmoid(&r)? * &inner)?)?;
        let new = n.tanh()?;
        h = (&new + (sigmoid(&z)? * (h - &new)?)?)?;
        steps.put(step, [h.clone(), Tensor::cat(&[r, z, n], 1)?, inner]);
    }
    let like = Dims::shapes(dims, &[1, 3, 1], gates)?;
    let [y, gates, inner] = steps.stack(like)?.map(|part| part.to_dtype(of.x.dtype()));
    Ok((y?, Saved { gates: gates?, inner: inner? }))
}

/// See [`super::gru_backward`].
pub(super) fn gru_backward(
    of: &Sequence,
    saved: &Saved,
    y: &Tensor,
    grad: &Tensor,
) -> Result<GateGradients> {
    let (dims, weight) = (of.dims()?, upcast(&of.w_hh)?.contiguous()?);
    let (gates, inner) = (upcast(&saved.gates)?, upcast(&saved.inner)?);
    let (y, grad) = (upcast(y)?, upcast(grad)?);
    let mut dh = upcast(&of.h0)?.zeros_like()?;
    let mut steps = Steps::new(dims);
    for step in dims.order().rev() {
        let [r, z, n] = chunks(&at(&gates, step)?)?;
        let (r, z, n) = (sigmoid(&r)?, sigmoid(&z)?, n.tanh()?);
        let before = match dims.before(step) {
            Some(before) => at(&y, before)?,
            None => upcast(&of.h0)?,
        };
        dh = (dh + at(&grad, step)?)?;
        let dz = ((&dh * (before - &n)?)? * logistic(&z)?)?;
        let dn = ((&dh * (1.0 - &z)?)? * derivative(&n)?)?;
        let dr = ((&dn * at(&inner, step)?)? * logistic(&r)?)?;
        let of_h = Tensor::cat(&[&dr, &dz, &(&dn * r)?], 1)?;
        dh = ((dh * z)? + of_h.matmul(&weight)?)?;
        steps.put(step, [Tensor::cat(&[dr, dz, dn], 1)?, of_h]);
    }
    let gate_gradients = steps.stack(Dims::shapes(dims, &[3, 3], &gates)?)?;
    let rows = (dims.batch * dims.steps, 3 * dims.hidden);
    let [of_x, of_h] = gate_gradients.map(|gate_gradients| gate_gradients.reshape(rows));
    Ok(GateGradients { of_x: of_x?, of_h: of_h?, h0: dh })
}

/// One step of a sequence, `(b, features)`.
fn at(sequence: &Tensor, step: usize) -> Result<Tensor> {
    sequence.narrow(1, step, 1)?.squeeze(1)?.contiguous()
}

fn chunks<const N: usize>(gates: &Tensor) -> Result<[Tensor; N]> {
    let chunks = gates.chunk(N, 1)?.iter().map(Tensor::contiguous).collect::<Result<Vec<_>>>()?;
    chunks.try_into().map_err(|_| candle_core::Error::Msg("gates that are not of one size".into()))
}

fn sigmoid(x: &Tensor) -> Result<Tensor> {
    (x.neg()?.exp()? + 1.0)?.recip()
}

/// The derivative of a sigmoid, from its value.
fn logistic(y: &Tensor) -> Result<Tensor> {
    y * (1.0 - y)?
}

/// The derivative of a hyperbolic tangent, from its value.
fn derivative(y: &Tensor) -> Result<Tensor> {
    1.0 - y.sqr()?
}

/// `N` results of every step, in the order of the sequence.
struct Steps<const N: usize>(Vec<Option<[Tensor; N]>>);

impl<const N: usize> Steps<N> {
    fn new(dims: Dims) -> Self {
        Self(vec![None; dims.steps])
    }

    fn put(&mut self, step: usize, results: [Tensor; N]) {
        self.0[step] = Some(results);
    }

    /// Each result as a sequence; `empty` where there are no steps.
    fn stack(self, empty: Vec<Tensor>) -> Result<[Tensor; N]> {
        let steps: Vec<_> = self.0.into_iter().flatten().collect();
        let sequences = empty.into_iter().enumerate().map(|(i, empty)| match steps.is_empty() {
            true => Ok(empty),
            false => Tensor::stack(&steps.iter().map(|step| &step[i]).collect::<Vec<_>>(), 1),
        });
        let sequences = sequences.collect::<Result<Vec<_>>>()?;
        sequences
            .try_into()
            .map_err(|_| candle_core::Error::Msg("a step of too few results".into()))
    }
}

impl Dims {
    /// Zeros `(b, t, parts n)`, for each number of parts.
    fn shapes(self, parts: &[usize], like: &Tensor) -> Result<Vec<Tensor>> {
        let zeros = |parts: &usize| {
            let dims = (self.batch, self.steps, parts * self.hidden);
            Tensor::zeros(dims, like.dtype(), like.device())
        };
        parts.iter().map(zeros).collect()
    }
}
