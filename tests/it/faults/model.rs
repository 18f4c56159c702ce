//! The scaler in every order of calls, beside a model that is loops over `f64`.

use candle_amp::optim::{Sgd, SgdConfig};
use candle_amp::{
    Error, GradScaler, LossScale, MasterWeights, Parameters, ScaleConfig, StepOutcome,
};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Optimizer, SGD};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::for_each_seed;
use crate::util::to_vec;

/// What the scaler should do, in plain numbers.
struct Model {
    config: ScaleConfig,
    scale: f64,
    clean: u32,
    forgiven: u32,
    weights: [Vec<f64>; 2],
    gradients: [Option<Gradient>; 2],
    foreign_stepped: bool,
    /// Where `f32` may have rounded differently: the largest number any weight has been.
    largest: f64,
}

#[derive(Clone)]
struct Gradient {
    values: Vec<f64>,
    unscaled: bool,
    stepped: bool,
    overflowed: bool,
}

/// Rounded as a tensor holds it.
fn single(x: f64) -> f64 {
    f64::from(x as f32)
}

/// Who steps: optimizers of one of the two variables, or candle's, of both.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Who {
    Own(usize),
    Foreign,
}

type Outcome<T> = Result<T, &'static str>;

impl Model {
    fn new(config: ScaleConfig, weights: [Vec<f64>; 2]) -> Self {
        let largest = weights.iter().flatten().fold(1.0, |m: f64, x| m.max(x.abs()));
        let scale = config.init_scale.into();
        let (clean, forgiven, foreign_stepped) = (0, 0, false);
        let gradients = [None, None];
        Self { config, scale, clean, forgiven, weights, gradients, foreign_stepped, largest }
    }

    fn backward(&mut self, factors: &[Option<Vec<f64>>; 2]) {
        for (gradient, factors) in self.gradients.iter_mut().zip(factors) {
            let Some(factors) = factors else { continue };
            let mut new: Vec<f64> = factors.iter().map(|f| single(f * self.scale)).collect();
            match gradient {
                None => {
                    let values = new;
                    *gradient = Some(Gradient {
                        values,
                        unscaled: false,
                        stepped: false,
                        overflowed: false,
                    });
                }
                Some(old) if old.stepped => {}
                Some(old) => {
                    if old.unscaled {
                        new.iter_mut().for_each(|x| *x = single(*x * single(1.0 / self.scale)));
                    }
                    old.values.iter_mut().zip(new).for_each(|(a, b)| *a = single(*a + b));
                    old.overflowed |= old.unscaled && old.values.iter().any(|x| !x.is_finite());
                }
            }
        }
    }

    /// The gradients that nobody has had, unscaled.
    fn prepare(&mut self, of: Option<usize>) -> Outcome<Vec<&mut Gradient>> {
        if self.gradients.iter().all(Option::is_none) {
            return Err("NoBackward");
        }
        let inverse = single(1.0 / self.scale);
        let chosen = self.gradients.iter_mut().enumerate();
        let chosen = chosen.filter(|(at, _)| of.is_none_or(|of| of == *at));
        let mut chosen: Vec<_> = chosen.filter_map(|(_, g)| g.as_mut()).collect();
        chosen.retain(|gradient| !gradient.stepped);
        for gradient in chosen.iter_mut().filter(|gradient| !gradient.unscaled) {
            gradient.values.iter_mut().for_each(|x| *x = single(*x * inverse));
            gradient.unscaled = true;
            gradient.overflowed = gradient.values.iter().any(|x| !x.is_finite());
        }
        Ok(chosen)
    }

    fn clip_norm(&mut self, of: Option<usize>, max_norm: f64) -> Outcome<f64> {
        let chosen = self.prepare(of)?;
        let norm = single(chosen.iter().flat_map(|g| &g.values).map(|x| x * x).sum::<f64>().sqrt());
        let spoiled = chosen.iter().any(|gradient| gradient.overflowed);
        for gradient in chosen {
            // One norm, one fate.
            gradient.overflowed |= spoiled;
            let factor = max_norm / (norm + 1e-6);
            if max_norm.is_finite() && (factor < 1.0 || factor.is_nan()) {
                gradient.values.iter_mut().for_each(|x| *x = single(*x * single(factor)));
            }
        }
        Ok(norm)
    }

    fn clip_value(&mut self, limit: f64) -> Outcome<()> {
        for gradient in self.prepare(None)? {
            gradient.values.iter_mut().for_each(|x| *x = x.clamp(-single(limit), single(limit)));
        }
        Ok(())
    }

    /// Whether the step was skipped.
    fn step(&mut self, who: Who, lr: f64) -> Outcome<bool> {
        let of = match who {
            Who::Own(at) => Some(at),
            Who::Foreign => None,
        };
        if self.gradients.iter().all(Option::is_none) {
            return Err("NoBackward");
        }
        let mine = |at: usize| of.is_none_or(|of| of == at);
        let stepped =
            (0..2).any(|at| mine(at) && self.gradients[at].as_ref().is_some_and(|g| g.stepped));
        let left =
            (0..2).any(|at| mine(at) && self.gradients[at].as_ref().is_some_and(|g| !g.stepped));
        match who {
            Who::Foreign if self.foreign_stepped => return Err("SecondForeignStep"),
            Who::Foreign if !left => return Err("AlreadyStepped"),
            Who::Own(_) if !left && !stepped => return Err("NoGradientForOptimizer"),
            Who::Own(_) if stepped && self.foreign_stepped => return Err("SecondForeignStep"),
            Who::Own(_) if stepped => return Err("AlreadyStepped"),
            _ => {}
        }
        let skipped = self.prepare(of)?.iter().any(|gradient| gradient.overflowed);
        for (at, gradient) in self.gradients.iter_mut().enumerate().filter(|(at, _)| mine(*at)) {
            let Some(gradient) = gradient.as_mut().filter(|gradient| !gradient.stepped) else {
                continue;
            };
            gradient.stepped = true;
            if !skipped {
                for (w, g) in self.weights[at].iter_mut().zip(&gradient.values) {
                    *w = single(*w - lr * g);
                    self.largest = self.largest.max(w.abs());
                }
            }
        }
        self.foreign_stepped |= who == Who::Foreign;
        Ok(skipped)
    }

    fn update(&mut self) -> Outcome<()> {
        let mut checked = self.gradients.iter().flatten().filter(|g| g.unscaled).peekable();
        if checked.peek().is_none() {
            return Err("NothingChecked");
        }
        let ScaleConfig { growth_factor, backoff_factor, growth_interval, hysteresis, .. } =
            self.config;
        if checked.any(|gradient| gradient.overflowed) {
            self.clean = 0;
            if self.forgiven + 1 < hysteresis {
                self.forgiven += 1;
            } else {
                self.scale *= backoff_factor;
            }
        } else {
            self.clean += 1;
            if self.clean >= growth_interval {
                self.scale *= growth_factor;
                (self.clean, self.forgiven) = (0, 0);
            }
        }
        let (low, high) = (self.config.min_scale.into(), self.config.max_scale.into());
        self.scale = self.scale.clamp(low, high);
        self.forget();
        Ok(())
    }

    fn forget(&mut self) {
        self.gradients = [None, None];
        self.foreign_stepped = false;
    }
}

/// The name of an error's variant, those of a scaler by their own.
fn kind(error: &Error) -> String {
    let text = match error {
        Error::Scaler(error) => format!("{error:?}"),
        other => format!("{other:?}"),
    };
    text.split([' ', '(', '{']).next().unwrap_or_default().to_owned()
}

/// A gradient element: mostly harmless, sometimes anything but.
fn factor(rng: &mut ChaCha8Rng) -> f64 {
    let sign = if rng.random() { 1.0 } else { -1.0 };
    sign * match rng.random_range(0..40) {
        0 => f64::INFINITY,
        1 => f64::NAN,
        2 => 2f64.powi(-149),                      // the smallest subnormal
        3 => 3.0 * 2f64.powi(-140),                // another
        4 => 2f64.powi(rng.random_range(96..112)), // overflows at a high scale
        5..=8 => 0.0,
        _ => f64::from(rng.random_range(1..1000)) / 256.0,
    }
}

fn run(rng: &mut ChaCha8Rng) {
    let config = ScaleConfig {
        init_scale: 2f32.powi(rng.random_range(-8..20)),
        growth_interval: rng.random_range(1..5),
        hysteresis: rng.random_range(1..4),
        min_scale: 2f32.powi(-8),
        max_scale: 2f32.powi(24),
        ..Default::default()
    };
    let weights: [Vec<f64>; 2] =
        [3, 2].map(|len| (0..len).map(|_| f64::from(rng.random_range(-64..64)) / 16.0).collect());
    let tensor = |values: &[f64]| Tensor::new(values, &Device::Cpu)?.to_dtype(DType::F32);
    let vars = [0, 1].map(|at| Var::from_tensor(&tensor(&weights[at]).unwrap()).unwrap());
    let parameters = Parameters::named([("a", vars[0].clone()), ("b", vars[1].clone())]).unwrap();
    let alone = ["a", "b"].map(|name| parameters.filter(|other| other == name));
    const LR: f64 = 0.25;
    let mut of_a =
        Sgd::new(vec![vars[0].clone()], SgdConfig { lr: LR, ..Default::default() }).unwrap();
    let mut of_b = MasterWeights::<SGD>::new(vec![vars[1].clone()], LR).unwrap();
    let mut foreign = SGD::new(vars.to_vec(), LR).unwrap();

    let mut model = Model::new(config, weights);
    let mut scaler = GradScaler::new(config).unwrap();
    for call in 0..40 {
        let before: Vec<Vec<f64>> = vars.iter().map(|var| to_vec(var)).collect();
        let mut moved = false;
        let context;
        let (got, expected): (Result<f64, Error>, Outcome<f64>) = match rng.random_range(0..20) {
            0..=6 => {
                let mut given = [3, 2].map(|len| {
                    rng.random_bool(0.7).then(|| (0..len).map(|_| factor(rng)).collect::<Vec<_>>())
                });
                if given.iter().all(Option::is_none) {
                    given[0] = Some(vec![1.0; 3]);
                }
                context = format!("backward {given:?}");
                let terms = given.iter().zip(&vars).filter_map(|(given, var)| {
                    let term = (var.as_tensor() * tensor(given.as_ref()?).unwrap()).unwrap();
                    Some(term.sum_all().unwrap())
                });
                let loss = terms.reduce(|a, b| (a + b).unwrap()).unwrap();
                let got = scaler.scale(&loss).and_then(|scaled| scaled.backward());
                model.backward(&given);
                (got.map(|()| 0.0), Ok(0.0))
            }
            7 => {
                context = "unscale".to_owned();
                (scaler.unscale().map(|()| 0.0), model.prepare(None).map(|_| 0.0))
            }
            8 => {
                let max_norm = [0.5, 8.0, 1e30, f64::INFINITY][rng.random_range(0..4)];
                let of = [None, Some(0), Some(1)][rng.random_range(0..3)];
                context = format!("clip_grad_norm of {of:?} to {max_norm}");
                let norm = match of {
                    None => scaler.clip_grad_norm(max_norm),
                    Some(at) => scaler.clip_grad_norm_of(&alone[at], max_norm),
                };
                let norm = norm.map(|norm| f64::from(norm.to_scalar::<f32>().unwrap()));
                (norm, model.clip_norm(of, max_norm))
            }
            9 => {
                context = "clip_grad_value".to_owned();
                (scaler.clip_grad_value(2.0).map(|()| 0.0), model.clip_value(2.0).map(|()| 0.0))
            }
            n @ 10..=14 => {
                let who =
                    [Who::Own(0), Who::Own(0), Who::Own(1), Who::Own(1), Who::Foreign][n - 10];
                context = format!("step {who:?}");
                let outcome = match who {
                    Who::Own(0) => scaler.step(&mut of_a),
                    Who::Own(_) => scaler.step(&mut of_b),
                    Who::Foreign => scaler.step(&mut foreign),
                };
                let skipped = |outcome: StepOutcome| {
                    let report = outcome.report(&parameters)?;
                    assert_eq!(report.is_empty(), !outcome.skipped()?, "{report}");
                    Ok(f64::from(u8::from(outcome.skipped()?)))
                };
                let got = outcome.and_then(skipped);
                let expected = model.step(who, LR).map(|skipped| f64::from(u8::from(skipped)));
                moved = matches!(got, Ok(0.0));
                (got, expected)
            }
            15..=17 => {
                context = "update".to_owned();
                (scaler.update().map(|()| 0.0), model.update().map(|()| 0.0))
            }
            18 => {
                context = "load_state".to_owned();
                let state =
                    LossScale::restore(config, 2f32.powi(rng.random_range(-8..24)), 1).unwrap();
                let expected = if model.gradients.iter().any(Option::is_some) {
                    Err("PendingGradients")
                } else {
                    (model.scale, model.clean, model.forgiven) = (state.get().into(), 1, 0);
                    Ok(0.0)
                };
                (scaler.load_state(Some(state)).map(|()| 0.0), expected)
            }
            _ => {
                context = "a look around".to_owned();
                let none = model.gradients.iter().all(Option::is_none);
                assert_eq!(scaler.histogram(&parameters).is_err(), none);
                for (at, name) in ["a", "b"].into_iter().enumerate() {
                    let missing = scaler.missing(&parameters).contains(&name);
                    assert_eq!(missing, model.gradients[at].is_none());
                    assert_eq!(scaler.grad(&vars[at]).unwrap().is_none(), missing);
                }
                if rng.random_bool(0.2) {
                    scaler.zero_grad();
                    model.forget();
                }
                (Ok(0.0), Ok(0.0))
            }
        };
        let context = format!("call {call}, {context}");
        match (got, expected) {
            (Ok(got), Ok(expected)) => {
                let near = (got - expected).abs() <= 1e-5 * expected.abs();
                let same = got == expected || got.is_nan() && expected.is_nan();
                assert!(near || same, "{context}: {got}, not {expected}");
            }
            (Err(got), Err(expected)) => assert_eq!(kind(&got), expected, "{context}: {got}"),
            (got, expected) => panic!("{context}: {got:?}, not {expected:?}"),
        }
        assert_eq!(f64::from(scaler.current_scale()), model.scale, "{context}: the scale");
        for (at, var) in vars.iter().enumerate() {
            let now = to_vec(var);
            assert!(now.iter().all(|x| x.is_finite()), "{context}: {now:?}");
            assert!(moved || now == before[at], "{context}: moved {:?} to {now:?}", before[at]);
            let tolerance = 64.0 * f64::from(f32::EPSILON) * model.largest;
            for (now, expected) in now.iter().zip(&model.weights[at]) {
                assert!((now - expected).abs() <= tolerance, "{context}: {now}, not {expected}");
            }
        }
    }
}

#[test]
fn a_scaler_is_its_plain_model_in_every_order_of_calls() {
    for_each_seed("the scaler", run);
}
