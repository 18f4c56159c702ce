//! The GRU: gates `r`, `z`, `n`; `n = tanh(n_x + r n_h)`, `h' = (1 - z) n + z h`.
//!
//! `r` multiplies `n_h`, the product with the state plus its bias. So the products with inputs and states cannot go
//! into one sum as those of the LSTM: each step computes the second in a buffer of its own, and forward saves `n_h`
//! too.
//!
//! Backward goes from the last step to the first. The gradients of the two products differ only in `n`:
//!
//! ```text
//! dn = dh' (1 - z) (1 - n²)     dz = dh' (h - n) z (1 - z)     dr = dn n_h r (1 - r)
//! of inputs (dr, dz, dn)        of states (dr, dz, dn r)       dh = dh' z + (dr, dz, dn r) × w_hh
//! ```

use candle_core::{Result, Tensor};

use super::cpu::{for_each_row, runs, runs_mut, widened};
use super::gate::Gate;
use super::gradients::{GateGradients, Saved};
use super::recurrent::{WidenedWeight, add_recurrent, recurrent_gradient};
use super::sequence::{Dims, Sequence};
use super::{cuda, portable};
use crate::kernels::choice::algorithm::chosen;
use crate::kernels::cpu::dtype::{Elements, Real, tensor, with_element};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::in_place;
use crate::kernels::cpu::lane::Lane;
use crate::kernels::cpu::simd::vectorise_in;
use crate::kernels::cuda::Gpu;

/// The state after every step, `(b, t, n)`, and what backward needs, all in the dtype of `x`.
pub(crate) fn gru(of: &Sequence) -> Result<(Tensor, Saved)> {
    let Dims { batch, steps, hidden, .. } = of.dims()?;
    let gates = of.project(of.b_ih.as_ref())?.reshape((batch, steps, 3 * hidden))?;
    if let Some(gpu) = Gpu::of(of.x.device()) {
        chosen("gru", cuda::CELL_KERNEL, of.x.shape());
        let (y, inner) = cuda::gru(gpu, of, &gates)?;
        return Ok((y, Saved { gates: of.save(gates)?, inner }));
    }
    if !of.x.device().is_cpu() {
        chosen("gru", "candle", of.x.shape());
        return portable::gru(of, &gates);
    }
    let (y, inner) = with_element!(of.x.dtype(), T => forward::<T>(of, &gates)?);
    Ok((y, Saved { gates: of.save(gates)?, inner }))
}

/// The gradient of [`gru`], from its results.
pub(crate) fn gru_backward(
    of: &Sequence,
    saved: &Saved,
    y: &Tensor,
    grad: &Tensor,
) -> Result<GateGradients> {
    if let Some(gpu) = Gpu::of(of.x.device()) {
        return cuda::gru_backward(gpu, of, saved, y, grad);
    }
    if !of.x.device().is_cpu() {
        return portable::gru_backward(of, saved, y, grad);
    }
    with_element!(of.x.dtype(), T => backward::<T>(of, saved, y, grad))
}

/// Completes the gates; the states, and what `r` is multiplied with.
fn forward<T: Lane<Acc: Gate>>(of: &Sequence, gates: &Tensor) -> Result<(Tensor, Tensor)> {
    let dims = of.dims()?;
    let Dims { batch, steps, hidden: n, .. } = dims;
    let (weight, mut h) =
        (WidenedWeight::<T::Acc>::of(&of.w_hh.t()?, dims)?, widened::<T::Acc>(&of.h0)?);
    let bias = match &of.b_hh {
        Some(bias) => widened(&bias.to_dtype(of.wide())?)?,
        None => vec![T::Acc::of(0.0); 3 * n],
    };
    let mut of_h = vec![T::Acc::of(0.0); batch * 3 * n];
    let mut y = vec![T::default(); batch * steps * n];
    let mut inner = y.clone();
    if y.is_empty() {
        let dims = [batch, steps, n];
        return Ok((tensor(y, &dims), tensor(inner, &dims))); // candle does not write to these
    }
    in_place::write(gates, |gates: &mut [T::Acc]| {
        for step in dims.order() {
            of_h.chunks_exact_mut(3 * n).for_each(|row| row.copy_from_slice(&bias));
            add_recurrent(&h, &weight, (&mut of_h, 3 * n), 0, Dims { steps: 1, ..dims });
            let products = gates.chunks_mut(steps * 3 * n).zip(of_h.chunks(3 * n));
            let outputs = y.chunks_mut(steps * n).zip(inner.chunks_mut(steps * n));
            let rows = products.zip(h.chunks_mut(n)).zip(outputs);
            for_each_row(dims, false, rows, |(((gates, of_h), h), (y, inner))| {
                let gates = &mut gates[step * 3 * n..][..3 * n];
                let (y, inner) = (&mut y[step * n..][..n], &mut inner[step * n..][..n]);
                vectorise_in::<T::Acc>(
                    #[inline(always)]
                    || {
                        unit(gates, of_h, h);
                        T::narrow(h, y);
                        T::narrow(&of_h[2 * n..], inner);
                    },
                );
            });
        }
    })?;
    let dims = [batch, steps, n];
    Ok((tensor(y, &dims), tensor(inner, &dims)))
}

#[inline(always)]
fn unit<A: Gate>(gates: &mut [A], of_h: &[A], h: &mut [A]) {
    let size = h.len();
    let ([r, z, n], [r_h, z_h, n_h]) = (runs_mut(gates, size), runs(of_h, size));
    for k in 0..size {
        r[k] += r_h[k];
        z[k] += z_h[k];
        n[k] += r[k].sigmoid() * n_h[k];
        let new = n[k].tangent();
        h[k] = new + z[k].sigmoid() * (h[k] - new);
    }
}

fn backward<T: Lane<Acc: Gate>>(
    of: &Sequence,
    saved: &Saved,
    y: &Tensor,
    grad: &Tensor,
) -> Result<GateGradients> {
    let dims = of.dims()?;
    let Dims { batch, steps, hidden: n, .. } = dims;
    let (weight, h0) = (WidenedWeight::<T::Acc>::of(&of.w_hh, dims)?, of.h0.contiguous()?);
    let _held = hold([&h0, &saved.gates, y, &saved.inner, grad]);
    let (h0, gates) = (&*Elements::<T>::of(&h0)?, &*Elements::<T>::of(&saved.gates)?);
    let (y, inner) = (&*Elements::<T>::of(y)?, &*Elements::<T>::of(&saved.inner)?);
    let grad = &*Elements::<T>::of(grad)?;
    let zeros = |len| vec![T::Acc::of(0.0); len];
    let (mut of_x, mut of_h) = (zeros(batch * steps * 3 * n), zeros(batch * steps * 3 * n));
    let mut dh = zeros(batch * n);
    for step in dims.order().rev() {
        let gate_gradients = of_x.chunks_mut(steps * 3 * n).zip(of_h.chunks_mut(steps * 3 * n));
        let rows = dh.chunks_mut(n).zip(gate_gradients).enumerate();
        for_each_row(dims, false, rows, |(row, (dh, (of_x, of_h)))| {
            let at = |step| (row * steps + step) * n;
            let before = match dims.before(step) {
                Some(before) => &y[at(before)..][..n],
                None => &h0[row * n..][..n],
            };
            let [r, z, new] = runs(&gates[3 * at(step)..], n);
            let values = [r, z, new, &inner[at(step)..][..n], before, &grad[at(step)..][..n]];
            let [of_x, of_h] =
                [of_x, of_h].map(|gate_gradients| &mut gate_gradients[step * 3 * n..][..3 * n]);
            vectorise_in::<T::Acc>(
                #[inline(always)]
                || unit_backward(values, dh, of_x, of_h),
            );
        });
        recurrent_gradient((&of_h, 3 * n), &weight, &mut dh, step, true, dims);
    }
    let gate_gradients =
        [of_x, of_h].map(|gate_gradients| tensor(gate_gradients, &[batch * steps, 3 * n]));
    let [of_x, of_h] = gate_gradients;
    Ok(GateGradients { of_x, of_h, h0: tensor(dh, &[batch, n]) })
}

#[inline(always)]
fn unit_backward<T: Lane<Acc: Gate>>(
    values: [&[T]; 6],
    dh: &mut [T::Acc],
    of_x: &mut [T::Acc],
    of_h: &mut [T::Acc],
) {
    let (size, one) = (dh.len(), T::Acc::of(1.0));
    let [r, z, n, inner, before, grad] = values.map(|v| &v[..size]);
    let ([dr, dz, dn], [dr_h, dz_h, dn_h]) = (runs_mut(of_x, size), runs_mut(of_h, size));
    for k in 0..size {
        let (r, z) = (r[k].widened().sigmoid(), z[k].widened().sigmoid());
        let n = n[k].widened().tangent();
        let gradient = dh[k] + grad[k].widened();
        dz[k] = gradient * (before[k].widened() - n) * z * (one - z);
        dn[k] = gradient * (one - z) * (one - n * n);
        dr[k] = dn[k] * inner[k].widened() * r * (one - r);
        (dr_h[k], dz_h[k], dn_h[k]) = (dr[k], dz[k], dn[k] * r);
        dh[k] = gradient * z;
    }
}
