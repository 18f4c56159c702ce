//! Which strides BLAS reads.

use candle_core::{Result, Tensor};

use crate::error::bail;
use crate::kernels::cuda::Matrices;
use crate::kernels::elementwise::plain;

/// How the matrices of a tensor `(…, rows, columns)` lie.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Layout {
    pub(super) transposed: bool,
    pub(super) ld: usize,
    pub(super) stride: usize,
}

impl Layout {
    /// `None` where neither rows nor columns follow each other, or matrices do not in one step.
    fn of(tensor: &Tensor) -> Option<Self> {
        let (batch, &[rows, columns]) = tensor.dims().split_last_chunk::<2>()?;
        let (batch_strides, &[down, right]) = tensor.stride().split_last_chunk::<2>()?;
        // With one row or column its stride is arbitrary, and BLAS rejects some values.
        let (transposed, ld) = match (down, right) {
            (_, 1) if rows <= 1 => (false, columns.max(1)),
            (down, 1) if down >= columns => (false, down),
            (1, _) if columns <= 1 => (true, rows.max(1)),
            (1, right) if right >= rows => (true, right),
            (_, _) if rows <= 1 && columns <= 1 => (false, 1),
            (down, _) if columns <= 1 && down > 0 => (false, down),
            (_, right) if rows <= 1 && right > 0 => (true, right),
            _ => return None,
        };
        let mut steps = batch.iter().zip(batch_strides).rev().filter(|&(&size, _)| size > 1);
        let Some((&size, &stride)) = steps.next() else {
            return Some(Self { transposed, ld, stride: 0 });
        };
        let mut next = size * stride;
        for (&size, &outer) in steps {
            if outer != next {
                return None;
            }
            next *= size;
        }
        Some(Self { transposed, ld, stride })
    }
}

/// A tensor that BLAS can read, and how; copied only where its strides are none for it.
pub(super) fn readable(tensor: &Tensor) -> Result<(Tensor, Layout)> {
    if let Some(layout) = Layout::of(tensor) {
        return Ok((tensor.detach(), layout));
    }
    let copy = plain(tensor)?;
    let copy = if Layout::of(&copy).is_some() { copy } else { copy.force_contiguous()? };
    let Some(layout) = Layout::of(&copy) else { bail!("no product of {:?}", tensor.layout()) };
    Ok((copy, layout))
}

impl Layout {
    pub(super) fn of_matrices(self, tensor: &Tensor) -> Matrices<'_> {
        let Self { transposed, ld, stride } = self;
        Matrices { tensor, transposed, ld, stride }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    fn layout(transposed: bool, ld: usize, stride: usize) -> Option<Layout> {
        Some(Layout { transposed, ld, stride })
    }

    #[test]
    fn views_are_read_where_they_lie() -> Result<()> {
        let x = Tensor::zeros((2, 3, 4, 5), DType::F32, &Device::Cpu)?;
        assert_eq!(Layout::of(&x), layout(false, 5, 20));
        assert_eq!(Layout::of(&x.t()?), layout(true, 5, 20));
        assert_eq!(Layout::of(&x.narrow(3, 1, 2)?), layout(false, 5, 20));
        assert_eq!(Layout::of(&x.narrow(2, 1, 2)?), layout(false, 5, 20));
        // Heads that lie within a row of all heads: rows are far apart, and so are samples.
        let heads = x.transpose(1, 2)?;
        assert_eq!(Layout::of(&heads), None);
        assert_eq!(Layout::of(&heads.narrow(0, 0, 1)?), layout(false, 20, 5));
        // One matrix for all.
        let shared = x.narrow(0, 0, 1)?.narrow(1, 0, 1)?.broadcast_as((2, 3, 4, 5))?;
        assert_eq!(Layout::of(&shared), layout(false, 5, 0));
        // One row for all rows.
        let row = x.narrow(2, 0, 1)?.broadcast_as((2, 3, 4, 5))?;
        assert_eq!(Layout::of(&row), None);
        // Every second element.
        assert_eq!(Layout::of(&x.permute((0, 2, 3, 1))?.narrow(3, 0, 2)?), None);
        Ok(())
    }

    #[test]
    fn one_row_or_column_has_any_stride() -> Result<()> {
        let x = Tensor::zeros((4, 5), DType::F32, &Device::Cpu)?;
        assert_eq!(Layout::of(&x.narrow(0, 1, 1)?), layout(false, 5, 0));
        assert_eq!(Layout::of(&x.narrow(1, 1, 1)?), layout(false, 5, 0));
        assert_eq!(Layout::of(&x.narrow(1, 1, 1)?.t()?), layout(true, 5, 0));
        assert_eq!(Layout::of(&x.narrow(0, 1, 1)?.t()?), layout(true, 5, 0));
        Ok(())
    }
}
