//! Layers against candle_nn's, and the seeded generator.

use candle_amp::{Autocast, Parameters, nn, ops, random as generator};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Module, ModuleT, VarBuilder, VarMap};

use crate::util::{assert_close, assert_same, largest, random, seeded, to_vec};

const CPU: Device = Device::Cpu;

#[test]
fn layers_compute_what_candle_nn_computes_from_the_same_variables() -> Result<()> {
    let _fork = seeded(1);
    let varmap = VarMap::new();
    let ours = nn::var_builder(&varmap, DType::F32, &CPU);
    let theirs = VarBuilder::from_varmap(&varmap, DType::F32, &CPU);
    let (x, image) = (random(1, (3, 6), DType::F32), random(2, (2, 4, 9, 7), DType::F32));
    let config = nn::Conv2dConfig { stride: 2, padding: 1, groups: 2, ..Default::default() };
    let close = |name, ours: Result<Tensor>, theirs: Result<Tensor>| -> Result<()> {
        assert_close(name, &ours?, &theirs?, DType::F32, 16.0);
        Ok(())
    };
    let (a, b) = (nn::linear(6, 4, ours.pp("a"))?, candle_nn::linear(6, 4, theirs.pp("a"))?);
    close("linear", a.forward(&x), b.forward(&x))?;
    let (a, b) = (
        nn::conv2d(4, 6, 3, config, ours.pp("b"))?,
        candle_nn::conv2d(4, 6, 3, config, theirs.pp("b"))?,
    );
    close("conv2d", a.forward(&image), b.forward(&image))?;
    let (a, b) = (
        nn::conv2d_no_bias(4, 6, 3, config, ours.pp("c"))?,
        candle_nn::conv2d_no_bias(4, 6, 3, config, theirs.pp("c"))?,
    );
    close("conv2d_no_bias", a.forward(&image), b.forward(&image))?;
    // Each updates its own statistics.
    let statistics = VarMap::new();
    let theirs = VarBuilder::from_varmap(&statistics, DType::F32, &CPU);
    let (a, b) = (nn::batch_norm(4, 1e-3, ours.pp("d"))?, candle_nn::batch_norm(4, 1e-3, theirs)?);
    for _ in 0..3 {
        close("batch_norm, train", a.forward_t(&image, true), b.forward_t(&image, true))?;
    }
    close("running mean", Ok(a.running_mean().clone()), Ok(b.running_mean().clone()))?;
    close("running var", Ok(a.running_var().clone()), Ok(b.running_var().clone()))?;
    close("batch_norm, eval", a.forward_t(&image, false), b.forward_t(&image, false))?;
    let names: Vec<_> = Parameters::from_varmap(&varmap).names().map(String::from).collect();
    assert_eq!(
        names,
        ["a.bias", "a.weight", "b.bias", "b.weight", "c.weight", "d.bias", "d.weight"]
    );
    Ok(())
}

/// The same variables, the same model: outputs, gradients and running statistics.
#[test]
fn a_model_with_channels_last_is_the_one_with_channels_first() -> Result<()> {
    let _fork = seeded(2);
    let images = random(3, (4, 3, 9, 7), DType::F32);
    let varmap = VarMap::new();
    let model = |last: bool, statistics: &VarMap| -> Result<_> {
        let vb = nn::var_builder(&varmap, DType::F32, &CPU);
        let own = nn::var_builder(statistics, DType::F32, &CPU);
        let config = nn::Conv2dConfig { stride: 2, padding: 1, ..Default::default() };
        let conv = nn::conv2d(3, 18, 3, config, vb.pp("conv"))?;
        let norm = nn::batch_norm(18, 1e-5, own)?;
        Ok(if last { (conv.channels_last(), norm.channels_last()) } else { (conv, norm) })
    };
    for dtype in [DType::F32, DType::BF16] {
        let statistics = [VarMap::new(), VarMap::new()];
        let (first, last) = (model(false, &statistics[0])?, model(true, &statistics[1])?);
        // Two roundings to a half, and what a variance makes of them.
        let roundings = if dtype == DType::F32 { 64.0 } else { 8.0 };
        let close = |what, a: &Tensor, b: &Tensor| assert_close(what, a, b, dtype, roundings);
        let (amp, turned) = (Autocast::new(dtype), images.permute((0, 2, 3, 1))?);
        for (six, train) in [(false, true), (false, false), (true, true), (true, false)] {
            let run = |(conv, norm): &(nn::Conv2d, nn::BatchNorm), x: &Tensor| {
                amp.scope(|| match (conv.forward(x)?, six) {
                    (y, false) => norm.forward_relu_t(&y, None, train),
                    (y, true) => norm.forward_relu6_t(&y, train),
                })
            };
            let (a, b) = (run(&first, &images)?, run(&last, &turned)?);
            assert_eq!((b.dims(), b.dtype()), (&[4, 5, 4, 18][..], dtype));
            close("output", &b.permute((0, 3, 1, 2))?.contiguous()?, &a);
            let weigh = random(4, a.dims(), DType::F32);
            let loss = |y: &Tensor, w: &Tensor| (y.to_dtype(DType::F32)? * w)?.sum_all();
            let by_first = loss(&a, &weigh)?.backward()?;
            let by_last = loss(&b, &weigh.permute((0, 2, 3, 1))?.contiguous()?)?.backward()?;
            for var in varmap.all_vars() {
                let gradients = [&by_last, &by_first].map(|store| store.get(&var).cloned());
                let [Some(a), Some(b)] = gradients else { panic!("a gradient is missing") };
                // A bias before a norm has none but roundings.
                if train && var.rank() == 1 {
                    assert!(largest(&a).max(largest(&b)) < 0.05);
                } else {
                    close("gradient", &a, &b);
                }
            }
        }
        close("running mean", last.1.running_mean(), first.1.running_mean());
        close("running var", last.1.running_var(), first.1.running_var());
    }
    Ok(())
}

#[test]
fn a_batch_norm_with_relu6_is_one_and_then_the_other() -> Result<()> {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let layer = || {
            let varmap = VarMap::new();
            let norm = nn::batch_norm(5, 1e-3, nn::var_builder(&varmap, DType::F32, &CPU))?;
            // So that some results are above six.
            let weight = &varmap.data().lock().unwrap()["weight"];
            weight.set(&(weight.as_detached_tensor() * 8.0)?)?;
            Ok::<_, candle_core::Error>(norm)
        };
        let (joined, apart) = (layer()?, layer()?);
        let x = Var::from_tensor(&(random(1, (6, 5, 3, 4), dtype) * 3.0)?)?;
        for train in [true, false] {
            let a = joined.forward_relu6_t(&x, train)?;
            let b = ops::relu6(&apart.forward_t(&x, train)?)?;
            assert_same("output", &a, &b);
            let gradient = |y: &Tensor| -> Result<Tensor> {
                let store = ops::sum(&ops::mul(y, y)?)?.backward()?;
                Ok(store.get(&x).expect("a gradient").clone())
            };
            assert_same("gradient", &gradient(&a)?, &gradient(&b)?);
        }
        assert_same("running mean", joined.running_mean(), apart.running_mean());
        assert_same("running variance", joined.running_var(), apart.running_var());
    }
    Ok(())
}

/// candle_nn's batch norm fails in half, in one mode or the other.
#[test]
fn batch_norm_works_in_half_in_both_modes() -> Result<()> {
    let _fork = seeded(3);
    for dtype in [DType::F16, DType::BF16] {
        let norm = nn::batch_norm(3, 1e-5, nn::var_builder(&VarMap::new(), dtype, &CPU))?;
        let full = nn::batch_norm(3, 1e-5, nn::var_builder(&VarMap::new(), DType::F32, &CPU))?;
        let x = random(1, (8, 3, 5, 5), dtype);
        for train in [true, false] {
            let y = norm.forward_t(&x, train)?;
            assert_eq!(y.dtype(), dtype);
            assert_eq!(norm.running_var().dtype(), DType::F32);
            let expected = full.forward_t(&x.to_dtype(DType::F32)?, train)?;
            assert_close("half", &y, &expected, dtype, 0.5);
        }
        assert_same("running mean", norm.running_mean(), full.running_mean());
    }
    Ok(())
}

#[test]
fn the_same_seed_gives_the_same_model_and_run() -> Result<()> {
    let run = |seed: u64| -> Result<Vec<f64>> {
        let _fork = seeded(seed);
        let vb = nn::var_builder(&VarMap::new(), DType::F32, &CPU);
        let layer = nn::linear(16, 16, vb)?;
        let y = ops::dropout(&layer.forward(&random(1, (4, 16), DType::F32))?, 0.3)?;
        Ok(to_vec(&y))
    };
    assert_eq!(run(11)?, run(11)?);
    assert_ne!(run(11)?, run(12)?);
    Ok(())
}

#[test]
fn a_fork_neither_disturbs_the_generator_nor_is_disturbed() -> Result<()> {
    let x = random(1, (4, 16), DType::F32);
    let draw = || -> Result<Vec<f64>> { Ok(to_vec(&ops::dropout(&x, 0.3)?)) };
    let _fork = seeded(3);
    let undisturbed = [draw()?, draw()?];
    generator::manual_seed(3);
    let first = draw()?;
    // Other threads draw from the process's generator, a fork of the fork from its own.
    std::thread::scope(|scope| scope.spawn(draw).join().expect("the thread drew"))?;
    {
        let _inner = generator::fork_rng_guard();
        assert_eq!(draw()?, undisturbed[1], "from where the outer one stands");
        generator::manual_seed(4);
        assert_ne!(draw()?, undisturbed[0]);
    }
    assert_eq!([first, draw()?], undisturbed);
    Ok(())
}

#[test]
fn initial_values_have_the_distribution_asked_for() -> Result<()> {
    let _fork = seeded(4);
    let vb = nn::var_builder(&VarMap::new(), DType::F32, &CPU);
    let moments = |t: &Tensor| {
        let v = to_vec(t);
        let mean = v.iter().sum::<f64>() / v.len() as f64;
        (mean, v.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / v.len() as f64)
    };
    let init = nn::Init::Uniform { lo: -1.0, up: 3.0 };
    let (mean, var) = moments(&vb.get_with_hints(40_000, "uniform", init)?);
    // Four standard errors of 40,000 draws: 4 * sqrt(4/3) / 200.
    assert!((mean - 1.0).abs() < 0.024 && (var - 4.0 / 3.0).abs() < 0.03, "{mean} {var}");
    let (mean, var) = moments(nn::linear(200, 200, vb.pp("kaiming"))?.weight());
    assert!(mean.abs() < 0.002 && (var * 100.0 - 1.0).abs() < 0.03, "{mean} {var}: 2 / fan in");
    Ok(())
}

#[test]
fn the_builder_refuses_a_variable_of_another_shape_or_dtype() -> Result<()> {
    let _fork = seeded(5);
    let varmap = VarMap::new();
    nn::var_builder(&varmap, DType::F32, &CPU).get(3, "w")?;
    for (dtype, dims) in [(DType::F16, 3), (DType::F32, 4)] {
        let error = nn::var_builder(&varmap, dtype, &CPU).get(dims, "w").unwrap_err().to_string();
        assert!(error.contains("variable `w` was asked for as"), "{error}");
    }
    Ok(())
}

#[test]
fn dropout_keeps_the_right_share_and_drops_infinities() -> Result<()> {
    let _fork = seeded(6);
    let x = Tensor::full(f32::INFINITY, 10_000, &CPU)?;
    let y = to_vec(&ops::dropout(&x, 0.3)?);
    let dropped = y.iter().filter(|&&y| y == 0.0).count();
    assert!(y.iter().all(|&y| y == 0.0 || y == f64::INFINITY));
    // Four standard deviations of a binomial of 10,000.
    assert!((dropped as f64 - 3000.0).abs() < 4.0 * 2100f64.sqrt(), "{dropped}");
    let ones = Tensor::ones(1000, DType::F32, &CPU)?;
    assert!(to_vec(&ops::dropout(&ones, 1.0)?).iter().all(|&y| y == 0.0));
    assert_same("p of 0", &ops::dropout(&ones, 0.0)?, &ones);
    assert_same("evaluation", &nn::Dropout::new(0.5).forward_t(&ones, false)?, &ones);
    let kept = to_vec(&nn::Dropout::new(0.5).forward_t(&ones, true)?);
    assert!(kept.iter().all(|&y| y == 0.0 || y == 2.0) && kept.contains(&2.0));
    Ok(())
}

#[test]
fn a_small_network_learns_in_every_precision() -> candle_amp::Result<()> {
    let _fork = seeded(7);
    use candle_amp::optim::{Sgd, SgdConfig};
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for masters in [false, true] {
            let storage = if masters { dtype } else { DType::F32 };
            let varmap = VarMap::new();
            let vb = nn::var_builder(&varmap, storage, &CPU);
            let conv = nn::conv2d_no_bias(
                1,
                4,
                3,
                nn::Conv2dConfig { padding: 1, ..Default::default() },
                vb.pp("conv"),
            )?;
            let norm = nn::batch_norm(4, 1e-5, vb.pp("norm"))?;
            let head = nn::linear(4, 2, vb.pp("head"))?;
            // Horizontal or vertical stripes.
            let x: Vec<f32> = (0..32 * 64)
                .map(|i| {
                    [(i / 8) % 2, i % 2][i / 64 % 2] as f32 - 0.5 + (i * 37 % 101) as f32 / 200.0
                })
                .collect();
            let x = Tensor::from_vec(x, (32, 1, 8, 8), &CPU)?;
            let y = Tensor::from_vec((0..32u32).map(|i| i % 2).collect(), 32, &CPU)?;
            let config = SgdConfig { lr: 0.2, momentum: 0.9, ..Default::default() };
            let mut opt = Sgd::new(Parameters::from_varmap(&varmap).vars(), config)?;
            let mut scaler = candle_amp::GradScaler::default();
            let amp = Autocast::new(dtype);
            let mut losses = Vec::new();
            for _ in 0..25 {
                let loss = amp.scope(|| {
                    let h = ops::relu(&norm.forward_t(&conv.forward(&x)?, true)?)?;
                    ops::cross_entropy(&head.forward(&ops::global_avg_pool2d(&h)?)?, &y)
                })?;
                losses.push(loss.to_scalar::<f32>()?);
                scaler.scale(&loss)?.backward()?;
                let _ = scaler.step(&mut opt)?;
                scaler.update()?;
            }
            let (first, last) = (losses[0], losses[24]);
            assert!(last < 0.2 * first, "{dtype:?}, masters {masters}: {first} to {last}");
        }
    }
    Ok(())
}

/// A checkpoint may say that any number of tensors was drawn.
#[test]
fn the_generator_goes_on_after_its_last_stream() -> Result<()> {
    let _fork = seeded(8);
    let x = Tensor::ones(64, DType::F32, &CPU)?;
    generator::set_state(generator::RandomState { seed: 1, draws: u64::MAX });
    let (last, first) = (ops::dropout(&x, 0.5)?, ops::dropout(&x, 0.5)?);
    assert_eq!(generator::state(), generator::RandomState { seed: 1, draws: 1 });
    generator::manual_seed(1);
    assert_eq!(to_vec(&first), to_vec(&ops::dropout(&x, 0.5)?));
    assert_ne!(to_vec(&first), to_vec(&last));
    Ok(())
}
