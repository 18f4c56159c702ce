//! Every misuse has a message that says what was asked, what was given and what would do, and
//! leaves nothing half done.

use candle_amp::error::ScalerError;
use candle_amp::optim::{Sgd, SgdConfig};
use candle_amp::{
    Autocast, Error, GradScaler, LossScale, MasterWeights, Parameters, ScaleConfig, ops,
};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{
    Conv1dConfig, Conv2dConfig, ConvTranspose1dConfig, ConvTranspose2dConfig, Optimizer, SGD,
};

use crate::util::random;

#[track_caller]
pub(crate) fn assert_says<T>(
    result: std::result::Result<T, impl std::fmt::Display>,
    parts: &[&str],
) {
    let Err(error) = result else { panic!("expected an error that says {parts:?}") };
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "{message:?} does not say {part:?}");
    }
}

fn var(values: &[f32]) -> Var {
    Var::new(values, &Device::Cpu).unwrap()
}

#[test]
fn a_half_loss_cannot_be_scaled() -> Result<()> {
    for dtype in [DType::F16, DType::BF16] {
        let w = Var::from_tensor(&random(1, 3, dtype))?;
        let mut scaler = GradScaler::default();
        let loss = w.sum_all()?;
        assert_says(scaler.scale(&loss), &[&format!("{dtype:?} loss"), "reduce the loss in F32"]);
        assert!(matches!(scaler.unscale(), Err(Error::Scaler(ScalerError::NoBackward { .. }))));
        // A disabled scaler multiplies nothing, so it takes it.
        assert!(GradScaler::disabled().scale(&loss).is_ok());
    }
    Ok(())
}

#[test]
fn a_loss_is_one_number() {
    let w = var(&[1.0, 2.0]);
    assert_says(GradScaler::default().scale(&w), &["shape [2]", "one number"]);
}

#[test]
fn calls_before_backward_say_what_to_call() -> Result<()> {
    let w = var(&[1.0]);
    let mut sgd = SGD::new(vec![w], 0.1)?;
    let mut scaler = GradScaler::default();
    let cure = "scaler.scale(&loss)?.backward()?";
    assert_says(scaler.step(&mut sgd), &["`step`", cure]);
    assert_says(scaler.unscale(), &["`unscale`", cure]);
    assert_says(scaler.clip_grad_norm(1.0), &["`clip_grad_norm`", cure]);
    assert_says(scaler.clip_grad_value(1.0), &["`clip_grad_value`", cure]);
    assert_says(scaler.update(), &["`update`", "call `step` or `unscale` first"]);
    Ok(())
}

#[test]
fn a_loss_without_variables_is_refused() -> Result<()> {
    let mut scaler = GradScaler::default();
    let constant = Tensor::new(1f32, &Device::Cpu)?;
    assert_says(scaler.scale(&constant)?.backward(), &["no variable got a gradient", "detached"]);
    assert!(matches!(scaler.update(), Err(Error::Scaler(ScalerError::NothingChecked))));
    Ok(())
}

#[test]
fn update_needs_a_check() -> candle_amp::Result<()> {
    let w = var(&[1.0]);
    let mut scaler = GradScaler::default();
    scaler.scale(&w.sum_all()?)?.backward()?;
    assert!(matches!(scaler.update(), Err(Error::Scaler(ScalerError::NothingChecked))));
    scaler.unscale()?;
    scaler.update()
}

#[test]
fn an_optimizer_steps_once_an_update() -> candle_amp::Result<()> {
    let (a, b) = (var(&[1.0]), var(&[1.0]));
    let mut masters = MasterWeights::<SGD>::new(vec![a.clone()], 0.5)?;
    let mut raw = SGD::new(vec![b.clone()], 0.5)?;
    let mut scaler = GradScaler::default();
    scaler.scale(&(a.as_tensor() + b.as_tensor())?.sum_all()?)?.backward()?;
    assert!(!scaler.step(&mut masters)?.skipped()?);
    assert_says(scaler.step(&mut masters), &["already stepped", "scaler.update()?"]);
    assert!(!scaler.step(&mut raw)?.skipped()?);
    assert_says(scaler.step(&mut raw), &["keeps its variables to itself", "MasterWeights", "bind"]);
    assert_eq!((a.to_vec1::<f32>()?, b.to_vec1::<f32>()?), (vec![0.5], vec![0.5]));
    scaler.update()?;
    scaler.scale(&(a.as_tensor() + b.as_tensor())?.sum_all()?)?.backward()?;
    scaler.step(&mut raw)?;
    assert_says(scaler.step(&mut masters), &["given every gradient", "bind"]);
    scaler.update()
}

#[test]
fn an_optimizer_none_of_whose_variables_has_a_gradient_is_told_so() -> candle_amp::Result<()> {
    let (used, unused) = (var(&[1.0]), var(&[1.0]));
    let mut opt = Sgd::new(vec![unused], SgdConfig::default())?;
    let mut scaler = GradScaler::default();
    scaler.scale(&used.sum_all()?)?.backward()?;
    assert_says(scaler.step(&mut opt), &["none of this optimizer's 1 variables has a gradient"]);
    Ok(())
}

#[test]
fn a_state_cannot_be_loaded_over_gradients_in_flight() -> candle_amp::Result<()> {
    let w = var(&[1.0]);
    let mut scaler = GradScaler::default();
    scaler.scale(&w.sum_all()?)?.backward()?;
    let other = Some(LossScale::new(ScaleConfig::constant(2.0))?);
    assert_says(scaler.load_state(other), &["`load_state`", "two scales", "call `update` first"]);
    assert_eq!(scaler.current_scale(), 65536.0);
    Ok(())
}

#[test]
fn impossible_settings_name_the_setting_and_its_range() {
    let default = ScaleConfig::default();
    let cases: [(ScaleConfig, &[&str]); 14] = [
        (ScaleConfig { growth_factor: 1.0, ..default }, &["growth_factor is 1,", "above 1"]),
        (ScaleConfig { growth_factor: f64::INFINITY, ..default }, &["growth_factor is inf"]),
        (ScaleConfig { growth_factor: f64::NAN, ..default }, &["growth_factor is NaN"]),
        (ScaleConfig { backoff_factor: 1.0, ..default }, &["backoff_factor is 1,", "below 1"]),
        (ScaleConfig { backoff_factor: 0.0, ..default }, &["backoff_factor is 0,", "above 0"]),
        (ScaleConfig { growth_interval: 0, ..default }, &["growth_interval is 0", "at least 1"]),
        (ScaleConfig { hysteresis: 0, ..default }, &["hysteresis is 0", "at least 1"]),
        (ScaleConfig { min_scale: 0.0, ..default }, &["min_scale is 0", "MIN_POSITIVE"]),
        (ScaleConfig { min_scale: 1e-40, ..default }, &["min_scale is", "MIN_POSITIVE"]),
        (ScaleConfig { max_scale: f32::INFINITY, ..default }, &["max_scale is inf", "finite"]),
        (ScaleConfig { init_scale: f32::NAN, ..default }, &["init_scale is NaN"]),
        (ScaleConfig { init_scale: -1.0, ..default }, &["init_scale is -1"]),
        (
            ScaleConfig { min_scale: 1e6, ..default },
            &["min_scale 1000000 is above init_scale 65536"],
        ),
        (ScaleConfig { max_scale: 2.0, ..default }, &["init_scale 65536 is above max_scale 2"]),
    ];
    for (config, parts) in cases {
        assert_says(GradScaler::new(config), parts);
    }
    assert_says(LossScale::restore(default, 1e30, 0), &["above max_scale"]);
}

#[test]
fn impossible_optimizer_settings_name_the_setting() {
    let default = SgdConfig::default();
    let cases: [(SgdConfig, &[&str]); 5] = [
        (SgdConfig { lr: -1.0, ..default }, &["lr is -1"]),
        (SgdConfig { momentum: f64::NAN, ..default }, &["momentum is NaN"]),
        (SgdConfig { weight_decay: -0.1, ..default }, &["weight_decay is -0.1"]),
        (SgdConfig { nesterov: true, ..default }, &["momentum is 0", "nesterov"]),
        (
            SgdConfig { nesterov: true, momentum: 0.9, dampening: 0.5, ..default },
            &["dampening is 0.5", "0 with nesterov"],
        ),
    ];
    for (config, parts) in cases {
        assert_says(Sgd::new(vec![], config), parts);
    }
}

#[test]
fn clipping_limits_are_checked_before_anything_is_unscaled() -> candle_amp::Result<()> {
    let w = var(&[3.0]);
    let mut scaler = GradScaler::default();
    scaler.scale(&w.sum_all()?)?.backward()?;
    assert_says(scaler.clip_grad_norm(f64::NAN), &["max_norm is NaN"]);
    assert_says(scaler.clip_grad_value(-1.0), &["limit is -1"]);
    assert!(matches!(scaler.update(), Err(Error::Scaler(ScalerError::NothingChecked))));
    Ok(())
}

#[test]
fn a_compute_dtype_must_be_a_float_of_at_most_32_bits() {
    for dtype in [DType::F64, DType::U8, DType::U32, DType::I64] {
        assert_says(Autocast::try_new(dtype), &[&format!("not in {dtype:?}"), "F16, BF16 or F32"]);
        let x = random(1, (2, 2), DType::F32);
        let result = Autocast::new(dtype).scope(|| ops::matmul(&x, &x));
        assert_says(result, &[&format!("not in {dtype:?}"), "Autocast::disabled()"]);
    }
}

#[test]
fn shapes_that_do_not_fit_name_the_argument() {
    let t = |dims: &[usize]| random(1, dims, DType::F32);
    assert_says(ops::matmul(&t(&[2, 3]), &t(&[4, 5])), &["matmul: rhs has shape [4, 5]", "[2, 3]"]);
    assert_says(ops::matmul(&t(&[2, 3]), &t(&[2])), &["matmul: rhs has shape [2]"]);
    assert_says(ops::linear(&t(&[2, 3]), &t(&[4, 5]), None), &["linear: weight", "(n, 3)"]);
    let bias = t(&[3]);
    assert_says(
        ops::linear(&t(&[2, 3]), &t(&[4, 3]), Some(&bias)),
        &["linear: bias has shape [3]", "[4]"],
    );
    let config = Conv2dConfig::default();
    assert_says(
        ops::conv2d(&t(&[1, 3, 8, 8]), &t(&[4, 2, 3, 3]), None, config),
        &["conv2d: weight has shape [4, 2, 3, 3]", "3 / 1"],
    );
    assert_says(
        ops::conv2d(&t(&[1, 3, 2, 2]), &t(&[4, 3, 3, 3]), None, config),
        &["conv2d: weight", "fits 2 x 2 pixels"],
    );
    assert_says(ops::conv2d(&t(&[3, 8, 8]), &t(&[4, 3, 3, 3]), None, config), &["conv2d: x"]);
    for (config, name) in [
        (Conv2dConfig { stride: 0, ..config }, "stride is 0"),
        (Conv2dConfig { groups: 0, ..config }, "groups is 0"),
        (Conv2dConfig { dilation: 0, ..config }, "dilation is 0"),
    ] {
        assert_says(ops::conv2d(&t(&[1, 3, 8, 8]), &t(&[4, 3, 3, 3]), None, config), &[name]);
    }
    assert_says(ops::add(&t(&[2]), &t(&[3])), &["add: b has shape [3]", "[2]"]);
    assert_says(ops::mse(&t(&[2]), &t(&[2, 1])), &["mse: target has shape [2, 1]"]);
    assert_says(ops::max_pool2d(&t(&[1, 1, 4, 4]), 2, 0, 0), &["stride is 0"]);
    assert_says(ops::max_pool2d(&t(&[1, 1, 4, 4]), 2, 1, 2), &["padding is 2", "half the kernel"]);
    assert_says(ops::avg_pool2d(&t(&[1, 1, 2, 4]), 3, 1, 0), &["avg_pool2d: x", "(3, 3)"]);
    // Padding alone has no window.
    assert_says(ops::max_pool2d(&t(&[1, 1, 0, 0]), 2, 1, 1), &["at least one pixel"]);
    assert_says(ops::avg_pool2d(&t(&[1, 1, 2, 0]), (1, 2), 1, (0, 1)), &["at least one pixel"]);
    assert_says(ops::batch_norm(&t(&[1, 3]), None, None, 1e-5), &["batch_norm: x", "variance"]);
    assert_says(ops::batch_norm(&t(&[4, 3]), None, None, -1.0), &["eps is -1"]);
    assert_says(ops::dropout(&t(&[4]), 1.5), &["p is 1.5", "from 0 to 1"]);
}

/// Sizes so large that offsets, or numbers of pixels, would overflow.
#[test]
fn sizes_beyond_numbers_are_errors() -> Result<()> {
    let t = |dims: &[usize]| random(1, dims, DType::F32);
    let (x, w) = (t(&[1, 3, 8, 8]), t(&[4, 3, 3, 3]));
    let (x1, w1) = (t(&[1, 3, 8]), t(&[4, 3, 3]));
    let most = "at most 2147483647";
    for far in [usize::MAX, usize::MAX / 2, 1 << 40] {
        let config = Conv2dConfig::default();
        for (config, name) in [
            (Conv2dConfig { padding: far, ..config }, "padding"),
            (Conv2dConfig { stride: far, ..config }, "stride"),
            (Conv2dConfig { dilation: far, ..config }, "dilation"),
        ] {
            assert_says(ops::conv2d(&x, &w, None, config), &[name, most]);
            let last = x.permute((0, 2, 3, 1))?;
            assert_says(ops::channels_last::conv2d(&last, &w, None, config), &[name, most]);
        }
        let groups = Conv2dConfig { groups: far, ..config };
        assert_says(ops::conv2d(&x, &w, None, groups), &["conv2d: weight"]);
        let config = Conv1dConfig { padding: far, ..Default::default() };
        assert_says(ops::conv1d(&x1, &w1, None, config), &["padding", most]);
        let config = ConvTranspose1dConfig::default();
        let w1 = w1.transpose(0, 1)?;
        for (config, name) in [
            (ConvTranspose1dConfig { padding: far, ..config }, "padding"),
            (ConvTranspose1dConfig { stride: far, ..config }, "stride"),
            (ConvTranspose1dConfig { dilation: far, ..config }, "dilation"),
            (ConvTranspose1dConfig { output_padding: far, ..config }, "output_padding"),
        ] {
            assert_says(ops::conv_transpose1d(&x1, &w1, None, config), &[name, most]);
        }
        assert_says(ops::max_pool2d(&x, far, 1, far / 2), &["kernel", most]);
        assert_says(ops::avg_pool2d(&x, 3, far, 1), &["stride", most]);
        for size in [(far, 1), (1, far), (far, far)] {
            assert_says(ops::upsample_nearest2d(&x, size.0, size.1), &["upsample_nearest2d: x"]);
        }
        assert_says(ops::upsample_nearest1d(&x1, far), &["upsample_nearest1d: x"]);
    }
    let scaled = ops::upsample_bilinear2d_with_scale(&x, 1e300, 1.0, false);
    assert_says(scaled, &["upsample_bilinear2d: x", "addresses"]);
    // All that settings allow, and yet too much.
    let far = i32::MAX as usize;
    let config = Conv2dConfig { padding: far, ..Default::default() };
    assert_says(ops::conv2d(&x, &w, None, config), &["padding (2147483647", "addresses"]);
    let config = Conv2dConfig { dilation: far, ..Default::default() };
    assert_says(ops::conv2d(&x, &w, None, config), &["conv2d: weight", "fits 8 x 8 pixels"]);
    let config = ConvTranspose2dConfig { stride: far, ..Default::default() };
    let many = ops::conv_transpose2d(&x, &w.transpose(0, 1)?.contiguous()?, None, config);
    assert_says(many, &["addresses"]);
    // A kernel far larger than the image and its padding: one window.
    let far = far / 2 * 2;
    let one = ops::avg_pool2d(&x, far, 1, far / 2 - 4)?;
    assert_eq!(one.dims(), [1, 3, 1, 1]);
    Ok(())
}

/// Numbers of pixels, rows and ids are U32: views of one element have more for nothing.
#[test]
fn more_elements_than_u32_can_number_are_errors() -> Result<()> {
    let one = Tensor::zeros((1, 1, 1, 1), DType::F32, &Device::Cpu)?;
    let image = one.broadcast_as((1, 1, 1usize << 17, 1usize << 17))?;
    for result in [ops::max_pool2d(&image, 2, 2, 0), ops::avg_pool2d(&image, 2, 2, 0)] {
        assert_says(result, &["pool2d: x", "4294967295 pixels"]);
    }
    let last = image.permute((0, 2, 3, 1))?;
    let result = ops::channels_last::max_pool2d(&last, 2, 2, 0);
    assert_says(result, &["max_pool2d: x", "4294967295 pixels"]);
    let table = one.reshape((1, 1))?.broadcast_as((1usize << 33, 1))?;
    let id = Tensor::new(&[1i64 << 32], &Device::Cpu)?;
    assert_says(ops::embedding(&id, &table), &["embedding: table", "4294967295 rows"]);
    let table = random(1, (3, 2), DType::F32);
    let ids = Tensor::zeros(1, DType::U32, &Device::Cpu)?.broadcast_as(1usize << 33)?;
    assert_says(ops::embedding(&ids, &table), &["embedding: ids", "4294967295 ids"]);
    let tall = one.reshape((1, 1))?.broadcast_as((1usize << 40, 1))?;
    assert_says(ops::matmul(&tall, &tall.t()?), &["more elements than memory has addresses"]);
    Ok(())
}

/// A batch that is padding alone has no row left once its rows are dropped, as `ignore_index` is to be replaced.
#[test]
fn a_batch_whose_every_row_is_ignored_says_so() -> Result<()> {
    let (logits, targets) =
        (random(1, (3, 4), DType::F32), Tensor::new(&[-100i64; 3], &Device::Cpu)?);
    let kept = Tensor::zeros(0, DType::U32, &Device::Cpu)?;
    let (logits, targets) = (logits.index_select(&kept, 0)?, targets.index_select(&kept, 0)?);
    let says = ["at least one row", "every row of a batch is ignored", "skip the batch"];
    assert_says(ops::cross_entropy(&logits, &targets), &says);
    assert_says(ops::nll(&logits, &targets), &says);
    let table = random(2, (7, 4), DType::F32);
    assert_says(ops::linear_cross_entropy(&logits, &table, None, &targets), &says);
    Ok(())
}

#[test]
fn dtypes_that_do_not_fit_say_what_would_do() {
    let half = random(1, (2, 2), DType::F16);
    let full = random(1, (2, 2), DType::F32);
    assert_says(ops::matmul(&half, &full), &["matmul: rhs is F32", "F16 as the first", "Autocast"]);
    let int = full.to_dtype(DType::U32).unwrap();
    assert_says(ops::relu(&int), &["relu: x is U32", "F16, BF16, F32 or F64"]);
    assert_says(ops::cross_entropy(&full, &full), &["cross_entropy: targets is F32", "U32"]);
}

#[test]
fn a_head_says_what_does_not_fit() {
    let (x, table) = (random(1, (2, 3, 5), DType::F32), random(2, (7, 5), DType::F32));
    let next = Tensor::new(&[[0u32, 6, 2], [3, 1, 5]], &Device::Cpu).unwrap();
    let flat = next.flatten_all().unwrap();
    let head =
        |x: &Tensor, table: &Tensor, next: &Tensor| ops::linear_cross_entropy(x, table, None, next);
    head(&x, &table, &next).unwrap();
    assert_says(head(&x, &table, &flat), &["linear_cross_entropy: targets", "[6]", "[2, 3]"]);
    assert_says(head(&x, &table.t().unwrap(), &next), &["weight", "(n, 5)"]);
    assert_says(head(&x, &table, &(next * 2.0).unwrap()), &["row 1 is 12", "7 classes"]);
    let none = x.narrow(0, 0, 0).unwrap();
    let no_targets = flat.reshape((2, 3)).unwrap().narrow(0, 0, 0).unwrap();
    assert_says(head(&none, &table, &no_targets), &["x", "at least one row"]);
    let smoothed = ops::linear_cross_entropy_smoothed(&x, &table, None, &flat, 1.5);
    assert_says(smoothed, &["label_smoothing", "1.5", "from 0 to 1"]);
}

#[test]
fn a_target_that_is_no_class_names_its_row() {
    let logits = random(1, (3, 4), DType::F32);
    let targets = Tensor::new(&[0u32, 4, 1], &Device::Cpu).unwrap();
    assert_says(ops::cross_entropy(&logits, &targets), &["row 1", "4"]);
    for class in [-100i64, 1 << 32] {
        let targets = Tensor::new(&[0, class, 1], &Device::Cpu).unwrap();
        assert_says(ops::cross_entropy(&logits, &targets), &["row 1", &class.to_string()]);
    }
}

#[test]
fn parameter_names_are_unique() {
    let twice = [("w", var(&[1.0])), ("w", var(&[2.0]))];
    assert_says(Parameters::named(twice), &["`w` appears twice"]);
}

/// Where a convolution lays its padded images out whole, there may be no memory for them.
#[test]
fn padding_beyond_memory_is_an_error() -> candle_core::Result<()> {
    let x = Tensor::ones((1, 1, 4, 4), DType::F64, &Device::Cpu)?;
    let weight = Tensor::ones((8, 1, 3, 3), DType::F64, &Device::Cpu)?;
    let config =
        candle_nn::Conv2dConfig { padding: 1 << 24, stride: 1 << 24, ..Default::default() };
    assert_says(
        ops::conv2d(&x, &weight, None, config),
        &["no memory for padded images of 33554436"],
    );
    // Padding that only the outer taps meet. A group for each channel is laid out whole too.
    let config = candle_nn::Conv2dConfig { padding: 1 << 22, dilation: 1 << 22, ..config };
    let config = candle_nn::Conv2dConfig { stride: 1, groups: 2, ..config };
    let x = Tensor::ones((1, 2, 4, 4), DType::F32, &Device::Cpu)?;
    let weight = Tensor::ones((2, 1, 3, 3), DType::F32, &Device::Cpu)?;
    let says = ["no memory for padded images of 8388612"];
    assert_says(ops::conv2d(&x, &weight, None, config), &says);
    let x = x.permute((0, 2, 3, 1))?;
    assert_says(ops::channels_last::conv2d(&x, &weight, None, config), &says);
    Ok(())
}

/// Rows of padding that no tap meets take no memory, with channels last either; by im2col they do, which says so.
#[test]
fn padding_between_taps_takes_no_memory() -> candle_core::Result<()> {
    let config =
        candle_nn::Conv2dConfig { padding: 1 << 22, dilation: 1 << 22, ..Default::default() };
    let x = Tensor::randn(0f32, 1., (1, 2, 4, 5), &Device::Cpu)?;
    let weight = Tensor::randn(0f32, 1., (3, 2, 3, 3), &Device::Cpu)?;
    let middle = weight.narrow(2, 1, 1)?.narrow(3, 1, 1)?;
    let expected = ops::conv2d(&x, &middle, None, Default::default())?;
    // Of two terms.
    let magnitude = ops::conv2d(&x.abs()?, &middle.abs()?, None, Default::default())?;
    let allowed = 4. * f32::EPSILON * magnitude.max_all()?.to_scalar::<f32>()?;
    let by_im2col = candle_amp::backend::instruction_sets().f32_convolutions == "baseline";
    let right = |y: candle_core::Result<Tensor>| -> candle_core::Result<()> {
        if by_im2col {
            assert_says(y, &["no memory for padded images"]);
            return Ok(());
        }
        let error = (y? - &expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
        assert!(error <= allowed, "{error}, not {allowed}");
        Ok(())
    };
    right(ops::conv2d(&x, &weight, None, config))?;
    let last = x.permute((0, 2, 3, 1))?.contiguous()?;
    let y = ops::channels_last::conv2d(&last, &weight, None, config);
    right(y.and_then(|y| y.permute((0, 3, 1, 2))))?;
    Ok(())
}
