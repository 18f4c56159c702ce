//! Rotary position embedding on CUDA: one launch of `rope.cu`, which also turns backwards for the gradient.
//!
//! The kernel reads `x` by its strides, so that heads in a fused projection are not copied first. It takes cosines and
//! sines in the dtype of `x` if both have it, else in the arithmetic's, to which others are cast. Threads take packs
//! where sizes, strides and addresses allow it, else pairs one by one.

use candle_core::{D, DType, Result, Tensor};

use super::form::Form;
use crate::error::bail;
use crate::kernels::accumulator;
use crate::kernels::cast;
use crate::kernels::cuda::{Gpu, Grid, Source, pack, suffix};
use crate::kernels::elementwise::cuda::in_dtype;
use crate::kernels::elementwise::plain;

static SOURCE: Source = Source { name: "rope", code: include_str!("rope.cu") };

/// See [`super::rotate`]; one launch.
pub(super) fn rotate(
    gpu: &Gpu,
    x: &Tensor,
    [cos, sin]: [&Tensor; 2],
    form: Form,
    back: bool,
    out: DType,
) -> Result<Tensor> {
    let same = [cos, sin].iter().all(|angles| angles.dtype() == x.dtype());
    let angles = if same { x.dtype() } else { accumulator(x.dtype()) };
    let near = |t: &Tensor| if t.dtype() == angles { plain(t) } else { cast(t, angles) };
    let (cos, sin) = (near(cos)?, near(sin)?);
    let (b, first, second, d) = x.dims4()?;
    let &[x0, x1, x2, x3] = x.stride() else { bail!("expected four dimensions") };
    let (half, pairs) = (d / 2, b * first * second * (d / 2));
    in_dtype(x.dtype(), out, |out| {
        let y = gpu.empty(x.shape(), out)?;
        let each = pack(x.dtype(), out).max(pack(x.dtype(), angles));
        let packed = half.is_multiple_of(each)
            && x3 == 1
            && [x0, x1, x2].iter().all(|stride| stride.is_multiple_of(each));
        let name = ["rotate", suffix(x.dtype())?, suffix(angles)?, suffix(out)?];
        // Each thread has pairs of a row of `x` and `y`, of `b * first * second` rows of `2 * half`,
        // and their angles, of `positions` rows of `half`, which are no fewer than those of `x`.
        gpu.launch(&SOURCE, name)?
            .write_new(&y)?
            .read_strided(x)?
            .read(&cos)?
            .read(&sin)?
            .sizes(&[pairs, first, second, half, x0, x1, x2, x3, cos.dim(D::Minus2)?])
            .int((cos.rank() == 3).into())
            .int(form.positions_first.into())
            .int(form.adjacent.into())
            .int(back.into())
            .int(packed.into())
            .run(Grid::over(pairs, if packed { each } else { 1 }))?;
        Ok(y)
    })
}
