//! The scope as operators see it: the cast cache, gradients, threads.

use candle_amp::{Autocast, Op, Policy, ops};
use candle_core::{DType, Device, Result, Tensor, Var};

use crate::util::{assert_close, assert_same, epsilon, random, to_vec};

/// A weight whose value in half shows which version of it was used.
fn weight(value: f32) -> Result<Var> {
    Var::from_tensor(&Tensor::full(value, (1, 1), &Device::Cpu)?)
}

fn product(x: &Tensor, w: &Var) -> Result<f32> {
    ops::matmul(x, w)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>().map(|v| v[0])
}

#[test]
fn a_weight_is_cast_anew_in_the_next_scope_and_on_request() -> Result<()> {
    let (x, w) = (Tensor::ones((1, 1), DType::F32, &Device::Cpu)?, weight(1.0)?);
    let amp = Autocast::new(DType::BF16);
    amp.scope(|| {
        assert_eq!(product(&x, &w)?, 1.0);
        // `Var::set` cannot be seen: the copy of this scope may stay, until it is cleared.
        w.set(&Tensor::full(2f32, (1, 1), &Device::Cpu)?)?;
        Autocast::clear_cache();
        assert_eq!(product(&x, &w)?, 2.0);
        w.set(&Tensor::full(3f32, (1, 1), &Device::Cpu)?)?;
        Ok::<_, candle_core::Error>(())
    })?;
    amp.scope(|| product(&x, &w)).map(|y| assert_eq!(y, 3.0))
}

/// PyTorch's cache outlives a backward inside the region.
#[test]
fn backward_empties_the_cache() -> Result<()> {
    let (x, w) = (Tensor::ones((1, 1), DType::F32, &Device::Cpu)?, weight(1.0)?);
    Autocast::new(DType::F16).scope(|| {
        ops::sum(&ops::matmul(&x, &w)?)?.backward()?;
        w.set(&Tensor::full(2f32, (1, 1), &Device::Cpu)?)?;
        assert_eq!(product(&x, &w)?, 2.0);
        Ok(())
    })
}

/// PyTorch's cache has no dtype in its key, and fails here.
#[test]
fn a_nested_scope_of_another_dtype_casts_for_itself() -> Result<()> {
    let (x, w) = (random(1, (2, 3), DType::F32), Var::from_tensor(&random(2, (3, 2), DType::F32))?);
    Autocast::new(DType::BF16).scope(|| {
        assert_eq!(ops::matmul(&x, &w)?.dtype(), DType::BF16);
        Autocast::new(DType::F16).scope(|| {
            assert_eq!(ops::matmul(&x, &w)?.dtype(), DType::F16);
            Ok::<_, candle_core::Error>(())
        })?;
        assert_eq!(ops::matmul(&x, &w)?.dtype(), DType::BF16);
        Ok(())
    })
}

/// PyTorch had this wrong for four years: a cast cached under `no_grad` cut later gradients.
#[test]
fn a_cast_made_under_no_grad_does_not_cut_gradients() -> Result<()> {
    let (x, w) = (random(1, (8, 2), DType::F32), Var::from_tensor(&random(2, (2, 2), DType::F32))?);
    Autocast::new(DType::BF16).scope(|| {
        assert!(!candle_amp::no_grad(|| ops::matmul(&x, &w))?.track_op());
        let grads = ops::sum(&ops::matmul(&x, &w)?)?.backward()?;
        assert!(grads.get(&w).is_some());
        Ok(())
    })
}

/// Output bit for bit, gradients to the half dtype's epsilon, against casting by hand.
#[test]
fn autocast_is_casting_by_hand() -> Result<()> {
    for dtype in [DType::F16, DType::BF16] {
        let x = Var::from_tensor(&random(3, (5, 33), DType::F32))?;
        let w = Var::from_tensor(&random(4, (7, 33), DType::F32))?;
        let b = Var::from_tensor(&random(5, 7, DType::F32))?;
        let auto = Autocast::new(dtype).scope(|| ops::linear(&x, &w, Some(&b)))?;
        let [xh, wh, bh] = [&x, &w, &b].map(|v| v.to_dtype(dtype).unwrap());
        let hand = ops::linear(&xh, &wh, Some(&bh))?;
        assert_same("output", &auto, &hand);

        let [x64, w64] = [&xh, &wh]
            .map(|t| Var::from_tensor(&t.detach().to_dtype(DType::F64).unwrap()).unwrap());
        let seed = random(6, (5, 7), dtype);
        let backward = |y: &Tensor| {
            (y * seed.to_dtype(y.dtype())?)?.to_dtype(DType::F32)?.sum_all()?.backward()
        };
        let (auto, hand) = (backward(&auto)?, backward(&hand)?);
        let exact = backward(&ops::linear(&x64, &w64, None)?)?;
        for (name, var, var64) in [("dx", &x, &x64), ("dw", &w, &w64)] {
            let (auto, hand) = (auto.get(var).unwrap(), hand.get(var).unwrap());
            let exact = exact.get(var64).unwrap();
            assert_eq!(auto.dtype(), DType::F32, "{name}: of an F32 variable");
            assert_close(name, auto, hand, dtype, 1.0);
            let error = |g: &Tensor| -> Result<f64> {
                (g.to_dtype(DType::F64)? - exact)?.abs()?.max_all()?.to_scalar()
            };
            // Straight from the F32 accumulator: closer than what went through a half.
            assert!(error(auto)? <= error(hand)?, "{name}: {} > {}", error(auto)?, error(hand)?);
            assert!(error(auto)? < epsilon(dtype) / 4.0, "{name} was rounded to half on its way");
        }
    }
    Ok(())
}

#[test]
fn edits_and_presets_reach_operators() -> Result<()> {
    let x = random(1, (4, 4), DType::F32);
    let half = x.to_dtype(DType::F16)?;
    let amp = Autocast::new(DType::F16);
    assert_eq!(amp.scope(|| ops::softmax(&half, 1))?.dtype(), DType::F16);
    let pytorch = amp.clone().with_policy(Policy::pytorch());
    assert_eq!(pytorch.scope(|| ops::softmax(&half, 1))?.dtype(), DType::F32);
    let denied = amp.clone().deny(Op::Matmul);
    assert_eq!(denied.scope(|| ops::matmul(&half, &half))?.dtype(), DType::F32);
    let allowed = amp.allow(Op::Sum);
    assert_eq!(allowed.scope(|| ops::sum(&x))?.dtype(), DType::F16);
    Ok(())
}

#[test]
fn doubles_and_integers_are_never_cast() -> Result<()> {
    let x = random(1, (4, 4), DType::F64);
    for dtype in [DType::F16, DType::BF16] {
        Autocast::new(dtype).scope(|| {
            assert_eq!(ops::matmul(&x, &x)?.dtype(), DType::F64);
            assert_eq!(ops::sum(&x)?.dtype(), DType::F64);
            let targets = Tensor::new(&[0i64, 1, 2, 3], &Device::Cpu)?;
            assert_eq!(ops::cross_entropy(&x, &targets)?.dtype(), DType::F64);
            Ok::<_, candle_core::Error>(())
        })?;
    }
    Ok(())
}

/// Losses widen halves where they read them: the bits of a copy in F32, of loss and gradient.
#[test]
fn losses_of_halves_are_those_of_their_f32_copies() -> Result<()> {
    type Loss = fn(&Tensor, &Tensor) -> Result<Tensor>;
    let classes = Tensor::new(&[0u32, 1002, 7, 500, 501], &Device::Cpu)?;
    let losses: [(&str, Loss); 4] = [
        ("cross_entropy", ops::cross_entropy),
        ("nll", ops::nll),
        ("mse", ops::mse),
        ("bce", ops::binary_cross_entropy_with_logit),
    ];
    for dtype in [DType::F16, DType::BF16] {
        for (name, loss) in losses {
            let x = Var::from_tensor(&random(1, (5, 1003), dtype))?;
            let wide = Var::from_tensor(&x.to_dtype(DType::F32)?)?;
            let target = random(2, (5, 1003), dtype);
            for target in [&target, &target.to_dtype(DType::F32)?] {
                let is_class = matches!(name, "cross_entropy" | "nll");
                let target = if is_class { &classes } else { target };
                let (ours, trace) = Autocast::new(dtype).trace(|| loss(&x, target));
                let ours = ours?;
                assert_eq!((ours.dtype(), trace.rows()[0].cast), (DType::F32, Some(DType::F32)));
                let wide_target =
                    if is_class { target.clone() } else { target.to_dtype(DType::F32)? };
                let theirs = loss(&wide, &wide_target)?;
                assert_eq!(to_vec(&ours), to_vec(&theirs), "{name} {dtype:?}");
                let (ours, theirs) = (ours.backward()?, theirs.backward()?);
                let ours = ours.get(&x).expect("a gradient");
                let theirs = theirs.get(&wide).expect("a gradient").to_dtype(dtype)?;
                assert_eq!(ours.dtype(), dtype);
                assert_eq!(to_vec(ours), to_vec(&theirs), "gradient of {name} {dtype:?}");
            }
        }
    }
    Ok(())
}

/// Backward runs in what forward chose, on whatever thread and in whatever scope it is called.
#[test]
fn backward_does_not_ask_the_scope() -> Result<()> {
    let (x, w) = (random(1, (3, 5), DType::F32), Var::from_tensor(&random(2, (5, 2), DType::F32))?);
    let loss = || Autocast::new(DType::BF16).scope(|| ops::sum(&ops::matmul(&x, &w)?));
    let here = loss()?.backward()?;
    let in_f16 = Autocast::new(DType::F16).scope(|| loss()?.backward())?;
    let there = {
        let loss = loss()?;
        std::thread::spawn(move || loss.backward()).join().unwrap()?
    };
    assert_same("in another scope", in_f16.get(&w).unwrap(), here.get(&w).unwrap());
    assert_same("on another thread", there.get(&w).unwrap(), here.get(&w).unwrap());
    Ok(())
}

/// Batch norm writes its running statistics in forward, also those that another operator has read in the scope.
#[test]
fn running_statistics_are_cast_anew() -> Result<()> {
    use candle_core::ModuleT;
    let varmap = candle_amp::nn::VarMap::new();
    let vb = candle_amp::nn::var_builder(&varmap, DType::F32, &Device::Cpu);
    let norm = candle_amp::nn::batch_norm(1, candle_nn::BatchNormConfig::default(), vb)?;
    let mean = norm.running_mean().clone();
    let (x, w) = (Tensor::zeros((1, 1), DType::F32, &Device::Cpu)?, weight(1.0)?);
    let batch = Tensor::new(&[[[[9f32, 11.0]]]], &Device::Cpu)?;
    Autocast::new(DType::BF16).scope(|| {
        let sum = || ops::linear(&x, &w, Some(&mean)).map(|y| to_vec(&y));
        assert_eq!(sum()?, [0.0]);
        norm.forward_t(&batch, true)?;
        assert_eq!(sum()?, [1.0]);
        Ok(())
    })
}
