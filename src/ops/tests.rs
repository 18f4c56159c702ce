use candle_core::{DType, Device, Result, Tensor, Var};

use crate::autograd::{Backward, Gradient, Operator, apply, share_storage};
use crate::kernels::cuda::reads;
use crate::kernels::elementwise::testing::*;
use crate::kernels::testing::devices::{devices, gpus};
use crate::ops::product;
use crate::optim::{Sgd, SgdConfig};
use crate::{Cast, GradScaler, Op, ScaleConfig, ops};

/// A transformer's block forward, of `x (n, t, 64)` and its seven parameters, as `examples/gpt` has it.
fn block(x: &Tensor, p: &[Tensor]) -> Result<Tensor> {
    let inner = ops::layer_norm(x, Some(&p[0]), Some(&p[1]), 1e-5)?;
    let attention = ops::sdpa_packed(&ops::linear(&inner, &p[2], None)?, 4, true, 0.25)?;
    let x = ops::add(x, &ops::linear(&attention, &p[3], None)?)?;
    let inner = ops::layer_norm(&x, Some(&p[0]), Some(&p[1]), 1e-5)?;
    let inner = ops::gelu_tanh(&ops::linear(&inner, &p[4], Some(&p[5]))?)?;
    ops::add(&x, &ops::linear(&inner, &p[6], None)?)
}

#[test]
fn a_transformers_block_and_its_gradients_are_the_cpus_on_gpus() -> Result<()> {
    let shapes: [&[usize]; 7] =
        [&[64], &[64], &[192, 64], &[64, 64], &[256, 64], &[256], &[64, 256]];
    for dtype in [DType::F16, DType::F32] {
        let run = |device: &Device| -> Result<Vec<Tensor>> {
            let of = |shape: &[usize], seed| (random(shape, dtype, seed) * 0.2)?.to_device(device);
            let parameters: Vec<Var> = (0..)
                .zip(shapes)
                .map(|(seed, shape)| Var::from_tensor(&of(shape, seed)?))
                .collect::<Result<_>>()?;
            let tensors: Vec<Tensor> = parameters.iter().map(|p| p.as_tensor().clone()).collect();
            let y = block(&of(&[2, 9, 64], 9)?, &tensors)?;
            let grads = ops::mean(&ops::mul(&y, &y)?)?.backward()?;
            let gradients = parameters.iter().filter_map(|p| grads.get(p)).cloned();
            std::iter::once(y.clone()).chain(gradients).map(|t| t.to_device(&Device::Cpu)).collect()
        };
        let expected = run(&Device::Cpu)?;
        assert_eq!(expected.len(), 8);
        for gpu in gpus() {
            let before = reads();
            let results = run(&gpu)?;
            assert_eq!(reads(), before, "somebody waited for the device");
            for (actual, expected) in results.iter().zip(&expected) {
                assert_close(
                    actual,
                    &values(expected),
                    if dtype == DType::F16 { 16.0 } else { 256.0 },
                );
            }
        }
    }
    Ok(())
}

/// What backward would multiply by, if it had a gradient to compute: nothing, for a frozen weight.
#[test]
fn a_product_keeps_no_operand_that_backward_does_not_read() -> Result<()> {
    let (a, b) = (random(&[4, 3], DType::F32, 1), random(&[3, 5], DType::F32, 2));
    let kept = |wanted: &[bool]| -> Result<[bool; 2]> {
        let (_, mut saved) = product::Matmul.forward(&[a.clone(), b.clone()])?;
        product::Matmul.trim(&mut saved, wanted)?;
        assert_eq!((saved.0.dims(), saved.1.dims()), (a.dims(), b.dims()));
        Ok([share_storage(&saved.0, &a), share_storage(&saved.1, &b)])
    };
    assert_eq!(kept(&[true, true])?, [true, true]);
    assert_eq!(kept(&[true, false])?, [false, true]);
    assert_eq!(kept(&[false, true])?, [true, false]);
    let (_, mut saved) = product::Linear.forward(&[a.clone(), b.t()?])?;
    product::Linear.trim(&mut saved, &[true, false])?;
    assert!(!share_storage(&saved.0, &a) && saved.0.dims() == a.dims());
    Ok(())
}

/// A loss that makes its own logits has the numbers of those that `linear` makes: the same bits on a CPU.
#[test]
fn a_head_and_its_loss_are_as_two_operators() -> Result<()> {
    for device in devices() {
        for dtype in DTYPES {
            for (classes, with_bias) in [(7, false), (1031, false), (1031, true)] {
                let of = |dims: &[usize], seed| random(dims, dtype, seed).to_device(&device);
                let vars = [of(&[2, 3, 16], 1)?, of(&[classes, 16], 2)?, of(&[classes], 3)?];
                let [x, weight, bias] = vars.map(|var| Var::from_tensor(&var));
                let (x, weight, bias) = (x?, weight?, bias?);
                let bias = with_bias.then_some(&bias);
                let next = Tensor::new(&[[1u32, 0, 6], [3, 2, 5]], &device)?;
                let before = reads();
                let logits = ops::linear(&x, &weight, bias.map(|b| b.as_tensor()))?;
                let flat = next.flatten_all()?;
                let two = ops::cross_entropy_smoothed(&logits.flatten_to(1)?, &flat, 0.1)?;
                let bias_tensor = bias.map(|b| b.as_tensor());
                let one = ops::linear_cross_entropy_smoothed(&x, &weight, bias_tensor, &next, 0.1)?;
                let (of_two, of_one) = (two.backward()?, one.backward()?);
                assert_eq!(reads(), before, "somebody waited for the device");
                let mut pairs = vec![(two, one)];
                for var in [Some(&x), Some(&weight), bias].into_iter().flatten() {
                    let [two, one] = [of_two.get(var), of_one.get(var)].map(Option::unwrap);
                    assert_eq!((one.dims(), one.dtype()), (var.dims(), var.dtype()));
                    pairs.push((two.clone(), one.clone()));
                }
                for (two, one) in pairs {
                    let two = values(&two.to_device(&Device::Cpu)?);
                    let one = one.to_device(&Device::Cpu)?;
                    if device.is_cpu() {
                        assert_eq!(values(&one), two, "{dtype:?} {classes}");
                    }
                    assert_close(&one, &two, 64.0);
                }
                // The last time, logits become their gradient.
                let loss =
                    ops::linear_cross_entropy_smoothed(&x, &weight, bias_tensor, &next, 0.1)?;
                let mut scaler = GradScaler::new(ScaleConfig::constant(8.0))?;
                scaler.scale(&loss)?.retain_graph().backward()?;
                let mut passes = Vec::new();
                for _ in 0..2 {
                    let of = |var: &Var| scaler.grad(var).map(Option::unwrap);
                    let [x, weight] = [of(&x)?, of(&weight)?].map(|g| g.to_device(&Device::Cpu));
                    passes.push([values(&x?), values(&weight?)]);
                    scaler.zero_grad();
                    if passes.len() == 1 {
                        scaler.scale(&loss)?.backward()?;
                    }
                }
                assert_eq!(passes[0], passes[1], "{dtype:?} {classes}");
                // The gradient may lie in a longer tensor, as a step has to find out.
                let config = ScaleConfig { init_scale: 8.0, ..Default::default() };
                let mut scaler = GradScaler::new(config)?;
                let weights = || weight.as_detached_tensor().to_device(&Device::Cpu);
                let before = values(&weights()?);
                let loss = ops::linear_cross_entropy(&x, &weight, bias_tensor, &next)?;
                scaler.scale(&loss)?.backward()?;
                let gradient = scaler.grad(&weight)?.expect("a gradient");
                let gradient = values(&gradient.to_device(&Device::Cpu)?);
                let config = SgdConfig { lr: 0.5, ..Default::default() };
                assert!(!scaler.step(&mut Sgd::new(vec![weight.clone()], config)?)?.skipped()?);
                let expected = before.into_iter().zip(gradient);
                let expected = expected.map(|(weight, gradient)| weight - 0.5 * gradient);
                assert_close(&weights()?, &expected.collect::<Vec<_>>(), 2.0);
            }
        }
    }
    Ok(())
}

#[test]
fn a_head_takes_targets_of_any_strides() -> Result<()> {
    for device in devices() {
        let x = Var::from_tensor(&random(&[5, 16], DType::F32, 1).to_device(&device)?)?;
        let weight = random(&[7, 16], DType::F32, 2).to_device(&device)?;
        let pairs = Tensor::new(&[[1u32, 6], [0, 6], [6, 6], [3, 6], [2, 6]], &device)?;
        let apart = pairs.narrow(1, 0, 1)?.squeeze(1)?;
        assert!(!apart.is_contiguous());
        let mut gradients = Vec::new();
        for targets in [apart.contiguous()?, apart] {
            let mut scaler = GradScaler::disabled();
            let loss = ops::linear_cross_entropy(&x, &weight, None, &targets)?;
            scaler.scale(&loss)?.backward()?;
            let gradient = scaler.grad(&x)?.expect("a gradient");
            gradients.push(values(&gradient.to_device(&Device::Cpu)?));
        }
        assert_eq!(gradients[0], gradients[1]);
    }
    Ok(())
}

/// An output that is a part of what backward keeps is copied, not taken from under it.
#[test]
fn an_output_may_be_a_part_of_what_is_kept() -> Result<()> {
    struct Front;
    impl Operator for Front {
        type Saved = Tensor;

        fn op(&self) -> Op {
            Op::user("front", Cast::Keep)
        }

        fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Tensor)> {
            let all = inputs[0].affine(3.0, 1.0)?;
            Ok((all.narrow(0, 0, 2)?, all))
        }

        fn backward(&self, ctx: &Backward<'_, Tensor>) -> Result<Vec<Option<Gradient>>> {
            Ok(vec![Some(Gradient::owned(ctx.saved.affine(2.0, 0.0)?))])
        }
    }
    for device in devices() {
        let x = Var::new(&[1f32, -2.0, 5.0], &device)?;
        let y = apply(Front, &[&x])?;
        assert_eq!(y.to_vec1::<f32>()?, [4.0, -5.0]);
        let gradients = y.sum_all()?.backward()?;
        let dx = gradients.get(&x).unwrap();
        assert_eq!(dx.to_vec1::<f32>()?, [8.0, -10.0, 32.0]);
    }
    Ok(())
}

/// The bias moves all logits, and changes neither loss nor gradients.
#[test]
fn an_offset_of_a_heads_logits_does_not_matter() -> Result<()> {
    // Whole steps of 2^-4, so that the logits are exact at every offset.
    let steps = |shape: &[usize], seed| (random(shape, DType::F32, seed) * 16.0)?.round()? / 16.0;
    let (x, table, bias) = (steps(&[7, 5], 1)?, steps(&[11, 5], 2)?, steps(&[11], 3)?);
    let targets = Tensor::new(&[3u32, 0, 10, 2, 2, 9, 5], &Device::Cpu)?;
    for smoothing in [0.0, 0.1] {
        let run = |dtype: DType, offset: f64| -> Result<Vec<Vec<f64>>> {
            let of = |x: &Tensor| Var::from_tensor(&x.to_dtype(dtype)?);
            let (x, table, bias) = (of(&x)?, of(&table)?, of(&(&bias + offset)?)?);
            let targets = &targets;
            let loss =
                ops::linear_cross_entropy_smoothed(&x, &table, Some(&bias), targets, smoothing)?;
            let gradients = loss.backward()?;
            let all = [&x, &table, &bias].map(|var| values(gradients.get(var).unwrap()));
            Ok(all.into())
        };
        let exact = run(DType::F64, 0.0)?;
        for offset in [0.0, 100.0, 10_000.0, -10_000.0] {
            for (ours, exact) in run(DType::F32, offset)?.into_iter().zip(&exact) {
                // Sums of seven or eleven probabilities, each off by a few places.
                assert_close(&of(ours, &[exact.len()], DType::F32), exact, 8.0);
            }
        }
    }
    Ok(())
}

#[test]
fn flatten_takes_any_rank() -> Result<()> {
    for (dims, expected) in [
        (&[][..], &[1][..]),
        (&[4], &[4]),
        (&[0], &[0]),
        (&[2, 3], &[2, 3]),
        (&[2, 3, 4, 5], &[2, 60]),
        (&[2, 0, 4], &[2, 0]),
    ] {
        let x = Var::from_tensor(&random(dims, DType::F32, 1))?;
        let y = ops::flatten(&x)?;
        assert_eq!((y.dims(), values(&y)), (expected, values(&x)));
        let weights = random(expected, DType::F32, 2);
        let gradients = ops::sum(&ops::mul(&y, &weights)?)?.backward()?;
        let gradient = gradients.get(&x).unwrap();
        assert_eq!((gradient.dims(), values(gradient)), (dims, values(&weights)));
    }
    Ok(())
}

/// A pointwise operator runs along the memory of its input, and its result lies in memory as that does.
#[test]
fn activations_keep_the_strides_of_what_has_no_gaps() -> Result<()> {
    let root = Var::from_tensor(&random(&[3, 5, 4, 7], DType::F32, 1))?;
    type View<'a> = &'a dyn Fn(&Tensor) -> Result<Tensor>;
    let views: [View<'_>; 3] = [&|x| x.transpose(1, 3), &|x| x.permute((2, 0, 3, 1)), &|x| {
        x.narrow(0, 1, 2)?.permute((3, 1, 0, 2))
    }];
    for f in [ops::silu, ops::relu] {
        for view in views {
            let x = view(&root)?;
            let weights = random(x.dims(), DType::F32, 2);
            let run = |x: &Tensor| -> Result<(Tensor, Vec<f64>)> {
                let y = f(x)?;
                let gradients = ops::sum(&ops::mul(&y, &weights)?)?.backward()?;
                Ok((y, values(gradients.get(&root).unwrap())))
            };
            let (y, gradient) = run(&x)?;
            assert_eq!((y.dims(), y.stride()), (x.dims(), x.stride()));
            let (expected, expected_gradient) = run(&x.contiguous()?)?;
            assert_eq!(values(&y), values(&expected));
            assert_eq!(gradient, expected_gradient);
        }
        let repeated = root.narrow(1, 0, 1)?.broadcast_as((3, 5, 4, 7))?.t()?;
        for gaps in [root.narrow(3, 1, 5)?.t()?, repeated] {
            let y = f(&gaps)?;
            assert!(y.is_contiguous());
            assert_eq!(values(&y), values(&f(&gaps.contiguous()?)?));
        }
    }
    Ok(())
}

/// A gradient reaches the tensor of a view in whatever order it lies in memory.
#[test]
fn a_views_gradient_may_lie_in_memory_in_any_order() -> Result<()> {
    struct Given(Tensor);
    impl Operator for Given {
        type Saved = ();

        fn op(&self) -> Op {
            Op::user("given", Cast::Keep)
        }

        fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, ())> {
            Ok((Tensor::zeros((), DType::F32, inputs[0].device())?, ()))
        }

        fn backward(&self, _: &Backward<'_, ()>) -> Result<Vec<Option<Gradient>>> {
            Ok(vec![Some(Gradient::shared(self.0.clone()))])
        }
    }
    let root = Var::from_tensor(&random(&[3, 4, 5], DType::F32, 1))?;
    type View<'a> = &'a dyn Fn(&Tensor) -> Result<Tensor>;
    let views: [View<'_>; 4] =
        [&|x| Ok(x.clone()), &|x| x.reshape((5, 3, 4)), &|x| x.transpose(0, 2), &|x| {
            x.permute((1, 2, 0))
        }];
    for view in views {
        let y = view(&ops::affine(&root, 2.0, 0.0)?)?;
        let given = random(y.dims(), DType::F32, 2);
        // Each element of the gradient at the place in `root` that the view shows there.
        let place = view(&Tensor::arange(0f32, 60.0, &Device::Cpu)?.reshape((3, 4, 5))?)?;
        let mut expected = vec![0.0; 60];
        for (place, given) in values(&place).into_iter().zip(values(&given)) {
            expected[place as usize] = 2.0 * given;
        }
        for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0], [2, 0, 1]] {
            let mut back = [0; 3];
            order.iter().enumerate().for_each(|(place, &dim)| back[dim] = place);
            let laid_out = given.permute(order)?.contiguous()?.permute(back)?;
            let gradients = apply(Given(laid_out), &[&y])?.backward()?;
            assert_eq!(values(gradients.get(&root).unwrap()), expected, "{order:?}");
        }
    }
    Ok(())
}
