//! LAMB and Lion, which PyTorch has not, against their formulas.

use candle_amp::optim::{AdamW, Config, Lamb, LambConfig, Lion, LionConfig, Optim, Sgd, SgdConfig};
use candle_core::{DType, Device, Tensor, Var};

use super::{ADAMW, LAMB, LION, SGD, gradients};
use crate::util::{assert_absolute, random, to_vec};

/// Takes four steps, and compares each with what `step` makes of weights, gradients and the step's number.
fn follows<C: Config>(
    config: C,
    mut step: impl FnMut(&mut [f64], &[f64], i32),
) -> candle_amp::Result<()> {
    let vars = [Var::from_tensor(&random(1, 37, DType::F64))?];
    let mut optimizer = Optim::new(vars.to_vec(), config)?;
    let mut expected = to_vec(&vars[0]);
    for number in 1..=4 {
        let store = gradients(&vars, number, DType::F64)?;
        optimizer.step(&store)?;
        let gradient = store.get(&vars[0]).expect("it has one");
        step(&mut expected, &to_vec(gradient), number as i32);
        let expected = Tensor::new(&expected[..], &Device::Cpu)?;
        assert_absolute(&format!("{config:?}, step {number}"), &vars[0], &expected, 1e-12);
    }
    Ok(())
}

#[test]
fn lamb_follows_its_formula() -> candle_amp::Result<()> {
    let plain = LambConfig { weight_decay: 0.0, trust_clip: false, ..LAMB };
    for config in [
        LAMB,
        LambConfig { trust_clip: false, ..LAMB },
        plain,
        LambConfig { always_adapt: true, ..plain },
        LambConfig { maximize: true, ..LAMB },
    ] {
        let (mut mean, mut square) = (vec![0.0; 37], vec![0.0; 37]);
        follows(config, |weights, gradients, step| {
            let LambConfig { lr, beta1, beta2, eps, weight_decay, maximize, .. } = config;
            let mut update = Vec::new();
            for (i, (w, g)) in weights.iter().zip(gradients).enumerate() {
                let g = if maximize { -g } else { *g };
                mean[i] = beta1 * mean[i] + (1.0 - beta1) * g;
                square[i] = beta2 * square[i] + (1.0 - beta2) * g * g;
                let (m, v) =
                    (mean[i] / (1.0 - beta1.powi(step)), square[i] / (1.0 - beta2.powi(step)));
                update.push(m / (v.sqrt() + eps) + weight_decay * w);
            }
            let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
            let adapts = weight_decay > 0.0 || config.always_adapt;
            let ratio = if adapts { norm(weights) / norm(&update) } else { 1.0 };
            let ratio = if config.trust_clip { ratio.min(1.0) } else { ratio };
            weights.iter_mut().zip(update).for_each(|(w, u)| *w -= lr * ratio * u);
        })?;
    }
    Ok(())
}

#[test]
fn lion_follows_its_formula() -> candle_amp::Result<()> {
    for config in [LION, LionConfig { maximize: false, ..LION }] {
        let mut momentum = vec![0.0; 37];
        follows(config, |weights, gradients, _| {
            let LionConfig { lr, beta1, beta2, weight_decay, maximize } = config;
            for ((w, m), g) in weights.iter_mut().zip(&mut momentum).zip(gradients) {
                let g = if maximize { -g } else { *g };
                let direction: f64 = beta1 * *m + (1.0 - beta1) * g;
                *w -= lr * (direction.signum() + weight_decay * *w);
                *m = beta2 * *m + (1.0 - beta2) * g;
            }
        })?;
    }
    Ok(())
}

#[test]
fn every_optimizer_has_the_learning_rate_of_its_settings() -> candle_amp::Result<()> {
    let none = Vec::<Var>::new;
    assert_eq!(Sgd::new(none(), SgdConfig { lr: 0.75, ..SGD })?.learning_rate(), 0.75);
    assert_eq!(AdamW::new(none(), ADAMW)?.learning_rate(), ADAMW.lr);
    assert_eq!(Lion::new(none(), LION)?.learning_rate(), LION.lr);
    assert_eq!(Lamb::new(none(), LAMB)?.learning_rate(), LAMB.lr);
    Ok(())
}
