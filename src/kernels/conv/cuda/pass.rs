//! One pass of a convolution on a GPU: its operands and dtypes, and what its algorithms give to products and kernels.

use candle_core::{DType, Result, Tensor};

use crate::kernels::choice::cudnn::cudnn_f32_weight_gradients;
use crate::kernels::conv::geometry::Geometry;
use crate::kernels::conv::shape::Shape;
use crate::kernels::cuda::{Gpu, Matrices, PassKind};
use crate::kernels::elementwise::add_assign;

/// Bytes of columns at a time, unless a single image has more.
pub(super) const WORKSPACE: usize = 256 << 20;

/// One pass, and all that its algorithms need to know.
pub(super) struct CudaPass<'a> {
    pub(super) gpu: &'a Gpu,
    pub(super) kind: PassKind,
    pub(super) shape: &'a Shape,
    /// What the pass reads, as [`super::operands`] makes it: `x` or `grad`, and the weight; in wgrad `x` and `grad`.
    pub(super) operands: [&'a Tensor; 2],
    /// A number for each channel of the images that the pass writes, contiguous and in `wide`.
    pub(super) bias: Option<&'a Tensor>,
    /// The dtype of the arithmetic.
    pub(super) wide: DType,
    pub(super) out: DType,
}

impl CudaPass<'_> {
    pub(super) fn result_dims(&self) -> [usize; 4] {
        match self.kind {
            PassKind::Forward => self.shape.out_dims(),
            PassKind::Dgrad => self.shape.input_dims(),
            PassKind::Wgrad => self.shape.weight_dims(),
        }
    }

    /// What a kernel that reads the operands writes: `out` if they have that dtype, else `wide`.
    pub(super) fn near_dtype(&self) -> DType {
        if self.out == self.operands[0].dtype() { self.out } else { self.wide }
    }

    /// What a product of the operands writes: the same, but what a bias is added to later may not be rounded.
    pub(super) fn product_dtype(&self) -> DType {
        if self.bias.is_none() { self.near_dtype() } else { self.wide }
    }

    /// What cuDNN writes: the same as a product. But a weight's gradient is in the operands' dtype even if `out`
    /// is wider, in one pass over them, unless it is to be exact.
    pub(super) fn cudnn_dtype(&self) -> DType {
        let dtype = self.operands[0].dtype();
        match self.kind {
            PassKind::Wgrad if self.out != dtype && cudnn_f32_weight_gradients() => self.wide,
            PassKind::Wgrad => dtype,
            _ => self.product_dtype(),
        }
    }

    /// What a kernel that moves products into place, and may add a bias, writes: `out`, but `wide` if either is F64.
    pub(super) fn moved_dtype(&self) -> DType {
        if self.wide == DType::F32 && self.out != DType::F64 { self.out } else { self.wide }
    }
}

/// The sum in `wide` of what `write` makes of each tile, of these dimensions.
pub(super) fn sum_of_tiles<T>(
    pass: &CudaPass<'_>,
    dims: &[usize],
    tiles: impl Iterator<Item = T>,
    write: impl Fn(T, &Tensor) -> Result<()>,
) -> Result<Tensor> {
    let CudaPass { gpu, wide, .. } = *pass;
    let mut sum: Option<Tensor> = None;
    for tile in tiles {
        let part = match &sum {
            None => gpu.empty(dims, wide)?,
            Some(_) => gpu.scratch(2, dims.iter().product(), wide)?.reshape(dims)?,
        };
        write(tile, &part)?;
        // One tile after the other.
        sum = Some(match sum {
            None => part,
            Some(sum) => add_assign(sum, &part)?,
        });
    }
    sum.map_or_else(|| gpu.zeros(dims, wide), Ok)
}

/// Matrices whose rows lie `ld` elements apart, and which are `stride` elements apart.
pub(super) fn rows(tensor: &Tensor, ld: usize, stride: usize) -> Matrices<'_> {
    Matrices { tensor, transposed: false, ld, stride }
}

/// The sizes in the order of the kernels' parameters.
pub(super) fn sizes(shape: &Shape) -> [usize; 12] {
    let Geometry { stride, padding: (above, left), dilation, .. } = shape.geometry;
    let Shape { c_in, c_out, height, width, out_height, out_width, .. } = *shape;
    let (kh, kw) = (shape.kernel_height, shape.kernel_width);
    [c_in, c_out, height, width, out_height, out_width, kh, kw, stride, above, left, dilation]
}
