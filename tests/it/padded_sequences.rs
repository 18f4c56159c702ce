//! Sequences of unequal lengths, and those that are trained piece by piece.

use candle_amp::optim::{Sgd, SgdConfig};
use candle_amp::{GradScaler, Parameters, nn, ops};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::rnn::Direction;

use crate::util::{random, seeded};

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

/// Each sequence of a padded batch is what it is alone, and so are the gradients; the padding is NaN.
#[test]
fn padded_sequences_are_those_without_padding() -> candle_amp::Result<()> {
    let lengths = [5, 1, 3];
    let _fork = seeded(1);
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
