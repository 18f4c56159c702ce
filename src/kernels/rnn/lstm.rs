//! The LSTM: gates `i`, `f`, `g`, `o`; `c' = f c + i g`, `h' = o tanh(c')`.
//!
//! The two biases only occur as a sum, so the projection of the inputs adds both. Each step adds its product with the
//! state to the gates in place. The rows of a batch are independent: a thread may take some rows through all steps, and
//! then waits for no other thread (see [`super::recurrent`]).
//!
//! Forward saves the states after every step and what goes into the gates' functions. Backward goes from the last step
//! to the first:
//!
//! ```text
//! dc' += dh' o (1 - tanh²(c'))     di = dc' g i (1 - i)     dg = dc' i (1 - g²)
//! dc   = dc' f                     df = dc' c f (1 - f)     do = dh' tanh(c') o (1 - o)
//! dh   = (di, df, dg, do) × w_hh
//! ```

use candle_core::{Result, Tensor};

use super::cpu::{for_each_row, runs, runs_mut, widened};
use super::gate::Gate;
use super::gradients::GateGradients;
use super::packed::Multiply;
use super::recurrent::{add_recurrent, recurrent_gradient};
use super::sequence::{Dims, Sequence};
use super::{cuda, portable};
use crate::kernels::choice::algorithm::chosen;
use crate::kernels::cpu::dtype::{Elements, Real, tensor, with_element};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::in_place;
use crate::kernels::cpu::lane::Lane;
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::simd::vectorise_in;
use crate::kernels::cuda::Gpu;

/// Hidden and cell states after every step, `(2, b, t, n)`, and what goes into the gates' functions,
/// `(b, t, 4 n)`, both in the dtype of `x`.
pub(crate) fn lstm(of: &Sequence, c0: &Tensor) -> Result<(Tensor, Tensor)> {
    let Dims { batch, steps, hidden, .. } = of.dims()?;
    let bias = match (&of.b_ih, &of.b_hh) {
        (Some(a), Some(b)) => Some((a.to_dtype(of.wide())? + b.to_dtype(of.wide())?)?),
        (a, b) => a.as_ref().or(b.as_ref()).cloned(),
    };
    let gates = of.project(bias.as_ref())?.reshape((batch, steps, 4 * hidden))?;
    if let Some(gpu) = Gpu::of(of.x.device()) {
        chosen("lstm", cuda::CELL_KERNEL, of.x.shape());
        return Ok((cuda::lstm(gpu, of, c0, &gates)?, of.save(gates)?));
    }
    if !of.x.device().is_cpu() {
        chosen("lstm", "candle", of.x.shape());
        return portable::lstm(of, c0, &gates);
    }
    let y = with_element!(of.x.dtype(), T => forward::<T>(of, c0, &gates)?);
    Ok((y, of.save(gates)?))
}

/// The gradient of [`lstm`], from its results: the gates' gradients, and the gradient of `c0`, `(b, n)`.
pub(crate) fn lstm_backward(
    of: &Sequence,
    c0: &Tensor,
    gates: &Tensor,
    y: &Tensor,
    grad: &Tensor,
) -> Result<(GateGradients, Tensor)> {
    if let Some(gpu) = Gpu::of(of.x.device()) {
        return cuda::lstm_backward(gpu, of, c0, gates, y, grad);
    }
    if !of.x.device().is_cpu() {
        return portable::lstm_backward(of, c0, gates, y, grad);
    }
    let (gate_gradients, h0, c0) =
        with_element!(of.x.dtype(), T => backward::<T>(of, c0, gates, y, grad)?);
    Ok((GateGradients { of_h: gate_gradients.clone(), of_x: gate_gradients, h0 }, c0))
}

/// Completes the gates, to which each step adds its part.
fn forward<T: Lane<Acc: Multiply>>(of: &Sequence, c0: &Tensor, gates: &Tensor) -> Result<Tensor> {
    let dims = of.dims()?;
    let Dims { batch, steps, hidden: n, .. } = dims;
    let weight = T::Acc::recurrent(&of.w_hh.t()?, dims)?;
    let (mut h, mut c) = (widened::<T::Acc>(&of.h0)?, widened::<T::Acc>(c0)?);
    let mut y = vec![T::default(); 2 * batch * steps * n];
    if y.is_empty() {
        return Ok(tensor(y, &[2, batch, steps, n])); // candle does not write to empty tensors
    }
    let (y_h, y_c) = y.split_at_mut(batch * steps * n);
    in_place::write(gates, |gates: &mut [T::Acc]| {
        // Rows of a batch have nothing to do with each other.
        let (units, others) = (weight.rows() * n, weight.rows() < batch);
        let states = h.chunks_mut(units).zip(c.chunks_mut(units));
        let outputs = y_h.chunks_mut(steps * units).zip(y_c.chunks_mut(steps * units));
        let groups = gates.chunks_mut(steps * 4 * units).zip(states.zip(outputs));
        parallel::for_each_item(groups, |(gates, ((h, c), (y_h, y_c)))| {
            let dims = Dims { batch: h.len() / n, ..dims };
            for step in dims.order() {
                add_recurrent(h, &*weight, (&mut *gates, 4 * n), step, dims);
                let states = h.chunks_mut(n).zip(c.chunks_mut(n));
                let outputs = y_h.chunks_mut(steps * n).zip(y_c.chunks_mut(steps * n));
                let rows = gates.chunks(steps * 4 * n).zip(states.zip(outputs));
                for_each_row(dims, others, rows, |(gates, ((h, c), (y_h, y_c)))| {
                    let gates = &gates[step * 4 * n..][..4 * n];
                    let (y_h, y_c) = (&mut y_h[step * n..][..n], &mut y_c[step * n..][..n]);
                    vectorise_in::<T::Acc>(
                        #[inline(always)]
                        || {
                            unit(gates, h, c);
                            T::narrow(h, y_h);
                            T::narrow(c, y_c);
                        },
                    );
                });
            }
        });
    })?;
    Ok(tensor(y, &[2, batch, steps, n]))
}

#[inline(always)]
fn unit<A: Gate>(gates: &[A], h: &mut [A], c: &mut [A]) {
    let n = h.len();
    let ([i, f, g, o], c) = (runs(gates, n), &mut c[..n]);
    for k in 0..n {
        let kept = f[k].sigmoid() * c[k];
        c[k] = kept + i[k].sigmoid() * g[k].tangent();
        h[k] = o[k].sigmoid() * c[k].tangent();
    }
}

/// Slopes of the gates, `(b t, 4 n)`, and gradients of `h0` and `c0`.
fn backward<T: Lane<Acc: Multiply>>(
    of: &Sequence,
    c0: &Tensor,
    gates: &Tensor,
    y: &Tensor,
    grad: &Tensor,
) -> Result<(Tensor, Tensor, Tensor)> {
    let dims = of.dims()?;
    let Dims { batch, steps, hidden: n, .. } = dims;
    let weight = T::Acc::recurrent(&of.w_hh, dims)?;
    let c0 = c0.contiguous()?;
    let _held = hold([&c0, gates, y, grad]);
    let (c0, gates) = (&*Elements::<T>::of(&c0)?, &*Elements::<T>::of(gates)?);
    let (y, grad) = (&*Elements::<T>::of(y)?, &*Elements::<T>::of(grad)?);
    let y_c = &y[batch * steps * n..];
    let (grad_h, grad_c) = grad.split_at(batch * steps * n);
    let mut gate_gradients = vec![T::Acc::of(0.0); batch * steps * 4 * n];
    let (mut dh, mut dc) = (vec![T::Acc::of(0.0); batch * n], vec![T::Acc::of(0.0); batch * n]);
    let (size, others) = (weight.rows(), weight.rows() < batch);
    // Without steps there is nothing to cut.
    let all_steps = gate_gradients.chunks_mut((size * steps * 4 * n).max(1));
    let states = dh.chunks_mut(size * n).zip(dc.chunks_mut(size * n));
    parallel::for_each_item(states.zip(all_steps).enumerate(), |(group, states)| {
        let ((dh, dc), gate_gradients) = states;
        let dims = Dims { batch: dh.len() / n, ..dims };
        for step in dims.order().rev() {
            let states = dh.chunks(n).zip(dc.chunks_mut(n));
            let rows = states.zip(gate_gradients.chunks_mut(steps * 4 * n)).enumerate();
            for_each_row(dims, others, rows, |(row, ((dh, dc), gate_gradients))| {
                let row = group * size + row;
                let at = |step| (row * steps + step) * n;
                let before = match dims.before(step) {
                    Some(before) => &y_c[at(before)..][..n],
                    None => &c0[row * n..][..n],
                };
                let cells = [before, &y_c[at(step)..][..n]];
                let grads = [&grad_h[at(step)..][..n], &grad_c[at(step)..][..n]];
                let gates = runs(&gates[4 * at(step)..], n);
                let gate_gradients = &mut gate_gradients[step * 4 * n..][..4 * n];
                vectorise_in::<T::Acc>(
                    #[inline(always)]
                    || unit_backward(gates, cells, grads, dh, dc, gate_gradients),
                );
            });
            recurrent_gradient((&*gate_gradients, 4 * n), &*weight, dh, step, false, dims);
        }
    });
    let gate_gradients = tensor(gate_gradients, &[batch * steps, 4 * n]);
    Ok((gate_gradients, tensor(dh, &[batch, n]), tensor(dc, &[batch, n])))
}

#[inline(always)]
fn unit_backward<T: Lane<Acc: Multiply>>(
    gates: [&[T]; 4],
    cells: [&[T]; 2],
    grads: [&[T]; 2],
    dh: &[T::Acc],
    dc: &mut [T::Acc],
    gate_gradients: &mut [T::Acc],
) {
    let (n, one) = (dh.len(), T::Acc::of(1.0));
    let ([i, f, g, o], [before, after]) = (gates.map(|g| &g[..n]), cells.map(|c| &c[..n]));
    let ([grad_h, grad_c], dc) = (grads.map(|g| &g[..n]), &mut dc[..n]);
    let [di, df, dg, do_] = runs_mut(gate_gradients, n);
    for k in 0..n {
        let (i, f) = (i[k].widened().sigmoid(), f[k].widened().sigmoid());
        let (g, o) = (g[k].widened().tangent(), o[k].widened().sigmoid());
        let tangent = after[k].widened().tangent();
        let dh = dh[k] + grad_h[k].widened();
        let cell = dc[k] + grad_c[k].widened() + dh * o * (one - tangent * tangent);
        di[k] = cell * g * i * (one - i);
        df[k] = cell * before[k].widened() * f * (one - f);
        dg[k] = cell * i * (one - g * g);
        do_[k] = dh * tangent * o * (one - o);
        dc[k] = cell * f;
    }
}
