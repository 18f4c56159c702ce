//! Masters and state in parts, which train as whole ones do.

use std::sync::Arc;

use candle_amp::dist::{Communicator, DataParallelConfig, Sharded};
use candle_amp::optim::{AdamWConfig, Config, LionConfig, Masters, Optim, SgdConfig, Step};
use candle_amp::{GradScaler, Parameters, Result, ops};
use candle_core::{DType, Tensor, Var};

use super::{assert_same_everywhere, attached, cpu, layers, loss, samples, small_buckets};
use crate::util::{assert_same, random, to_vec};

const STEPS: usize = 6;

/// Some steps, clipped, of which one overflows on the last rank alone; which were skipped.
pub(crate) fn steps<S: Step>(
    scaler: &mut GradScaler,
    optimizer: &mut S,
    vars: &[Var],
    [rank, size]: [usize; 2],
    from: usize,
) -> Result<Vec<(bool, f32)>> {
    let mut outcomes = Vec::new();
    for step in from..from + STEPS {
        let x = samples(10 * step + rank, vars[0].dtype());
        let factor = if step == 2 && rank + 1 == size { f32::INFINITY } else { 1.0 };
        let loss = ops::mul(&loss(vars, &x)?, &Tensor::new(factor, &cpu())?)?;
        scaler.scale(&loss)?.backward()?;
        let norm = scaler.clip_grad_norm(0.01)?.to_scalar::<f32>()?;
        outcomes.push((scaler.step(optimizer)?.skipped()?, norm));
        scaler.update()?;
    }
    Ok(outcomes)
}

/// What a rank ends with: weights, outcomes, scale.
type End = (Vec<Tensor>, Vec<(bool, f32)>, f32);

fn train<C: Config>(
    communicator: &Arc<dyn Communicator>,
    dtype: DType,
    config: C,
    masters: Masters,
    wire_dtype: DType,
    sharded: bool,
) -> Result<End> {
    let place = [communicator.rank(), communicator.size()];
    let (vars, parameters) = layers(dtype, place[0])?;
    let buckets = DataParallelConfig { wire_dtype, ..small_buckets() };
    let (parallel, mut scaler) = attached(communicator.clone(), &parameters, buckets)?;
    let outcomes = if sharded {
        let mut optimizer = Sharded::new(&parallel, &parameters, config, masters)?;
        steps(&mut scaler, &mut optimizer, &vars, place, 0)?
    } else {
        let mut optimizer = Optim::new(&parameters, config)?.with_masters(masters)?;
        steps(&mut scaler, &mut optimizer, &vars, place, 0)?
    };
    let weights = vars.iter().map(|var| var.copy()).collect::<Result<_, _>>()?;
    Ok((weights, outcomes, scaler.current_scale()))
}

fn compare_one<C: Config>(
    communicator: &Arc<dyn Communicator>,
    dtype: DType,
    config: C,
    masters: Masters,
    wire: DType,
) -> Result<()> {
    let (expected, plain_outcomes, plain_scale) =
        train(communicator, dtype, config, masters, wire, false)?;
    let (weights, outcomes, scale) = train(communicator, dtype, config, masters, wire, true)?;
    let size = communicator.size();
    let what = format!("{config:?}, {dtype:?}, {masters:?}, {wire:?} on the wire, {size} ranks");
    assert_eq!((scale, scale), (plain_scale, 32768.0), "{what}");
    for (step, (own, other)) in outcomes.iter().zip(&plain_outcomes).enumerate() {
        assert_eq!(own.0, step == 2, "{what}");
        assert!(own == other || step == 2 && own.0 == other.0, "{what}: {own:?} {other:?}");
    }
    for (weight, expected) in weights.iter().zip(&expected) {
        assert_same(&what, weight, expected);
        assert_same_everywhere(&what, &**communicator, weight)?;
    }
    let start = layers(dtype, 0)?.0;
    assert_ne!(to_vec(&expected[0]), to_vec(&start[0]), "nothing was trained");
    Ok(())
}

/// Compares every optimizer in parts with the whole one.
pub(crate) fn compare(communicator: &Arc<dyn Communicator>) -> Result<()> {
    let adamw = AdamWConfig { lr: 1e-2, weight_decay: 0.1, ..Default::default() };
    let sgd = SgdConfig { lr: 0.5, momentum: 0.9, ..Default::default() };
    let lion = LionConfig { lr: 1e-3, ..Default::default() };
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        compare_one(communicator, dtype, adamw, Masters::F32, DType::F32)?;
        compare_one(communicator, dtype, sgd, Masters::F32, DType::F32)?;
        compare_one(communicator, dtype, lion, Masters::F32, DType::F32)?;
    }
    compare_one(communicator, DType::F32, sgd, Masters::F32, DType::BF16)?;
    compare_one(communicator, DType::BF16, adamw, Masters::Remainder, DType::F32)
}

/// An infinity that only the last rank sees, and only in the part of the last rank: all skip that step.
pub(crate) fn one_infinity_skips_everywhere(communicator: &Arc<dyn Communicator>) -> Result<()> {
    let (rank, size) = (communicator.rank(), communicator.size());
    let start = random(1, 2 * size, DType::F32);
    let w = Var::from_tensor(&start)?;
    let parameters = Parameters::named([("w", w.clone())])?;
    let (parallel, mut scaler) = attached(communicator.clone(), &parameters, small_buckets())?;
    let mut sgd = Sharded::new(&parallel, &parameters, SgdConfig::default(), Masters::F32)?;
    for overflows in [true, false] {
        let mut factors = vec![1f32; 2 * size];
        if overflows && rank + 1 == size {
            factors[2 * size - 1] = f32::INFINITY;
        }
        let product = ops::mul(&w, &Tensor::new(factors, &cpu())?)?;
        scaler.scale(&ops::sum(&product)?)?.backward()?;
        let what = format!("rank {rank} of {size}, an infinity: {overflows}");
        assert_eq!(scaler.step(&mut sgd)?.skipped()?, overflows, "{what}");
        scaler.update()?;
        assert_eq!(to_vec(&w) == to_vec(&start), overflows, "{what}");
    }
    Ok(())
}
