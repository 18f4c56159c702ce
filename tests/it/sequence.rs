//! Convolution in one dimension, transposed convolution, resampling, recurrent networks: against
//! candle's, and where candle's fail.

use candle_amp::nn::rnn::Direction;
use candle_amp::nn::{GRUState, LSTMState, RNN};
use candle_amp::ops::{self, RecurrentWeights};
use candle_amp::{Autocast, GradScaler, Parameters, nn};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Module, VarBuilder, VarMap};

use crate::bad_input::assert_says;
use crate::util::{assert_close, assert_same, epsilon, random, seeded, to_vec};

const CPU: Device = Device::Cpu;

/// The same variables for our layers and for candle_nn's.
fn builders(varmap: &VarMap) -> (VarBuilder<'static>, VarBuilder<'static>) {
    let ours = nn::var_builder(varmap, DType::F32, &CPU);
    (ours, VarBuilder::from_varmap(varmap, DType::F32, &CPU))
}

#[test]
fn convolution_layers_compute_what_candle_nn_computes() -> Result<()> {
    let _fork = seeded(1);
    let varmap = VarMap::new();
    let (ours, theirs) = builders(&varmap);
    let (x, image) = (random(1, (2, 4, 19), DType::F32), random(2, (2, 4, 5, 7), DType::F32));
    let close = |name, ours: Result<Tensor>, theirs: Result<Tensor>| -> Result<()> {
        assert_close(name, &ours?, &theirs?, DType::F32, 16.0);
        Ok(())
    };
    let config =
        nn::Conv1dConfig { stride: 2, padding: 3, dilation: 2, groups: 2, ..Default::default() };
    let a = nn::conv1d(4, 6, 3, config, ours.pp("a"))?;
    let b = candle_nn::conv1d(4, 6, 3, config, theirs.pp("a"))?;
    close("conv1d", a.forward(&x), b.forward(&x))?;
    let a = nn::conv1d_no_bias(4, 6, 3, config, ours.pp("b"))?;
    let b = candle_nn::conv1d_no_bias(4, 6, 3, config, theirs.pp("b"))?;
    close("conv1d_no_bias", a.forward(&x), b.forward(&x))?;
    let groups = nn::ConvTranspose1dConfig {
        stride: 3,
        padding: 2,
        output_padding: 1,
        dilation: 2,
        groups: 2,
    };
    let more = nn::ConvTranspose1dConfig { output_padding: 4, ..groups };
    for (name, config) in [("c", groups), ("d", more)] {
        let a = nn::conv_transpose1d(4, 6, 4, config, ours.pp(name))?;
        let b = candle_nn::conv_transpose1d(4, 6, 4, config, theirs.pp(name))?;
        close("conv_transpose1d", a.forward(&x), b.forward(&x))?;
    }
    let a = nn::conv_transpose1d_no_bias(4, 6, 4, groups, ours.pp("e"))?;
    let b = candle_nn::conv_transpose1d_no_bias(4, 6, 4, groups, theirs.pp("e"))?;
    close("conv_transpose1d_no_bias", a.forward(&x), b.forward(&x))?;
    for (name, stride, output_padding) in [("f", 1, 0), ("g", 2, 1), ("h", 2, 3)] {
        let config = nn::ConvTranspose2dConfig { stride, padding: 1, output_padding, dilation: 1 };
        let a = nn::conv_transpose2d(4, 3, 3, config, ours.pp(name))?;
        let b = candle_nn::conv_transpose2d(4, 3, 3, config, theirs.pp(name))?;
        close("conv_transpose2d", a.forward(&image), b.forward(&image))?;
        let a = nn::conv_transpose2d_no_bias(4, 3, 3, config, ours.pp(name))?;
        let b = candle_nn::conv_transpose2d_no_bias(4, 3, 3, config, theirs.pp(name))?;
        close("conv_transpose2d_no_bias", a.forward(&image), b.forward(&image))?;
    }
    Ok(())
}

#[test]
fn upsampling_is_candles() -> Result<()> {
    let (x, image) = (random(1, (2, 3, 11), DType::F32), random(2, (2, 3, 5, 7), DType::F32));
    assert_same("1d", &ops::upsample_nearest1d(&x, 17)?, &x.upsample_nearest1d(17)?);
    assert_same("2d", &ops::upsample_nearest2d(&image, 15, 9)?, &image.upsample_nearest2d(15, 9)?);
    for align_corners in [false, true] {
        let ours = ops::upsample_bilinear2d(&image, 8, 21, align_corners)?;
        let theirs = image.upsample_bilinear2d(8, 21, align_corners)?;
        assert_close("bilinear", &ours, &theirs, DType::F32, 4.0);
        let ours = ops::upsample_bilinear2d_with_scale(&image, 1.3, 2.9, align_corners)?;
        let theirs = image.upsample_bilinear2d_with_scale(1.3, 2.9, align_corners)?;
        assert_close("scaled", &ours, &theirs, DType::F32, 4.0);
    }
    Ok(())
}

/// The numbers of PyTorch 2.15 on a CPU. An axis that keeps its size is copied, whatever its scale.
#[test]
fn upsampling_by_a_scale_is_pytorchs() -> Result<()> {
    let x = Tensor::new(&[0f32, 1., 2., 3., 4., 5.], &CPU)?.reshape((1, 1, 2, 3))?;
    let rows = [0., 1., 2., 0.75, 1.75, 2.75, 2.25, 3.25, 4.25, 3., 4., 5.];
    let same = [0., 1., 2., 3., 4., 5.];
    let sevenths = [9. / 14., 23. / 14., 37. / 14.];
    type Golden<'a> = ((f64, f64), bool, &'a [f32], [f32; 6]);
    let golden: [Golden<'_>; 8] = [
        ((2., 1.3), false, &rows, [5.75, 7.75, 9.75, 16.25, 18.25, 20.25]),
        ((2., 1.), false, &rows, [5.75, 7.75, 9.75, 16.25, 18.25, 20.25]),
        ((1., 1.3), false, &same, [1., 2., 3., 4., 5., 6.]),
        ((1.4, 1.3), false, &same, [1., 2., 3., 4., 5., 6.]),
        ((1.4, 1.3), true, &same, [1., 2., 3., 4., 5., 6.]),
        ((1.4, 0.5), false, &[0.5, 3.5], [0.5, 0.5, 0., 1., 1., 0.]),
        (
            (0.7, 1.3),
            false,
            &sevenths,
            [11. / 14., 11. / 7., 33. / 14., 3. / 14., 3. / 7., 9. / 14.],
        ),
        ((0.7, 1.3), true, &[0., 1., 2.], [1., 2., 3., 0., 0., 0.]),
    ];
    for ((h, w), align_corners, expected, gradient) in golden {
        let v = Var::from_tensor(&x)?;
        let y = ops::upsample_bilinear2d_with_scale(&v, h, w, align_corners)?;
        let what = format!("{h} {w} {align_corners}");
        let expected = Tensor::new(expected, &CPU)?.reshape(y.shape())?;
        assert_close(&what, &y, &expected, DType::F32, 2.0);
        let weights = (1..=y.elem_count()).map(|i| i as f32).collect::<Vec<_>>();
        let weights = Tensor::from_vec(weights, y.shape(), &CPU)?;
        let gradients = ops::sum(&ops::mul(&y, &weights)?)?.backward()?;
        let gradient = Tensor::new(&gradient, &CPU)?.reshape(x.shape())?;
        assert_close(&what, gradients.get(&v).unwrap(), &gradient, DType::F32, 4.0);
    }
    Ok(())
}

/// Along an axis that is copied, an infinity reaches no neighbour, forward or backward.
#[test]
fn an_axis_that_keeps_its_size_is_copied() -> Result<()> {
    let row = [1., f32::INFINITY, 2.];
    for (h, w) in [(2., 1.3), (2., 1.)] {
        let x = Tensor::new(&[row, [3., 4., 5.]], &CPU)?.reshape((1, 1, 2, 3))?;
        let y = ops::upsample_bilinear2d_with_scale(&x, h, w, false)?;
        for across in [y.clone(), ops::upsample_bilinear2d_with_scale(&x.t()?, w, h, false)?.t()?] {
            let rows = across.reshape((4, 3))?.to_vec2::<f32>()?;
            for (at, row) in rows.iter().enumerate() {
                assert!(row[0].is_finite() && row[2].is_finite(), "{row:?}");
                assert_eq!(row[1].is_finite(), at == 3, "{row:?}");
            }
        }
        let v = Var::from_tensor(&x.zeros_like()?)?;
        let y = ops::upsample_bilinear2d_with_scale(&v, h, w, false)?;
        let weights = Tensor::new(&[row; 4], &CPU)?.reshape((1, 1, 4, 3))?;
        let gradients = ops::sum(&ops::mul(&y, &weights)?)?.backward()?;
        let gradient = gradients.get(&v).unwrap().reshape((2, 3))?.to_vec2::<f32>()?;
        for row in gradient {
            assert_eq!((row[0], row[2]), (2., 4.), "{row:?}");
        }
    }
    Ok(())
}

/// candle's upsampling forgets the gradient that another operator gave its input.
#[test]
fn upsampling_adds_to_other_gradients() -> Result<()> {
    for flip in [false, true] {
        let x = Var::ones((1, 1, 2, 2), DType::F32, &CPU)?;
        let (triple, up) = ((x.as_tensor() * 3.0)?, ops::upsample_nearest2d(&x, 4, 4)?);
        let (triple, up) = (ops::sum(&triple)?, ops::sum(&up)?);
        let loss = if flip { up + triple } else { triple + up }?;
        assert_eq!(to_vec(loss.backward()?.get(&x).unwrap()), [7.0; 4]);
    }
    Ok(())
}

#[test]
fn recurrent_layers_compute_what_candle_nn_computes() -> Result<()> {
    let _fork = seeded(2);
    let varmap = VarMap::new();
    let (ours, theirs) = builders(&varmap);
    let x = random(1, (3, 6, 4), DType::F32);
    let (h, c) = (random(2, (3, 5), DType::F32), random(3, (3, 5), DType::F32));
    let biased = nn::Init::Uniform { lo: -1.0, up: 1.0 };
    let config = nn::LSTMConfig {
        b_ih_init: Some(biased),
        b_hh_init: Some(biased),
        layer_idx: 2,
        direction: Direction::Backward,
        ..Default::default()
    };
    let close = |name, a: &Tensor, b: &Tensor| assert_close(name, a, b, DType::F32, 16.0);
    for (name, config) in [("a", config), ("b", nn::LSTMConfig::default_no_bias())] {
        let a = nn::lstm(4, 5, config, ours.pp(name))?;
        let b = candle_nn::lstm(4, 5, config, theirs.pp(name))?;
        let start = candle_nn::rnn::LSTMState::new(h.clone(), c.clone());
        let (all, reference) =
            (a.seq_init(&x, &LSTMState::new(h.clone(), c.clone()))?, b.seq_init(&x, &start)?);
        assert_eq!(all.len(), reference.len());
        for (state, reference) in all.iter().zip(&reference) {
            close("h", state.h(), reference.h());
            close("c", &state.c, &reference.c);
        }
        let (tensor, reference) = (a.states_to_tensor(&all)?, b.states_to_tensor(&reference)?);
        close("states", &tensor, &reference);
        let step = a.step(&x.get_on_dim(1, 0)?, &a.zero_state(3)?)?;
        let reference = b.step(&x.get_on_dim(1, 0)?, &b.zero_state(3)?)?;
        close("step, h", step.h(), reference.h());
        close("step, c", step.c(), reference.c());
        let (first, reference) = (&a.seq(&x)?[0], &b.seq(&x)?[0]);
        close("seq", first.h(), reference.h());
    }
    for (name, config) in [
        (
            "c",
            nn::GRUConfig {
                b_ih_init: Some(biased),
                b_hh_init: Some(biased),
                ..Default::default()
            },
        ),
        ("d", nn::GRUConfig::default_no_bias()),
    ] {
        let a = nn::gru(4, 5, config, ours.pp(name))?;
        let b = candle_nn::gru(4, 5, config, theirs.pp(name))?;
        let all = a.seq_init(&x, &GRUState::new(h.clone()))?;
        let reference = b.seq_init(&x, &candle_nn::rnn::GRUState { h: h.clone() })?;
        for (state, reference) in all.iter().zip(&reference) {
            close("gru", state.h(), reference.h());
        }
        close("states", &a.states_to_tensor(&all)?, &b.states_to_tensor(&reference)?);
        let step = a.step(&x.get_on_dim(1, 0)?, &a.zero_state(3)?)?;
        let reference = b.step(&x.get_on_dim(1, 0)?, &b.zero_state(3)?)?;
        close("gru, step", step.h(), reference.h());
    }
    let names: Vec<_> = Parameters::from_varmap(&varmap).names().map(String::from).collect();
    assert_eq!(
        names,
        [
            "a.bias_hh_l2_reverse",
            "a.bias_ih_l2_reverse",
            "a.weight_hh_l2_reverse",
            "a.weight_ih_l2_reverse",
            "b.weight_hh_l0",
            "b.weight_ih_l0",
            "c.bias_hh_l0",
            "c.bias_ih_l0",
            "c.weight_hh_l0",
            "c.weight_ih_l0",
            "d.weight_hh_l0",
            "d.weight_ih_l0",
        ]
    );
    Ok(())
}

#[test]
fn a_backward_sequence_is_the_reversed_one_reversed() -> Result<()> {
    let _fork = seeded(3);
    let varmap = VarMap::new();
    let config = nn::LSTMConfig { direction: Direction::Backward, ..Default::default() };
    let lstm = nn::lstm(3, 4, config, nn::var_builder(&varmap, DType::F32, &CPU))?;
    let x = random(1, (2, 5, 3), DType::F32);
    let (all, last) = lstm.sequence(&x, None)?;
    let states = lstm.seq(&x.flip(&[1])?)?;
    for (step, state) in states.iter().rev().enumerate() {
        assert_same("h", &all.get_on_dim(1, step)?, state.h());
    }
    assert_same("last h", last.h(), states[4].h());
    assert_same("last c", last.c(), states[4].c());
    // From the last state on, as if it had not stopped.
    let (_, from_last) = lstm.sequence(&x, Some(&last))?;
    let again = lstm.seq_init(&x.flip(&[1])?, &states[4])?;
    assert_same("carried on", from_last.c(), again[4].c());
    Ok(())
}

/// States taken by themselves, and all as one tensor, have one gradient.
#[test]
fn states_can_be_taken_apart_and_put_together() -> Result<()> {
    let _fork = seeded(4);
    let varmap = VarMap::new();
    let vb = nn::var_builder(&varmap, DType::F32, &CPU);
    let lstm = nn::lstm(3, 4, Default::default(), vb.pp("lstm"))?;
    let gru = nn::gru(3, 4, Default::default(), vb.pp("gru"))?;
    let x = Var::from_tensor(&random(1, (2, 6, 3), DType::F32))?;
    let gradient = |y: Tensor| -> Result<Tensor> {
        let weights = random(2, y.shape(), DType::F32);
        Ok((y * weights)?.sum_all()?.backward()?.get(&x).unwrap().clone())
    };
    let (states, of_gru) = (lstm.seq(&x)?, gru.seq(&x)?);
    let apart: Vec<_> = states[1..4].iter().map(|state| state.h().clone()).collect();
    let (together, apart) = (lstm.states_to_tensor(&states[1..4])?, Tensor::stack(&apart, 1)?);
    assert_same("states", &together, &apart);
    assert_close("gradient", &gradient(together)?, &gradient(apart)?, DType::F32, 4.0);
    let apart: Vec<_> = of_gru.iter().map(|state| state.h().clone()).collect();
    let (together, apart) = (gru.states_to_tensor(&of_gru)?, Tensor::cat(&apart, 1)?);
    assert_same("states of a GRU", &together, &apart);
    assert_close("gradient", &gradient(together)?, &gradient(apart)?, DType::F32, 4.0);
    // In another order, and with one replaced.
    let mut mixed = vec![states[2].clone(), states[1].clone()];
    mixed[1].h = mixed[1].h.zeros_like()?;
    let tensor = lstm.states_to_tensor(&mixed)?;
    assert_same("first", &tensor.get_on_dim(1, 0)?, states[2].h());
    assert_same("second", &tensor.get_on_dim(1, 1)?, &states[0].h().zeros_like()?);
    let mut replaced = states[..2].to_vec();
    replaced[1].h = replaced[1].h.zeros_like()?;
    let tensor = lstm.states_to_tensor(&replaced)?;
    assert_same("replaced", &tensor.get_on_dim(1, 1)?, &states[0].h().zeros_like()?);
    assert!(lstm.states_to_tensor(&[]).is_err());
    Ok(())
}

/// candle's backward recurses along the graph: of single steps, three thousand need megabytes.
#[test]
fn three_thousand_steps_need_no_stack() -> Result<()> {
    let work = || -> Result<f64> {
        let (x, h) = (random(1, (1, 3000, 2), DType::F32), random(2, (1, 3), DType::F32));
        let var = |seed, dims: &[usize]| Var::from_tensor(&random(seed, dims, DType::F32));
        let (w_ih, w_hh) = (var(3, &[12, 2])?, var(4, &[12, 3])?);
        let direction = Direction::Forward;
        let weights =
            RecurrentWeights { w_ih: &w_ih, w_hh: &w_hh, b_ih: None, b_hh: None, direction };
        let (h, _) = ops::lstm(&x, &h, &h, weights)?;
        let grads = ops::sum(&h)?.backward()?;
        Ok(to_vec(grads.get(&w_hh).unwrap()).iter().map(|g| g.abs()).sum())
    };
    let thread = std::thread::Builder::new().stack_size(256 << 10);
    let sum = thread.spawn(move || work().unwrap()).unwrap().join().unwrap();
    assert!(sum.is_finite() && sum > 0.0, "{sum}");
    Ok(())
}

/// 4,096 terms end at 2,048 in F16 and at 256 in BF16, added up in half.
#[test]
fn gradients_of_biases_do_not_saturate() -> Result<()> {
    for dtype in [DType::F16, DType::BF16] {
        let ones = |dims: &[usize]| Var::ones(dims, dtype, &CPU);
        let value = |t: Option<&Tensor>| to_vec(t.unwrap())[0];
        let (x, w, b) = (ones(&[4, 1, 1024])?, ones(&[1, 1, 1])?, ones(&[1])?);
        for y in [
            ops::conv1d(&x, &w, Some(&b), Default::default())?,
            ops::conv_transpose1d(&x, &w, Some(&b), Default::default())?,
        ] {
            let grads = ops::sum(&y)?.backward()?;
            assert_eq!((value(grads.get(&b)), value(grads.get(&w))), (4096.0, 4096.0));
        }
        let (x, w, b) = (ones(&[4, 1, 32, 32])?, ones(&[1, 1, 1, 1])?, ones(&[1])?);
        let y = ops::conv_transpose2d(&x, &w, Some(&b), Default::default())?;
        let grads = ops::sum(&y)?.backward()?;
        assert_eq!((value(grads.get(&b)), value(grads.get(&w))), (4096.0, 4096.0));
        // Equal rows: 4,096 times the gradient of one.
        for gates in [3, 4] {
            let bias = |rows: usize| -> Result<f64> {
                let (x, state) = (ones(&[rows, 1, 1])?, ones(&[rows, 1])?);
                let (w, b) = (ones(&[gates, 1])?, ones(&[gates])?);
                let direction = Direction::Forward;
                let (w_ih, w_hh, b_ih) = (w.as_tensor(), w.as_tensor(), Some(b.as_tensor()));
                let weights = RecurrentWeights { w_ih, w_hh, b_ih, b_hh: None, direction };
                let y = match gates {
                    4 => ops::lstm(&x, &state, &state, weights)?.0,
                    _ => ops::gru(&x, &state, weights)?,
                };
                let grads = ops::sum(&y)?.backward()?;
                Ok(to_vec(grads.get(&b).unwrap())[1])
            };
            let (one, many) = (bias(1)?, bias(4096)?);
            assert!((many - 4096.0 * one).abs() <= 2.0 * epsilon(dtype) * many.abs(), "{many}");
        }
    }
    Ok(())
}

/// Half parameters get F32 gradients, straight from the accumulators.
#[test]
fn autocast_is_a_cast_by_hand_and_gradients_stay_f32() -> candle_amp::Result<()> {
    let x = random(1, (2, 4, 3), DType::F32);
    let state = random(2, (2, 5), DType::F32);
    let var = |seed, dims: &[usize], dtype| Var::from_tensor(&random(seed, dims, dtype));
    for dtype in [DType::F16, DType::BF16] {
        let run = |x: &Tensor, state: &Tensor, w_ih: &Tensor, w_hh: &Tensor, b: &Tensor| {
            let direction = Direction::Forward;
            let weights = RecurrentWeights { w_ih, w_hh, b_ih: Some(b), b_hh: None, direction };
            ops::lstm(x, state, state, weights)
        };
        let (w_ih, w_hh, b) =
            (var(3, &[20, 3], dtype)?, var(4, &[20, 5], dtype)?, var(5, &[20], dtype)?);
        let (h, c) = Autocast::new(dtype).scope(|| run(&x, &state, &w_ih, &w_hh, &b))?;
        let by_hand = run(&x.to_dtype(dtype)?, &state.to_dtype(dtype)?, &w_ih, &w_hh, &b)?;
        assert_same("h", &h, &by_hand.0);
        assert_same("c", &c, &by_hand.1);
        let mut scaler = GradScaler::default();
        let loss = ops::sum(&h.to_dtype(DType::F32)?)?;
        scaler.scale(&loss)?.backward()?;
        scaler.unscale()?;
        for var in [&w_ih, &w_hh, &b] {
            assert_eq!(scaler.grad(var)?.map(|g| g.dtype()), Some(DType::F32));
        }
    }
    Ok(())
}

#[test]
fn empty_batches_and_sequences() -> Result<()> {
    let w = |dims: &[usize]| Var::from_tensor(&random(1, dims, DType::F32));
    for (b, t) in [(0, 3), (2, 0)] {
        let (x, h) = (random(1, (b, t, 3), DType::F32), random(2, (b, 5), DType::F32));
        let (w_ih, w_hh) = (w(&[20, 3])?, w(&[20, 5])?);
        let direction = Direction::Backward;
        let weights =
            RecurrentWeights { w_ih: &w_ih, w_hh: &w_hh, b_ih: None, b_hh: None, direction };
        let (y, _) = ops::lstm(&x, &h, &h, weights)?;
        assert_eq!(y.dims(), [b, t, 5]);
        let grads = ops::sum(&y)?.backward()?;
        assert_eq!(to_vec(grads.get(&w_hh).unwrap()), [0.0; 100]);
    }
    let varmap = VarMap::new();
    let _fork = seeded(5);
    let lstm = nn::lstm(3, 5, Default::default(), nn::var_builder(&varmap, DType::F32, &CPU))?;
    assert!(lstm.seq(&random(1, (2, 0, 3), DType::F32))?.is_empty());
    let (_, last) = lstm.sequence(&random(1, (2, 0, 3), DType::F32), None)?;
    assert_eq!(to_vec(last.h()), [0.0; 10]);
    let empty = random(1, (0, 2, 4), DType::F32);
    assert_eq!(ops::conv1d(&empty, &*w(&[3, 2, 2])?, None, Default::default())?.dims(), [0, 3, 3]);
    let y = ops::conv_transpose1d(&empty, &*w(&[2, 3, 2])?, None, Default::default())?;
    assert_eq!(y.dims(), [0, 3, 5]);
    assert_eq!(ops::upsample_nearest1d(&empty, 9)?.dims(), [0, 2, 9]);
    let empty = random(1, (0, 2, 4, 4), DType::F32);
    assert_eq!(ops::upsample_bilinear2d(&empty, 9, 3, true)?.dims(), [0, 2, 9, 3]);
    Ok(())
}

/// The same parameters, whatever the format: outputs, in F32 and BF16, and what does not fit.
#[test]
fn layers_with_channels_last_are_those_with_channels_first() -> Result<()> {
    let _fork = seeded(6);
    let vb = nn::var_builder(&VarMap::new(), DType::F32, &CPU);
    let config = nn::Conv1dConfig { stride: 2, padding: 1, groups: 2, ..Default::default() };
    let conv1d = nn::conv1d(4, 18, 3, config, vb.pp("a"))?;
    let config = nn::ConvTranspose1dConfig { stride: 2, groups: 2, ..Default::default() };
    let up1d = nn::conv_transpose1d(4, 18, 3, config, vb.pp("b"))?;
    let config = nn::ConvTranspose2dConfig { stride: 2, output_padding: 1, ..Default::default() };
    let up2d = nn::conv_transpose2d(4, 18, 3, config, vb.pp("c"))?;
    let (sequences, images) =
        (random(5, (3, 4, 9), DType::F32), random(6, (3, 4, 5, 7), DType::F32));
    let check = |x: &Tensor, first: &dyn Module, last: &dyn Module| -> Result<()> {
        let turn = |t: &Tensor| match t.rank() {
            3 => t.permute((0, 2, 1))?.contiguous(),
            _ => t.permute((0, 2, 3, 1))?.contiguous(),
        };
        for dtype in [DType::F32, DType::BF16] {
            Autocast::new(dtype).scope(|| -> Result<()> {
                let (a, b) = (turn(&first.forward(x)?)?, last.forward(&turn(x)?)?);
                assert_eq!((b.dtype(), b.dims().last()), (dtype, Some(&18)));
                assert_close("channels last", &b, &a, dtype, 16.0);
                assert_says(last.forward(x), &["weight has shape"]);
                Ok(())
            })?;
        }
        Ok(())
    };
    check(&sequences, &conv1d, &conv1d.clone().channels_last())?;
    check(&sequences, &up1d, &up1d.clone().channels_last())?;
    check(&images, &up2d, &up2d.clone().channels_last())
}

#[test]
fn what_does_not_fit_is_named() {
    let t = |dims: &[usize]| random(1, dims, DType::F32);
    let config = nn::Conv1dConfig::default();
    let conv = |x: &[usize], w: &[usize]| ops::conv1d(&t(x), &t(w), None, config);
    assert_says(conv(&[1, 3, 8], &[4, 2, 3]), &["conv1d: weight has shape [4, 2, 3]", "3 / 1"]);
    assert_says(conv(&[3, 8], &[4, 3, 3]), &["conv1d: x", "(b, c_in, l)"]);
    assert_says(conv(&[1, 3, 8, 8], &[4, 3, 3]), &["conv1d: x"]);
    let last = ops::channels_last::conv1d(&t(&[8, 3]), &t(&[4, 3, 3]), None, config);
    assert_says(last, &["conv1d: x", "(b, l, c_in)"]);
    assert_says(conv(&[1, 3, 2], &[4, 3, 3]), &["conv1d: weight", "fits 1 x 2 pixels"]);
    let config = nn::Conv1dConfig { stride: 0, ..config };
    assert_says(ops::conv1d(&t(&[1, 3, 8]), &t(&[4, 3, 3]), None, config), &["stride is 0"]);
    let (x, w, b) = (t(&[1, 3, 8]), t(&[4, 3, 3]), t(&[3]));
    let biased = ops::conv1d(&x, &w, Some(&b), Default::default());
    assert_says(biased, &["conv1d: bias has shape [3]", "[4]"]);
    let config = nn::ConvTranspose1dConfig::default();
    let up = |x: &[usize], w: &[usize]| ops::conv_transpose1d(&t(x), &t(w), None, config);
    assert_says(up(&[1, 3, 8], &[4, 2, 3]), &["conv_transpose1d: weight", "(3, c_out / 1, k)"]);
    assert_says(up(&[1, 3, 0], &[3, 2, 3]), &["conv_transpose1d: x", "at least one pixel"]);
    let up = ops::channels_last::conv_transpose1d(&t(&[1, 0, 3]), &t(&[3, 2, 3]), None, config);
    assert_says(up, &["conv_transpose1d: x", "(b, l, c_in) of at least one pixel"]);
    let config = nn::ConvTranspose2dConfig { padding: 2, ..Default::default() };
    let up = ops::conv_transpose2d(&t(&[1, 1, 1, 2]), &t(&[1, 1, 3, 3]), None, config);
    assert_says(up, &["conv_transpose2d: weight", "beyond the padding of 2"]);
    assert_says(ops::upsample_nearest1d(&t(&[1, 3]), 4), &["upsample_nearest1d: x", "(b, c, l)"]);
    assert_says(ops::upsample_nearest1d(&t(&[1, 3, 2]), 0), &["target_size is 0", "at least 1"]);
    assert_says(ops::upsample_nearest2d(&t(&[1, 3, 2, 2]), 2, 0), &["target_w is 0"]);
    let x = t(&[1, 1, 2, 2]);
    assert_says(ops::upsample_bilinear2d(&t(&[1, 1, 0, 2]), 2, 2, false), &["bilinear2d: x"]);
    let scaled = |h, w| ops::upsample_bilinear2d_with_scale(&x, h, w, false);
    assert_says(scaled(f64::NAN, 1.0), &["scale_h is NaN", "above 0"]);
    assert_says(scaled(1.0, 0.2), &["upsample_bilinear2d: x", "0.2"]);
}

#[test]
fn what_does_not_fit_a_recurrent_network_is_named() {
    let t = |dims: &[usize]| random(1, dims, DType::F32);
    // The operands of an LSTM, one of them replaced.
    let lstm = |name: &str, other: Tensor| {
        let names = ["x", "h0", "c0", "w_ih", "w_hh", "b_ih", "b_hh"];
        let mut all =
            [t(&[2, 4, 3]), t(&[2, 5]), t(&[2, 5]), t(&[20, 3]), t(&[20, 5]), t(&[20]), t(&[20])];
        all[names.iter().position(|&n| n == name).unwrap()] = other;
        let [x, h0, c0, w_ih, w_hh, b_ih, b_hh] = &all;
        let direction = Direction::Forward;
        let weights =
            RecurrentWeights { w_ih, w_hh, b_ih: Some(b_ih), b_hh: Some(b_hh), direction };
        ops::lstm(x, h0, c0, weights)
    };
    assert_says(lstm("x", t(&[2, 3])), &["lstm: x has shape [2, 3]", "(b, t, in)"]);
    assert_says(lstm("h0", t(&[1, 5])), &["lstm: h0 has shape [1, 5]", "[2, 5]"]);
    assert_says(lstm("c0", t(&[2, 4])), &["lstm: c0 has shape [2, 4]", "[2, 5]"]);
    assert_says(lstm("w_ih", t(&[15, 3])), &["lstm: w_ih has shape [15, 3]", "[20, 3]"]);
    assert_says(lstm("w_hh", t(&[15, 5])), &["lstm: w_hh has shape [15, 5]", "(4 n, n)"]);
    assert_says(lstm("b_ih", t(&[5])), &["lstm: b_ih has shape [5]", "[20]"]);
    assert_says(lstm("b_hh", t(&[5])), &["lstm: b_hh has shape [5]", "[20]"]);
    let half = random(1, (2, 5), DType::F16);
    assert_says(lstm("h0", half), &["lstm: h0 is F16", "F32 as the first", "Autocast"]);
    let whole = t(&[2, 4, 3]).to_dtype(DType::U32).unwrap();
    assert_says(lstm("x", whole), &["lstm: x is U32"]);
    let direction = Direction::Forward;
    let (w_ih, w_hh) = (t(&[15, 3]), t(&[20, 5]));
    let weights = RecurrentWeights { w_ih: &w_ih, w_hh: &w_hh, b_ih: None, b_hh: None, direction };
    let gru = ops::gru(&t(&[2, 4, 3]), &t(&[2, 5]), weights);
    assert_says(gru, &["gru: w_hh has shape [20, 5]", "(3 n, n)"]);
}
