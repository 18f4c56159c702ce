//! Cross entropy and negative log-likelihood.

use candle_amp::nn::{CrossEntropyLoss, NllLoss, Reduction};
use candle_amp::{Autocast, GradScaler, ops};
use candle_core::{D, DType, Device, Result, Tensor, Var};

use super::{REDUCTIONS, double, gradient, near, weighted};
use crate::bad_input::assert_says;
use crate::util::{FLOATS, assert_absolute, assert_close, epsilon, largest, random, to_vec};

/// What a class loss is, out of candle's operators in F64. The input is `(n, classes, …)`, of finite numbers.
fn exact(x: &Tensor, targets: &[i64], loss: &CrossEntropyLoss, of_logits: bool) -> Result<Tensor> {
    let (classes, rank) = (x.dim(1)?, x.rank());
    let order: Vec<usize> = [0].into_iter().chain(2..rank).chain([1]).collect();
    let rows = x.permute(order)?.contiguous()?.reshape(((), classes))?;
    let logs = match of_logits {
        true => rows.broadcast_sub(&rows.exp()?.sum_keepdim(1)?.log()?)?,
        false => rows,
    };
    let counts = |class: usize| match &loss.weight {
        Some(weight) => to_vec(weight)[class],
        None => 1.0,
    };
    let (mut distribution, mut total) = (vec![0.0; targets.len() * classes], 0.0);
    for (row, &target) in targets.iter().enumerate() {
        if Some(target) == loss.ignore_index {
            continue;
        }
        total += counts(target as usize);
        for class in 0..classes {
            let right = if class == target as usize { 1.0 - loss.label_smoothing } else { 0.0 };
            let share = right + loss.label_smoothing / classes as f64;
            distribution[row * classes + class] = -share * counts(class);
        }
    }
    let distribution = Tensor::from_vec(distribution, (targets.len(), classes), x.device())?;
    let rows = (logs * distribution)?.sum(D::Minus1)?;
    match loss.reduction {
        Reduction::Mean => rows.sum_all()? / total,
        Reduction::Sum => rows.sum_all(),
        Reduction::None => rows.reshape([&x.dims()[..1], &x.dims()[2..]].concat()),
    }
}

#[test]
fn class_losses_with_every_setting() -> candle_amp::Result<()> {
    let shapes: [&[usize]; 4] = [&[5, 7], &[2, 7, 3], &[1, 7, 3, 2], &[3, 1]];
    for (case, shape) in shapes.into_iter().enumerate() {
        let (classes, n) = (shape[1], shape.iter().product::<usize>() / shape[1]);
        let all: Vec<i64> = (0..n as i64).map(|i| i * 3 % classes as i64).collect();
        let some = all.iter().enumerate().map(|(i, &class)| if i % 3 == 1 { -7 } else { class });
        let some: Vec<i64> = some.collect();
        for (weighs, ignores, smooth, reduction) in [false, true]
            .into_iter()
            .flat_map(|weighs| [false, true].map(|ignores| (weighs, ignores)))
            .flat_map(|(w, i)| [0.0, 0.1].map(|smooth| (w, i, smooth)))
            .flat_map(|(w, i, smooth)| REDUCTIONS.map(|reduction| (w, i, smooth, reduction)))
        {
            let weight = random(5, classes, DType::F32).affine(0.5, 1.0)?;
            let loss = CrossEntropyLoss {
                weight: weighs.then_some(weight),
                ignore_index: ignores.then_some(-7),
                label_smoothing: smooth,
                reduction,
            };
            let targets = if ignores { &some } else { &all };
            let dims = [&shape[..1], &shape[2..]].concat();
            let indices = Tensor::from_vec(targets.clone(), dims, &Device::Cpu)?;
            for (dtype, of_logits) in FLOATS.into_iter().flat_map(|d| [(d, true), (d, false)]) {
                if !of_logits && smooth > 0.0 {
                    continue;
                }
                let what = format!("{shape:?} {loss:?} {dtype:?}, logits: {of_logits}");
                let x = Var::from_tensor(&random(case as u64, shape, dtype))?;
                let forward = |x: &Tensor| match of_logits {
                    true => loss.forward(x, &indices),
                    false => {
                        let CrossEntropyLoss { weight, ignore_index, reduction, .. } = loss.clone();
                        NllLoss { weight, ignore_index, reduction }.forward(x, &indices)
                    }
                };
                let ours = forward(&x)?;
                let wide = if dtype == DType::F64 { dtype } else { DType::F32 };
                assert_eq!(ours.dtype(), wide, "{what}");
                let wide_x = Var::from_tensor(&double(&x)?)?;
                let expected = exact(&wide_x, targets, &loss, of_logits)?;
                // Of one class, it is 0.
                let tolerance = 16.0 * epsilon(wide) * largest(&expected).max(1.0);
                assert_absolute(&what, &ours, &expected, tolerance);
                // Under autocast, the same numbers.
                let cast = Autocast::new(DType::BF16).scope(|| forward(&x))?;
                assert_absolute(&what, &cast, &expected, tolerance);

                let grads = weighted(&expected)?.backward()?;
                let expected = grads.get(&wide_x).expect("a gradient");
                // For one class it is 1 - 0.9 - 0.1, each rounded, so the largest is no measure there.
                let tolerance = 32.0 * epsilon(dtype) * largest(expected).max(1e-2);
                let gradient = gradient(&ours, &x)?;
                assert_absolute(&what, &gradient, expected, tolerance);
            }
        }
    }
    Ok(())
}

/// `F.cross_entropy(x, y, weight=w, label_smoothing=0.1)` and its gradient, of PyTorch 2.15 in F64.
#[test]
fn class_losses_are_pytorchs() -> Result<()> {
    let x = [0.5f64, -1.0, 2.0, 0.25, -0.75, 1.5, 1.25, -0.5, 0.0, 3.0, -2.0, 0.75];
    let x = Var::from_tensor(&Tensor::from_slice(&x, (2, 3, 2), &Device::Cpu)?)?;
    let y = Tensor::new(&[[2i64, -100], [0, 1]], &Device::Cpu)?;
    let weight = Some(Tensor::new(&[1f64, 0.5, 3.0], &Device::Cpu)?);
    let loss = |reduction| CrossEntropyLoss {
        weight: weight.clone(),
        ignore_index: Some(-100),
        label_smoothing: 0.1,
        reduction,
    };
    let mean = loss(Reduction::Mean).forward(&x, &y)?;
    near("mean", &mean, &[2.117493829231903]);
    let grads = mean.backward()?;
    let expected = [
        0.10239010424262283,
        0.0,
        0.48837460420855316,
        0.0,
        -0.5907647084511761,
        0.0,
        -0.03134385210527207,
        -0.003861854557624197,
        0.046739349442617435,
        0.013708881360296818,
        -0.015395497337345344,
        -0.009847026802672632,
    ];
    near("gradient", grads.get(&x).expect("a gradient"), &expected);
    near("sum", &loss(Reduction::Sum).forward(&x, &y)?, &[9.528722231543563]);
    let each = [8.469223179172094, 0.0, 0.6415374905261746, 0.4179615618452952];
    near("none", &loss(Reduction::None).forward(&x, &y)?, &each);
    let nll = NllLoss { weight, ignore_index: Some(-100), reduction: Reduction::Mean };
    near("nll", &nll.forward(&ops::log_softmax(&x, 1)?, &y)?, &[2.07828424819407]);
    Ok(())
}

/// Rows that do not count may hold anything, and get a gradient of 0.
#[test]
fn ignored_rows_reach_nothing() -> candle_amp::Result<()> {
    for dtype in FLOATS {
        for reduction in REDUCTIONS {
            let clean = random(1, (4, 5), dtype);
            let bad = Tensor::new(&[[f32::NAN], [0.0], [f32::INFINITY], [0.0]], &Device::Cpu)?;
            let x = Var::from_tensor(&clean.broadcast_add(&bad.to_dtype(dtype)?)?)?;
            let targets = Tensor::new(&[-100i64, 2, -100, 4], &Device::Cpu)?;
            let loss =
                CrossEntropyLoss { ignore_index: Some(-100), reduction, ..Default::default() };
            let value = loss.forward(&x, &targets)?;
            let of_two = loss.forward(
                &clean.index_select(&Tensor::new(&[1u32, 3], &Device::Cpu)?, 0)?,
                &Tensor::new(&[2i64, 4], &Device::Cpu)?,
            )?;
            assert_close("sum", &value.sum_all()?, &of_two.sum_all()?, dtype, 4.0);
            let gradient = to_vec(&gradient(&value, &x)?);
            assert!(
                gradient[..5].iter().chain(&gradient[10..15]).all(|&x| x == 0.0),
                "{gradient:?}"
            );
            assert!(gradient.iter().all(|x| x.is_finite()) && gradient[5] != 0.0, "{gradient:?}");
        }
    }
    let (x, none) = (random(1, (2, 3), DType::F32), Tensor::new(&[-1i64, -1], &Device::Cpu)?);
    let loss =
        |reduction| CrossEntropyLoss { ignore_index: Some(-1), reduction, ..Default::default() };
    assert_says(loss(Reduction::Mean).forward(&x, &none), &["logits", "whose mean is NaN"]);
    let x = Var::from_tensor(&x)?;
    for reduction in [Reduction::Sum, Reduction::None] {
        let value = loss(reduction).forward(&x, &none)?;
        assert!(to_vec(&value).iter().all(|&x| x == 0.0));
        assert_eq!(to_vec(&gradient(&value, &x)?), [0.0; 6]);
    }
    Ok(())
}

#[test]
fn what_does_not_fit_a_class_loss_is_named() -> Result<()> {
    let x = random(1, (2, 3, 4), DType::F32);
    let targets = Tensor::zeros((2, 4), DType::I64, &Device::Cpu)?;
    let weighted = |weight: &Tensor| {
        let weight = Some(weight.clone());
        CrossEntropyLoss { weight, ..Default::default() }.forward(&x, &targets)
    };
    assert_says(weighted(&random(1, 4, DType::F32)), &["cross_entropy: weight", "[3]"]);
    let tracked = Var::from_tensor(&random(1, 3, DType::F32))?;
    assert_says(weighted(&tracked), &["weight is tracked", "`detach`"]);
    assert_says(ops::cross_entropy(&x, &targets.t()?), &["targets has shape [4, 2]", "[2, 4]"]);
    assert_says(ops::cross_entropy(&x.get(0)?.get(0)?, &targets), &["logits", "(n, classes, …)"]);
    let outside = Tensor::new(&[[0i64, 0, 0, 0], [0, 3, 0, 0]], &Device::Cpu)?;
    assert_says(ops::nll(&x, &outside), &["row 5 is 3", "one of 3 classes", "ignore_index"]);
    let sum = CrossEntropyLoss { reduction: Reduction::Sum, ..Default::default() };
    assert_says(sum.forward(&x, &outside), &["row 5 is 3", "one of 3 classes"]);
    assert_says(sum.forward(&x, &outside.to_dtype(DType::F32)?), &["targets is F32"]);
    let smoothed = CrossEntropyLoss { label_smoothing: 2.0, ..Default::default() };
    assert_says(smoothed.forward(&x, &targets), &["label_smoothing is 2"]);
    Ok(())
}

/// Padding and class weights of a language model's head: the numbers of a `linear` and the loss of its logits, where the
/// gradient takes the place of the logits too.
#[test]
fn a_head_with_every_setting() -> candle_amp::Result<()> {
    let targets = Tensor::new(&[[0i64, -100, 6], [3, 3, -100]], &Device::Cpu)?;
    let weight = random(5, 7, DType::F32).affine(0.5, 1.0)?;
    for (dtype, reduction) in FLOATS.into_iter().flat_map(|d| REDUCTIONS.map(|r| (d, r))) {
        for weight in [None, Some(weight.clone())] {
            let loss = CrossEntropyLoss {
                weight,
                ignore_index: Some(-100),
                label_smoothing: 0.1,
                reduction,
            };
            let what = format!("{dtype:?} {loss:?}");
            let x = Var::from_tensor(&random(1, (2, 3, 5), dtype))?;
            let table = Var::from_tensor(&random(2, (7, 5), dtype))?;
            let bias = Var::from_tensor(&random(3, 7, DType::F32))?;
            let logits = ops::linear(&x, &table, Some(&bias))?;
            let apart = loss.forward(&logits.flatten(0, 1)?, &targets.flatten_all()?)?;
            let head = loss.forward_linear(&x, &table, Some(&bias), &targets)?;
            let wide = if dtype == DType::F64 { dtype } else { DType::F32 };
            assert_eq!(head.dtype(), wide, "{what}");
            let dims: &[usize] = if reduction == Reduction::None { &[2, 3] } else { &[] };
            assert_eq!(head.dims(), dims, "{what}");
            assert_absolute(&what, &head.flatten_all()?, &apart.flatten_all()?, 0.0);
            let grads = weighted(&apart.reshape(dims)?)?.backward()?;
            let mut scaler = GradScaler::disabled();
            scaler.scale(&weighted(&head)?)?.backward()?; // in place of the logits
            for of in [&x, &table, &bias] {
                let ours = scaler.grad(of)?.expect("a gradient");
                assert_close(&what, &ours, grads.get(of).expect("a gradient"), dtype, 4.0);
            }
        }
    }
    Ok(())
}

/// Where all rows count, the settings change nothing, not even a bit; and any dtype can hold what is ignored.
#[test]
fn what_is_ignored_is_a_target_of_any_dtype() -> candle_amp::Result<()> {
    let x = Var::from_tensor(&random(1, (5, 4), DType::F32))?;
    let targets = Tensor::new(&[3u32, 0, 2, 0, 1], &Device::Cpu)?;
    let none = CrossEntropyLoss { ignore_index: Some(-100), ..Default::default() };
    let (ours, plain) = (none.forward(&x, &targets)?, ops::cross_entropy(&x, &targets)?);
    assert_eq!(to_vec(&ours), to_vec(&plain));
    assert_eq!(to_vec(&gradient(&ours, &x)?), to_vec(&gradient(&plain, &x)?));

    let padding = CrossEntropyLoss { ignore_index: Some(0), ..Default::default() };
    let kept = Tensor::new(&[0u32, 2, 4], &Device::Cpu)?;
    let expected =
        ops::cross_entropy(&x.index_select(&kept, 0)?, &targets.index_select(&kept, 0)?)?;
    for dtype in [DType::U8, DType::U32, DType::I64] {
        let ours = padding.forward(&x, &targets.to_dtype(dtype)?)?;
        assert_eq!(to_vec(&ours), to_vec(&expected), "{dtype:?}");
    }
    Ok(())
}

/// Class weights are read in forward alone.
#[test]
fn class_weights_may_change_before_backward() -> candle_amp::Result<()> {
    let x = Var::from_tensor(&random(1, (5, 4), DType::F32))?;
    let targets = Tensor::new(&[3u32, 0, 2, 0, 1], &Device::Cpu)?;
    let weight = Var::new(&[1f32, 2.0, 3.0, 4.0], &Device::Cpu)?;
    let loss = CrossEntropyLoss { weight: Some(weight.detach()), ..Default::default() };
    let expected = gradient(&loss.forward(&x, &targets)?, &x)?;
    let value = loss.forward(&x, &targets)?;
    weight.set(&weight.zeros_like()?)?;
    assert_eq!(to_vec(&gradient(&value, &x)?), to_vec(&expected));
    Ok(())
}
