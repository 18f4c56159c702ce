//! candle's nodes of one element: what candle adds up in place of gradients.

use std::sync::Arc;

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, DType, Layout, MetalStorage, Result, Shape, Tensor,
};

use crate::kernels::cuda;

/// The shape of tokens, which no other tensor is likely to have.
pub(super) const TOKEN_SHAPE: [usize; 6] = [1; 6];

/// Implements one of candle's custom ops, with one element for a result, for a type with `name` and `backward`.
macro_rules! one_element_op {
    ($op:ty, $trait:ident, ($($s:ident $l:ident),*), $grads:ty) => {
        impl $trait for $op {
            fn name(&self) -> &'static str {
                self.name()
            }
            fn cpu_fwd(&self, $($s: &CpuStorage, $l: &Layout),*) -> Result<(CpuStorage, Shape)> {
                let _ = ($($s, $l),*);
                super::marker::on_cpu()
            }
            fn cuda_fwd(&self, $($s: &CudaStorage, $l: &Layout),*) -> Result<(CudaStorage, Shape)> {
                let _ = ($($l),*,);
                super::marker::on_cuda([$($s),*][0])
            }
            fn metal_fwd(&self, $($s: &MetalStorage, $l: &Layout),*) -> Result<(MetalStorage, Shape)> {
                let _ = ($($l),*,);
                super::marker::on_metal([$($s),*][0])
            }
            fn bwd(&self, $($s: &Tensor),*, _: &Tensor, _: &Tensor) -> Result<$grads> {
                let mut gradients = self.backward(&[$($s),*])?.into_iter();
                Ok(($({ let _ = $s; gradients.next().flatten() }),*))
            }
        }
    };
}
pub(super) use one_element_op;

pub(super) fn on_cpu() -> Result<(CpuStorage, Shape)> {
    Ok((CpuStorage::F32(vec![0.0]), Shape::from(&TOKEN_SHAPE)))
}

pub(super) fn on_cuda(beside: &CudaStorage) -> Result<(CudaStorage, Shape)> {
    Ok((cuda::of_one(beside)?, Shape::from(&TOKEN_SHAPE)))
}

pub(super) fn on_metal(beside: &MetalStorage) -> Result<(MetalStorage, Shape)> {
    let shape = Shape::from(&TOKEN_SHAPE);
    Ok((beside.device().zeros_impl(&shape, DType::F32)?, shape))
}

/// The gradient of `token` in a pass of candle's own, which keeps `alive`.
pub(super) fn alive(token: &Tensor, alive: Arc<()>) -> Result<Tensor> {
    token.apply_op1(Alive { _alive: alive })
}

struct Alive {
    _alive: Arc<()>,
}

impl Alive {
    fn name(&self) -> &'static str {
        "token gradient"
    }

    fn backward(&self, args: &[&Tensor]) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![None; args.len()])
    }
}

one_element_op!(Alive, CustomOp1, (s1 l1), Option<Tensor>);
