//! The scaler on real graphs: the scale never moves the weights, overflows skip, gradients
//! accumulate and clip, and several optimizers keep out of each other's way.

use candle_amp::error::ScalerError;
use candle_amp::optim::{Sgd, SgdConfig, Step};
use candle_amp::{Autocast, Error, GradScaler, MasterWeights, Parameters, ScaleConfig, ops};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, SGD};

use crate::util::{assert_close, assert_same, random, to_vec};

fn var(values: &[f32]) -> Var {
    Var::new(values, &Device::Cpu).unwrap()
}

fn values(var: &Var) -> Vec<f64> {
    to_vec(var)
}

fn growing(init_scale: f32) -> GradScaler {
    GradScaler::new(ScaleConfig { init_scale, growth_interval: 1, ..Default::default() }).unwrap()
}

/// PyTorch's `_run_scaling_case`: two layers, SGD at 1, four batches, the third with an infinity;
/// against the same without a scaler, skipping that batch.
fn scaling_case(dtype: DType, optimizer: MakeOptimizer) -> candle_amp::Result<()> {
    let layer = |seed| Var::from_tensor(&(random(seed, (8, 8), DType::F32) * 0.35)?);
    let (control, model) = ([layer(1)?, layer(2)?], [layer(1)?, layer(2)?]);
    let loss = |w: &[Var; 2], i: u64| {
        let (x, y) = (random(10 + i, (8, 8), DType::F32), random(20 + i, (8, 8), DType::F32));
        let h = ops::linear(&x, &w[0], None)?;
        ops::mse(&ops::linear(&h, &w[1], None)?, &y)
    };
    let amp = if dtype == DType::F32 { Autocast::disabled() } else { Autocast::new(dtype) };
    let mut plain = GradScaler::disabled();
    let mut scaler = growing(128.0);
    let (mut plain_opt, mut opt) = (optimizer(control.to_vec()), optimizer(model.to_vec()));
    for i in 0..4 {
        let loss_of_model = amp.scope(|| loss(&model, i))?;
        scaler.scale(&loss_of_model)?.backward()?;
        if i == 2 {
            let inf = (model[1].sum_all()? * f64::INFINITY)?;
            scaler.scale(&inf)?.backward()?;
        } else {
            let loss = amp.scope(|| loss(&control, i))?;
            plain.scale(&loss)?.backward()?;
            plain_opt.step(&mut plain)?;
            plain.update()?;
        }
        assert_eq!(opt.step(&mut scaler)?, i == 2, "step {i}");
        scaler.update()?;
    }
    assert_eq!(scaler.current_scale(), 128.0 * 8.0 * 0.5);
    assert_eq!(plain.current_scale(), 1.0);
    for (model, control) in model.iter().zip(&control) {
        // The scale is a power of two: nothing but F16's underflow could tell.
        assert_close("weights", model, control, DType::F32, 4.0);
    }
    Ok(())
}

type MakeOptimizer = fn(Vec<Var>) -> Box<dyn AnyStep>;

/// `GradScaler::step` is generic; the table of cases is not.
trait AnyStep {
    /// Whether the step was skipped.
    fn step(&mut self, scaler: &mut GradScaler) -> candle_amp::Result<bool>;
}

impl<S: Step> AnyStep for S {
    fn step(&mut self, scaler: &mut GradScaler) -> candle_amp::Result<bool> {
        scaler.step(self)?.skipped()
    }
}

#[test]
fn a_run_with_a_scaler_is_the_run_without_minus_the_skipped_step() -> candle_amp::Result<()> {
    let optimizers: [MakeOptimizer; 5] = [
        |vars| Box::new(SGD::new(vars, 1.0).unwrap()),
        |vars| Box::new(AdamW::new(vars, ParamsAdamW { lr: 0.01, ..Default::default() }).unwrap()),
        |vars| Box::new(MasterWeights::<SGD>::new(vars, 1.0).unwrap()),
        |vars| {
            let config = ParamsAdamW { lr: 0.01, ..Default::default() };
            Box::new(MasterWeights::<AdamW>::new(vars, config).unwrap())
        },
        |vars| {
            let config = SgdConfig { lr: 0.5, momentum: 0.9, ..Default::default() };
            Box::new(Sgd::new(vars, config).unwrap())
        },
    ];
    for optimizer in optimizers {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            scaling_case(dtype, optimizer)?;
        }
    }
    Ok(())
}

/// The point of it all: a gradient below F16's smallest number arrives.
#[test]
fn scaling_saves_gradients_that_f16_cannot_hold() -> candle_amp::Result<()> {
    let gradient = |mut scaler: GradScaler| -> candle_amp::Result<f64> {
        let w = Var::ones((1, 1), DType::F32, &Device::Cpu)?;
        let x = Tensor::ones((1, 1), DType::F32, &Device::Cpu)?;
        let y = Autocast::new(DType::F16).scope(|| ops::matmul(&x, &w))?;
        let loss = (ops::mean(&y.to_dtype(DType::F32)?)? * 1e-9)?;
        scaler.scale(&loss)?.backward()?;
        Ok(to_vec(&scaler.grad(&w)?.expect("a gradient"))[0])
    };
    assert_eq!(gradient(GradScaler::disabled())?, 0.0);
    let scaled = gradient(GradScaler::default())?;
    assert!((scaled - 1e-9).abs() < 1e-9 * half::f16::EPSILON.to_f64(), "{scaled:e}");
    Ok(())
}

/// candle has gradients for constants too; an infinite one there is no reason to skip.
#[test]
fn a_scaled_loss_is_the_loss_times_the_scale() -> candle_amp::Result<()> {
    let w = Var::from_tensor(&random(1, 5, DType::F32))?;
    let mut scaler = GradScaler::new(ScaleConfig::constant(8.0))?;
    for loss in [ops::mean(&w)?, w.mean_all()?] {
        let (scaled, expected) = (scaler.scale(&loss)?, (&loss * 8.0)?);
        assert_same("scaled", scaled.loss(), &expected);
    }
    Ok(())
}

#[test]
fn only_variables_decide_whether_to_skip() -> candle_amp::Result<()> {
    let w = var(&[1.0]);
    let constant = Tensor::new(&[1f32], &Device::Cpu)?;
    // d/dw is 1; d/dconstant is w = 1e38, and infinite once scaled.
    let w_large = (w.as_tensor() + 1e38)?;
    let loss = (w_large * &constant)?.sum_all()?;
    let mut sgd = SGD::new(vec![w.clone()], 0.5)?;
    let mut scaler = GradScaler::default();
    scaler.scale(&loss)?.backward()?;
    assert!(scaler.grad(&constant)?.is_none());
    assert!(!scaler.step(&mut sgd)?.skipped()?);
    assert_eq!(values(&w), [0.5]);
    Ok(())
}

#[test]
fn a_nan_that_is_not_first_is_seen_and_named() -> candle_amp::Result<()> {
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        for at in [0, 1, 16, 70_000] {
            let (good, w) = (var(&[1.0]), Var::zeros(70_001, DType::F32, &Device::Cpu)?);
            let parameters = Parameters::named([("good", good.clone()), ("bad", w.clone())])?;
            let mut factors = vec![1f64; 70_001];
            factors[at] = bad;
            let factors = Tensor::new(factors, &Device::Cpu)?.to_dtype(DType::F32)?;
            let loss = ((w.as_tensor() * factors)?.sum_all()? + good.sum_all()?)?;
            let mut sgd = Sgd::new(parameters.vars(), SgdConfig::default())?;
            let mut scaler = GradScaler::new(ScaleConfig::constant(0.5))?;
            scaler.scale(&loss)?.backward()?;
            let outcome = scaler.step(&mut sgd)?;
            assert!(outcome.skipped()?, "{bad} at {at}");
            assert_eq!(outcome.overflowed(&parameters)?, ["bad"]);
            assert_eq!(outcome.scale(), 0.5);
        }
    }
    Ok(())
}

/// PyTorch checks before it multiplies, and lets this through: the parameter becomes infinite.
#[test]
fn an_overflow_of_unscaling_itself_is_seen() -> candle_amp::Result<()> {
    let w = var(&[0.0]);
    let mut sgd = SGD::new(vec![w.clone()], 1.0)?;
    let mut scaler = GradScaler::new(ScaleConfig::constant(2f32.powi(-20)))?;
    scaler.scale(&(w.sum_all()? * 3e38)?)?.backward()?;
    // 3e38 is in F32's range again after unscaling; ten times that is not.
    assert!(!scaler.step(&mut sgd)?.skipped()?);
    scaler.update()?;
    let w2 = var(&[0.0]);
    let mut sgd = SGD::new(vec![w2.clone()], 1.0)?;
    for _ in 0..10 {
        scaler.scale(&(w2.sum_all()? * 3e38)?)?.backward()?;
    }
    assert!(scaler.step(&mut sgd)?.skipped()?);
    assert_eq!(values(&w2), [0.0]);
    Ok(())
}

/// PyTorch's weights are NaN after 166 overflows in a row.
#[test]
fn no_pattern_of_overflows_makes_a_weight_nan() -> candle_amp::Result<()> {
    let w = var(&[1.0, -2.0]);
    let mut opt = Sgd::new(vec![w.clone()], SgdConfig { lr: 1e-3, ..Default::default() })?;
    let mut scaler = growing(65536.0);
    for i in 0..600 {
        let factor = if i % 200 < 180 { f64::INFINITY } else { 1.0 };
        scaler.scale(&(w.sum_all()? * factor)?)?.backward()?;
        let skipped = scaler.step(&mut opt)?.skipped()?;
        scaler.update()?;
        assert_eq!(skipped, factor.is_infinite());
        assert!(values(&w).iter().all(|x| x.is_finite()), "after {i}");
    }
    assert!(values(&w)[0] < 1.0, "the clean steps were taken");
    Ok(())
}

#[test]
fn backward_again_accumulates() -> candle_amp::Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let w = Var::from_tensor(&random(1, (6, 3), DType::F32).to_dtype(dtype)?)?;
        let x = random(2, (8, 6), dtype);
        let loss = |x: &Tensor| ops::sum(&ops::matmul(x, &w)?.to_dtype(DType::F32)?);
        // The cast to F32 hands the gradient back in half, where 65536 is infinite.
        let mut whole = growing(1024.0);
        whole.scale(&loss(&x)?)?.backward()?;
        let mut parts = growing(1024.0);
        for i in 0..4 {
            parts.scale(&loss(&x.narrow(0, 2 * i, 2)?)?)?.backward()?;
        }
        let gradient = |scaler: &GradScaler| scaler.grad(&w).map(|g| g.expect("a gradient"));
        let (whole, parts) = (gradient(&whole)?, gradient(&parts)?);
        assert_eq!(parts.dtype(), DType::F32, "gradients of {dtype:?} variables collect in F32");
        assert_close("accumulated", &parts, &whole, DType::F32, 4.0);
    }
    Ok(())
}

/// 4,096 micro-batches of gradient 1 would end at 256 in BF16.
#[test]
fn accumulation_does_not_saturate() -> candle_amp::Result<()> {
    let w = Var::ones((1, 1), DType::BF16, &Device::Cpu)?;
    let mut scaler = GradScaler::disabled();
    for _ in 0..1000 {
        scaler.scale(&ops::sum(&ops::relu(&w)?.to_dtype(DType::F32)?)?)?.backward()?;
    }
    assert_eq!(to_vec(&scaler.grad(&w)?.expect("a gradient")), [1000.0]);
    Ok(())
}

#[test]
fn unscaling_twice_and_accumulating_afterwards_is_harmless() -> candle_amp::Result<()> {
    let w = var(&[1.0]);
    let mut scaler = GradScaler::default();
    let loss = || -> Result<Tensor> { w.sum_all()? * 3.0 };
    scaler.scale(&loss()?)?.backward()?;
    scaler.unscale()?;
    scaler.unscale()?;
    scaler.scale(&loss()?)?.backward()?;
    assert_eq!(to_vec(&scaler.grad(&w)?.expect("a gradient")), [6.0]);
    let mut sgd = SGD::new(vec![w.clone()], 0.5)?;
    assert!(!scaler.step(&mut sgd)?.skipped()?);
    assert_eq!(values(&w), [-2.0]);
    Ok(())
}

#[test]
fn an_overflow_after_unscale_is_still_seen() -> candle_amp::Result<()> {
    let w = var(&[1.0]);
    let mut scaler = GradScaler::default();
    scaler.scale(&w.sum_all()?)?.backward()?;
    scaler.unscale()?;
    scaler.scale(&(w.sum_all()? * f64::NAN)?)?.backward()?;
    let mut sgd = SGD::new(vec![w.clone()], 0.5)?;
    assert!(scaler.step(&mut sgd)?.skipped()?);
    scaler.update()?;
    assert_eq!(scaler.current_scale(), 32768.0);
    Ok(())
}

#[test]
fn clip_grad_norm_clips_the_true_norm() -> candle_amp::Result<()> {
    for scaler in [GradScaler::default(), GradScaler::disabled(), growing(3.0)] {
        let mut scaler = scaler;
        let (a, b) = (var(&[0.0, 0.0]), var(&[0.0]));
        let gradient = Tensor::new(&[3f32, 0.0], &Device::Cpu)?;
        let loss = ((a.as_tensor() * gradient)?.sum_all()? + (b.sum_all()? * 4.0)?)?;
        scaler.scale(&loss)?.backward()?;
        let norm = scaler.clip_grad_norm(f64::INFINITY)?.to_scalar::<f32>()?;
        assert!((norm - 5.0).abs() < 1e-5, "only measured: {norm}");
        let norm = scaler.clip_grad_norm(2.5)?.to_scalar::<f32>()?;
        assert!((norm - 5.0).abs() < 1e-5, "{norm}");
        let norm = scaler.clip_grad_norm(1e9)?.to_scalar::<f32>()?;
        assert!((norm - 2.5).abs() < 1e-5, "after clipping: {norm}");
        let mut opt =
            Sgd::new(vec![a.clone(), b.clone()], SgdConfig { lr: 1.0, ..Default::default() })?;
        assert!(!scaler.step(&mut opt)?.skipped()?);
        assert_close("a", &a, &Tensor::new(&[-1.5f32, 0.0], &Device::Cpu)?, DType::F32, 4.0);
        assert_close("b", &b, &Tensor::new(&[-2f32], &Device::Cpu)?, DType::F32, 4.0);
    }
    Ok(())
}

#[test]
fn clipping_keeps_an_overflow_an_overflow() -> candle_amp::Result<()> {
    for bad in [f64::NAN, f64::INFINITY] {
        let (a, b) = (var(&[1.0]), var(&[1.0]));
        let mut scaler = GradScaler::default();
        scaler.scale(&((a.sum_all()? * bad)? + b.sum_all()?)?)?.backward()?;
        assert!(!scaler.clip_grad_norm(1.0)?.to_scalar::<f32>()?.is_finite());
        scaler.clip_grad_value(1.0)?;
        let mut opt = Sgd::new(vec![a.clone(), b.clone()], SgdConfig::default())?;
        assert!(scaler.step(&mut opt)?.skipped()?, "{bad}");
        assert_eq!((values(&a), values(&b)), (vec![1.0], vec![1.0]));
    }
    Ok(())
}

/// The crate's optimizers multiply by scale and clip in their own pass, and everybody else is given
/// gradients that are multiplied: the bits are the same, whatever was called in between.
#[test]
fn gradients_are_multiplied_by_whoever_reads_them() -> candle_amp::Result<()> {
    let config = SgdConfig { lr: 0.3, momentum: 0.9, ..Default::default() };
    type Between = fn(&mut GradScaler) -> candle_amp::Result<()>;
    let between: [Between; 7] = [
        |_| Ok(()),
        |scaler| scaler.unscale(),
        |scaler| scaler.clip_grad_norm(2.5).map(|_| ()),
        |scaler| scaler.clip_grad_norm(1e9).map(|_| ()),
        |scaler| {
            scaler.unscale()?;
            scaler.clip_grad_norm(2.5)?;
            scaler.clip_grad_norm(0.7).map(|_| ())
        },
        |scaler| {
            scaler.clip_grad_norm(2.5)?;
            scaler.clip_grad_value(0.1)
        },
        |scaler| scaler.clip_grad_norm(f64::INFINITY).map(|_| ()),
    ];
    for (number, between) in between.into_iter().enumerate() {
        let gradients = [random(1, (70, 1003), DType::F32), random(2, 77, DType::F32)];
        let start = |seed| Var::from_tensor(&random(seed, (70, 1003), DType::F32));
        let run = |as_candle: bool| -> candle_amp::Result<Vec<Vec<f64>>> {
            let (a, b) = (start(3)?, Var::from_tensor(&random(4, 77, DType::F32))?);
            let mut sgd = Sgd::new(vec![a.clone(), b.clone()], config)?;
            // Its inverse is no power of two.
            let mut scaler = growing(1536.0);
            let mut seen = Vec::new();
            for _ in 0..2 {
                let loss = (a.as_tensor() * &gradients[0])?.sum_all()?;
                let loss = (loss + (b.as_tensor() * &gradients[1])?.sum_all()?)?;
                scaler.scale(&loss)?.backward()?;
                between(&mut scaler)?;
                let before = scaler.grad(&a)?.expect("a gradient");
                let outcome = match as_candle {
                    true => scaler.step(&mut sgd.as_candle())?,
                    false => scaler.step(&mut sgd)?,
                };
                assert!(!outcome.skipped()?);
                let after = scaler.grad(&a)?.expect("a gradient");
                assert_eq!(to_vec(&before), to_vec(&after));
                seen.push(to_vec(&before));
                scaler.update()?;
            }
            seen.extend([to_vec(&a), to_vec(&b)]);
            Ok(seen)
        };
        assert!(run(false)? == run(true)?, "{number}");
    }
    Ok(())
}

#[test]
fn clip_grad_value_limits_elements() -> candle_amp::Result<()> {
    let w = var(&[0.0, 0.0, 0.0]);
    let gradient = Tensor::new(&[0.25f32, -3.0, 7.0], &Device::Cpu)?;
    let mut scaler = GradScaler::default();
    scaler.scale(&(w.as_tensor() * gradient)?.sum_all()?)?.backward()?;
    scaler.clip_grad_value(0.5)?;
    assert_eq!(to_vec(&scaler.grad(&w)?.expect("a gradient")), [0.25, -0.5, 0.5]);
    Ok(())
}

/// PyTorch's `test_grad_scaling_multiple`: one optimizer is skipped, the other steps, and the
/// scale backs off once.
#[test]
fn optimizers_that_know_their_variables_are_independent() -> candle_amp::Result<()> {
    let (a, b) = (var(&[1.0]), var(&[1.0]));
    let all = Parameters::named([("a.w", a.clone()), ("b.w", b.clone())])?;
    let [of_a, of_b] = ["a.", "b."].map(|prefix| all.filter(|name| name.starts_with(prefix)));
    let mut sgd_a = SGD::new(of_a.vars(), 0.5)?;
    let mut sgd_b = MasterWeights::<SGD>::new(of_b.vars(), 0.5)?;
    let mut scaler = growing(128.0);
    scaler.scale(&((a.sum_all()? * f64::INFINITY)? + b.sum_all()?)?)?.backward()?;
    let norm = scaler.clip_grad_norm_of(&of_b, 0.25)?.to_scalar::<f32>()?;
    assert_eq!(norm, 1.0, "the norm is b's own");
    assert!(scaler.step(&mut of_a.bind(&mut sgd_a))?.skipped()?);
    assert!(!scaler.step(&mut sgd_b)?.skipped()?);
    scaler.update()?;
    assert_eq!(scaler.current_scale(), 64.0);
    assert_eq!(values(&a), [1.0]);
    assert!((values(&b)[0] - 0.875).abs() < 1e-6);
    Ok(())
}

#[test]
fn an_optimizer_that_shares_a_variable_with_one_that_has_stepped_is_refused()
-> candle_amp::Result<()> {
    let (a, b) = (var(&[1.5]), var(&[2.5]));
    let config = SgdConfig { lr: 0.5, ..Default::default() };
    let (mut first, mut both) =
        (Sgd::new(vec![a.clone()], config)?, Sgd::new(vec![a.clone(), b.clone()], config)?);
    let mut scaler = GradScaler::default();
    scaler.scale(&ops::sum(&ops::add(&a, &b)?)?)?.backward()?;
    scaler.step(&mut first)?;
    let refused = scaler.step(&mut both);
    assert!(matches!(refused, Err(Error::Scaler(ScalerError::AlreadyStepped))), "{refused:?}");
    assert_eq!((values(&a), values(&b)), (vec![1.0], vec![2.5]));
    Ok(())
}

/// As in a GAN: the second loss reaches variables that were stepped already.
#[test]
fn losses_after_a_step_add_nothing_to_what_was_stepped() -> candle_amp::Result<()> {
    let (critic, generator) = (var(&[1.0]), var(&[1.0]));
    let mut step_critic = MasterWeights::<SGD>::new(vec![critic.clone()], 0.5)?;
    let mut step_generator = MasterWeights::<SGD>::new(vec![generator.clone()], 0.5)?;
    let mut scaler = GradScaler::default();
    scaler.scale(&critic.sum_all()?)?.backward()?;
    assert!(!scaler.step(&mut step_critic)?.skipped()?);
    scaler
        .scale(&((critic.as_tensor() * generator.as_tensor())?.sum_all()? * f64::from(1))?)?
        .backward()?;
    assert!(!scaler.step(&mut step_generator)?.skipped()?);
    scaler.update()?;
    assert_eq!((values(&critic), values(&generator)), (vec![0.5], vec![0.75]));
    Ok(())
}

#[test]
fn missing_names_the_variables_that_got_no_gradient() -> candle_amp::Result<()> {
    let (w, x) = (var(&[1.0, 2.0]), var(&[3.0, 4.0]));
    let parameters = Parameters::named([("norm.w", w.clone()), ("head.w", x.clone())])?;
    let mut scaler = GradScaler::default();
    // candle's fused layer norm cuts the graph without a word.
    let bias = Tensor::zeros(2, DType::F32, &Device::Cpu)?;
    let y = candle_nn::ops::layer_norm(&random(1, (3, 2), DType::F32), &w, &bias, 1e-5)?;
    let loss = ops::mean(&ops::matmul(&y, &x.reshape((2, 1))?)?)?;
    scaler.scale(&loss)?.backward()?;
    assert_eq!(scaler.missing(&parameters), ["norm.w"]);
    Ok(())
}

#[test]
fn state_saves_and_restores() -> candle_amp::Result<()> {
    let config = ScaleConfig {
        init_scale: 24.0,
        growth_factor: 3.0,
        backoff_factor: 0.25,
        growth_interval: 3,
        hysteresis: 2,
        min_scale: 0.5,
        max_scale: 1e5,
    };
    let w = var(&[1.0]);
    let iterate = |scaler: &mut GradScaler, factor: f64| -> candle_amp::Result<f32> {
        scaler.scale(&(w.sum_all()? * factor)?)?.backward()?;
        scaler.unscale()?;
        scaler.update()?;
        Ok(scaler.current_scale())
    };
    let mut scaler = GradScaler::new(config)?;
    for factor in [f64::NAN, f64::NAN, 1.0, 1.0] {
        iterate(&mut scaler, factor)?;
    }
    let state = scaler.state().expect("enabled");
    let parts = (state.config(), state.get(), state.growth_tracker());
    assert_eq!(parts, (&config, 6.0, 2));
    assert_eq!(state.hysteresis_tracker(), 1);
    let mut restored = GradScaler::default();
    let again = candle_amp::LossScale::restore(*parts.0, parts.1, parts.2)?;
    restored.load_state(Some(again.with_hysteresis_tracker(state.hysteresis_tracker())))?;
    assert_eq!(restored.state(), scaler.state());
    for factor in [f64::INFINITY, 1.0, 1.0, 1.0, f64::INFINITY, f64::INFINITY] {
        assert_eq!(iterate(&mut restored, factor)?, iterate(&mut scaler, factor)?);
    }
    restored.load_state(None)?;
    assert!(!restored.is_enabled());
    Ok(())
}

/// A disabled scaler changes nothing: even a NaN is the optimizer's to see.
#[test]
fn a_disabled_scaler_never_skips() -> candle_amp::Result<()> {
    let w = var(&[1.0]);
    let mut sgd = SGD::new(vec![w.clone()], 0.5)?;
    let mut scaler = GradScaler::disabled();
    scaler.scale(&(w.sum_all()? * f64::NAN)?)?.backward()?;
    assert!(!scaler.step(&mut sgd)?.skipped()?);
    scaler.update()?;
    assert!(values(&w)[0].is_nan());
    assert_eq!(scaler.state(), None);
    Ok(())
}

/// Gradients of half variables arrive unrounded, and in candle's optimizers in half.
#[test]
fn half_variables_are_served_in_the_dtype_an_optimizer_wants() -> candle_amp::Result<()> {
    struct Sees(Var, Option<DType>);
    impl Step for Sees {
        fn variables(&self) -> Option<Vec<candle_core::TensorId>> {
            Some(vec![self.0.id()])
        }
        fn apply(&mut self, gradients: &candle_amp::optim::UnscaledGradients<'_>) -> Result<()> {
            self.1 = gradients.get(&self.0)?.map(|g| g.dtype());
            Ok(())
        }
    }
    let w = Var::from_tensor(&random(1, (3, 3), DType::BF16))?;
    let loss =
        || ops::sum(&ops::matmul(&random(2, (5, 3), DType::BF16), &w)?.to_dtype(DType::F32)?);
    let mut scaler = GradScaler::default();
    scaler.scale(&loss()?)?.backward()?;
    let mut sees = Sees(w.clone(), None);
    assert!(!scaler.step(&mut sees)?.skipped()?);
    assert_eq!(sees.1, Some(DType::F32));
    scaler.update()?;
    let before = w.as_tensor().copy()?;
    let mut raw = SGD::new(vec![w.clone()], 1.0)?;
    scaler.scale(&loss()?)?.backward()?;
    assert!(!scaler.step(&mut raw)?.skipped()?);
    let plain = loss()?.backward()?;
    assert_same("a raw optimizer", &w, &(before - plain.get(&w).unwrap())?);
    Ok(())
}

/// A gradient of 1e6 is finite, but not for an optimizer that gets it in F16.
#[test]
fn a_16_bit_variable_steps_where_its_gradient_fits() -> candle_amp::Result<()> {
    for dtype in [DType::F16, DType::BF16] {
        let w = Var::from_tensor(&random(1, 5, dtype))?;
        let expected = (w.to_dtype(DType::F32)? - 0.5)?;
        let mut sgd = SGD::new(vec![w.clone()], 0.5)?;
        let mut scaler = GradScaler::new(ScaleConfig::constant(8.0))?;
        scaler.scale(&ops::sum(&w.to_dtype(DType::F32)?)?)?.backward()?;
        assert!(!scaler.step(&mut sgd)?.skipped()?, "{dtype:?}");
        assert_close("weights", &w, &expected, dtype, 1.0);
    }
    Ok(())
}

#[test]
fn a_gradient_too_large_for_its_variable_is_an_overflow() -> candle_amp::Result<()> {
    let gradient = 1e6f32;
    let w = Var::from_tensor(&Tensor::ones((1, 1), DType::F16, &Device::Cpu)?)?;
    let parameters = Parameters::named([("w", w.clone())])?;
    let x = Tensor::full(1000f32, (1000, 1), &Device::Cpu)?.to_dtype(DType::F16)?;
    let mut scaler = GradScaler::new(ScaleConfig { init_scale: 1.0, ..Default::default() })?;
    let mut sgd = SGD::new(vec![w.clone()], 1e-6)?;
    let mut masters = MasterWeights::<SGD>::new(vec![w.clone()], 1e-6)?;
    let backward = |scaler: &mut GradScaler| -> candle_amp::Result<()> {
        scaler.scale(&ops::sum(&ops::matmul(&x, &w)?.to_dtype(DType::F32)?)?)?.backward()?;
        assert_eq!(to_vec(&scaler.grad(&w)?.expect("a gradient")), [f64::from(gradient)]);
        Ok(())
    };
    backward(&mut scaler)?;
    let outcome = scaler.step(&mut sgd)?;
    assert!(outcome.skipped()?);
    assert_eq!(outcome.overflowed(&parameters)?, ["w"]);
    scaler.update()?;
    assert_eq!((scaler.current_scale(), values(&w)), (0.5, vec![1.0]));
    backward(&mut scaler)?;
    assert!(scaler.step(&mut parameters.bind(&mut sgd))?.skipped()?);
    scaler.update()?;
    backward(&mut scaler)?;
    assert!(!scaler.step(&mut masters)?.skipped()?, "in F32 there is room");
    assert!(values(&w)[0].abs() < 1e-3);
    Ok(())
}
