//! Sharded masters and optimizer state.

use candle_amp::checkpoints::{Checkpoint, State, Stateful};
use candle_amp::dist::{DataParallelConfig, Sharded};
use candle_amp::optim::{
    AdamW, AdamWConfig, LambConfig, Masters, Sgd, SgdConfig, Step, UnscaledGradients,
};
use candle_amp::{Parameters, Result, ops};
use candle_core::{DType, Tensor, TensorId, Var};

use super::{attached, cpu, layers, loss, on_ranks, samples, small_buckets};
use crate::ranks::sharded::{compare, one_infinity_skips_everywhere, steps};
use crate::util::{assert_same, random};

#[test]
fn shards_are_plain_data_parallel_to_the_last_bit() -> Result<()> {
    for size in [1, 2, 3, 4] {
        on_ranks(size, |communicator| compare(&communicator))?;
    }
    Ok(())
}

#[test]
fn an_infinity_in_one_part_skips_the_step_of_all() -> Result<()> {
    for size in [1, 2, 3, 4] {
        on_ranks(size, |communicator| one_infinity_skips_everywhere(&communicator))?;
    }
    Ok(())
}

#[test]
fn a_rank_has_the_memory_that_the_formula_says() -> Result<()> {
    for (masters, dtype, bytes) in [
        (Masters::F32, DType::BF16, 12),
        (Masters::F32, DType::F16, 12),
        (Masters::Remainder, DType::BF16, 12),
        (Masters::F32, DType::F32, 12),
    ] {
        for size in [1, 2, 4] {
            let all = on_ranks(size, |communicator| {
                let w = Var::from_tensor(&random(1, (64, 32), dtype))?;
                let parameters = Parameters::named([("w", w.clone())])?;
                let (parallel, mut scaler) = attached(communicator, &parameters, small_buckets())?;
                let mut adamw =
                    Sharded::new(&parallel, &parameters, AdamWConfig::default(), masters)?;
                scaler.scale(&ops::mean(&w.to_dtype(DType::F32)?)?)?.backward()?;
                // What the scaler holds is a part too.
                assert_eq!(scaler.grad(&w)?.expect("one").elem_count(), 64 * 32 / size);
                let _ = scaler.step(&mut adamw)?;
                let saved: usize = adamw
                    .save()?
                    .tensors
                    .values()
                    .map(|x| x.elem_count() * x.dtype().size_in_bytes())
                    .sum();
                Ok((adamw.bytes(), saved))
            })?;
            for (held, saved) in all {
                assert_eq!(held, bytes * 64 * 32 / size, "{masters:?}, {dtype:?}, {size} ranks");
                // Of a part that is no master, the variable has the value.
                let itself = if masters == Masters::Remainder { 2 } else { 4 };
                let master = dtype != DType::F32 && masters == Masters::F32;
                let unsaved = if master { 0 } else { itself * 64 * 32 / size };
                assert_eq!(saved + unsaved, held, "{masters:?}, {dtype:?}, {size} ranks");
            }
        }
    }
    Ok(())
}

#[test]
fn a_checkpoint_loads_on_another_number_of_ranks() -> Result<()> {
    let config = AdamWConfig { lr: 1e-2, ..Default::default() };
    for (dtype, masters) in [
        (DType::BF16, Masters::F32),
        (DType::BF16, Masters::Remainder),
        (DType::F16, Masters::F32),
        (DType::F32, Masters::F32),
    ] {
        let folder = std::env::temp_dir()
            .join(format!("shards-{}-{dtype:?}-{masters:?}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let file = |rank: usize| folder.join(format!("{rank}.safetensors"));
        // Three ranks save; the same training without shards is what to compare with.
        let whole = on_ranks(3, |communicator| {
            let place = [communicator.rank(), 3];
            let (vars, parameters) = layers(dtype, 0)?;
            let (parallel, mut scaler) =
                attached(communicator.clone(), &parameters, small_buckets())?;
            let mut sharded = Sharded::new(&parallel, &parameters, config, masters)?;
            steps(&mut scaler, &mut sharded, &vars, place, 0)?;
            Checkpoint::new(1)
                .with("model", &parameters)?
                .with("optimizer", &sharded)?
                .save(file(place[0]))?;

            let (vars, parameters) = layers(dtype, 0)?;
            let (_, mut scaler) = attached(communicator, &parameters, small_buckets())?;
            let mut plain = AdamW::new(&parameters, config)?.with_masters(masters)?;
            steps(&mut scaler, &mut plain, &vars, place, 0)?;
            plain.save()
        })?;
        let shards: Vec<State> = (0..3)
            .map(|rank| {
                let mut shard = State::default();
                Checkpoint::open(file(rank))?.load(&mut [("optimizer", &mut shard)])?;
                Ok(shard)
            })
            .collect::<Result<_>>()?;
        for size in [1, 2, 4] {
            let all = on_ranks(size, |communicator| {
                let place = [communicator.rank(), size];
                let go_on = |sharded: bool| -> Result<(State, Vec<Tensor>)> {
                    let (vars, mut parameters) = layers(dtype, 9)?;
                    let (parallel, mut scaler) =
                        attached(communicator.clone(), &parameters, small_buckets())?;
                    if sharded {
                        let mut optimizer = Sharded::new(&parallel, &parameters, config, masters)?;
                        Checkpoint::open(file(0))?.load(&mut [("model", &mut parameters)])?;
                        let mut shuffled = shards.clone();
                        shuffled.rotate_left(1);
                        optimizer.load_shards(&shuffled)?;
                        let loaded = optimizer.save()?;
                        steps(&mut scaler, &mut optimizer, &vars, place, 20)?;
                        return Ok((
                            loaded,
                            vars.iter().map(|var| var.copy()).collect::<Result<_, _>>()?,
                        ));
                    }
                    let mut optimizer = AdamW::new(&parameters, config)?.with_masters(masters)?;
                    Checkpoint::open(file(0))?.load(&mut [("model", &mut parameters)])?;
                    optimizer.load(&whole[0])?;
                    steps(&mut scaler, &mut optimizer, &vars, place, 20)?;
                    Ok((
                        State::default(),
                        vars.iter().map(|var| var.copy()).collect::<Result<_, _>>()?,
                    ))
                };
                let ((loaded, sharded), (_, plain)) = (go_on(true)?, go_on(false)?);
                for (own, expected) in sharded.iter().zip(&plain) {
                    assert_same("the path after loading", own, expected);
                }
                Ok(loaded)
            })?;
            // Joined, the shards of any number of ranks are the state of the optimizer that has all.
            for (name, expected) in &whole[0].tensors {
                let parts: Vec<&Tensor> = all.iter().map(|state| &state.tensors[name]).collect();
                let joined = Tensor::cat(&parts, 0)?.narrow(0, 0, expected.elem_count())?;
                assert_same(name, &joined, &expected.flatten_all()?);
            }
        }
        // Not all of them, or not of this model.
        let (_, parameters) = layers(dtype, 0)?;
        let single = std::sync::Arc::new(candle_amp::dist::Single);
        let (parallel, _) = attached(single, &parameters, small_buckets())?;
        let mut sharded = Sharded::new(&parallel, &parameters, config, masters)?;
        let twice = [shards[0].clone(), shards[0].clone(), shards[1].clone()];
        for (given, expected) in [
            (&shards[..2], "3 ranks have saved, and 2 shards are given"),
            (&twice[..], "rank 0 is given twice"),
            (&[][..], "none is given"),
        ] {
            let error = sharded.load_shards(given).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        let error = sharded.check(&shards[1]).unwrap_err().to_string();
        assert!(error.contains("`load_shards` takes those of other ranks"), "{error}");
        std::fs::remove_dir_all(&folder).expect("the folder");
    }
    Ok(())
}

#[test]
fn a_parameter_that_no_rank_used_is_left_alone() -> Result<()> {
    on_ranks(2, |communicator| {
        let (a, b) = (Var::new(&[1f32, 2.0, 3.0], &cpu())?, Var::new(&[1f32, 2.0], &cpu())?);
        let parameters = Parameters::named([("a", a.clone()), ("b", b.clone())])?;
        let config = DataParallelConfig { allow_unused: true, ..small_buckets() };
        let (parallel, mut scaler) = attached(communicator, &parameters, config)?;
        let config = AdamWConfig { lr: 0.1, weight_decay: 0.5, ..Default::default() };
        let mut adamw = Sharded::new(&parallel, &parameters, config, Masters::F32)?;
        scaler.scale(&ops::sum(&a)?)?.backward()?;
        assert_eq!(scaler.missing(&parameters), ["b"]);
        let _ = scaler.step(&mut adamw)?;
        scaler.update()?;
        assert_eq!(b.to_vec1::<f32>()?, [1.0, 2.0]);
        assert_ne!(a.to_vec1::<f32>()?, [1.0, 2.0, 3.0]);
        Ok(())
    })?;
    Ok(())
}

/// The parts of a tensor of one element look like wholes.
#[test]
fn an_optimizer_of_whole_variables_is_refused_beside_shards() -> Result<()> {
    on_ranks(2, |communicator| {
        let (a, b) = (Var::new(&[1f32, 2.0, 3.0], &cpu())?, Var::new(&[1f32], &cpu())?);
        let named = |name: &str, var: &Var| Parameters::named([(name, var.clone())]);
        let parameters = Parameters::named([("a", a.clone()), ("b", b.clone())])?;
        let (parallel, mut scaler) = attached(communicator, &parameters, small_buckets())?;
        let config = SgdConfig::default();
        let mut parts = Sharded::new(&parallel, &named("a", &a)?, config, Masters::F32)?;
        let mut whole = Sgd::new(&named("b", &b)?, config)?;
        scaler.scale(&ops::sum(&ops::mul(&a, &b)?)?)?.backward()?;
        let error = scaler.step(&mut whole).unwrap_err().to_string();
        assert!(error.contains("give all variables to `Sharded`"), "{error}");
        assert_eq!(b.to_vec1::<f32>()?, [1.0]);
        assert!(!scaler.step(&mut parts)?.skipped()?);
        Ok(())
    })?;
    Ok(())
}

/// Hands shards on, and says to whom or does not.
struct Wrapper<'a>(&'a mut Sharded<SgdConfig>, bool);

impl Step for Wrapper<'_> {
    fn variables(&self) -> Option<Vec<TensorId>> {
        self.0.variables()
    }
    fn inner(&self) -> Option<&dyn Step> {
        if self.1 { Some(&*self.0) } else { None }
    }
    fn apply(&mut self, gradients: &UnscaledGradients<'_>) -> candle_core::Result<()> {
        self.0.apply(gradients)
    }
}

#[test]
fn a_wrapper_takes_shards_if_it_names_the_optimizer_within() -> Result<()> {
    on_ranks(2, |communicator| {
        let w = Var::new(&[1f32, 2.0, 3.0], &cpu())?;
        let parameters = Parameters::named([("w", w.clone())])?;
        let (parallel, mut scaler) = attached(communicator, &parameters, small_buckets())?;
        let config = SgdConfig { lr: 0.5, ..Default::default() };
        let mut sgd = Sharded::new(&parallel, &parameters, config, Masters::F32)?;
        scaler.scale(&ops::sum(&ops::mul(&w, &w)?)?)?.backward()?;
        let error = scaler.step(&mut Wrapper(&mut sgd, false)).unwrap_err().to_string();
        assert!(error.contains("give all variables to `Sharded`"), "{error}");
        assert_eq!(w.to_vec1::<f32>()?, [1.0, 2.0, 3.0]);
        assert!(!scaler.step(&mut Wrapper(&mut sgd, true))?.skipped()?);
        assert_eq!(w.to_vec1::<f32>()?, [0.0; 3]);
        Ok(())
    })?;
    Ok(())
}

#[test]
fn micro_batches_accumulate_into_shards() -> Result<()> {
    let run = |sharded: bool| {
        on_ranks(2, move |communicator| {
            let rank = communicator.rank();
            let (vars, parameters) = layers(DType::F32, 0)?;
            let (parallel, mut scaler) = attached(communicator, &parameters, small_buckets())?;
            let config = SgdConfig { lr: 0.5, ..Default::default() };
            let parts = || Sharded::new(&parallel, &parameters, config, Masters::F32);
            let mut parts = if sharded { Some(parts()?) } else { None };
            let mut whole = Sgd::new(&parameters, config)?;
            for step in 0..2 {
                let loss = |micro: usize| loss(&vars, &samples(10 * step + micro, DType::F32));
                parallel.no_sync(|| scaler.scale(&loss(2 + rank)?)?.backward())?;
                scaler.scale(&loss(4 + rank)?)?.backward()?;
                match &mut parts {
                    Some(parts) => scaler.step(parts)?,
                    None => scaler.step(&mut whole)?,
                };
                scaler.update()?;
            }
            Ok(vars.iter().map(|var| var.copy()).collect::<Result<Vec<_>, _>>()?)
        })
    };
    for (parts, whole) in run(true)?.concat().iter().zip(&run(false)?.concat()) {
        assert_same("accumulated", parts, whole);
    }
    Ok(())
}

#[test]
fn what_cannot_be_sharded_is_refused() -> Result<()> {
    let (vars, parameters) = layers(DType::F32, 0)?;
    let single = std::sync::Arc::new(candle_amp::dist::Single);
    let (parallel, mut scaler) = attached(single, &parameters, small_buckets())?;
    let other = Var::new(&[1f32], &cpu())?;
    let error =
        Sharded::new(&parallel, vec![other], SgdConfig::default(), Masters::F32).unwrap_err();
    assert!(error.to_string().contains("not among the parameters"), "{error}");
    let error =
        Sharded::new(&parallel, &parameters, LambConfig::default(), Masters::F32).unwrap_err();
    assert!(error.to_string().contains("`lamb` takes norms"), "{error}");
    scaler.scale(&loss(&vars, &samples(0, DType::F32))?)?.backward()?;
    let error =
        Sharded::new(&parallel, &parameters, SgdConfig::default(), Masters::F32).unwrap_err();
    assert!(error.to_string().contains("before the first backward"), "{error}");
    Ok(())
}
