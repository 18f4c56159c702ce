//! The steps on CUDA: each is a product, by cuBLAS, and one launch for all else.
//!
//! Steps share the buffers of states and products. The stream keeps their order, so no step allocates memory.

use candle_core::{DType, Result, Tensor};

use super::{Dims, GateGradients, Saved, Sequence};
use crate::kernels::cuda::{Gpu, Grid, Launch, Matrices, Product, Source, suffix};
use crate::kernels::elementwise::plain;
use crate::kernels::{add, in_dtype};

static SOURCE: Source = Source { name: "rnn", code: include_str!("rnn.cu") };

/// See [`super::lstm`]: the states. Completes `gates`, the projected inputs, `(b, t, 4 n)`, in place.
pub(super) fn lstm(gpu: &Gpu, of: &Sequence, c0: &Tensor, gates: &Tensor) -> Result<Tensor> {
    let steps = Steps::new(gpu, of, 4)?;
    let Dims { batch, steps: t, hidden, .. } = steps.dims;
    let y = gpu.empty((2, batch, t, hidden), steps.dtype)?;
    let [h, c] = [steps.empty(1)?, steps.empty(1)?];
    let product = steps.empty(4)?;
    let (mut h_before, mut c_before) = (steps.widened(&of.h0)?, steps.widened(c0)?);
    for step in steps.dims.order() {
        steps.project(&h_before, &product)?;
        let launch = steps.launch("lstm")?.parts(&y, 2, [0, 1])?.write_new(gates)?;
        let launch = launch.write_new(&h)?.write_new(&c)?.read(&c_before)?.read(&product)?;
        steps.run(launch.sizes(&[batch, t, hidden, step]))?;
        (h_before, c_before) = (h.clone(), c.clone());
    }
    Ok(y)
}

/// See [`super::lstm_backward`].
pub(super) fn lstm_backward(
    gpu: &Gpu,
    of: &Sequence,
    c0: &Tensor,
    gates: &Tensor,
    y: &Tensor,
    grad: &Tensor,
) -> Result<(GateGradients, Tensor)> {
    let steps = Steps::new(gpu, of, 4)?;
    let Dims { batch, steps: t, hidden, .. } = steps.dims;
    let (c0, grad) = (plain(c0)?, plain(grad)?);
    let gradients = steps.gradients()?;
    let [dh, dc] = [steps.zeros()?, steps.zeros()?];
    for step in steps.dims.order().rev() {
        let launch = steps.launch("lstm_backward")?.write_new(&gradients)?.write_new(&dc)?;
        let launch = launch.read(&dh)?.read(gates)?.parts(y, 2, [1])?.read(&c0)?;
        let launch = launch.parts(&grad, 2, [0, 1])?.sizes(&[batch, t, hidden, step]);
        steps.run(steps.before(launch, step))?;
        steps.back(&gradients, step, &dh)?;
    }
    let gradients = gradients.reshape((batch * t, 4 * hidden))?;
    Ok((GateGradients { of_h: gradients.clone(), of_x: gradients, h0: dh }, dc))
}

/// See [`super::gru`]: the states, and what `r` is multiplied with. Completes `gates`, the projected inputs,
/// `(b, t, 3 n)`, in place.
pub(super) fn gru(gpu: &Gpu, of: &Sequence, gates: &Tensor) -> Result<(Tensor, Tensor)> {
    let steps = Steps::new(gpu, of, 3)?;
    let Dims { batch, steps: t, hidden, .. } = steps.dims;
    let outputs = || gpu.empty((batch, t, hidden), steps.dtype);
    let (y, inner) = (outputs()?, outputs()?);
    let (h, product) = (steps.empty(1)?, steps.empty(3)?);
    let bias = of.b_hh.as_ref().map(|bias| steps.widened(bias)).transpose()?;
    let mut h_before = steps.widened(&of.h0)?;
    for step in steps.dims.order() {
        steps.project(&h_before, &product)?;
        let launch = steps.launch("gru")?.write_new(&y)?.write_new(&inner)?.write_new(gates)?;
        let launch = launch.write_new(&h)?.read(&h_before)?.read(&product)?;
        let launch = launch.read_or_null(bias.as_ref())?;
        steps.run(launch.sizes(&[batch, t, hidden, step]))?;
        h_before = h.clone();
    }
    Ok((y, inner))
}

/// See [`super::gru_backward`].
pub(super) fn gru_backward(
    gpu: &Gpu,
    of: &Sequence,
    saved: &Saved,
    y: &Tensor,
    grad: &Tensor,
) -> Result<GateGradients> {
    let steps = Steps::new(gpu, of, 3)?;
    let Dims { batch, steps: t, hidden, .. } = steps.dims;
    let (h0, grad) = (plain(&of.h0)?, plain(grad)?);
    let [of_x, of_h] = [steps.gradients()?, steps.gradients()?];
    let [kept, product] = [steps.zeros()?, steps.zeros()?];
    for step in steps.dims.order().rev() {
        let launch = steps.launch("gru_backward")?.write_new(&of_x)?.write_new(&of_h)?;
        let launch = launch.write_new(&kept)?.read(&product)?.read(&saved.gates)?;
        let launch = launch.read(&saved.inner)?.read(y)?.read(&h0)?.read(&grad)?;
        let launch = launch.sizes(&[batch, t, hidden, step]);
        steps.run(steps.before(launch, step))?;
        steps.back(&of_h, step, &product)?;
    }
    let rows = (batch * t, 3 * hidden);
    let (of_x, of_h) = (of_x.reshape(rows)?, of_h.reshape(rows)?);
    Ok(GateGradients { of_x, of_h, h0: add(&kept, &product)? })
}

/// What all steps of a sequence share.
struct Steps<'a> {
    gpu: &'a Gpu,
    dims: Dims,
    gates: usize,
    dtype: DType,
    wide: DType,
    /// `w_hh` in the dtype of the arithmetic, `(gates n, n)`.
    weight: Tensor,
}

impl<'a> Steps<'a> {
    fn new(gpu: &'a Gpu, of: &Sequence, gates: usize) -> Result<Self> {
        let (dims, dtype, wide) = (of.dims()?, of.x.dtype(), of.wide());
        let weight = plain(&in_dtype(&of.w_hh, wide)?)?;
        Ok(Self { gpu, dims, gates, dtype, wide, weight })
    }

    fn widened(&self, x: &Tensor) -> Result<Tensor> {
        plain(&in_dtype(x, self.wide)?)
    }

    /// `(batch, parts n)`: so many numbers for each unit, of one step.
    fn empty(&self, parts: usize) -> Result<Tensor> {
        self.gpu.empty((self.dims.batch, parts * self.dims.hidden), self.wide)
    }

    /// Gradients of a state: zeros, as backward begins with the last step.
    fn zeros(&self) -> Result<Tensor> {
        self.gpu.zeros((self.dims.batch, self.dims.hidden), self.wide)
    }

    /// Gradients of the gates of all steps.
    fn gradients(&self) -> Result<Tensor> {
        let Dims { batch, steps, hidden, .. } = self.dims;
        self.gpu.empty((batch, steps, self.gates * hidden), self.wide)
    }

    /// `out (b, gates n) = states (b, n) × weightᵀ`
    fn project(&self, states: &Tensor, out: &Tensor) -> Result<()> {
        let (n, columns) = (self.dims.hidden, self.gates * self.dims.hidden);
        let weight = Matrices { transposed: true, ..rows(&self.weight, n) };
        self.multiply([self.dims.batch, n, columns], rows(states, n), weight, rows(out, columns))
    }

    /// `out (b, n) = gradients (b, gates n) × weight`, of the gradients of one step.
    fn back(&self, gradients: &Tensor, step: usize, out: &Tensor) -> Result<()> {
        let (n, columns) = (self.dims.hidden, self.gates * self.dims.hidden);
        let of_step = gradients.narrow(1, step, 1)?;
        // A single row has no distance to the next, which BLAS might not be able to count.
        let ld = if self.dims.batch == 1 { columns } else { self.dims.steps * columns };
        let of_step = rows(&of_step, ld);
        self.multiply([self.dims.batch, columns, n], of_step, rows(&self.weight, n), rows(out, n))
    }

    fn multiply(
        &self,
        [m, k, n]: [usize; 3],
        lhs: Matrices<'_>,
        rhs: Matrices<'_>,
        out: Matrices<'_>,
    ) -> Result<()> {
        self.gpu.product(&Product { batch: 1, m, k, n, lhs, rhs, out })
    }

    fn launch(&self, name: &'static str) -> Result<Launch> {
        self.gpu.launch(&SOURCE, [name, suffix(self.dtype)?])
    }

    /// Appends the step whose state this one started from, and whether there is none, but the state before all steps.
    fn before(&self, launch: Launch, step: usize) -> Launch {
        let before = self.dims.before(step);
        launch.size(before.unwrap_or(step)).int(before.is_none().into())
    }

    /// A thread for each unit of the batch: every tensor of the launch has the units, steps and gates that `dims` says,
    /// and the kernel reaches no others.
    fn run(&self, launch: Launch) -> Result<()> {
        launch.run(Grid::over(self.dims.batch * self.dims.hidden, 1))
    }
}

/// One matrix, whose rows begin `ld` elements apart.
fn rows(tensor: &Tensor, ld: usize) -> Matrices<'_> {
    Matrices { tensor, transposed: false, ld, stride: 0 }
}
