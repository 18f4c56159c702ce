//! What the benchmarks share: an allocator, networks, a place in the middle of one, and the comparison
//! with PyTorch in turns.

pub mod candle;
pub mod cifar;
pub mod list;
pub mod measure;
pub mod networks;
pub mod precision;
pub mod table;
pub mod torch;
pub mod workload;
pub mod zoo;

use candle_amp::autograd::{Backward, Gradient, Operator, apply};
use candle_amp::{Cast, Op};
use candle_core::{DType, Device, Result, Shape, Tensor, Var};

/// What the README advises: one that keeps memory for the next step.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Normal values on the CPU.
///
/// # Errors
///
/// What drawing them meets.
pub fn normal(shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
    Tensor::randn(0f32, 1.0, shape, &Device::Cpu)?.to_dtype(dtype)
}

/// The values of `x` as an earlier layer's output: tracked, with a gradient in its own dtype that
/// nobody collects.
///
/// A variable would not do: its gradient is F32 and kept, and a layer in a network has neither.
///
/// # Errors
///
/// What copying `x` meets.
pub fn tracked(x: &Tensor) -> Result<Tensor> {
    let anchor = Var::zeros(1, DType::F32, x.device())?;
    let x = apply(Earlier(x.clone()), &[&anchor])?;
    // A loss that never goes back, so that those that do leave `x` to the next.
    std::mem::forget(loss_with(&[&x], Vec::new())?);
    Ok(x)
}

struct Earlier(Tensor);

impl Operator for Earlier {
    type Saved = ();

    fn op(&self) -> Op {
        Op::user("earlier", Cast::Keep)
    }

    fn forward(&self, _: &[Tensor]) -> Result<(Tensor, ())> {
        // The graph takes the storage of what is returned here.
        Ok((self.0.copy()?, ()))
    }

    fn backward(&self, _: &Backward<'_, ()>) -> Result<Vec<Option<Gradient>>> {
        Ok(vec![Some(Gradient::owned(Tensor::zeros(1, DType::F32, self.0.device())?))])
    }
}

/// A loss whose gradient in each of `inputs` is the one given, computed by nobody.
///
/// # Errors
///
/// What joining the graph meets.
pub fn loss_with(inputs: &[&Tensor], gradients: Vec<Tensor>) -> Result<Tensor> {
    apply(Later(gradients), inputs)
}

struct Later(Vec<Tensor>);

impl Operator for Later {
    type Saved = ();

    fn op(&self) -> Op {
        Op::user("later", Cast::Keep)
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, ())> {
        let device = inputs.first().map_or(&Device::Cpu, Tensor::device);
        Ok((Tensor::zeros((), DType::F32, device)?, ()))
    }

    fn backward(&self, _: &Backward<'_, ()>) -> Result<Vec<Option<Gradient>>> {
        Ok(self.0.iter().map(|gradient| Some(Gradient::shared(gradient.clone()))).collect())
    }
}
