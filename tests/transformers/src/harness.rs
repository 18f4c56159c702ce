//! One model in several dtypes, against its twin in `F32`.

use std::collections::BTreeMap;

use candle_amp::{GradScaler, MasterVars, Result, ScaleConfig, random};
use candle_core::{DType, Device, Tensor};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder};

pub(crate) const CPU: Device = Device::Cpu;

/// A model's loss on an input of its own.
pub(crate) type Loss = Box<dyn FnMut() -> candle_core::Result<Tensor>>;

/// Builds a model in the dtype of the builder.
pub(crate) type Build = dyn Fn(VarBuilder<'static>) -> candle_core::Result<Loss>;

/// What becomes of a model in one dtype.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Outcome {
    /// It trains, as far as its gradients go.
    Trains,
    /// Forward or backward is an error with this text.
    Fails(&'static str),
    /// The loss is NaN.
    NotANumber,
}

/// What is true of a model.
pub(crate) struct Truth {
    /// How many variables it has.
    pub(crate) variables: usize,
    /// How many of them get a gradient, and which.
    pub(crate) reached: usize,
    pub(crate) is_reached: fn(&str) -> bool,
    /// Whether what they get is the derivative of the loss. A cut beside an open path leaves a
    /// part of it out.
    pub(crate) whole: bool,
    /// The `F32` twin, then `F16`, then `BF16`.
    pub(crate) outcomes: [Outcome; 3],
}

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

fn epsilon(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2f64.powi(-10),
        DType::BF16 => 2f64.powi(-7),
        _ => f64::from(f32::EPSILON),
    }
}

type Gradients = BTreeMap<String, Tensor>;

/// A model and its masters.
struct Subject {
    masters: MasterVars,
    loss: Loss,
}

impl Subject {
    /// With initial values that depend on nothing but the order it asks for them.
    fn new(dtype: DType, all_half: bool, build: &Build) -> candle_core::Result<Self> {
        let _fork = random::fork_rng_guard();
        random::manual_seed(1);
        let mut masters = MasterVars::new(dtype, &CPU);
        if all_half {
            masters = masters.dtypes(move |_, _| dtype);
        }
        let loss = build(masters.var_builder())?;
        Ok(Self { masters, loss })
    }

    fn gradients(&mut self) -> Result<Gradients> {
        let mut scaler = GradScaler::new(ScaleConfig::constant(1024.0))?;
        scaler.scale(&(self.loss)()?)?.backward()?;
        let parameters = self.masters.parameters();
        let all = parameters.iter().map(|(name, var)| Ok((name.to_owned(), scaler.grad(var)?)));
        let all = all.collect::<Result<Vec<_>>>()?;
        Ok(all.into_iter().filter_map(|(name, gradient)| Some((name, gradient?))).collect())
    }

    fn snapshot(&self) -> candle_core::Result<Gradients> {
        let copy = |(name, var): (&str, &candle_core::Var)| Ok((name.to_owned(), var.copy()?));
        self.masters.parameters().iter().map(copy).collect()
    }

    /// The slope of the loss in the direction of `gradients`, by differences.
    fn slope(&mut self, gradients: &Gradients) -> Result<f64> {
        let step = 4e-3 / norm(gradients);
        let before = self.snapshot()?;
        let mut at = |distance: f64| -> Result<f64> {
            for (name, var) in self.masters.parameters().iter() {
                let Some(gradient) = gradients.get(name) else { continue };
                var.set(&(&before[name] + (gradient * distance)?)?)?;
            }
            self.masters.refresh()?;
            Ok(f64::from((self.loss)()?.to_scalar::<f32>()?))
        };
        let (up, down) = (at(step)?, at(-step)?);
        at(0.0)?;
        Ok((up - down) / (2.0 * step * norm(gradients)))
    }

    /// Takes a few steps, and returns the loss before and after.
    fn train(&mut self) -> Result<(f32, f32)> {
        let config = ParamsAdamW { lr: 0.01, ..Default::default() };
        let mut adamw = AdamW::new(self.masters.parameters().vars(), config)?;
        let mut scaler = GradScaler::new(ScaleConfig::constant(1024.0))?;
        let first = (self.loss)()?.to_scalar()?;
        for _ in 0..4 {
            scaler.scale(&(self.loss)()?)?.backward()?;
            let outcome = scaler.step(&mut self.masters.bind(&mut adamw))?;
            assert!(!outcome.skipped()?);
            scaler.update()?;
        }
        Ok((first, (self.loss)()?.to_scalar()?))
    }
}

fn square(tensor: &Tensor) -> f64 {
    let sum = tensor.sqr().and_then(|t| t.sum_all()).and_then(|t| t.to_scalar::<f32>());
    f64::from(sum.expect("an F32 gradient"))
}

fn norm(gradients: &Gradients) -> f64 {
    gradients.values().map(square).sum::<f64>().sqrt()
}

/// Asserts that all of `truth` holds for the model.
#[track_caller]
pub(crate) fn check(truth: &Truth, build: &Build) {
    check_with(truth, false, build);
}

/// As [`check`], with running statistics in half too.
#[track_caller]
pub(crate) fn check_with(truth: &Truth, all_half: bool, build: &Build) {
    let mut twin = None;
    for (dtype, outcome) in DTYPES.into_iter().zip(truth.outcomes) {
        let mut subject = Subject::new(dtype, all_half, build).expect("the model is built");
        let result = subject.gradients();
        match (outcome, result) {
            (Outcome::Trains, Ok(gradients)) => {
                if twin.is_none() {
                    check_twin(truth, &mut subject, &gradients);
                }
                let twin = twin.get_or_insert_with(|| gradients.clone());
                check_against(dtype, &gradients, twin);
                check_training(&mut subject, &gradients).expect("it trains");
            }
            (Outcome::NotANumber, Ok(gradients)) => {
                let loss = (subject.loss)().and_then(|t| t.to_scalar::<f32>()).expect("a loss");
                assert!(loss.is_nan(), "{dtype:?}: the loss is {loss}");
                assert!(norm(&gradients).is_nan(), "{dtype:?}");
            }
            (Outcome::Fails(text), Err(error)) => {
                let error = error.to_string();
                assert!(error.contains(text), "{dtype:?}: {error}");
            }
            (outcome, Ok(_)) => panic!("{dtype:?}: expected {outcome:?}, and it has gradients"),
            (outcome, Err(error)) => panic!("{dtype:?}: expected {outcome:?}, and got {error}"),
        }
    }
}

/// Which variables get a gradient, and whether it is the whole one.
fn check_twin(truth: &Truth, subject: &mut Subject, gradients: &Gradients) {
    let missing = subject.masters.missing(&(subject.loss)().expect("a loss"));
    for (name, _) in subject.masters.parameters().iter() {
        let reached = gradients.contains_key(name);
        assert_eq!(reached, (truth.is_reached)(name), "a gradient for {name}");
        assert_eq!(reached, missing.names().all(|missing| missing != name), "{name}: {missing}");
    }
    assert_eq!(subject.masters.parameters().len(), truth.variables);
    assert_eq!(gradients.len(), truth.reached);

    let slope = subject.slope(gradients).expect("a slope");
    let error = (slope / norm(gradients) - 1.0).abs();
    if truth.whole {
        assert!(error < 0.003, "the slope is {slope}, and the gradient's norm {}", norm(gradients));
    } else {
        assert!(error > 0.008, "nothing seems to be cut: {error}");
    }
}

/// Rounding adds up along the way: eight units are what the deepest of these models needs.
fn check_against(dtype: DType, gradients: &Gradients, twin: &Gradients) {
    assert!(gradients.keys().eq(twin.keys()), "{dtype:?}: other variables than in F32");
    let difference: f64 =
        twin.iter().map(|(name, t)| square(&(&gradients[name] - t).expect("one shape"))).sum();
    let error = difference.sqrt() / norm(twin);
    assert!(error <= 8.0 * epsilon(dtype), "{dtype:?}: {} units", error / epsilon(dtype));
}

/// What has a gradient moves, nothing else does, and the loss falls.
fn check_training(subject: &mut Subject, gradients: &Gradients) -> Result<()> {
    let before = subject.snapshot()?;
    let (first, last) = subject.train()?;
    assert!(last < 0.99 * first, "the loss goes from {first} to {last}");
    for (name, var) in subject.masters.parameters().iter() {
        let moved = square(&(var.as_tensor() - &before[name])?) > 0.0;
        assert_eq!(moved, gradients.contains_key(name), "{name} moved");
    }
    Ok(())
}
