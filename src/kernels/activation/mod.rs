//! Pointwise operators and their derivatives, and the gated form of one.
//!
//! Computed in F32 (F64 for F64) from the input as stored, rounded once. `table.rs` lists the operators.

mod cpu;
mod cuda;
mod functions;
mod lookup;
mod math;
mod portable;
pub(crate) mod prelu;
pub(crate) mod table;
#[cfg(test)]
mod tests;

use candle_core::{Result, Tensor};

pub(crate) use math::Math;

use crate::kernels::cuda::Gpu;
use crate::kernels::elementwise::plain;
#[cfg(test)]
use tests::{FRAC_2_SQRT_PI, INF, LN_2, NAN};

macro_rules! operators {
    ([] $(
        $(#[$doc:meta])* $name:ident => $variant:ident (
            $($parameter:ident: $type:ty = $sample:literal),*
        ), $policy:tt, { $($facts:tt)* }, $arithmetic:tt;
    )*) => {
        /// A pointwise operator: a row of the table, with its parameters.
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub(crate) enum Pointwise {
            $($(#[$doc])* $variant { $($parameter: f64),* },)*
        }

        impl Pointwise {
            /// The number of its row, which is that of its line in `activation.cu`, and its parameters, which are
            /// two at most.
            fn number(self) -> (i32, [f64; 2]) {
                enum RowNumber { $($variant),* }
                let mut parameters = [0.0; 2];
                let row = match self {
                    $(Self::$variant { $($parameter),* } => {
                        let given: &[f64] = &[$($parameter),*];
                        parameters.iter_mut().zip(given).for_each(|(to, from)| *to = *from);
                        RowNumber::$variant
                    })*
                };
                (row as i32, parameters)
            }
        }

        #[cfg(test)]
        const ROWS: &[tests::TableRow] = &[$(
            tests::row!($variant { $($parameter: $sample),* } $($facts)*),
        )*];
    };
}
table::pointwise!(operators []);

/// `function(x)`, in the dtype of `x`.
pub(crate) fn value(function: Pointwise, x: &Tensor) -> Result<Tensor> {
    let x = plain(x)?;
    if let Some(gpu) = Gpu::of(x.device()) {
        return cuda::value(gpu, function, &x);
    }
    if x.device().is_cpu() { cpu::value(function, &x) } else { portable::value(function, &x) }
}

/// The gradient of [`value`]: `function'(x) * grad`, in the dtype of `x`, which `grad` has too.
pub(crate) fn derivative(function: Pointwise, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let (x, grad) = (plain(x)?, plain(grad)?);
    if let Some(gpu) = Gpu::of(x.device()) {
        return cuda::derivative(gpu, function, &x, &grad);
    }
    if x.device().is_cpu() {
        cpu::derivative(function, &x, &grad)
    } else {
        portable::derivative(function, &x, &grad)
    }
}

/// [`derivative`] in the place of `grad`, of the shape and in the dtype of `x`.
pub(crate) fn derivative_assign(function: Pointwise, grad: Tensor, x: &Tensor) -> Result<Tensor> {
    if grad.elem_count() == 0 {
        return Ok(grad); // strides of 0, which candle takes for repeats
    }
    let x = plain(x)?;
    if let Some(gpu) = Gpu::of(x.device()).filter(|_| grad.is_contiguous()) {
        cuda::derivative_over(gpu, function, &x, &grad, &grad)?;
        return Ok(grad);
    }
    if x.device().is_cpu() && grad.is_contiguous() {
        cpu::derivative_assign(function, &grad, &x)?;
        return Ok(grad);
    }
    derivative(function, &x, &grad)
}

/// `silu(a) * b` of the halves of the last dimension of `x (…, 2 n)`: `(…, n)`.
pub(crate) fn swiglu(x: &Tensor) -> Result<Tensor> {
    let x = plain(x)?;
    if let Some(gpu) = Gpu::of(x.device()) {
        return cuda::swiglu(gpu, &x);
    }
    if x.device().is_cpu() { cpu::swiglu(&x) } else { portable::swiglu(&x) }
}

/// The gradient of [`swiglu`], of the shape and in the dtype of `x`, which `grad` has too.
pub(crate) fn swiglu_backward(x: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let (x, grad) = (plain(x)?, plain(grad)?);
    if let Some(gpu) = Gpu::of(x.device()) {
        return cuda::swiglu_backward(gpu, &x, &grad);
    }
    if x.device().is_cpu() {
        cpu::swiglu_backward(&x, &grad)
    } else {
        portable::swiglu_backward(&x, &grad)
    }
}

/// The dtype and dimensions of half of the last dimension.
fn half_dims(x: &Tensor) -> Vec<usize> {
    let mut dims = x.dims().to_vec();
    if let Some(last) = dims.last_mut() {
        *last /= 2;
    }
    dims
}
