//! Variables that are not trained, and gradients that are not wanted.

use candle_amp::optim::{Sgd, SgdConfig};
use candle_amp::{GradScaler, MasterVars, Parameters, nn, ops};
use candle_core::{DType, Device, Module, Result, Tensor, Var};

use crate::util::{assert_same, random};

/// `body`, then `head`, then `tail`.
struct Model {
    layers: [nn::Linear; 3],
    all: Parameters,
}

impl Model {
    fn new(dtype: DType) -> Result<Self> {
        let varmap = nn::VarMap::new();
        let vb = nn::var_builder(&varmap, dtype, &Device::Cpu);
        let layers = [
            nn::linear(5, 7, vb.pp("body"))?,
            nn::linear(7, 7, vb.pp("head"))?,
            nn::linear(7, 3, vb.pp("tail"))?,
        ];
        Ok(Self { layers, all: Parameters::from_varmap(&varmap) })
    }

    fn loss(&self, x: &Tensor) -> Result<Tensor> {
        let [body, head, tail] = &self.layers;
        let inner = ops::relu(&head.forward(&ops::relu(&body.forward(x)?)?)?)?;
        ops::mean(&ops::square(&tail.forward(&inner)?)?)
    }

    /// Those of some layers.
    fn of(&self, names: &[&str]) -> Parameters {
        self.all.filter(|name| names.iter().any(|start| name.starts_with(start)))
    }
}

fn backward(model: &Model, x: &Tensor) -> candle_amp::Result<GradScaler> {
    let mut scaler = GradScaler::default();
    scaler.scale(&model.loss(x)?.to_dtype(DType::F32)?)?.backward()?;
    Ok(scaler)
}

#[test]
fn frozen_variables_get_no_gradient_and_the_others_the_same() -> candle_amp::Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        let (model, x) = (Model::new(dtype)?, random(1, (4, 5), dtype));
        let all = backward(&model, &x)?;
        // Below all that is trained, above, and both.
        for names in [&["body"][..], &["tail"], &["body", "tail"]] {
            let frozen = model.of(names);
            frozen.freeze();
            let mut scaler = backward(&model, &x)?;
            let mut squares = 0.0;
            for (name, var) in model.all.iter() {
                if frozen.iter().any(|(other, _)| other == name) {
                    assert!(scaler.grad(var)?.is_none(), "{name}");
                    continue;
                }
                let gradient = scaler.grad(var)?.expect("a gradient");
                assert_same(name, &gradient, &all.grad(var)?.expect("a gradient"));
                squares += gradient.to_dtype(DType::F64)?.sqr()?.sum_all()?.to_scalar::<f64>()?;
            }
            assert!(scaler.missing(&model.all).is_empty());
            // The norm is of the others alone.
            let norm = scaler.clip_grad_norm(1e9)?.to_dtype(DType::F64)?.to_scalar::<f64>()?;
            let error = (norm - squares.sqrt()).abs() / norm;
            assert!(error < 4.0 * f64::from(f32::EPSILON), "{names:?}: {norm}, {squares}");
            frozen.unfreeze();
        }
        let again = backward(&model, &x)?;
        for (name, var) in model.all.iter() {
            let gradient = again.grad(var)?.expect("a gradient again");
            assert_same(name, &gradient, &all.grad(var)?.expect("a gradient"));
        }
    }
    Ok(())
}

#[test]
fn below_what_is_trained_there_is_no_graph() -> candle_amp::Result<()> {
    let (model, x) = (Model::new(DType::F32)?, random(2, (4, 5), DType::F32));
    model.of(&["body"]).freeze();
    assert!(!model.layers[0].forward(&x)?.track_op());
    assert!(model.layers[1].forward(&random(3, (4, 7), DType::F32))?.track_op());
    // candle's own backward finds none either.
    let gradients = model.loss(&x)?.backward()?;
    assert!(gradients.get(model.layers[0].weight()).is_none());
    assert!(gradients.get(model.layers[1].weight()).is_some());
    model.all.freeze();
    let error = GradScaler::default().scale(&model.loss(&x)?)?.backward().unwrap_err();
    assert!(error.to_string().contains("frozen"), "{error}");
    Ok(())
}

#[test]
fn an_overflow_of_a_frozen_variable_skips_no_step() -> candle_amp::Result<()> {
    let trained = Var::new(&[1f32, -2.0], &Device::Cpu)?;
    let frozen = Var::new(&[3f32, 0.5], &Device::Cpu)?;
    // The gradient of `frozen` is infinite, by an operator of the crate and by one of candle's.
    let huge = Tensor::new(&[f32::MAX, f32::MAX], &Device::Cpu)?;
    for by_candle in [false, true] {
        let named = [("trained", trained.clone()), ("frozen", frozen.clone())];
        let all = Parameters::named(named)?;
        all.filter(|name| name == "frozen").freeze();
        let before = frozen.to_vec1::<f32>()?;
        let product = match by_candle {
            true => (&huge * frozen.as_tensor())?,
            false => ops::mul(&huge, &frozen)?,
        };
        let loss = ops::add(&ops::sum(&product)?, &ops::sum(&trained)?)?;
        let mut scaler = GradScaler::default();
        let mut sgd = Sgd::new(&all, SgdConfig { lr: 0.1, ..Default::default() })?;
        scaler.scale(&loss)?.backward()?;
        assert!(scaler.grad(&frozen)?.is_none(), "by candle: {by_candle}");
        assert!(!scaler.step(&mut sgd)?.skipped()?, "by candle: {by_candle}");
        scaler.update()?;
        assert_eq!(frozen.to_vec1::<f32>()?, before);
    }
    Ok(())
}

#[test]
fn copies_of_frozen_masters_are_frozen() -> candle_amp::Result<()> {
    let masters = MasterVars::new(DType::BF16, &Device::Cpu);
    let vb = masters.var_builder();
    let (body, head) = (nn::linear(5, 7, vb.pp("body"))?, nn::linear(7, 3, vb.pp("head"))?);
    let all = masters.parameters();
    all.filter(|name| name.starts_with("head")).freeze();
    let x = random(5, (4, 5), DType::BF16);
    let loss = ops::mean(&head.forward(&ops::relu(&body.forward(&x)?)?)?)?;
    let mut scaler = GradScaler::default();
    scaler.scale(&loss.to_dtype(DType::F32)?)?.backward()?;
    for (name, var) in all.iter() {
        assert_eq!(scaler.grad(var)?.is_none(), name.starts_with("head"), "{name}");
    }
    Ok(())
}

/// A critic's loss of samples that were not detached leaves nothing on the generator.
#[test]
fn gradients_of_some_parameters_can_be_dropped() -> candle_amp::Result<()> {
    let (generator, critic) = (Model::new(DType::F32)?, Model::new(DType::F32)?);
    let sample = |x: &Tensor| generator.layers[0].forward(x);
    let judge = |x: &Tensor| ops::mean(&ops::square(&critic.layers[1].forward(x)?)?);
    let x = random(6, (4, 5), DType::F32);
    let weight = generator.layers[0].weight();

    let mut alone = GradScaler::default();
    alone.scale(&judge(&sample(&x)?)?)?.backward()?;
    let expected = alone.grad(weight)?.expect("a gradient");

    let mut scaler = GradScaler::default();
    let of_critic = ops::affine(&judge(&sample(&x)?)?, -3.0, 1.0)?;
    scaler.scale(&of_critic)?.backward()?;
    scaler.unscale()?;
    scaler.zero_grad_of(&generator.all);
    assert!(scaler.grad(weight)?.is_none());
    assert!(scaler.grad(critic.layers[1].weight())?.is_some());
    scaler.scale(&judge(&sample(&x)?)?)?.backward()?;
    assert_same("the generator's", &scaler.grad(weight)?.expect("a gradient"), &expected);
    Ok(())
}

#[test]
fn dropped_overflows_are_forgotten_and_kept_ones_are_not() -> candle_amp::Result<()> {
    let [a, b] = [1f32, 2.0].map(|x| Var::new(&[x], &Device::Cpu).expect("a variable"));
    let huge = Tensor::new(&[f32::MAX], &Device::Cpu)?;
    for of_dropped in [true, false] {
        let (infinite, finite) = if of_dropped { (&a, &b) } else { (&b, &a) };
        let loss = ops::add(&ops::mul(&huge, infinite)?, &ops::square(finite)?)?;
        let mut scaler = GradScaler::default();
        scaler.scale(&ops::sum(&loss)?)?.backward()?;
        let [dropped, kept] =
            [("a", &a), ("b", &b)].map(|(name, var)| Parameters::named([(name, var.clone())]));
        scaler.unscale()?;
        scaler.zero_grad_of(&dropped?);
        let mut sgd = Sgd::new(&kept?, SgdConfig { lr: 0.0, ..Default::default() })?;
        let before = scaler.current_scale();
        assert_eq!(scaler.step(&mut sgd)?.skipped()?, !of_dropped);
        scaler.update()?;
        assert_eq!(scaler.current_scale() < before, !of_dropped);
    }
    Ok(())
}

#[test]
fn dropout_of_nothing_is_its_input_and_draws_nothing() -> Result<()> {
    let x = random(9, (3, 5), DType::F32);
    candle_amp::random::manual_seed(3);
    assert_eq!(ops::dropout(&x, 0.0)?.id(), x.id());
    let after = ops::dropout(&x, 0.5)?;
    candle_amp::random::manual_seed(3);
    assert_same("what is drawn next", &ops::dropout(&x, 0.5)?, &after);
    Ok(())
}

#[test]
fn a_state_that_was_not_detached_is_named() -> candle_amp::Result<()> {
    let varmap = nn::VarMap::new();
    let vb = nn::var_builder(&varmap, DType::F32, &Device::Cpu);
    let lstm = nn::lstm(3, 4, Default::default(), vb)?;
    let mut sgd = Sgd::new(Parameters::from_varmap(&varmap), SgdConfig::default())?;
    let mut scaler = GradScaler::disabled();
    for detached in [true, false] {
        let mut state = None;
        for piece in 0..3 {
            let x = random(10 + piece, (2, 5, 3), DType::F32);
            let (h, last) = lstm.sequence(&x, state.as_ref())?;
            let result = scaler.scale(&ops::mean(&ops::square(&h)?)?)?.backward();
            if piece > 0 && !detached {
                let error = result.expect_err("the piece before was stepped").to_string();
                assert!(error.contains("`detach`") && error.contains("recurrent"), "{error}");
                break;
            }
            result?;
            let _ = scaler.step(&mut sgd)?;
            scaler.update()?;
            state = Some(if detached { last.detach() } else { last });
        }
    }
    Ok(())
}

/// Run by the next test, in a process whose errors of candle's have backtraces.
#[test]
fn errors_are_a_few_lines() -> Result<()> {
    let x = random(11, (3, 5), DType::F32);
    let errors = [
        ops::matmul(&x, &x).unwrap_err(),
        ops::cross_entropy(&x, &Tensor::new(&[9i64, 0, 0], &Device::Cpu)?).unwrap_err(),
        ops::embedding(&Tensor::new(&[9i64], &Device::Cpu)?, &x).unwrap_err(),
        candle_core::Error::from(GradScaler::default().update().unwrap_err()),
    ];
    for error in errors {
        let message = error.to_string();
        assert!(!message.contains(".rs:") && message.lines().count() < 4, "{message}");
    }
    Ok(())
}

#[test]
fn errors_have_no_frames_where_backtraces_are_asked_for() {
    let mut tests = std::process::Command::new(std::env::current_exe().expect("this program"));
    let output = tests
        .args(["--exact", "frozen::errors_are_a_few_lines"])
        .env("RUST_BACKTRACE", "1")
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

/// Each sequence of a padded batch is what it is alone, and so are the gradients; the padding is NaN.
#[test]
fn padded_sequences_are_those_without_padding() -> candle_amp::Result<()> {
    use candle_nn::rnn::Direction;
    let lengths = [5, 1, 3];
    let varmap = nn::VarMap::new();
    let vb = nn::var_builder(&varmap, DType::F32, &Device::Cpu);
    let backward = nn::LSTMConfig { direction: Direction::Backward, ..Default::default() };
    let forward = nn::lstm(3, 4, Default::default(), vb.pp("forward"))?;
    let reversed = nn::lstm(3, 4, backward, vb.pp("reversed"))?;
    let gru = nn::gru(3, 4, Default::default(), vb.pp("gru"))?;
    let all = Parameters::from_varmap(&varmap);
    let x = random(12, (3, 5, 3), DType::F32);
    let mask: Vec<u8> =
        lengths.iter().flat_map(|n| (0..5).map(move |step| u8::from(step < *n))).collect();
    let mask = Tensor::from_vec(mask, (3, 5, 1), &Device::Cpu)?.broadcast_as((3, 5, 3))?;
    let padded = mask.where_cond(&x, &Tensor::full(f32::NAN, (3, 5, 3), &Device::Cpu)?)?;
    let near = |what: &str, actual: &Tensor, expected: &Tensor| -> Result<()> {
        let error = (actual - expected)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
        assert!(error <= 32.0 * f32::EPSILON, "{what}: {error}");
        Ok(())
    };
    for name in ["forward", "reversed", "gru"] {
        let run = |x: &Tensor, lengths: Option<&[usize]>| -> Result<(Tensor, Tensor)> {
            let lstm = if name == "forward" { &forward } else { &reversed };
            Ok(match (name, lengths) {
                ("gru", Some(lengths)) => {
                    let (h, state) = gru.padded_sequence(x, lengths, None)?;
                    (h, state.h().clone())
                }
                ("gru", None) => {
                    let (h, state) = gru.sequence(x, None)?;
                    (h, state.h().clone())
                }
                (_, Some(lengths)) => {
                    let (h, state) = lstm.padded_sequence(x, lengths, None)?;
                    (h, ops::add(state.h(), state.c())?)
                }
                (_, None) => {
                    let (h, state) = lstm.sequence(x, None)?;
                    (h, ops::add(state.h(), state.c())?)
                }
            })
        };
        let (h, last) = run(&padded, Some(&lengths))?;
        let loss = ops::add(&ops::sum(&ops::square(&h)?)?, &ops::sum(&last)?)?;
        let (mut together, mut alone) = (GradScaler::disabled(), GradScaler::disabled());
        together.scale(&loss)?.backward()?;
        for (i, &length) in lengths.iter().enumerate() {
            let (own, end) = run(&x.narrow(0, i, 1)?.narrow(1, 0, length)?, None)?;
            near(name, &h.narrow(0, i, 1)?.narrow(1, 0, length)?, &own)?;
            near(name, &last.narrow(0, i, 1)?, &end)?;
            let after = h.narrow(0, i, 1)?.narrow(1, length, 5 - length)?;
            assert!(after.flatten_all()?.to_vec1::<f32>()?.iter().all(|x| *x == 0.0));
            let loss = ops::add(&ops::sum(&ops::square(&own)?)?, &ops::sum(&end)?)?;
            alone.scale(&loss)?.backward()?;
        }
        for (parameter, var) in all.iter().filter(|(other, _)| other.starts_with(name)) {
            let [actual, expected] = [&together, &alone].map(|s| s.grad(var));
            let (actual, expected) = (actual?.expect("a gradient"), expected?.expect("a gradient"));
            near(parameter, &actual, &expected)?;
        }
        for lengths in [&[5, 1][..], &[5, 0, 3], &[6, 1, 3]] {
            assert!(run(&padded, Some(lengths)).is_err(), "{lengths:?}");
        }
    }
    Ok(())
}
