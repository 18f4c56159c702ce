//! CUDA against the CPU: the same bits, but for LAMB, whose norms are sums in another order.

use candle_core::{DType, Device, Result, Tensor};

use super::tests::{KINDS, LENGTHS, Start, close, rules};
use super::{AdamW, Rule, Skip};
use crate::kernels::testing::devices::gpus;

impl Start {
    fn to(&self, device: &Device) -> Result<Self> {
        Ok(Self {
            variable: self.variable.to_device(device)?,
            extra: self.extra.as_ref().map(|t| t.to_device(device)).transpose()?,
            states: self.states.iter().map(|t| t.to_device(device)).collect::<Result<_>>()?,
            gradient: self.gradient.to_device(device)?,
            by: self.by.on(device)?,
        })
    }
}

fn start(len: usize, kind: (DType, &str), states: usize, gradient: DType) -> Result<Start> {
    let (dtype, how) = kind;
    let mut start = Start::new(len, dtype, how, states, gradient)?;
    if how == "state in BF16" {
        for state in &mut start.states {
            *state = state.to_dtype(DType::BF16)?;
        }
    }
    Ok(start)
}

fn is_lamb(rule: Rule) -> bool {
    matches!(rule, Rule::LambMoments(_))
}

/// The tensors' bits, as far as `F64` shows them.
#[track_caller]
fn same(what: &str, rule: Rule, ours: &Start, theirs: &Start) {
    for (ours, theirs) in ours.tensors().into_iter().zip(theirs.tensors()) {
        let ours = ours.to_device(&Device::Cpu).unwrap();
        let bits = |t: &Tensor| -> Vec<u64> {
            let all = t.to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
            all.into_iter().map(|x| if x.is_nan() { u64::MAX } else { x.to_bits() }).collect()
        };
        match is_lamb(rule) && ours.dtype() != DType::I16 {
            true => close(what, &ours, theirs),
            false if is_lamb(rule) => {}
            false => assert_eq!(bits(&ours), bits(theirs), "{what}"),
        }
    }
}

#[test]
fn cuda_does_what_the_cpu_does() -> Result<()> {
    for device in gpus() {
        for (rule, states) in rules() {
            for kind in KINDS {
                for gradient in [DType::F32, DType::BF16, DType::F16, DType::F64] {
                    if (kind.0 == DType::F64) != (gradient == DType::F64) {
                        continue;
                    }
                    let theirs: Vec<Start> = LENGTHS
                        .iter()
                        .map(|&len| start(len, kind, states, gradient))
                        .collect::<Result<_>>()?;
                    let ours: Vec<Start> =
                        theirs.iter().map(|one| one.to(&device)).collect::<Result<_>>()?;
                    for all in [&ours, &theirs] {
                        let slots = all.iter().map(|one| one.slot(rule, kind.1));
                        super::step(slots.collect(), None)?;
                    }
                    for ((ours, theirs), len) in ours.iter().zip(&theirs).zip(LENGTHS) {
                        let what = format!("{len} {rule:?} {kind:?} {gradient:?}");
                        same(&what, rule, ours, theirs);
                    }
                }
            }
        }
    }
    Ok(())
}

/// Tensors that start at no multiple of 16 bytes, and not-a-number among the gradients.
#[test]
fn cuda_takes_any_address() -> Result<()> {
    for device in gpus() {
        for (rule, states) in rules().into_iter().filter(|(rule, _)| !is_lamb(*rule)) {
            let mut whole = start(1030, (DType::F32, "itself"), states, DType::F32)?;
            let bad = Tensor::new(&[f32::NAN, f32::INFINITY, 0.0, -0.0], &Device::Cpu)?;
            whole.gradient = Tensor::cat(&[&bad, &whole.gradient.narrow(0, 4, 1026)?], 0)?;
            let part = |start: &Start| -> Result<Start> {
                let cut = |t: &Tensor| t.narrow(0, 1, 1029);
                Ok(Start {
                    variable: cut(&start.variable)?,
                    extra: None,
                    states: start.states.iter().map(cut).collect::<Result<_>>()?,
                    gradient: cut(&start.gradient)?,
                    by: start.by.clone(),
                })
            };
            let (ours, theirs) = (part(&whole.to(&device)?)?, part(&whole)?);
            super::step(vec![ours.slot(rule, "itself")], None)?;
            super::step(vec![theirs.slot(rule, "itself")], None)?;
            same(&format!("{rule:?}"), rule, &ours, &theirs);
        }
    }
    Ok(())
}

/// More tensors than a launch takes, and rules and dtypes mixed.
#[test]
fn cuda_takes_any_number_of_tensors() -> Result<()> {
    for device in gpus() {
        let mut all = Vec::new();
        for (number, (rule, states)) in rules().into_iter().cycle().take(900).enumerate() {
            let kind = KINDS[number % KINDS.len()];
            let gradient = if kind.0 == DType::F64 { DType::F64 } else { DType::F32 };
            let theirs = start(number % 37 + 1, kind, states, gradient)?;
            all.push((rule, kind.1, theirs.to(&device)?, theirs));
        }
        super::step(all.iter().map(|(rule, how, ours, _)| ours.slot(*rule, how)).collect(), None)?;
        super::step(all.iter().map(|(rule, how, _, it)| it.slot(*rule, how)).collect(), None)?;
        for (rule, how, ours, theirs) in &all {
            same(&format!("{rule:?} {how}"), *rule, ours, theirs);
        }
    }
    Ok(())
}

/// What is skipped is untouched and counted, and the corrections follow the steps that were taken.
#[test]
fn cuda_decides_what_is_skipped() -> Result<()> {
    let settings = |step: u64, taken: i32| {
        let (lr, beta1, beta2) = (0.1, 0.9f64, 0.99f64);
        Rule::AdamW(AdamW {
            lr,
            step,
            keep: 0.999,
            beta1,
            beta2,
            eps: 1e-8,
            step_size: lr / (1.0 - beta1.powi(taken)),
            correction: (1.0 - beta2.powi(taken)).sqrt(),
            amsgrad: false,
            maximize: false,
        })
    };
    for device in gpus() {
        let counts = Tensor::zeros(3, DType::U32, &device)?;
        let theirs = start(1030, (DType::BF16, "master"), 2, DType::F32)?;
        let ours = theirs.to(&device)?;
        // Steps 2 and 3 are skipped; the CPU never hears of them. Nothing may skip step 4.
        let mut taken = 0;
        for (step, skipped) in
            [(1, Some(0u32)), (2, Some(7)), (3, Some(1)), (4, None), (5, Some(0))]
        {
            let flag = skipped.map(|skipped| Tensor::new(&[skipped], &device)).transpose()?;
            let skip = Skip { flag: flag.as_ref(), counts: &counts, places: &[1] };
            let rule = settings(step, step as i32);
            super::step(vec![ours.slot(rule, "master")], Some(skip))?;
            if skipped.is_none_or(|skipped| skipped == 0) {
                taken += 1;
                super::step(vec![theirs.slot(settings(step, taken), "master")], None)?;
            }
            same(&format!("step {step}"), rule, &ours, &theirs);
        }
        assert_eq!(counts.to_vec1::<u32>()?, [0, 2, 0]);
    }
    Ok(())
}

#[test]
fn cuda_rebuilds_what_remainders_hold() -> Result<()> {
    for device in gpus() {
        let theirs = start(1030, (DType::BF16, "remainder"), 0, DType::F32)?;
        let ours = theirs.to(&device)?;
        let exact = |start: &Start| match &start.extra {
            Some(rest) => super::rebuild(&start.variable, rest)?.to_vec1::<f32>(),
            None => unreachable!("it has a remainder"),
        };
        assert_eq!(exact(&ours)?, exact(&theirs)?);
    }
    Ok(())
}
