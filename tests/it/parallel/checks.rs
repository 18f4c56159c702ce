//! What ranks must have in common.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_amp::dist::{Communicator, DataParallelConfig, Pending, ReduceOp, Sharded};
use candle_amp::optim::{Masters, Sgd, SgdConfig, Step};
use candle_amp::{MasterWeights, Parameters, Result, ops, random as generator};
use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};
use candle_nn::Optimizer;

use super::{attached, cpu, layers, loss, on_ranks, samples, small_buckets};
use crate::util::{assert_same, random};

#[test]
fn all_ranks_start_with_the_weights_of_rank_0() -> Result<()> {
    let (expected, _) = layers(DType::BF16, 0)?;
    let all = on_ranks(3, |communicator| {
        let (vars, parameters) = layers(DType::BF16, communicator.rank())?;
        attached(communicator, &parameters, small_buckets())?;
        Ok(vars)
    })?;
    for vars in all {
        for (var, expected) in vars.iter().zip(&expected) {
            assert_same("a weight", var, expected);
        }
    }
    Ok(())
}

/// The message of rank 0 of 3, where rank 2's model or settings differ.
fn message(
    differ: impl Fn(bool) -> Result<(Parameters, DataParallelConfig)> + Sync,
) -> Result<Vec<String>> {
    on_ranks(3, |communicator| {
        let (parameters, config) = differ(communicator.rank() == 2)?;
        let error = attached(communicator, &parameters, config).err();
        Ok(error.map(|error| error.to_string()).unwrap_or_default())
    })
}

#[test]
fn another_model_or_other_settings_are_an_error_on_all_ranks() -> Result<()> {
    let named = |name: &str, rows: usize, dtype: DType| {
        Parameters::named([(name, Var::zeros((rows, 2), dtype, &cpu())?)])
    };
    let base = DataParallelConfig::default;
    for (messages, expected) in [
        (
            message(|other| Ok((named(if other { "b" } else { "a" }, 3, DType::F32)?, base())))?,
            "parameter `a`: missing, on rank 0 F32 [3, 2]",
        ),
        (
            message(|other| Ok((named("a", if other { 4 } else { 3 }, DType::F32)?, base())))?,
            "parameter `a`: F32 [4, 2], on rank 0 F32 [3, 2]",
        ),
        (
            message(|other| {
                Ok((named("a", 3, if other { DType::F16 } else { DType::F32 })?, base()))
            })?,
            "F16 [3, 2]",
        ),
        (
            message(|other| {
                let bucket_bytes = if other { 7 } else { 8 };
                Ok((named("a", 3, DType::F32)?, DataParallelConfig { bucket_bytes, ..base() }))
            })?,
            "bucket_bytes: 7",
        ),
    ] {
        for message in messages {
            assert!(
                message.contains("the model of rank 2 differs from that of rank 0"),
                "{message}"
            );
            assert!(message.contains(expected), "{message}");
        }
    }
    Ok(())
}

#[test]
fn a_rank_whose_state_went_apart_is_named() -> Result<()> {
    let run = |what: &'static str| {
        on_ranks(3, move |communicator| {
            let rank = communicator.rank();
            generator::fork_rng(|| {
                generator::manual_seed(5);
                let (vars, parameters) = layers(DType::F32, rank)?;
                let config = DataParallelConfig { check_every: 2, ..small_buckets() };
                let (_, mut scaler) = attached(communicator, &parameters, config)?;
                let mut messages = Vec::new();
                for step in 0..3 {
                    if step == 1 && rank == 1 {
                        match what {
                            "weights" => vars[2].set(&(vars[2].as_tensor() * 1.000001)?)?,
                            "scale" => scaler
                                .load_state(Some(scaler.state().expect("enabled").after(true)))?,
                            "seed" => generator::manual_seed(99),
                            _ => {}
                        }
                    }
                    let loss = loss(&vars, &samples(rank, DType::F32))?;
                    messages
                        .push(scaler.scale(&loss)?.backward().err().map(|error| error.to_string()));
                    scaler.zero_grad();
                }
                Ok(messages)
            })
        })
    };
    for messages in run("nothing")? {
        assert_eq!(messages, [None, None, None]);
    }
    for (what, expected) in [
        ("weights", "fingerprint of `layer2`: "),
        ("scale", "scale: 32768, on rank 0 65536"),
        ("seed", "seed of the generator: 99, on rank 0 5"),
    ] {
        for messages in run(what)? {
            assert_eq!(messages[..2], [None, None], "{what}");
            let message = messages[2].clone().unwrap_or_default();
            assert!(message.contains("the state of rank 1 differs"), "{message}");
            assert!(message.contains(expected), "{message}");
        }
    }
    Ok(())
}

#[test]
fn an_optimizer_that_went_apart_is_named() -> Result<()> {
    let run = |what: &'static str, sharded: bool| {
        on_ranks(2, move |communicator| {
            let rank = communicator.rank();
            let (vars, parameters) = layers(DType::F32, 0)?;
            let config = DataParallelConfig { check_every: 2, ..small_buckets() };
            let (parallel, mut scaler) = attached(communicator, &parameters, config)?;
            let mut whole = Sgd::new(&parameters, SgdConfig { lr: 0.0, ..Default::default() })?;
            let mut parts = match sharded {
                true => Some(Sharded::new(
                    &parallel,
                    &parameters,
                    SgdConfig { lr: 0.0, ..Default::default() },
                    Masters::F32,
                )?),
                false => None,
            };
            let mut messages = Vec::new();
            for pass in 0..3 {
                if pass == 1 && rank == 1 {
                    match (what, &mut parts) {
                        ("rate", Some(parts)) => parts.set_learning_rate(1e-30),
                        ("rate", None) => whole.set_learning_rate(1e-30),
                        ("steps", None) => {
                            let fresh = Sgd::new(&parameters, SgdConfig::default())?;
                            whole.load_state(&fresh.state()?)?;
                            whole.set_learning_rate(0.0);
                        }
                        _ => {}
                    }
                }
                let loss = loss(&vars, &samples(rank, DType::F32))?;
                scaler.scale(&loss)?.backward()?;
                let stepped = match &mut parts {
                    Some(parts) => scaler.step(parts),
                    None => scaler.step(&mut whole),
                };
                messages.push(stepped.err().map(|error| error.to_string()));
                scaler.zero_grad();
            }
            Ok(messages)
        })
    };
    for sharded in [false, true] {
        for messages in run("nothing", sharded)? {
            assert_eq!(messages, [None, None, None]);
        }
    }
    for (what, sharded, expected) in [
        ("rate", false, "settings of the optimizer's group 0: SgdConfig { lr: 1e-30, "),
        ("rate", true, "settings of the optimizer's group 0: SgdConfig { lr: 1e-30, "),
        ("steps", false, "steps of `layer0`: 1, on rank 0 2"),
    ] {
        for messages in run(what, sharded)? {
            assert_eq!(messages[..2], [None, None], "{what}");
            let message = messages[2].clone().unwrap_or_default();
            assert!(message.contains("the optimizer of rank 1 differs"), "{message}");
            assert!(message.contains(expected), "{message}");
        }
    }
    Ok(())
}

/// The messages of two ranks whose learning rates differ from the second step on. Each step has two backward passes.
fn of_rates<S: Step>(
    make: impl Fn(&Parameters) -> Result<S> + Sync,
    set: impl Fn(&mut S, f64) + Sync,
) -> Result<()> {
    let all = on_ranks(2, |communicator| {
        let rank = communicator.rank();
        let (vars, parameters) = layers(DType::F32, 0)?;
        let config = DataParallelConfig { check_every: 4, ..small_buckets() };
        let (_, mut scaler) = attached(communicator, &parameters, config)?;
        let mut optimizer = make(&parameters)?;
        let mut messages = Vec::new();
        for step in 0..3 {
            if step == 1 && rank == 1 {
                set(&mut optimizer, 1e-30);
            }
            for _ in 0..2 {
                scaler.scale(&loss(&vars, &samples(rank, DType::F32))?)?.backward()?;
            }
            messages.push(scaler.step(&mut optimizer).err().map(|error| error.to_string()));
            scaler.zero_grad();
        }
        Ok(messages)
    })?;
    for messages in all {
        assert_eq!(messages[..2], [None, None]);
        let message = messages[2].clone().unwrap_or_default();
        assert!(message.contains("the optimizer of rank 1 differs"), "{message}");
        assert!(message.contains("1e-30") || message.contains("0.0000000000"), "{message}");
    }
    Ok(())
}

#[test]
fn learning_rates_are_compared_whoever_steps() -> Result<()> {
    let config = SgdConfig { lr: 0.0, ..Default::default() };
    of_rates(|parameters| Sgd::new(parameters, config), Sgd::set_learning_rate)?;
    let candles = |parameters: &Parameters| Ok(candle_nn::SGD::new(parameters.vars(), 0.0)?);
    of_rates(candles, candle_nn::SGD::set_learning_rate)?;
    let masters =
        |parameters: &Parameters| Ok(MasterWeights::<candle_nn::SGD>::new(parameters.vars(), 0.0)?);
    of_rates(masters, MasterWeights::set_learning_rate)
}

/// Masters are copies: those from before the ranks had one model are not put back in its place.
#[test]
fn masters_from_before_are_an_error() -> Result<()> {
    let all = on_ranks(2, |communicator| {
        let rank = communicator.rank();
        let (vars, parameters) = layers(DType::BF16, rank)?;
        let mut sgd = MasterWeights::<candle_nn::SGD>::new(vars.clone(), 0.5)?;
        let (_, mut scaler) = attached(communicator, &parameters, small_buckets())?;
        scaler.scale(&loss(&vars, &samples(rank, DType::BF16))?)?.backward()?;
        if rank > 0 {
            let error = sgd.step(&GradStore::default()).unwrap_err().to_string();
            assert!(error.contains("written after its master"), "{error}");
            assert_same("untouched", &vars[0], &layers(DType::BF16, 0)?.0[0]);
            sgd.reload_masters()?;
        }
        assert!(!scaler.step(&mut sgd)?.skipped()?);
        Ok(vars)
    })?;
    for (own, first) in all[1].iter().zip(&all[0]) {
        assert_same("the same step", own, first);
    }
    Ok(())
}

#[test]
fn what_is_frozen_does_not_travel() -> Result<()> {
    let messages = on_ranks(2, |communicator| {
        let rank = communicator.rank();
        let var = |seed: usize| Var::from_tensor(&random_tensor((seed + rank) as u64, 3));
        let (a, b) = (var(1)?, var(5)?);
        let parameters = Parameters::named([("a", a.clone()), ("b", b.clone())])?;
        let frozen = Parameters::named([("b", b.clone())])?;
        frozen.freeze();
        // A gradient of `b` on the wire would be one too many, and none is asked for.
        let (parallel, mut scaler) = attached(communicator, &parameters, small_buckets())?;
        let mut sharded = Sharded::new(&parallel, &parameters, SgdConfig::default(), Masters::F32)?;
        assert_same("rank 0's", &b, &random_tensor(5, 3));
        scaler.scale(&ops::sum(&ops::mul(&a, &b)?)?)?.backward()?;
        assert!(!scaler.step(&mut sharded)?.skipped()?);
        scaler.update()?;
        assert_same("frozen", &b, &random_tensor(5, 3));
        frozen.unfreeze();
        let error = scaler.scale(&ops::sum(&ops::mul(&a, &b)?)?)?.backward().unwrap_err();
        Ok(error.to_string())
    })?;
    assert!(messages[0].contains("was frozen when that was made"), "{}", messages[0]);
    let differ = message(|other| {
        let a = Parameters::named([("a", Var::zeros(3, DType::F32, &cpu())?)])?;
        if other {
            a.freeze();
        }
        Ok((a, DataParallelConfig::default()))
    })?;
    assert!(
        differ[0].contains("parameter `a`: F32 [3], frozen, on rank 0 F32 [3]"),
        "{}",
        differ[0]
    );
    Ok(())
}

fn random_tensor(seed: u64, len: usize) -> Tensor {
    random(seed, len, DType::F32)
}

/// A pass that fails on one rank leaves it a bucket behind the others, whose next bucket has the same length.
#[test]
fn a_pass_that_fails_on_one_rank_does_not_mix_buckets() -> Result<()> {
    let messages = on_ranks(2, |communicator| {
        let rank = communicator.rank();
        let vars: Vec<Var> =
            (0..3).map(|at| Var::from_tensor(&random_tensor(at, 2))).collect::<Result<_, _>>()?;
        let named = vars.iter().enumerate().map(|(at, var)| (format!("w{at}"), var.clone()));
        let parameters = Parameters::named(named)?;
        let config = DataParallelConfig { bucket_bytes: 1, ..small_buckets() };
        let config = DataParallelConfig { first_bucket_bytes: 1, ..config };
        let (_, mut scaler) = attached(communicator, &parameters, config)?;
        let unknown = Var::from_tensor(&random_tensor(9, 2))?;
        let mut pass = |fails: bool| -> Result<()> {
            // The gradients come last to first, that of the unknown variable after the first one.
            let mut y = ops::mul(&vars[0], &vars[1])?;
            if fails {
                y = ops::mul(&y, &unknown)?;
            }
            y = ops::mul(&y, &vars[2])?;
            scaler.scale(&ops::sum(&y)?)?.backward()?;
            scaler.zero_grad();
            Ok(())
        };
        pass(false)?; // after which buckets keep their order
        let first = pass(rank == 1);
        let second = pass(false);
        Ok([first, second].map(|pass| pass.err().map(|error| error.to_string())))
    })?;
    let text = |rank: usize, pass: usize| messages[rank][pass].clone().unwrap_or_default();
    assert!(text(1, 0).contains("not among the parameters"), "{messages:?}");
    // One of the two is in its first pass still.
    assert!(text(0, 0).contains("the peers' call differs"), "{messages:?}");
    assert!(text(1, 1).contains("the peers' call differs"), "{messages:?}");
    Ok(())
}

#[test]
fn a_variable_that_is_no_parameter_is_an_error() -> Result<()> {
    let messages = on_ranks(2, |communicator| {
        let (a, b) = (Var::new(&[1f32], &cpu())?, Var::new(&[1f32], &cpu())?);
        let parameters = Parameters::named([("a", a.clone())])?;
        let (_, mut scaler) = attached(communicator, &parameters, small_buckets())?;
        let error = scaler.scale(&ops::sum(&ops::mul(&a, &b)?)?)?.backward().unwrap_err();
        // The next pass begins anew.
        let again = ops::sum(&ops::mul(&a, &Tensor::new(&[4f32], &cpu())?)?)?;
        scaler.scale(&again)?.backward()?;
        assert_eq!(scaler.grad(&a)?.expect("one").to_vec1::<f32>()?, [4.0]);
        Ok(error.to_string())
    })?;
    assert!(messages[0].contains("not among the parameters"), "{}", messages[0]);
    Ok(())
}

#[test]
fn buffers_are_broadcast_too() -> Result<()> {
    use candle_amp::nn;
    on_ranks(2, |communicator| {
        let varmap = nn::VarMap::new();
        let norm = nn::batch_norm(2, 1e-5, nn::var_builder(&varmap, DType::F32, &cpu()))?;
        let parameters = Parameters::from_varmap(&varmap);
        let (parallel, _) = attached(communicator.clone(), &parameters, small_buckets())?;
        norm.forward_train(&Tensor::new(
            &[[communicator.rank() as f32, 1.0], [2.0, 3.0]],
            &cpu(),
        )?)?;
        parallel.broadcast_buffers()?;
        assert_eq!(norm.running_mean().to_vec1::<f32>()?, [0.1, 0.2]);
        Ok(())
    })?;
    Ok(())
}

/// Ranks draw from other places of one sequence, or more often, and round their weights alike.
#[test]
fn ranks_round_alike_wherever_they_draw() -> Result<()> {
    use candle_amp::optim::{AdamW, AdamWConfig};
    for (dtype, masters, state) in
        [(DType::BF16, Masters::Stochastic, DType::F32), (DType::F32, Masters::F32, DType::BF16)]
    {
        let all = on_ranks(3, |communicator| {
            let _fork = generator::fork_rng_guard();
            generator::manual_seed(5);
            let rank = communicator.rank();
            let (vars, parameters) = layers(dtype, 0)?;
            let (parallel, mut scaler) = attached(communicator, &parameters, small_buckets())?;
            let mut place = generator::state();
            place.draws += (rank as u64) << 40;
            generator::set_state(place);
            let config = AdamWConfig { lr: 0.01, ..Default::default() };
            let adamw = AdamW::new(&parameters, config)?.with_masters(masters)?;
            let mut adamw = adamw.with_state_dtype(state)?;
            for step in 0..4 {
                if rank == 1 {
                    ops::dropout(&samples(0, DType::F32), 0.5)?;
                }
                scaler.scale(&loss(&vars, &samples(3 * step + rank, dtype))?)?.backward()?;
                assert!(!scaler.step(&mut adamw)?.skipped()?);
                scaler.update()?;
            }
            drop(parallel);
            Ok((vars, adamw.state()?.tensors))
        })?;
        for (vars, states) in &all[1..] {
            for (a, b) in vars.iter().zip(&all[0].0) {
                assert_same("a weight", a, b);
            }
            for (name, state) in states {
                assert_same(name, state, &all[0].1[name]);
            }
        }
    }
    Ok(())
}

/// A rank whose wait for a sum fails, once.
#[derive(Debug)]
struct Failing(Arc<dyn Communicator>, Arc<AtomicBool>);

impl Communicator for Failing {
    fn rank(&self) -> usize {
        self.0.rank()
    }
    fn size(&self) -> usize {
        self.0.size()
    }
    fn start_all_reduce(&self, x: &Tensor, reduction: ReduceOp) -> Result<Pending> {
        let (pending, fails) = (self.0.start_all_reduce(x, reduction)?, self.1.clone());
        Ok(Pending::new(move || match (pending.wait(), fails.swap(false, Ordering::Relaxed)) {
            (Ok(_), true) => Err(candle_core::Error::Msg("no memory".to_owned()).into()),
            (sum, _) => sum,
        }))
    }
    fn start_reduce_scatter(&self, x: &Tensor, reduction: ReduceOp) -> Result<Pending> {
        self.0.start_reduce_scatter(x, reduction)
    }
    fn start_all_gather(&self, x: &Tensor) -> Result<Pending> {
        self.0.start_all_gather(x)
    }
    fn start_broadcast(&self, x: &Tensor, root: usize) -> Result<Pending> {
        self.0.start_broadcast(x, root)
    }
    fn barrier(&self) -> Result<()> {
        self.0.barrier()
    }
}

/// The others have the gradients of that pass and step. Had it gone on, it would have averaged what its old weights give.
#[test]
fn a_rank_that_lacks_the_gradients_of_a_pass_does_not_go_on() -> Result<()> {
    let all = on_ranks(2, |communicator| {
        let (vars, parameters) = layers(DType::F32, 0)?;
        let (rank, fails) = (communicator.rank(), Arc::new(AtomicBool::new(false)));
        let communicator = Arc::new(Failing(communicator, fails.clone()));
        let (_parallel, mut scaler) = attached(communicator, &parameters, small_buckets())?;
        let mut sgd = Sgd::new(&parameters, SgdConfig { lr: 0.1, ..Default::default() })?;
        let mut results = Vec::new();
        for step in 0..3 {
            fails.store(rank == 1 && step == 1, Ordering::Relaxed);
            let passed =
                scaler.scale(&loss(&vars, &samples(2 * step + rank, DType::F32))?)?.backward();
            results.push(passed.is_ok());
            match passed {
                Ok(()) if step == 0 => drop(scaler.step(&mut sgd)?),
                _ => {}
            }
            scaler.zero_grad();
        }
        Ok(results)
    })?;
    assert_eq!(all, [[true, true, false], [true, false, false]]);
    Ok(())
}
