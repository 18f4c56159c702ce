//! The CPU side against the portable one, and both against plain loops on doubles.

use candle_core::{DType, Device, Result, Tensor};

use super::{AdamW, Lamb, Lion, Master, Rule, Sgd, Slot, cpu, portable};
use crate::kernels::elementwise::testing::{epsilon, random, values};
use crate::kernels::multi_tensor::{Clip, Multiplier, Number};

/// Shorter and longer than a vector, a block and a task, and none of their multiples.
pub(super) const LENGTHS: [usize; 5] = [1, 17, 1025, (1 << 16) + 3, (2 << 16) + 1030];

pub(super) fn rules() -> Vec<(Rule, usize)> {
    let sgd = |momentum, nesterov, first, maximize| {
        let step = if first { 1 } else { 2 };
        let (lr, dampening, weight_decay) = (0.1, 0.25, 0.01);
        Rule::Sgd(Sgd { lr, momentum, dampening, weight_decay, nesterov, maximize, step, first })
    };
    let adamw = |amsgrad, maximize| {
        let (keep, beta1, beta2, eps) = (0.999, 0.9, 0.99, 1e-8);
        let (lr, step, step_size, correction) = (0.1, 3, 0.1, 0.25);
        Rule::AdamW(AdamW {
            lr,
            step,
            keep,
            beta1,
            beta2,
            eps,
            step_size,
            correction,
            amsgrad,
            maximize,
        })
    };
    let lion = Lion { lr: 0.1, keep: 0.999, beta1: 0.9, beta2: 0.99, maximize: false };
    let lamb = Lamb {
        lr: 0.1,
        step: 3,
        weight_decay: 0.01,
        beta1: 0.9,
        beta2: 0.99,
        eps: 1e-6,
        correction1: 0.5,
        correction2: 0.25,
        maximize: false,
        adapt: true,
        clip: false,
    };
    vec![
        (sgd(0.0, false, true, false), 0),
        (sgd(0.9, false, true, true), 1),
        (sgd(0.9, false, false, false), 1),
        (sgd(0.9, true, false, false), 1),
        (adamw(false, false), 2),
        (adamw(true, true), 3),
        (Rule::Lion(lion), 1),
        (Rule::LambMoments(lamb), 2),
        (Rule::LambMoments(Lamb { clip: true, maximize: true, ..lamb }), 2),
        (Rule::Average(0.125), 0),
    ]
}

/// What a step starts from. Second moments are above zero.
pub(super) struct Start {
    pub(super) variable: Tensor,
    pub(super) extra: Option<Tensor>,
    pub(super) states: Vec<Tensor>,
    pub(super) gradient: Tensor,
    pub(super) by: Multiplier,
}

impl Start {
    pub(super) fn new(
        len: usize,
        dtype: DType,
        how: &str,
        states: usize,
        gradient: DType,
    ) -> Result<Self> {
        let shape = [len];
        let master = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let exact = random(&shape, master, 1);
        let (variable, extra) = match how {
            "master" => (exact.to_dtype(dtype)?, Some(exact)),
            "remainder" => {
                let rest: Vec<i16> = (0..len).map(|i| (i * 37 % 65_521) as u16 as i16).collect();
                (exact.to_dtype(dtype)?, Some(Tensor::new(rest, &Device::Cpu)?))
            }
            _ => (exact.to_dtype(dtype)?, None),
        };
        let state = |seed| random(&shape, master, seed).abs();
        let states = (2..2 + states as u64).map(state).collect::<Result<_>>()?;
        // Neither factor is a power of two.
        let norm = Tensor::new(3f32, &Device::Cpu)?;
        let by = match len % 2 {
            0 => Multiplier::ONE,
            _ => {
                Multiplier { inverse: Number::Host(1.1), clip: Some(Clip { norm, max_norm: 2.5 }) }
            }
        };
        Ok(Self { variable, extra, states, gradient: random(&shape, gradient, 9), by })
    }

    /// The gradient times both factors, rounded after each.
    fn multiplied(&self) -> Vec<f64> {
        let double = self.variable.dtype() == DType::F64;
        let round = |x: f64| if double { x } else { f64::from(x as f32) };
        let [inverse, clip] = self.by.on_host().unwrap().map(round);
        let product = |x: f64| round(round(x * inverse) * clip);
        values(&self.gradient).into_iter().map(product).collect()
    }

    pub(super) fn slot(&self, rule: Rule, how: &str) -> Slot<'_> {
        let master = match (&self.extra, how) {
            (Some(master), "master") => Master::Full(master),
            (Some(rest), _) => Master::Remainder(rest),
            (None, "stochastic") => Master::Stochastic,
            (None, _) => Master::Itself,
        };
        let (variable, states, gradient) = (&self.variable, &self.states[..], &self.gradient);
        Slot { variable, master, states, gradient, by: &self.by, rule, seed: 11 }
    }

    /// The result: variable, master or remainder, and states.
    pub(super) fn tensors(&self) -> Vec<&Tensor> {
        std::iter::once(&self.variable).chain(&self.extra).chain(&self.states).collect()
    }
}

pub(super) const KINDS: [(DType, &str); 8] = [
    (DType::F32, "itself"),
    (DType::F64, "itself"),
    (DType::F16, "master"),
    (DType::BF16, "master"),
    (DType::BF16, "remainder"),
    (DType::F16, "stochastic"),
    (DType::BF16, "stochastic"),
    (DType::F32, "state in BF16"),
];

fn step_portably(slot: Slot<'_>) -> Result<()> {
    let mut next = Some(slot);
    while let Some(slot) = next {
        let rule = slot.rule.next(portable::update(&slot)?);
        next = rule.map(|rule| Slot { rule, ..slot });
    }
    Ok(())
}

#[test]
fn the_cpu_does_what_the_portable_side_does() -> Result<()> {
    for len in LENGTHS {
        for (rule, states) in rules() {
            for (dtype, how) in KINDS {
                // One random bit in 2^16 falls between two results that differ in the last place.
                let random = how == "stochastic" || how == "state in BF16";
                if len > 2000 && (random || dtype == DType::F16) || len > 70_000 && how != "itself"
                {
                    continue;
                }
                let gradient = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
                let make = || {
                    let mut start = Start::new(len, dtype, how, states, gradient)?;
                    if how == "state in BF16" {
                        for state in &mut start.states {
                            *state = state.to_dtype(DType::BF16)?;
                        }
                    }
                    Ok::<_, candle_core::Error>(start)
                };
                let (ours, theirs) = (make()?, make()?);
                super::step(vec![ours.slot(rule, how)], None)?;
                step_portably(theirs.slot(rule, how))?;
                if how == "remainder" {
                    let exact = |start: &Start| match &start.extra {
                        Some(rest) => portable::rebuild(&start.variable, rest),
                        None => unreachable!("it has a remainder"),
                    };
                    close(&format!("{rule:?} {how}"), &exact(&ours)?, &exact(&theirs)?);
                    continue;
                }
                for (ours, theirs) in ours.tensors().into_iter().zip(theirs.tensors()) {
                    assert_eq!(ours.dtype(), theirs.dtype());
                    close(&format!("{len} {rule:?} {dtype:?} {how}"), ours, theirs);
                }
            }
        }
    }
    Ok(())
}

/// Within eight roundings of the values' own size (weights start within 2): the order of one or two
/// operations differs. A 16-bit number may be its neighbour.
#[track_caller]
pub(super) fn close(what: &str, ours: &Tensor, theirs: &Tensor) {
    let (ours_values, theirs_values) = (values(ours), values(theirs));
    let tolerance = match ours.dtype() {
        DType::F32 => 8.0 * epsilon(DType::F32),
        // LAMB's norms are sums in F64, here in another order.
        DType::F64 => (8.0 + (ours_values.len() as f64).sqrt()) * epsilon(DType::F64),
        half => 2.0 * epsilon(half),
    };
    for (i, (a, b)) in ours_values.iter().zip(&theirs_values).enumerate() {
        let allowed = tolerance * b.abs().max(1.0);
        assert!((a - b).abs() <= allowed, "{what}, {i}: {a} for {b}");
    }
}

/// Adam's moments on doubles.
fn moments(m: f64, v: f64, g: f64, b1: f64, b2: f64) -> (f64, f64) {
    (b1 * m + (1.0 - b1) * g, b2 * v + (1.0 - b2) * g * g)
}

/// The formulas of the papers, on doubles: weight and states afterwards.
fn oracle(rule: Rule, w: &[f64], g: &[f64], states: &[Vec<f64>]) -> (Vec<f64>, Vec<Vec<f64>>) {
    let mut after = (w.to_vec(), states.to_vec());
    let signed = |maximize: bool, g: f64| if maximize { -g } else { g };
    let mut updates = Vec::new();
    for i in 0..w.len() {
        let (w, states) = (&mut after.0[i], &mut after.1);
        match rule {
            Rule::Sgd(r) => {
                let mut g = signed(r.maximize, g[i]) + r.weight_decay * *w;
                if let Some(b) = states.first_mut() {
                    b[i] = if r.first { g } else { r.momentum * b[i] + (1.0 - r.dampening) * g };
                    g = if r.nesterov { g + r.momentum * b[i] } else { b[i] };
                }
                *w -= r.lr * g;
            }
            Rule::AdamW(r) => {
                let g = signed(r.maximize, g[i]);
                let (m, mut v) = moments(states[0][i], states[1][i], g, r.beta1, r.beta2);
                (states[0][i], states[1][i]) = (m, v);
                if r.amsgrad {
                    v = v.max(states[2][i]);
                    states[2][i] = v;
                }
                *w = *w * r.keep - r.step_size * m / (v.sqrt() / r.correction + r.eps);
            }
            Rule::Lion(r) => {
                let (m, g) = (&mut states[0][i], signed(r.maximize, g[i]));
                *w = *w * r.keep - r.lr * (r.beta1 * *m + (1.0 - r.beta1) * g).signum();
                *m = r.beta2 * *m + (1.0 - r.beta2) * g;
            }
            Rule::LambMoments(r) => {
                let g = signed(r.maximize, g[i]);
                let (m, v) = moments(states[0][i], states[1][i], g, r.beta1, r.beta2);
                (states[0][i], states[1][i]) = (m, v);
                let denominator = v.sqrt() / r.correction2 + r.eps;
                updates.push(m / r.correction1 / denominator + r.weight_decay * *w);
            }
            Rule::Average(share) => *w += share * (g[i] - *w),
            Rule::LambUpdate(..) => unreachable!("it is never first"),
        }
    }
    if let Rule::LambMoments(r) = rule {
        let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
        let mut ratio = norm(w) / norm(&updates);
        if r.clip {
            ratio = ratio.min(1.0);
        }
        after.0.iter_mut().zip(updates).for_each(|(w, u)| *w -= r.lr * ratio * u);
    }
    after
}

#[test]
fn every_rule_is_its_formula() -> Result<()> {
    for len in LENGTHS {
        for (rule, count) in rules() {
            for (dtype, how) in KINDS.into_iter().filter(|(_, how)| !how.contains("BF16")) {
                for gradient in [dtype, DType::BF16, DType::F16] {
                    let large = len > 2000 && (gradient != dtype || dtype == DType::F64);
                    if (dtype == DType::F64) != (gradient == DType::F64) || large {
                        continue;
                    }
                    let start = Start::new(len, dtype, how, count, gradient)?;
                    let exact = |start: &Start| match (&start.extra, how) {
                        (Some(rest), "remainder") => portable::rebuild(&start.variable, rest),
                        (Some(master), _) => Ok(master.clone()),
                        _ => Ok(start.variable.clone()),
                    };
                    let before: Vec<Vec<f64>> = start.states.iter().map(values).collect();
                    let (w, g) = (values(&exact(&start)?), start.multiplied());
                    let (w, states) = oracle(rule, &w, &g, &before);
                    super::step(vec![start.slot(rule, how)], None)?;
                    let expected = Tensor::new(w, &Device::Cpu)?;
                    let what = format!("{len} {rule:?} {dtype:?} {how} {gradient:?}");
                    close(&what, &exact(&start)?, &expected);
                    for (state, expected) in start.states.iter().zip(states) {
                        close(&what, state, &Tensor::new(expected, &Device::Cpu)?);
                    }
                    if how == "master" {
                        let rounded = exact(&start)?.to_dtype(dtype)?;
                        assert_eq!(values(&start.variable), values(&rounded), "{what}");
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn many_tensors_at_once_are_each_as_if_alone() -> Result<()> {
    let lengths = LENGTHS.iter().cycle().take(40).map(|len| len % 70_000 + 1);
    for (rule, count) in rules() {
        let make = |len| Start::new(len, DType::F32, "itself", count, DType::F32);
        let (one, all): (Vec<Start>, Vec<Start>) = (
            lengths.clone().map(make).collect::<Result<_>>()?,
            lengths.clone().map(make).collect::<Result<_>>()?,
        );
        super::step(all.iter().map(|start| start.slot(rule, "itself")).collect(), None)?;
        for (one, all) in one.iter().zip(&all) {
            super::step(vec![one.slot(rule, "itself")], None)?;
            for (one, all) in one.tensors().into_iter().zip(all.tensors()) {
                assert_eq!(values(one), values(all), "{rule:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn the_sums_of_squares_do_not_depend_on_the_threads() -> Result<()> {
    let Some((rule, count)) = rules().into_iter().find(|(r, _)| r.next([1.0; 2]).is_some()) else {
        unreachable!("LAMB is among the rules")
    };
    let sums = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        // Little beside the others where one thread is, and more than a third's share where three are.
        let start = |_| Start::new((3 << 16) + 77, DType::F32, "itself", count, DType::F32);
        let starts = (0..9).map(start).collect::<Result<Vec<_>>>()?;
        let slots: Vec<_> = starts.iter().map(|start| start.slot(rule, "itself")).collect();
        pool.install(|| cpu::pass(&slots))
    };
    let (one, three) = (sums(1)?, sums(3)?);
    assert_eq!(one, three);
    assert!(one.iter().flatten().all(|sum| *sum > 0.0));
    Ok(())
}

#[test]
fn nan_and_infinities_pass_through() -> Result<()> {
    for (rule, count) in rules() {
        let gradient = [f32::NAN, f32::INFINITY, 1.0];
        let mut start = Start::new(3, DType::F32, "itself", count, DType::F32)?;
        start.gradient = Tensor::new(&gradient, &Device::Cpu)?;
        super::step(vec![start.slot(rule, "itself")], None)?;
        let w = values(&start.variable);
        assert!(w[0].is_nan(), "{rule:?}: {w:?}");
        let norms = matches!(rule, Rule::LambMoments(_));
        assert!(norms || w[2].is_finite(), "{rule:?}: {w:?}");
    }
    Ok(())
}
