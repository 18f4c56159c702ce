//! Writing into a tensor that exists: the one door to candle's mutable storage.

use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Tensor, bail};

use super::element::Element;

struct Write<F>(F);

impl<F: Fn(&mut CpuStorage, &Layout) -> Result<()>> InplaceOp1 for Write<F> {
    fn name(&self) -> &'static str {
        "write"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        (self.0)(storage, layout)
    }
}

/// Calls `f` with the elements of `dst`, a contiguous CPU tensor of dtype `T`.
///
/// The storage is locked meanwhile: `f` must not read it through another tensor.
pub(crate) fn write<T: Element>(dst: &Tensor, f: impl FnOnce(&mut [T])) -> Result<()> {
    let f = std::cell::Cell::new(Some(f));
    dst.inplace_op1(&Write(|storage: &mut CpuStorage, layout: &Layout| {
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("expected a contiguous tensor to write to, found {layout:?}")
        };
        let elements = &mut T::slice_mut(storage)?[start..end];
        if let Some(f) = f.take() {
            f(elements);
        }
        Ok(())
    }))
}
