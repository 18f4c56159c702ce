use candle_amp::{nn, random};
use candle_core::{DType, Device, Var};
use candle_nn::VarMap;

use super::*;
use crate::{common::testing::parse, models::Model};

fn options(line: &str) -> Result<Options> {
    Ok(parse(line)?)
}

#[test]
fn a_triangle_rises_and_falls_along_straight_lines() -> Result<()> {
    let recipe = options("--schedule triangle")?.recipe;
    let rates = recipe.rates(100);
    let factor = |step| rates.factor(step);
    assert_eq!(factor(23), 1.);
    assert!((factor(11) - 0.5).abs() < 1e-12, "{}", factor(11));
    assert!((factor(23 + 77 / 7 * 3) - (1. - 0.93 * 3. / 7.)).abs() < 1e-12);
    assert!((0.07..0.09).contains(&factor(99)), "{}", factor(99));
    assert_eq!(recipe.rates(1).factor(0), 1.);
    assert_eq!(options("")?.recipe.rates(100), common::rates(100));
    Ok(())
}

#[test]
fn smoothing_gives_a_part_of_the_label_to_all_classes() -> Result<()> {
    let logits = Var::new(&[[1f32, -2., 0.5], [0., 3., 1.]], &Device::Cpu)?;
    let labels = Tensor::new(&[2u32, 0], &Device::Cpu)?;
    let loss = |line: &str| {
        let loss = options(line)?.recipe.loss(&logits, &labels)?;
        Ok::<_, anyhow::Error>(loss.to_scalar::<f32>()?)
    };
    let plain = ops::cross_entropy(&logits, &labels)?.to_scalar::<f32>()?;
    assert_eq!(loss("")?, plain);
    let mut all = 0.;
    for class in 0..3u32 {
        let labels = Tensor::new(&[class, class], &Device::Cpu)?;
        all += ops::cross_entropy(&logits, &labels)?.to_scalar::<f32>()? / 3.;
    }
    let smoothed = loss("--label-smoothing 0.2")?;
    assert!((smoothed - (0.8 * plain + 0.2 * all)).abs() < 1e-6, "{smoothed}");
    Ok(())
}

#[test]
fn biases_have_their_own_rate_and_frozen_weights_none() -> Result<()> {
    let _fork = random::fork_rng_guard();
    let options = options("--model airbench --lr 0.5 --weight-decay 0.01 --bias-lr 8 --nesterov")?;
    let varmap = VarMap::new();
    Model::new(options.model, nn::var_builder(&varmap, DType::F32, &Device::Cpu), false)?;
    let parameters = Parameters::from_varmap(&varmap);
    let images = Tensor::randn(0f32, 1., (4, 3, 8, 8), &Device::Cpu)?;
    options.model.prepare(&parameters, || Ok(images))?;
    let Optimizer::Whole(optimizer) = optimizer(&options, &parameters, None)? else {
        unreachable!("without --sharded")
    };
    let settings: Vec<_> =
        optimizer.configs().map(|one| (one.lr, one.weight_decay, one.nesterov)).collect();
    assert_eq!(settings, [(0.5, 0.01, true), (4., 0.00125, true)]);
    let sizes: Vec<usize> =
        optimizer.state()?.groups.iter().map(|group| group.variables.len()).collect();
    // Six convolutions and the head; six norms, whose weights are frozen.
    assert_eq!(sizes, [7, 6]);
    Ok(())
}

#[test]
fn an_average_has_running_statistics() -> Result<()> {
    let mean = Var::zeros(2, DType::F32, &Device::Cpu)?;
    let varmap = VarMap::new();
    varmap.data().lock().expect("one thread").insert("norm.running_mean".to_owned(), mean.clone());
    let parameters = Parameters::from_varmap(&varmap);
    assert!(options("")?.recipe.average(&parameters)?.is_none());
    let average = options("--ema 0.5")?.recipe.average(&parameters)?;
    let mut average = average.expect("one was asked for");
    mean.set(&Tensor::ones(2, DType::F32, &Device::Cpu)?)?;
    average.update()?;
    let found = average.average(&mean).expect("a variable of the average").to_vec1::<f32>()?;
    // At first it keeps less: 2 / 11.
    assert!(found.iter().all(|x| (x - 9. / 11.).abs() < 1e-6), "{found:?}");
    Ok(())
}

#[test]
fn a_table_tells_what_is_not_usual() -> Result<()> {
    assert_eq!(options("")?.recipe.summary(), None);
    let all = "--schedule triangle --nesterov --bias-lr 64 --label-smoothing 0.2 --ema 0.95 \
               --shift 2 --alternate-flips --flip-test";
    assert_eq!(
        options(all)?.recipe.summary().as_deref(),
        Some(
            "triangle schedule, nesterov, 64 x lr of biases, label smoothing 0.2, ema 0.95, shifts \
             to 2, alternate flips, flip test"
        )
    );
    Ok(())
}
