//! Targets of class losses as U32, which is what kernels read.

use candle_core::{DType, Result, Tensor};

use super::class::ClassLoss;
use super::cuda;
use crate::error::bail;
use crate::kernels::contiguous;
use crate::kernels::cuda::Gpu;
use crate::kernels::embedding;

/// `targets`, U8, U32 or I64, as U32, and what there stands for `ignore_index`. A target that is no class is an error,
/// or, on a GPU, where nobody looks, the largest number.
pub(crate) fn class_targets(
    op: &str,
    targets: &Tensor,
    classes: usize,
    ignore_index: Option<i64>,
) -> Result<(Tensor, Option<u32>)> {
    /// Stands for an `ignore_index` that is no U32.
    const IGNORED: u32 = u32::MAX - 1;
    let fitting = ignore_index.and_then(|index| u32::try_from(index).ok());
    let outside = ignore_index.filter(|_| fitting.is_none() && targets.dtype() == DType::I64);
    if let (Some(gpu), Some(index)) = (Gpu::of(targets.device()), outside) {
        let targets = contiguous(targets)?;
        return Ok((cuda::targets(gpu, &targets, index, IGNORED)?, Some(IGNORED)));
    }
    if targets.dtype() != DType::I64 || targets.device().is_cuda() {
        return Ok((embedding::numbers(targets)?, fitting));
    }
    // Before the cast to U32, which would wrap a negative class around.
    let number = |(row, &class): (usize, &i64)| match u32::try_from(class) {
        _ if outside == Some(class) => Ok(IGNORED),
        Ok(number) if (number as usize) < classes || Some(number) == fitting => Ok(number),
        _ => bail!("{op}: the target of row {row} is {class}, expected {}", class_of(classes)),
    };
    let numbers =
        targets.to_vec1::<i64>()?.iter().enumerate().map(number).collect::<Result<_>>()?;
    let n = targets.dim(0)?;
    let numbers = Tensor::from_vec::<_, u32>(numbers, n, targets.device())?;
    Ok((numbers, outside.map(|_| IGNORED).or(fitting)))
}

/// What would do for a target.
fn class_of(classes: usize) -> String {
    format!(
        "one of {classes} classes, from 0; for rows that are not to count, PyTorch's -100, set the `ignore_index` of \
         `nn::CrossEntropyLoss` or `nn::NllLoss`"
    )
}

/// Every target is a class, or ignored.
pub(super) fn check_targets(op: &str, loss: &ClassLoss, targets: &Tensor) -> Result<()> {
    for (row, &target) in targets.to_vec1::<u32>()?.iter().enumerate() {
        if target as usize >= loss.classes && Some(target) != loss.ignored {
            let expected = class_of(loss.classes);
            bail!("{op}: the target of row {row} is {target}, expected {expected}")
        }
    }
    Ok(())
}
