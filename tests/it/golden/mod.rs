//! Training against PyTorch's, step by step: `tests/golden/make_golden.py` made the files.
//!
//! The measure is PyTorch's own error. Every file has the training in F64, which stands for exact
//! arithmetic, and how far nine of PyTorch's runs in a precision came to be from theirs in F64, for
//! every loss, gradient norm and final weight. A run here may be `MARGIN` times as far off.

mod models;
mod runs;

use candle_amp::Autocast;
use candle_amp::optim::SgdConfig;
use candle_core::{DType, Tensor};
use candle_nn::ParamsAdamW;

use crate::util::{epsilon, to_vec};
use models::Build;
use runs::{Golden, Optimizer, Recipe, Run, pytorch};

/// How much further off than the worst of nine a tenth may be. It draws from the same distribution,
/// as it rounds in the same places, or fewer; but errors of two draws differ.
const MARGIN: f64 = 2.0;

const SGD: SgdConfig = SgdConfig {
    lr: 0.05,
    momentum: 0.9,
    dampening: 0.0,
    weight_decay: 5e-4,
    nesterov: false,
    maximize: false,
};
const SLOW_SGD: SgdConfig = SgdConfig { lr: 0.01, ..SGD };
const ADAMW: ParamsAdamW =
    ParamsAdamW { lr: 5e-3, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.05 };

/// Every file, how it was trained, and the precisions in it.
fn recipes() -> Vec<(&'static str, Recipe, &'static [DType])> {
    let (both, all) = (&[DType::F32, DType::BF16][..], &[DType::F32, DType::BF16, DType::F16][..]);
    let sgd =
        |model: Build, config| Recipe { model, optimizer: Optimizer::Sgd(config), limit: None };
    let adamw = |model: Build| Recipe { model, optimizer: Optimizer::AdamW(ADAMW), limit: None };
    vec![
        ("mlp_sgd", sgd(models::mlp, SGD), all),
        ("mlp_adamw", adamw(models::mlp), both),
        ("cnn_sgd", sgd(models::cnn, SLOW_SGD), all),
        ("cnn_adamw", adamw(models::cnn), both),
        ("gpt_sgd", Recipe { limit: Some(1.0), ..sgd(models::gpt, SGD) }, both),
        ("gpt_adamw", Recipe { limit: Some(1.0), ..adamw(models::gpt) }, all),
    ]
}

/// The L2 norm of `a - b`.
fn distance(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.dims(), b.dims());
    to_vec(a).iter().zip(to_vec(b)).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt()
}

fn norm(a: &Tensor) -> f64 {
    to_vec(a).iter().map(|a| a.powi(2)).sum::<f64>().sqrt()
}

/// What of `run` is furthest from F64, and how far, in PyTorch's errors; and of how many figures.
fn worst(golden: &Golden, run: &Run, dtype: DType) -> (String, f64, usize) {
    let mut measured: Vec<(String, f64)> = Vec::new();
    for (name, error) in golden.under(&format!("{}.error.", dtype.as_str())) {
        let (got, exact) = (&run[name], golden.get(&format!("f64.{name}")));
        let error = to_vec(error);
        if !matches!(name, "losses" | "norms") {
            measured.push((name.to_owned(), distance(got, exact) / error[0]));
            continue;
        }
        let (got, exact) = (to_vec(got), to_vec(exact));
        for (step, (got, exact)) in got.iter().zip(exact).enumerate() {
            let off = (got - exact).abs() / error[step];
            if exact.is_nan() {
                assert!(!got.is_finite(), "{name}, step {step}: {got} where PyTorch has none");
            } else {
                measured.push((format!("{name}, step {step}"), off));
            }
        }
    }
    let count = measured.len();
    // In this order a NaN is further off than everything.
    let worst = measured.into_iter().max_by(|(_, a), (_, b)| a.total_cmp(b));
    let (name, off) = worst.expect("something to compare");
    (name, off, count)
}

#[test]
fn training_stays_as_close_to_exact_arithmetic_as_pytorchs() -> candle_amp::Result<()> {
    for (name, recipe, dtypes) in recipes() {
        let golden = Golden::load(name);
        for &dtype in dtypes {
            let policies = [("pytorch", pytorch(dtype)), ("default", Autocast::new(dtype))];
            // In F32 there is no policy to follow.
            for (policy, amp) in &policies[..if dtype == DType::F32 { 1 } else { 2 }] {
                let run = recipe.follow(&golden, dtype, amp)?;
                let (what, off, count) = worst(&golden, &run, dtype);
                println!("{name}, {dtype:?}, {policy} policy: {what}: {off:.2}");
                assert!(count > 100, "{name}, {dtype:?}: only {count} figures");
                assert!(
                    off <= MARGIN,
                    "{name}, {dtype:?}, {policy} policy: {what} is {off:.2} times as far from F64 \
                     as PyTorch's"
                );
            }
        }
    }
    Ok(())
}

/// Where both round to half in the same places, most roundings come out the same.
#[test]
fn the_first_step_rounds_where_pytorch_rounds() -> candle_amp::Result<()> {
    for (file, recipe, dtypes) in recipes() {
        let golden = Golden::load(file);
        for &dtype in dtypes.iter().filter(|&&dtype| dtype != DType::F32) {
            let run = recipe.follow(&golden, dtype, &pytorch(dtype))?;
            let theirs = |name: &str| golden.get(&format!("{}.{name}", dtype.as_str()));
            let exact = |name: &str| golden.get(&format!("f64.{name}"));
            let logits = distance(&run["logits"], theirs("logits"));
            let rounding = distance(theirs("logits"), exact("logits"));
            assert!(logits <= rounding / 4.0, "{file}, {dtype:?}: logits {logits} off, {rounding}");
            // The gradient of a mean cross entropy is shorter than 1, and it is taken in F32.
            let [loss, expected] = [&run["loss"], theirs("loss")].map(|l| to_vec(l)[0]);
            let allowed = logits + 8.0 * epsilon(DType::F32) * expected;
            assert!((loss - expected).abs() <= allowed, "{file}, {dtype:?}: {loss} for {expected}");
            // PyTorch rounds the gradients of weights to half, at most half an epsilon, those of
            // F32 inputs too, and adds up the gradients of overlapping windows in half.
            for (name, gradient) in run.iter().filter(|(name, _)| name.starts_with("first.")) {
                let (off, size) = (distance(gradient, theirs(name)), norm(exact(name)));
                let off = off / size / epsilon(dtype);
                assert!(off <= 2.0, "{file}, {dtype:?}, {name}: {off} epsilons off");
            }
        }
    }
    Ok(())
}

/// It grows, halves when step 30 overflows, and grows again.
#[test]
fn the_loss_scale_moves_as_pytorchs() -> candle_amp::Result<()> {
    let mut moved = 0;
    for (file, recipe, dtypes) in recipes() {
        if !dtypes.contains(&DType::F16) {
            continue;
        }
        let golden = Golden::load(file);
        let run = recipe.follow(&golden, DType::F16, &pytorch(DType::F16))?;
        let scales = to_vec(&run["scales"]);
        assert_eq!(scales, to_vec(golden.get("f16.scales")), "{file}");
        moved += scales.windows(2).filter(|pair| pair[0] != pair[1]).count();
    }
    assert!(moved >= 4, "{moved}");
    Ok(())
}

/// Files that let a wrong setting pass would show nothing.
#[test]
fn a_setting_slightly_off_is_noticed() -> candle_amp::Result<()> {
    use Optimizer::{AdamW, Sgd};
    type Edit = fn(SgdConfig, ParamsAdamW) -> (SgdConfig, ParamsAdamW);
    let slightly: [(&str, Edit); 4] = [
        ("lr", |s, a| (SgdConfig { lr: 1.001 * s.lr, ..s }, ParamsAdamW { lr: 1.001 * a.lr, ..a })),
        ("momentum", |s, a| {
            (SgdConfig { momentum: 0.899, ..s }, ParamsAdamW { beta1: 0.899, ..a })
        }),
        ("weight_decay", |s, a| {
            (SgdConfig { weight_decay: 4e-4, ..s }, ParamsAdamW { weight_decay: 0.04, ..a })
        }),
        ("nesterov, beta2", |s, a| {
            (SgdConfig { nesterov: true, ..s }, ParamsAdamW { beta2: 0.989, ..a })
        }),
    ];
    let grossly: [(&str, Edit); 1] =
        [("lr", |s, a| (SgdConfig { lr: 1.1 * s.lr, ..s }, ParamsAdamW { lr: 1.1 * a.lr, ..a }))];
    for (file, recipe, _) in recipes() {
        let golden = Golden::load(file);
        for (dtype, edits) in [(DType::F32, &slightly[..]), (DType::BF16, &grossly)] {
            for (setting, edit) in edits {
                let optimizer = match &recipe.optimizer {
                    Sgd(config) => Sgd(edit(*config, ADAMW).0),
                    AdamW(config) => AdamW(edit(SGD, config.clone()).1),
                };
                let recipe = Recipe { optimizer, ..recipe };
                let run = recipe.follow(&golden, dtype, &pytorch(dtype))?;
                let (what, off, _) = worst(&golden, &run, dtype);
                println!("{file}, {dtype:?}, {setting}: {what}: {off:.1}");
                assert!(off > MARGIN, "{file}, {dtype:?}: nothing shows that {setting} is wrong");
            }
        }
    }
    Ok(())
}
