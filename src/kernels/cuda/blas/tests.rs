//! Products in captures.

use candle_core::{DType, Device, Tensor};

use super::*;
use crate::Result;
use crate::kernels::cuda::Graph;
use crate::kernels::testing::devices::gpus;
use crate::kernels::testing::own_process::in_own_process;

const HERE: &str = "kernels::cuda::blas::tests::";

/// A product by cuBLAS, then one by cuBLASLt.
fn both(gpu: &Gpu, [x, y, bias]: &[Tensor; 3]) -> Result<()> {
    let matrices = |tensor| Matrices { tensor, transposed: false, ld: 64, stride: 0 };
    let (lhs, rhs, out) = (matrices(x), matrices(x), matrices(y));
    let product = Product { batch: 1, m: 64, k: 64, n: 64, lhs, rhs, out };
    gpu.product(&product)?;
    gpu.biased_product(&product, bias)?;
    Ok(())
}

fn tensors(device: &Device) -> Result<[Tensor; 3]> {
    let ones = |dims: &[usize]| Tensor::ones(dims, DType::F32, device);
    Ok([ones(&[64, 64])?, ones(&[64, 64])?, ones(&[64])?])
}

fn capture(gpu: &Gpu, tensors: &[Tensor; 3]) -> Result<Graph> {
    Ok(gpu.capture(|| both(gpu, tensors))?.1)
}

/// cuBLAS gives a captured product memory of the graph's own, unless its handle has a workspace.
#[test]
fn captured_products_take_no_memory() -> Result<()> {
    let test = format!("{HERE}captured_products_take_no_memory");
    if gpus().is_empty() || !in_own_process(&test, &[]) {
        return Ok(());
    }
    for device in gpus() {
        let Some(gpu) = Gpu::of(&device) else { continue };
        let tensors = tensors(&device)?;
        crate::backend::keep_memory(&device)?;
        both(gpu, &tensors)?;
        device.synchronize()?;
        crate::backend::reset_peak_memory_stats(&device)?;
        let before = crate::backend::memory_stats(&device)?;
        let graph = capture(gpu, &tensors)?;
        for _ in 0..2 {
            gpu.replay(&graph)?;
        }
        device.synchronize()?;
        assert_eq!(crate::backend::memory_stats(&device)?, before);
        let sums = tensors[1].flatten_all()?.to_vec1::<f32>()?;
        assert!(sums.iter().all(|&sum| sum == 65.0), "{sums:?}");
    }
    Ok(())
}

/// What a library allocates at its first product would be the graph's.
#[test]
fn a_thread_s_first_product_is_not_captured() -> Result<()> {
    let test = format!("{HERE}a_thread_s_first_product_is_not_captured");
    if gpus().is_empty() || !in_own_process(&test, &[]) {
        return Ok(());
    }
    for device in gpus() {
        let Some(gpu) = Gpu::of(&device) else { continue };
        let tensors = tensors(&device)?;
        let refused = capture(gpu, &tensors).unwrap_err().to_string();
        assert!(refused.contains("a product that no step before the capture had"), "{refused}");
        both(gpu, &tensors)?;
        gpu.replay(&capture(gpu, &tensors)?)?;
        assert_eq!(tensors[1].sum_all()?.to_scalar::<f32>()?, 65.0 * 64.0 * 64.0);
    }
    Ok(())
}
