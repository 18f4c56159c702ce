//! Rotary position embedding.

use candle_core::{Result, Tensor};

use super::check::{check_operand, shape_error};
use crate::Op;
use crate::autograd::{Backward, Gradient, Operator, apply};
use crate::kernels::rope::{self as kernel, Form};

/// Turns pairs of elements, `i` and `i + d / 2`, by an angle of their position.
///
/// # Shapes
///
/// `x (b, h, t, d)`, `cos` and `sin` `(positions, d / 2)`, or `(b, positions, d / 2)` for positions
/// of each batch its own → that of `x`. Of at least `t` positions, the first `t` are used.
///
/// # Precision
///
/// `x` in any floating-point dtype, which the result has too; `cos` and `sin` in any, best in
/// `F32`, and autocast leaves them alone. Products and sums in `F32`, rounded once. The gradient of
/// `x` is turned back by the same angles; `cos` and `sin` are constants and get none.
///
/// # Errors
///
/// Shapes, dtypes or devices that do not fit.
///
/// # Examples
///
/// A quarter turn:
///
/// ```
/// use candle_amp::ops;
/// use candle_core::{Device, Tensor};
///
/// let x = Tensor::new(&[[[[1f32, 2., 3., 4.]]]], &Device::Cpu)?;
/// let (cos, sin) = (Tensor::zeros((1, 2), x.dtype(), x.device())?, Tensor::new(&[[1f32, 1.]], x.device())?);
/// let turned = |y: Tensor| y.flatten_all()?.to_vec1::<f32>();
/// assert_eq!(turned(ops::rope(&x, &cos, &sin)?)?, [-3., -4., 1., 2.]);
/// assert_eq!(turned(ops::rope_i(&x, &cos, &sin)?)?, [-2., 1., -4., 3.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// Su et al., [RoFormer](https://arxiv.org/abs/2104.09864), in the layout of GPT-NeoX and Llama;
/// `candle_nn::rotary_emb::rope`, which gives no gradient.
pub fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    run(x, cos, sin, Form { adjacent: false, positions_first: false })
}

/// As [`rope`], with pairs of neighbours, `2i` and `2i + 1`, as the paper has them.
pub fn rope_i(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    run(x, cos, sin, Form { adjacent: true, positions_first: false })
}

/// As [`rope`], of `x (b, t, h, d)`.
pub fn rope_thd(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    run(x, cos, sin, Form { adjacent: false, positions_first: true })
}

fn run(x: &Tensor, cos: &Tensor, sin: &Tensor, form: Form) -> Result<Tensor> {
    apply(Rope { cos: cos.detach(), sin: sin.detach(), form }, &[x])
}

struct Rope {
    cos: Tensor,
    sin: Tensor,
    form: Form,
}

impl Operator for Rope {
    type Saved = ();

    fn op(&self) -> Op {
        Op::Rope
    }

    fn reads(&self, _input: usize, _wanted: &[bool]) -> bool {
        false
    }

    fn captured(&self, _in_backward: bool) -> Vec<&Tensor> {
        vec![&self.cos, &self.sin]
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, ())> {
        let x = &inputs[0];
        check_operand(self.op(), x, "x", x, false)?;
        let (b, t, d) = match *x.dims() {
            [b, t, _, d] if self.form.positions_first && d % 2 == 0 => (b, t, d),
            [b, _, t, d] if !self.form.positions_first && d % 2 == 0 => (b, t, d),
            _ => {
                let order = if self.form.positions_first { "(b, t, h, d)" } else { "(b, h, t, d)" };
                return shape_error(self.op(), "x", x, format!("{order}, d even"));
            }
        };
        for (name, angles) in [("cos", &self.cos), ("sin", &self.sin)] {
            check_operand(self.op(), x, name, angles, false)?;
            let fits = match *angles.dims() {
                [positions, pairs] => positions >= t && pairs == d / 2,
                [batch, positions, pairs] => batch == b && positions >= t && pairs == d / 2,
                _ => false,
            };
            if !fits || angles.dims() != self.cos.dims() {
                let pairs = d / 2;
                let expected = format!(
                    "(positions, {pairs}) or ({b}, positions, {pairs}), {t} positions at least, \
                     for both cos and sin"
                );
                return shape_error(self.op(), name, angles, expected);
            }
        }
        Ok((kernel::rotate(x, &self.cos, &self.sin, self.form, false, x.dtype())?, ()))
    }

    fn backward(&self, ctx: &Backward<'_, ()>) -> Result<Vec<Option<Gradient>>> {
        let dx = ctx.wants[0]
            .map(|out| kernel::rotate(ctx.gradient, &self.cos, &self.sin, self.form, true, out));
        Ok(vec![dx.transpose()?.map(Gradient::owned)])
    }
}
