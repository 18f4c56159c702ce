//! The scaler and the crate's optimizers on a GPU: what a CPU does, without a wait.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Optimizer, SGD};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::kernels::cuda::Gpu;
use crate::kernels::testing::devices::{devices, gpus};
use crate::kernels::testing::own_process::in_own_process;
use crate::optim::{
    AdamW, AdamWConfig, Lamb, LambConfig, Masters, Schedule, Scheduler, Sgd, SgdConfig,
};
use crate::optim::{Step, UnscaledGradients};
use crate::{GradScaler, MasterWeights, Parameters, ScaleConfig, backend::device_reads};

/// Lengths of the variables: more than a chunk, and no multiple of a vector.
const LENGTHS: [usize; 3] = [(1 << 14) + 3, 5, 1024];

/// Numbers for variable `number` in step `step`; those of `bad` steps hold an infinity.
fn numbers(seed: u64, len: usize, bad: bool) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut all: Vec<f32> = (0..len).map(|_| rng.random_range(-1f32..1.0)).collect();
    if bad {
        all[len / 2] = f32::INFINITY;
        all[0] = f32::NAN;
    }
    all
}

struct Run {
    device: Device,
    parameters: Parameters,
    scaler: GradScaler,
}

impl Run {
    fn new(device: &Device, dtype: DType) -> Self {
        let variable = |(number, &len): (usize, &usize)| {
            let values = Tensor::new(numbers(number as u64, len, false), device).unwrap();
            let var = Var::from_tensor(&values.to_dtype(dtype).unwrap()).unwrap();
            (format!("w{number}"), var)
        };
        let named: Vec<_> = LENGTHS.iter().enumerate().map(variable).collect();
        let config =
            ScaleConfig { init_scale: 1024.0, growth_interval: 2, ..ScaleConfig::default() };
        Self {
            device: device.clone(),
            parameters: Parameters::named(named).unwrap(),
            scaler: GradScaler::new(config).unwrap(),
        }
    }

    /// Back-propagates a loss whose gradients are random numbers; those of variable 1 overflow in a
    /// `bad` step.
    fn backward(&mut self, step: u64, bad: bool) -> Result<()> {
        let mut loss: Option<Tensor> = None;
        for (number, var) in self.parameters.vars().iter().enumerate() {
            let seed = 100 * step + number as u64;
            let values = numbers(seed, var.elem_count(), bad && number == 1);
            let x = Tensor::new(values, &self.device)?;
            let term = (var.to_dtype(DType::F32)? * x)?.sum_all()?;
            loss = Some(match loss {
                Some(loss) => (loss + term)?,
                None => term,
            });
        }
        self.scaler.scale(&loss.unwrap()).unwrap().backward().unwrap();
        Ok(())
    }

    fn values(&self) -> Vec<Vec<f32>> {
        let value = |var: &Var| var.to_dtype(DType::F32)?.to_vec1::<f32>();
        self.parameters.vars().iter().map(|var| value(var).unwrap()).collect()
    }
}

const BAD: [bool; 8] = [false, true, false, false, true, true, false, false];

#[test]
fn a_run_on_a_gpu_is_that_on_the_cpu_and_waits_for_nothing() -> Result<()> {
    for gpu in gpus() {
        for (dtype, masters, clip) in [
            (DType::F32, Masters::F32, None),
            (DType::BF16, Masters::F32, Some(f64::INFINITY)),
            (DType::BF16, Masters::Remainder, None),
            (DType::F16, Masters::Stochastic, None),
        ] {
            let run = |device: &Device| {
                let _fork = crate::random::fork_rng_guard();
                crate::random::manual_seed(7);
                let mut run = Run::new(device, dtype);
                let config = AdamWConfig { lr: 0.1, ..AdamWConfig::default() };
                let adamw = AdamW::new(&run.parameters, config).unwrap();
                let mut adamw = adamw.with_masters(masters).unwrap();
                let before = device_reads();
                let mut outcomes = Vec::new();
                for (step, bad) in BAD.into_iter().enumerate() {
                    // A CPU draws random bits for the steps it takes alone, a GPU for all.
                    let bad = bad && masters != Masters::Stochastic;
                    run.backward(step as u64, bad).unwrap();
                    if let Some(max_norm) = clip {
                        run.scaler.clip_grad_norm(max_norm).unwrap();
                    }
                    outcomes.push(run.scaler.step(&mut adamw).unwrap());
                    run.scaler.update().unwrap();
                }
                assert_eq!(device_reads(), before, "a step waited");
                let reports: Vec<String> = outcomes
                    .iter()
                    .map(|outcome| {
                        let skipped = outcome.skipped().unwrap();
                        let report = outcome.report(&run.parameters).unwrap();
                        format!("{skipped} {report}")
                    })
                    .collect();
                let state = adamw.state().unwrap();
                (run.values(), reports, run.scaler.state(), run.scaler.history(), state.steps)
            };
            assert_eq!(run(&gpu), run(&Device::Cpu), "{dtype:?} {masters:?} {clip:?}");
        }
    }
    Ok(())
}

#[test]
fn an_outcome_may_be_read_on_another_thread() -> Result<()> {
    for gpu in gpus() {
        let mut run = Run::new(&gpu, DType::F32);
        let mut sgd = Sgd::new(run.parameters.vars(), SgdConfig::default())?;
        let busy = Tensor::ones((256, 256), DType::F32, &gpu)?;
        for (step, bad) in BAD.into_iter().enumerate() {
            // What the flag comes after on this thread's stream, and another's does not wait for.
            (0..8).try_for_each(|_| busy.matmul(&busy).map(drop))?;
            run.backward(step as u64, bad)?;
            let outcome = run.scaler.step(&mut sgd)?;
            run.scaler.update()?;
            let elsewhere = outcome.clone();
            let parameters = &run.parameters;
            let reported = std::thread::scope(|scope| {
                let reader =
                    scope.spawn(move || elsewhere.report(parameters).map(|r| r.to_string()));
                reader.join().expect("it does not panic")
            })?;
            assert_eq!(reported, outcome.report(parameters)?.to_string());
            assert_eq!(outcome.skipped()?, bad);
        }
    }
    Ok(())
}

#[test]
fn clipping_on_a_gpu_is_that_on_the_cpu() -> Result<()> {
    for gpu in gpus() {
        let run = |device: &Device| {
            let mut run = Run::new(device, DType::F32);
            let mut lamb = Lamb::new(&run.parameters, LambConfig::default()).unwrap();
            let mut norms = Vec::new();
            for (step, bad) in BAD.into_iter().enumerate() {
                run.backward(step as u64, bad).unwrap();
                // Micro-batches, the second after unscaling.
                let norm = run.scaler.clip_grad_norm(0.5).unwrap();
                run.backward(1000 + step as u64, false).unwrap();
                run.scaler.clip_grad_value(0.01).unwrap();
                run.scaler.step(&mut lamb).unwrap();
                run.scaler.update().unwrap();
                norms.push(norm.to_scalar::<f32>().unwrap());
            }
            (run.values(), norms, run.scaler.state())
        };
        let ((ours, norms, scale), (theirs, expected, same_scale)) = (run(&gpu), run(&Device::Cpu));
        assert_eq!(scale, same_scale);
        // Norms and LAMB's trust ratio are sums in another order, in F64, rounded to F32; a weight
        // near zero loses digits to the others in its sums.
        for (a, b) in norms.iter().zip(&expected) {
            assert!((a / b - 1.0).abs() <= f32::EPSILON || !a.is_finite() && !b.is_finite());
        }
        for (a, b) in ours.iter().flatten().zip(theirs.iter().flatten()) {
            assert!((a - b).abs() <= 16.0 * f32::EPSILON, "{a} {b}");
        }
    }
    Ok(())
}

/// An optimizer of candle's cannot skip on the device: one wait a step, for the flag.
#[test]
fn a_foreign_optimizer_costs_one_wait() -> Result<()> {
    for gpu in gpus() {
        let run = |device: &Device| {
            let mut run = Run::new(device, DType::F16);
            let mut sgd = SGD::new(run.parameters.vars(), 0.1).unwrap();
            let mut waits = Vec::new();
            for (step, bad) in BAD.into_iter().enumerate() {
                run.backward(step as u64, bad).unwrap();
                let before = device_reads();
                let outcome = run.scaler.step(&mut sgd).unwrap();
                assert_eq!(outcome.skipped().unwrap(), bad);
                waits.push(device_reads() - before);
                run.scaler.update().unwrap();
            }
            (run.values(), run.scaler.state(), waits)
        };
        let ((ours, scale, waits), (theirs, same_scale, _)) = (run(&gpu), run(&Device::Cpu));
        assert_eq!((ours, scale), (theirs, same_scale));
        assert_eq!(waits, [1; 8]);
        // Masters around one, likewise.
        let mut run = Run::new(&gpu, DType::BF16);
        let mut masters = MasterWeights::<SGD>::new(run.parameters.vars(), 0.1).unwrap();
        run.backward(0, false)?;
        let before = device_reads();
        run.scaler.step(&mut masters).unwrap();
        assert_eq!(device_reads() - before, 1);
    }
    Ok(())
}

/// A step that nothing may skip counts as the one after those that were taken: without a scaler, or with one that is off.
#[test]
fn skipped_steps_stay_off_the_count_of_later_ones() -> Result<()> {
    for gpu in gpus() {
        let weights = |skips: bool| {
            let mut run = Run::new(&gpu, DType::F32);
            let config = AdamWConfig { lr: 0.1, ..AdamWConfig::default() };
            let mut adamw = AdamW::new(&run.parameters, config).unwrap();
            for (step, bad) in [(0, false), (1, true), (2, true), (3, false)] {
                if bad && !skips {
                    continue;
                }
                run.backward(step, bad).unwrap();
                assert_eq!(run.scaler.step(&mut adamw).unwrap().skipped().unwrap(), bad);
                run.scaler.update().unwrap();
            }
            run.scaler = GradScaler::disabled();
            run.backward(4, false).unwrap();
            run.scaler.step(&mut adamw).unwrap();
            run.scaler.update().unwrap();
            assert!(adamw.state().unwrap().steps.values().all(|steps| *steps == 3));
            run.values()
        };
        let (skipped, never) = (weights(true), weights(false));
        for (a, b) in skipped.iter().flatten().zip(never.iter().flatten()) {
            assert!((a - b).abs() <= 8.0 * f32::EPSILON * b.abs().max(0.1), "{a} {b}");
        }
    }
    Ok(())
}

/// Two optimizers, two fates.
#[test]
fn optimizers_are_skipped_on_their_own() -> Result<()> {
    for gpu in gpus() {
        let mut run = Run::new(&gpu, DType::F32);
        let one = |name: &str| {
            let vars = run.parameters.iter().filter(|(own, _)| *own == name);
            let vars: Vec<_> = vars.map(|(name, var)| (name.to_owned(), var.clone())).collect();
            let parameters = Parameters::named(vars).unwrap();
            AdamW::new(&parameters, AdamWConfig::default()).unwrap()
        };
        let (mut first, mut second) = (one("w0"), one("w1"));
        let before = run.values();
        run.backward(0, true)?;
        let waits = device_reads();
        let taken = run.scaler.step(&mut first).unwrap();
        let skipped = run.scaler.step(&mut second).unwrap();
        run.scaler.update().unwrap();
        assert_eq!(device_reads(), waits);
        assert!(!taken.skipped().unwrap() && skipped.skipped().unwrap());
        assert_eq!(run.scaler.current_scale(), 512.0);
        let after = run.values();
        assert!(after[0] != before[0] && after[1] == before[1]);
        assert_eq!(skipped.overflowed(&run.parameters).unwrap(), ["w1"]);
        assert_eq!(skipped.scale(), 1024.0);
    }
    Ok(())
}

/// The schedule reads a step late, and ends where that on a CPU does.
#[test]
fn schedules_follow_a_step_late() -> Result<()> {
    for gpu in gpus() {
        let mut run = Run::new(&gpu, DType::F32);
        let mut adamw = AdamW::new(&run.parameters, AdamWConfig::default()).unwrap();
        let schedule = Schedule::step(1, 0.5);
        let mut scheduler = Scheduler::new(schedule, &mut adamw).unwrap();
        let mut rates = Vec::new();
        for (step, bad) in BAD.into_iter().enumerate() {
            run.backward(step as u64, bad)?;
            let outcome = run.scaler.step(&mut adamw).unwrap();
            run.scaler.update().unwrap();
            let before = device_reads();
            scheduler.step(&outcome, &mut adamw).unwrap();
            // That of the step before.
            assert_eq!(device_reads() - before, u64::from(step > 0));
            rates.push((scheduler.learning_rate() / 1e-3).log2().round());
        }
        // Steps 1, 4 and 5 were skipped: taken for taken at first, and known by the next.
        assert_eq!(rates, [-1.0, -2.0, -2.0, -3.0, -4.0, -4.0, -4.0, -5.0]);
        assert_eq!(scheduler.taken(), 5);
        // Whoever looks at an outcome changes no rate.
        run.backward(0, true)?;
        let outcome = run.scaler.step(&mut adamw).unwrap();
        run.scaler.update().unwrap();
        assert!(outcome.skipped().unwrap() && outcome.is_known());
        scheduler.step(&outcome, &mut adamw).unwrap();
        assert_eq!((scheduler.learning_rate() / 1e-3).log2().round(), -6.0);
        assert_eq!(scheduler.taken(), 5);
    }
    Ok(())
}

/// An optimizer that keeps the gradients alive: what was allocated before a capture must not be freed
/// in it.
struct Keeping<'a> {
    optimizer: &'a mut AdamW,
    variables: Vec<Var>,
    gradients: Vec<Tensor>,
}

impl Step for Keeping<'_> {
    fn variables(&self) -> Option<Vec<candle_core::TensorId>> {
        self.optimizer.variables()
    }

    fn skips_on_device(&self) -> bool {
        self.optimizer.skips_on_device()
    }

    fn apply(&mut self, gradients: &UnscaledGradients<'_>) -> Result<()> {
        for variable in &self.variables {
            self.gradients.extend(gradients.get(variable)?);
        }
        self.optimizer.apply(gradients)
    }
}

/// A step is captured whole: nothing in it waits, in candle's calls neither.
#[test]
fn a_step_can_be_captured() -> Result<()> {
    // A capture does not survive another test that waits for the device.
    let test = "ops::device_tests::a_step_can_be_captured";
    if gpus().is_empty() || !in_own_process(test, &[]) {
        return Ok(());
    }
    for device in gpus() {
        let gpu = Gpu::of(&device).unwrap();
        for masters in [Masters::F32, Masters::Remainder, Masters::Stochastic] {
            let mut run = Run::new(&device, DType::BF16);
            let adamw = AdamW::new(&run.parameters, AdamWConfig::default()).unwrap();
            let mut adamw = adamw.with_masters(masters).unwrap();
            let variables = run.parameters.vars();
            // Kernels are compiled and states made in the first.
            for step in 0..2 {
                run.backward(step, false)?;
                let (optimizer, variables) = (&mut adamw, variables.clone());
                let mut keeping = Keeping { optimizer, variables, gradients: Vec::new() };
                let scaler = &mut run.scaler;
                let mut whole = || {
                    let norm = scaler.clip_grad_norm(1.0).unwrap();
                    let outcome = scaler.step(&mut keeping).unwrap();
                    scaler.update().unwrap();
                    (norm, outcome)
                };
                if step == 0 {
                    whole();
                } else {
                    // What was allocated in the graph that is gone must not be freed either.
                    let (returned, _graph) = gpu.capture(|| Ok(whole()))?;
                    std::mem::forget(returned);
                }
            }
        }
        // And a wait is an error: this test can fail.
        let x = Tensor::new(1f32, &device)?;
        assert!(gpu.capture(|| Ok(x.to_scalar::<f32>()?)).is_err());
    }
    Ok(())
}

/// Two norms of the same gradients, with a backward between them that overflows in one: whoever has another one of them would
/// clip it by a norm that is not finite.
#[test]
fn what_overflows_before_a_second_norm_skips_all_that_it_clips() -> Result<()> {
    for device in devices() {
        let mut run = Run::new(&device, DType::F32);
        let vars = run.parameters.vars();
        run.backward(0, false)?;
        run.scaler.clip_grad_norm(1e9).unwrap();
        let x = Tensor::new(numbers(7, vars[1].elem_count(), true), &device)?;
        let loss = (vars[1].as_tensor() * x)?.sum_all()?;
        run.scaler.scale(&loss).unwrap().backward().unwrap();
        run.scaler.clip_grad_norm(1e9).unwrap();
        let before = run.values();
        let mut sgd = Sgd::new(vec![vars[0].clone()], SgdConfig::default()).unwrap();
        assert!(run.scaler.step(&mut sgd).unwrap().skipped().unwrap(), "{device:?}");
        assert_eq!(run.values(), before);
    }
    Ok(())
}

/// What spoiled a norm, though its own gradient was dropped since and another came in its place.
#[test]
fn an_overflow_that_was_clipped_with_others_skips_them_without_its_gradient() -> Result<()> {
    for device in devices() {
        let mut run = Run::new(&device, DType::F32);
        let vars = run.parameters.vars();
        run.backward(0, true)?; // in variable 1
        run.scaler.clip_grad_norm(1.0).unwrap();
        run.scaler.zero_grad_of(&run.parameters.filter(|name| name == "w1"));
        let x = Tensor::new(numbers(7, vars[1].elem_count(), false), &device)?;
        let loss = (vars[1].as_tensor() * x)?.sum_all()?;
        run.scaler.scale(&loss).unwrap().backward().unwrap();
        let before = run.values();
        let mut sgd = Sgd::new(vars.clone(), SgdConfig::default()).unwrap();
        assert!(run.scaler.step(&mut sgd).unwrap().skipped().unwrap(), "{device:?}");
        assert_eq!(run.values(), before);
    }
    Ok(())
}
