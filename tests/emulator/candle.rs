//! Candle's own operators, against the same ones on the CPU.

use std::cell::RefCell;

use anyhow::Result;
use candle_core::{DType, Device, Tensor, Var};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;

fn device() -> Result<Device> {
    Ok(Device::new_cuda(0)?)
}

/// Fails where the two differ by more than `epsilon`, relative to the largest value.
#[track_caller]
fn assert_close(gpu: &Tensor, cpu: &Tensor, epsilon: f32) {
    let values = |tensor: &Tensor| -> Result<Vec<f32>> {
        let tensor = tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
        Ok(tensor.flatten_all()?.to_vec1()?)
    };
    assert_eq!(gpu.dims(), cpu.dims());
    let (gpu, cpu) = (values(gpu).unwrap(), values(cpu).unwrap());
    let scale = cpu.iter().fold(1f32, |largest, x| largest.max(x.abs()));
    for (i, (a, b)) in gpu.iter().zip(&cpu).enumerate() {
        assert!((a - b).abs() <= epsilon * scale, "number {i} is {a}, and should be {b}");
    }
}

const EVERY: [(DType, f32); 3] = [(DType::F32, 1e-5), (DType::F16, 2e-3), (DType::BF16, 2e-2)];

thread_local! {
    static BITS: RefCell<ChaCha8Rng> = RefCell::new(ChaCha8Rng::seed_from_u64(7));
}

/// The same numbers on both devices, and in every run: candle sums 16-bit numbers in 16 bits, and a few draws would exceed the
/// tolerance.
fn pair(shape: &[usize], dtype: DType, gpu: &Device) -> Result<(Tensor, Tensor)> {
    let count: usize = shape.iter().product();
    let draw = |bits: &mut ChaCha8Rng| (0..count).map(|_| bits.sample(StandardNormal)).collect();
    let values: Vec<f32> = BITS.with_borrow_mut(draw);
    let cpu = Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)?;
    Ok((cpu.to_device(gpu)?, cpu))
}

#[test]
fn random_numbers_have_their_distribution() -> Result<()> {
    let gpu = device()?;
    for dtype in [DType::F32, DType::F64] {
        let normal =
            Tensor::randn(1f64, 2., 10_001, &gpu)?.to_dtype(dtype)?.to_dtype(DType::F64)?;
        let mean = normal.mean_all()?.to_scalar::<f64>()?;
        let variance = (&normal - mean)?.sqr()?.mean_all()?.to_scalar::<f64>()?;
        assert!((mean - 1.).abs() < 0.1 && (variance - 4.).abs() < 0.3, "{mean}, {variance}");
    }
    let uniform = Tensor::rand(0f32, 1., 1000, &gpu)?.to_vec1::<f32>()?;
    assert!(uniform.iter().all(|x| (0. ..=1.).contains(x)));
    Ok(())
}

#[test]
fn elementwise() -> Result<()> {
    let gpu = device()?;
    for (dtype, epsilon) in EVERY {
        let (a, a_cpu) = pair(&[37, 23], dtype, &gpu)?;
        let (b, b_cpu) = pair(&[37, 23], dtype, &gpu)?;
        let (row, row_cpu) = pair(&[23], dtype, &gpu)?;
        assert_close(&(&a + &b)?, &(&a_cpu + &b_cpu)?, epsilon);
        assert_close(&a.broadcast_mul(&row)?, &a_cpu.broadcast_mul(&row_cpu)?, epsilon);
        assert_close(&a.gelu()?.tanh()?, &a_cpu.gelu()?.tanh()?, epsilon);
        assert_close(&a.affine(2., 1.)?, &a_cpu.affine(2., 1.)?, epsilon);
        assert_close(&a.maximum(&b)?, &a_cpu.maximum(&b_cpu)?, 0.);
        assert_close(&a.t()?.contiguous()?, &a_cpu.t()?.contiguous()?, 0.);
        assert_close(&a.narrow(1, 3, 7)?.relu()?, &a_cpu.narrow(1, 3, 7)?.relu()?, 0.);
        let (mask, mask_cpu) = (a.gt(&b)?, a_cpu.gt(&b_cpu)?);
        assert_close(&mask.where_cond(&a, &b)?, &mask_cpu.where_cond(&a_cpu, &b_cpu)?, 0.);
        for (to, _) in EVERY {
            assert_close(&a.to_dtype(to)?, &a_cpu.to_dtype(to)?, 0.);
        }
    }
    Ok(())
}

#[test]
fn reductions_and_indices() -> Result<()> {
    let gpu = device()?;
    for (dtype, epsilon) in EVERY {
        let (a, a_cpu) = pair(&[9, 150], dtype, &gpu)?;
        assert_close(&a.sum(1)?, &a_cpu.to_dtype(DType::F32)?.sum(1)?, epsilon * 32.);
        assert_close(&a.sum_all()?, &a_cpu.to_dtype(DType::F32)?.sum_all()?, epsilon * 32.);
        assert_close(&a.max(1)?, &a_cpu.max(1)?, 0.);
        // Of equal numbers, any may be the largest.
        let largest = a.argmax(1)?.to_device(&Device::Cpu)?.unsqueeze(1)?;
        assert_close(&a_cpu.gather(&largest, 1)?.squeeze(1)?, &a_cpu.max(1)?, 0.);
        let softmax = |x: &Tensor| candle_nn::ops::softmax_last_dim(x);
        assert_close(&softmax(&a)?, &softmax(&a_cpu)?, epsilon);
        let ids = Tensor::new(&[8u32, 0, 3, 3], &gpu)?;
        let ids_cpu = ids.to_device(&Device::Cpu)?;
        assert_close(&a.index_select(&ids, 0)?, &a_cpu.index_select(&ids_cpu, 0)?, 0.);
        let added = |a: &Tensor, ids: &Tensor| a.index_add(ids, &a.narrow(0, 0, 4)?, 0);
        assert_close(&added(&a, &ids)?, &added(&a_cpu, &ids_cpu)?, epsilon);
        assert_close(&a.sort_last_dim(true)?.0, &a_cpu.sort_last_dim(true)?.0, 0.);
    }
    Ok(())
}

#[test]
fn products() -> Result<()> {
    let gpu = device()?;
    for (dtype, epsilon) in EVERY {
        let (a, a_cpu) = pair(&[3, 17, 33], dtype, &gpu)?;
        let (b, b_cpu) = pair(&[3, 33, 5], dtype, &gpu)?;
        let (c, c_cpu) = pair(&[3, 17, 5], dtype, &gpu)?;
        // The CPU has no products of BF16.
        let product = |a: &Tensor, b: &Tensor| {
            a.to_dtype(DType::F32)?.contiguous()?.matmul(&b.to_dtype(DType::F32)?.contiguous()?)
        };
        assert_close(&a.matmul(&b)?, &product(&a_cpu, &b_cpu)?, epsilon);
        let (at, at_cpu) = (a.transpose(1, 2)?, a_cpu.transpose(1, 2)?);
        assert_close(&at.matmul(&c)?, &product(&at_cpu, &c_cpu)?, epsilon);
        let (bt, bt_cpu) = (b.transpose(1, 2)?, b_cpu.transpose(1, 2)?);
        assert_close(&c.matmul(&bt)?, &product(&c_cpu, &bt_cpu)?, epsilon);
    }
    Ok(())
}

#[test]
fn convolutions() -> Result<()> {
    let gpu = device()?;
    for (dtype, epsilon) in EVERY {
        let (x, x_cpu) = pair(&[2, 3, 9, 8], dtype, &gpu)?;
        let (k, k_cpu) = pair(&[4, 3, 3, 3], dtype, &gpu)?;
        let convolution = |x: &Tensor, k: &Tensor, dtype: DType| {
            x.to_dtype(dtype)?.conv2d(&k.to_dtype(dtype)?, 1, 2, 1, 1)
        };
        let expected = convolution(&x_cpu, &k_cpu, DType::F32)?;
        assert_close(&convolution(&x, &k, dtype)?, &expected, epsilon);
        assert_close(&x.max_pool2d(2)?, &x_cpu.max_pool2d(2)?, 0.);
        assert_close(&x.avg_pool2d(2)?, &x_cpu.avg_pool2d(2)?, epsilon);
    }
    Ok(())
}

#[test]
fn backward_of_a_network() -> Result<()> {
    let gpu = device()?;
    let (x, x_cpu) = pair(&[16, 10], DType::F32, &gpu)?;
    let (w1, w1_cpu) = pair(&[10, 32], DType::F32, &gpu)?;
    let (w2, w2_cpu) = pair(&[32, 4], DType::F32, &gpu)?;
    let target = Tensor::new(&[0u32, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3], &Device::Cpu)?;
    let gradients = |x: &Tensor, w1: &Tensor, w2: &Tensor| -> Result<(Tensor, Tensor)> {
        let (w1, w2) = (Var::from_tensor(w1)?, Var::from_tensor(w2)?);
        let logits = x.matmul(&w1)?.gelu()?.matmul(&w2)?;
        let loss = candle_nn::loss::cross_entropy(&logits, &target.to_device(x.device())?)?;
        let mut gradients = loss.backward()?;
        Ok((gradients.remove(&w1).expect("w1 is used"), gradients.remove(&w2).expect("w2 is used")))
    };
    let ours = gradients(&x, &w1, &w2)?;
    let theirs = gradients(&x_cpu, &w1_cpu, &w2_cpu)?;
    assert_close(&ours.0, &theirs.0, 1e-5);
    assert_close(&ours.1, &theirs.1, 1e-5);
    Ok(())
}
