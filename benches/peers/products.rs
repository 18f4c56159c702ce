//! Matrix products.

use anyhow::Result;
use candle_amp::{no_grad, ops};
use candle_amp_benches::measure::{Runner, seconds};
use candle_amp_benches::normal;
use candle_core::DType;

/// `(m, k) × (k, n)`, or `(m, k)ᵀ × (m, n)`, the transposed one a view; in and out of one dtype.
pub(crate) fn gemm([m, k, n]: [usize; 3], weight_gradient: bool, dtype: DType) -> Result<Runner> {
    let lhs = normal((m, k), dtype)?;
    let lhs = if weight_gradient { lhs.t()? } else { lhs };
    let rhs = normal((if weight_gradient { m } else { k }, n), dtype)?;
    Ok(Box::new(move || {
        seconds(|| {
            no_grad(|| ops::matmul(&lhs, &rhs))?;
            Ok(())
        })
    }))
}
