//! Averaged gradients.

use candle_amp::dist::DataParallelConfig;
use candle_amp::optim::{Sgd, SgdConfig};
use candle_amp::{GradScaler, Parameters, Result, ops};
use candle_core::{DType, Tensor, Var};

use super::{attached, cpu, layers, loss, on_ranks, samples, small_buckets};
use crate::util::{assert_close, assert_same};

/// The gradients of rank 0's weights on the samples of each of `size` ranks, on this thread alone.
fn of_each(size: usize, dtype: DType) -> Result<Vec<Vec<Tensor>>> {
    let of_rank = |rank| {
        let (vars, _) = layers(dtype, 0)?;
        let mut scaler = GradScaler::default();
        scaler.scale(&loss(&vars, &samples(rank, dtype))?)?.backward()?;
        vars.iter().map(|var| Ok(scaler.grad(var)?.expect("a gradient"))).collect()
    };
    (0..size).map(of_rank).collect()
}

/// The mean over ranks, summed in their order.
fn mean(of_each: &[Vec<Tensor>], at: usize) -> Result<Tensor> {
    let mut sum = of_each[0][at].clone();
    for rank in &of_each[1..] {
        sum = (sum + &rank[at])?;
    }
    Ok((sum / of_each.len() as f64)?)
}

#[test]
fn gradients_are_the_mean_of_all_ranks() -> Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for size in [1, 2, 3, 4] {
            let expected = of_each(size, dtype)?;
            for config in [DataParallelConfig::default(), small_buckets()] {
                let all = on_ranks(size, |communicator| {
                    let rank = communicator.rank();
                    let (vars, parameters) = layers(dtype, rank)?;
                    let (_, mut scaler) = attached(communicator, &parameters, config.clone())?;
                    // The second pass has buckets in the order of the first.
                    for _ in 0..2 {
                        scaler.zero_grad();
                        scaler.scale(&loss(&vars, &samples(rank, dtype))?)?.backward()?;
                    }
                    vars.iter()
                        .map(|var| Ok(scaler.grad(var)?.expect("a gradient")))
                        .collect::<Result<Vec<_>>>()
                })?;
                for rank in &all {
                    for (at, gradient) in rank.iter().enumerate() {
                        assert_eq!(gradient.dtype(), DType::F32);
                        assert_same("between ranks", gradient, &all[0][at]);
                        let what = format!("{dtype:?}, {size} ranks, layer {at}");
                        assert_close(&what, gradient, &mean(&expected, at)?, DType::F32, 4.0);
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn bf16_on_the_wire_is_rounded_twice_and_the_same_everywhere() -> Result<()> {
    let expected = of_each(3, DType::F32)?;
    let config = DataParallelConfig { wire_dtype: DType::BF16, ..small_buckets() };
    let all = on_ranks(3, |communicator| {
        let rank = communicator.rank();
        let (vars, parameters) = layers(DType::F32, rank)?;
        let (_, mut scaler) = attached(communicator, &parameters, config.clone())?;
        scaler.scale(&loss(&vars, &samples(rank, DType::F32))?)?.backward()?;
        Ok(scaler.grad(&vars[0])?.expect("a gradient"))
    })?;
    let exact = mean(&expected, 0)?;
    assert_close("BF16", &all[0], &exact, DType::BF16, 4.0);
    let scaled = (&all[0] * (3.0 * 65536.0))?;
    let through = scaled.to_dtype(DType::BF16)?.to_dtype(DType::F32)?;
    assert_close("what travelled is BF16", &scaled, &through, DType::F32, 4.0);
    assert_same("between ranks", &all[0], &all[2]);
    let distance = (&all[0] - &exact)?.abs()?.max_all()?.to_scalar::<f32>()?;
    assert!(distance > 0.0, "F32 travelled");
    Ok(())
}

#[test]
fn a_variable_used_twice_and_one_behind_candles_operators() -> Result<()> {
    let run = |size: usize, through_candle: bool| {
        on_ranks(size, |communicator| {
            let rank = communicator.rank() as f32;
            let (a, b) = (Var::new(&[2f32, 3.0], &cpu())?, Var::new(&[5f32, 7.0], &cpu())?);
            let parameters = Parameters::named([("a", a.clone()), ("b", b.clone())])?;
            let (_, mut scaler) = attached(communicator, &parameters, small_buckets())?;
            let x = Tensor::new(&[1.0 + rank, 1.0], &cpu())?;
            // a * a * b * x: the gradient of a arrives twice.
            let product = ops::mul(&ops::mul(&a, &ops::mul(&a, &b)?)?, &x)?;
            let product = if through_candle { product.affine(1.0, 0.0)? } else { product };
            scaler.scale(&ops::sum(&product)?)?.backward()?;
            let of = |var: &Var| {
                Ok::<_, candle_amp::Error>(scaler.grad(var)?.expect("one").to_vec1::<f32>()?)
            };
            Ok((of(&a)?, of(&b)?))
        })
    };
    for through_candle in [false, true] {
        // x is (1, 1) and (2, 1): 1.5 on average.
        for (a, b) in run(2, through_candle)? {
            assert_eq!((a, b), (vec![30.0, 42.0], vec![6.0, 9.0]));
        }
    }
    Ok(())
}

#[test]
fn micro_batches_accumulate_without_communication() -> Result<()> {
    let all = on_ranks(2, |communicator| {
        let rank = communicator.rank();
        let (vars, parameters) = layers(DType::F32, rank)?;
        let (parallel, mut scaler) = attached(communicator, &parameters, small_buckets())?;
        // Ranks differ in how many there are: had one communicated, the other would wait.
        for micro in 0..=rank {
            let x = samples(10 * rank + micro, DType::F32);
            parallel.no_sync(|| scaler.scale(&loss(&vars, &x)?)?.backward())?;
        }
        assert!(scaler.grad(&vars[0])?.is_none(), "nothing is collected yet");
        let sgd = &mut Sgd::new(&parameters, SgdConfig::default())?;
        for error in [
            scaler.step(sgd).unwrap_err(),
            scaler.clip_grad_norm(1.0).unwrap_err(),
            scaler.update().unwrap_err(),
        ] {
            assert!(error.to_string().contains("no_sync"), "{error}");
        }
        scaler.scale(&loss(&vars, &samples(50 + rank, DType::F32))?)?.backward()?;
        let first = scaler.grad(&vars[0])?.expect("a gradient");
        // A second loss adds its average.
        scaler.scale(&loss(&vars, &samples(50 + rank, DType::F32))?)?.backward()?;
        Ok((first, scaler.grad(&vars[0])?.expect("a gradient")))
    })?;
    let mut alone = GradScaler::default();
    let (vars, _) = layers(DType::F32, 0)?;
    for seed in [0, 50, 10, 11, 51] {
        alone.scale(&loss(&vars, &samples(seed, DType::F32))?)?.backward()?;
    }
    let expected = (alone.grad(&vars[0])?.expect("a gradient") / 2.0)?;
    for seed in [50, 51] {
        alone.scale(&loss(&vars, &samples(seed, DType::F32))?)?.backward()?;
    }
    let more = (alone.grad(&vars[0])?.expect("a gradient") / 2.0)?;
    for (first, second) in &all {
        assert_close("accumulated", first, &expected, DType::F32, 8.0);
        assert_close("and one more", second, &more, DType::F32, 8.0);
        assert_same("between ranks", first, &all[0].0);
    }
    Ok(())
}

#[test]
fn an_unused_parameter_is_named_on_all_ranks_or_counts_as_zero() -> Result<()> {
    let used = |allow_unused: bool, frozen: bool| {
        on_ranks(3, move |communicator| {
            let rank = communicator.rank();
            let vars: Vec<Var> =
                (0..3).map(|_| Var::new(&[1f32], &cpu())).collect::<Result<_, _>>()?;
            let names = ["always", "never", "once"];
            let parameters = Parameters::named(names.into_iter().zip(vars.clone()))?;
            if frozen {
                parameters.filter(|name| name == "never").freeze();
            }
            let config = DataParallelConfig { allow_unused, ..small_buckets() };
            let (_, mut scaler) = attached(communicator, &parameters, config)?;
            let mut sum = ops::sum(&vars[0])?;
            if rank == 1 {
                sum = ops::add(&sum, &ops::sum(&vars[2])?)?;
            }
            let error = match scaler.scale(&sum)?.backward() {
                Ok(()) => String::new(),
                Err(error) => error.to_string(),
            };
            let gradient = |var: &Var| -> Result<Option<Vec<f32>>> {
                Ok(scaler.grad(var)?.map(|g| g.to_vec1::<f32>()).transpose()?)
            };
            Ok((error, gradient(&vars[0])?, gradient(&vars[1])?, gradient(&vars[2])?))
        })
    };
    for (error, always, ..) in used(false, false)? {
        assert!(
            error.contains("2 parameters: never, once;")
                || error.contains("2 parameters: once, never;"),
            "{error}"
        );
        assert_eq!(always, None, "nothing is collected after an error");
    }
    for (error, ..) in used(false, true)? {
        assert!(error.contains("1 parameters: once;"), "{error}");
    }
    for (error, always, never, once) in used(true, false)? {
        assert_eq!((error.as_str(), always, never), ("", Some(vec![1.0]), None));
        assert!((once.expect("of rank 1")[0] - 1.0 / 3.0).abs() < 1e-7);
    }
    Ok(())
}

#[test]
fn an_infinity_on_one_rank_skips_the_step_of_all() -> Result<()> {
    let all = on_ranks(3, |communicator| {
        let rank = communicator.rank();
        let (vars, parameters) = layers(DType::BF16, rank)?;
        let (_, mut scaler) = attached(communicator, &parameters, small_buckets())?;
        let mut sgd = Sgd::new(&parameters, SgdConfig { lr: 0.1, ..Default::default() })?;
        let before = vars[0].copy()?;
        let mut skipped = Vec::new();
        for step in 0..3 {
            let factor = if step == 1 && rank == 2 { f32::INFINITY } else { 1.0 };
            let loss = ops::mul(
                &loss(&vars, &samples(rank, DType::BF16))?,
                &Tensor::new(factor, &cpu())?,
            )?;
            scaler.scale(&loss)?.backward()?;
            skipped.push(scaler.step(&mut sgd)?.skipped()?);
            scaler.update()?;
        }
        assert!(
            before.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()?
                != vars[0].to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()?
        );
        Ok((skipped, scaler.current_scale(), vars[0].copy()?))
    })?;
    for (skipped, scale, weights) in &all {
        assert_eq!((skipped.as_slice(), *scale), (&[false, true, false][..], 32768.0));
        assert_same("weights", weights, &all[0].2);
    }
    Ok(())
}

#[test]
fn runs_repeat_bit_for_bit() -> Result<()> {
    let run = || {
        on_ranks(4, |communicator| {
            let rank = communicator.rank();
            let (vars, parameters) = layers(DType::F32, rank)?;
            let (_, mut scaler) = attached(communicator, &parameters, small_buckets())?;
            let mut sgd =
                Sgd::new(&parameters, SgdConfig { lr: 0.5, momentum: 0.9, ..Default::default() })?;
            for step in 0..5 {
                scaler.scale(&loss(&vars, &samples(7 * step + rank, DType::F32))?)?.backward()?;
                let _ = scaler.step(&mut sgd)?;
                scaler.update()?;
            }
            Ok(vars[1].copy()?)
        })
    };
    let (first, second) = (run()?, run()?);
    for (a, b) in first.iter().zip(&second) {
        assert_same("two runs", a, b);
        assert_same("between ranks", a, &first[0]);
    }
    Ok(())
}
