use candle_amp::{Autocast, GradScaler, Parameters, nn, no_grad, random};
use candle_core::{DType, Device};
use candle_nn::VarMap;

use super::*;

const SIZE: Size = Size { context: 9, layers: 2, heads: 2, width: 12 };

fn model(recompute: bool) -> Result<(Gpt, Parameters)> {
    random::manual_seed(1);
    let varmap = VarMap::new();
    let vb = nn::var_builder(&varmap, DType::F32, &Device::Cpu);
    Ok((Gpt::new(7, SIZE, recompute, vb)?, Parameters::from_varmap(&varmap)))
}

fn text(characters: [u32; 9]) -> Result<Tensor> {
    Tensor::new(&[characters], &Device::Cpu)
}

#[test]
fn no_place_sees_what_comes_after_it() -> Result<()> {
    let _fork = random::fork_rng_guard();
    let (model, _) = model(false)?;
    for amp in [Autocast::disabled(), Autocast::new(DType::BF16)] {
        let logits = |characters| -> Result<Vec<Vec<f32>>> {
            let logits = no_grad(|| amp.scope(|| model.forward(&text(characters)?)))?;
            logits.to_dtype(DType::F32)?.to_vec2()
        };
        let (one, other) =
            (logits([1, 2, 3, 4, 5, 6, 0, 1, 2])?, logits([1, 2, 3, 4, 4, 6, 0, 1, 2])?);
        assert_eq!(one[..4], other[..4]);
        for place in 4..9 {
            assert_ne!(one[place], other[place], "place {place} sees place 4");
        }
    }
    Ok(())
}

#[test]
fn every_variable_gets_a_gradient() -> candle_amp::Result<()> {
    let _fork = random::fork_rng_guard();
    for recompute in [false, true] {
        let (model, parameters) = model(recompute)?;
        for amp in [Autocast::disabled(), Autocast::new(DType::F16), Autocast::new(DType::BF16)] {
            let mut scaler = GradScaler::default();
            let y = text([2, 3, 4, 5, 6, 0, 1, 2, 3])?.flatten_all()?;
            let x = text([1, 2, 3, 4, 5, 6, 0, 1, 2])?;
            let loss = amp.scope(|| ops::cross_entropy(&model.forward(&x)?, &y))?;
            scaler.scale(&loss)?.backward()?;
            assert!(scaler.missing(&parameters).is_empty(), "{:?}", scaler.missing(&parameters));
            for (name, var) in parameters.iter() {
                let gradient = scaler.grad(var)?.expect("none is missing").sqr()?.sum_all()?;
                assert!(gradient.to_scalar::<f32>()? > 0., "{name}, {amp:?}");
            }
        }
    }
    Ok(())
}
