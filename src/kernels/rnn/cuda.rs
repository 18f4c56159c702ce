//! The steps on CUDA: each is a product, by cuBLAS, and one launch for all else.
//!
//! Steps share the buffers of states and products. The stream keeps their order, so no step allocates memory.
//!
//! Products are in F32 (F64 for F64); those of BF16 in BF16, for the tensor cores, with F32 results. A launch writes what
//! the next product multiplies, the states or the gradients of one step, in that dtype: its `operand`.

use candle_core::{DType, Result, Tensor};

use super::gradients::{GateGradients, Saved};
use super::sequence::{Dims, Sequence};
use crate::kernels::cuda::{Gpu, Grid, Launch, Matrices, Product, Source, suffix};
use crate::kernels::elementwise::plain;
use crate::kernels::{add, in_dtype};

static SOURCE: Source = Source { name: "rnn", code: include_str!("rnn.cu") };

/// What a trace calls the steps on CUDA.
pub(super) const CELL_KERNEL: &str = "cublas, cell kernel";

/// See [`super::lstm`]: the states. Completes `gates`, the projected inputs, `(b, t, 4 n)`, in place.
pub(super) fn lstm(gpu: &Gpu, of: &Sequence, c0: &Tensor, gates: &Tensor) -> Result<Tensor> {
    let steps = Steps::new(gpu, of, 4)?;
    let Dims { batch, steps: t, hidden, .. } = steps.dims;
    let y = gpu.empty((2, batch, t, hidden), steps.dtype)?;
    let (operand, c, product) = (steps.operand(1)?, steps.empty(1)?, steps.empty(4)?);
    let mut before = [plain_in(&of.h0, steps.multiplied)?, plain_in(c0, steps.wide)?];
    for step in steps.dims.order() {
        steps.project(&before[0], &product)?;
        let launch = steps.launch("lstm")?.parts(&y, 2, [0, 1])?.write_new(gates)?;
        let launch = launch.write_new(&operand)?.write_new(&c)?.read(&before[1])?.read(&product)?;
        steps.run(launch.sizes(&[batch, t, hidden, step]))?;
        before = [operand.clone(), c.clone()];
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
    let (gradients, operand) = (steps.gradients()?, steps.operand(4)?);
    let [dh, dc] = [steps.zeros()?, steps.zeros()?];
    for step in steps.dims.order().rev() {
        let launch = steps.launch("lstm_backward")?.write_new(&gradients)?.write_new(&operand)?;
        let launch = launch.write_new(&dc)?.read(&dh)?.read(gates)?.parts(y, 2, [1])?;
        let launch = launch.read(&c0)?.parts(&grad, 2, [0, 1])?;
        steps.run(steps.before(launch.sizes(&[batch, t, hidden, step]), step))?;
        steps.back(&operand, &dh)?;
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
    let (operand, h, product) = (steps.operand(1)?, steps.empty(1)?, steps.empty(3)?);
    let bias = of.b_hh.as_ref().map(|bias| plain_in(bias, steps.wide)).transpose()?;
    let mut before = [plain_in(&of.h0, steps.multiplied)?, plain_in(&of.h0, steps.wide)?];
    for step in steps.dims.order() {
        steps.project(&before[0], &product)?;
        let launch = steps.launch("gru")?.write_new(&y)?.write_new(&inner)?.write_new(gates)?;
        let launch = launch.write_new(&operand)?.write_new(&h)?.read(&before[1])?.read(&product)?;
        let launch = launch.read_or_null(bias.as_ref())?;
        steps.run(launch.sizes(&[batch, t, hidden, step]))?;
        before = [operand.clone(), h.clone()];
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
    let (of_x, of_h, operand) = (steps.gradients()?, steps.gradients()?, steps.operand(3)?);
    let [kept, product] = [steps.zeros()?, steps.zeros()?];
    for step in steps.dims.order().rev() {
        let launch = steps.launch("gru_backward")?.write_new(&of_x)?.write_new(&of_h)?;
        let launch = launch.write_new(&operand)?.write_new(&kept)?.read(&product)?;
        let launch = launch.read(&saved.gates)?.read(&saved.inner)?.read(y)?.read(&h0)?;
        let launch = launch.read(&grad)?.sizes(&[batch, t, hidden, step]);
        steps.run(steps.before(launch, step))?;
        steps.back(&operand, &product)?;
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
    /// Of the arithmetic.
    wide: DType,
    /// Of what products multiply, as `Operand` in the source.
    multiplied: DType,
    /// `w_hh` in that dtype, `(gates n, n)`.
    weight: Tensor,
}

impl<'a> Steps<'a> {
    fn new(gpu: &'a Gpu, of: &Sequence, gates: usize) -> Result<Self> {
        let (dims, dtype, wide) = (of.dims()?, of.x.dtype(), of.wide());
        let multiplied = if dtype == DType::BF16 { dtype } else { wide };
        let weight = plain_in(&of.w_hh, multiplied)?;
        Ok(Self { gpu, dims, gates, dtype, wide, multiplied, weight })
    }

    /// `(batch, parts n)`: so many numbers for each unit, of one step.
    fn empty(&self, parts: usize) -> Result<Tensor> {
        self.gpu.empty((self.dims.batch, parts * self.dims.hidden), self.wide)
    }

    /// The same, of what a product multiplies.
    fn operand(&self, parts: usize) -> Result<Tensor> {
        self.gpu.empty((self.dims.batch, parts * self.dims.hidden), self.multiplied)
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

    /// `out (b, n) = gradients (b, gates n) × weight`
    fn back(&self, gradients: &Tensor, out: &Tensor) -> Result<()> {
        let (n, columns) = (self.dims.hidden, self.gates * self.dims.hidden);
        let (gradients, weight) = (rows(gradients, columns), rows(&self.weight, n));
        self.multiply([self.dims.batch, columns, n], gradients, weight, rows(out, n))
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

/// `x`, contiguous and in that dtype.
fn plain_in(x: &Tensor, dtype: DType) -> Result<Tensor> {
    plain(&in_dtype(x, dtype)?)
}

/// One matrix, whose rows begin `ld` elements apart.
fn rows(tensor: &Tensor, ld: usize) -> Matrices<'_> {
    Matrices { tensor, transposed: false, ld, stride: 0 }
}
