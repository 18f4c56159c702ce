//! When buckets travel.

use std::sync::{Arc, Mutex};

use candle_amp::autograd::{Backward, Gradient, Operator, apply};
use candle_amp::dist::{
    Communicator, DataParallel, DataParallelConfig, Pending, ReduceOp, Sharded, Single,
};
use candle_amp::optim::{Masters, SgdConfig};
use candle_amp::{Cast, GradScaler, Op, Parameters, Result, ops};
use candle_core::{Tensor, Var};

use super::cpu;

type Log = Arc<Mutex<Vec<String>>>;

/// One rank that notes its all-reduces.
#[derive(Debug)]
struct Recording(Log);

impl Communicator for Recording {
    fn rank(&self) -> usize {
        0
    }
    fn size(&self) -> usize {
        1
    }
    fn start_all_reduce(&self, x: &Tensor, reduction: ReduceOp) -> Result<Pending> {
        self.0.lock().unwrap().push(format!("all_reduce of {}", x.elem_count()));
        Single.start_all_reduce(x, reduction)
    }
    fn start_reduce_scatter(&self, x: &Tensor, reduction: ReduceOp) -> Result<Pending> {
        Single.start_reduce_scatter(x, reduction)
    }
    fn start_all_gather(&self, x: &Tensor) -> Result<Pending> {
        Single.start_all_gather(x)
    }
    fn start_broadcast(&self, x: &Tensor, root: usize) -> Result<Pending> {
        Single.start_broadcast(x, root)
    }
    fn barrier(&self) -> Result<()> {
        Ok(())
    }
}

/// The identity, whose backward is noted.
struct Mark(Log, usize);

impl Operator for Mark {
    type Saved = ();

    fn op(&self) -> Op {
        Op::user("mark", Cast::Keep)
    }

    fn forward(&self, inputs: &[Tensor]) -> candle_core::Result<(Tensor, ())> {
        Ok((inputs[0].copy()?, ()))
    }

    fn backward(&self, ctx: &Backward<'_, ()>) -> candle_core::Result<Vec<Option<Gradient>>> {
        self.0.lock().unwrap().push(format!("backward of {}", self.1));
        Ok(vec![Some(Gradient::shared(ctx.gradient.clone()))])
    }
}

/// What happens in two backward passes through weights of 1, 2 and 3 elements, used in the order 2, 0, 1.
fn happens(bucket_bytes: usize) -> Result<Vec<Vec<String>>> {
    let log = Log::default();
    let vars: Vec<Var> =
        (1..=3).map(|count| Var::new(vec![2f32; count], &cpu())).collect::<Result<_, _>>()?;
    let named = vars.iter().enumerate().map(|(at, var)| (format!("w{at}"), var.clone()));
    let parameters = Parameters::named(named)?;
    let config = DataParallelConfig { first_bucket_bytes: 1, bucket_bytes, ..Default::default() };
    let parallel =
        DataParallel::with_config(Arc::new(Recording(log.clone())), &parameters, config)?;
    let mut scaler = GradScaler::disabled();
    parallel.attach(&mut scaler)?;
    let mut passes = Vec::new();
    for _ in 0..2 {
        let mut y = Tensor::new(1f32, &cpu())?;
        for at in [2, 0, 1] {
            y = ops::mul(&y, &ops::sum(&vars[at])?)?;
            y = apply(Mark(log.clone(), at), &[&y])?;
        }
        log.lock().unwrap().clear();
        scaler.scale(&y)?.backward()?;
        passes.push(log.lock().unwrap().clone());
        scaler.zero_grad();
    }
    Ok(passes)
}

/// Without a loss scale nothing is looked for, so that ranks have nothing to agree on.
#[test]
fn a_step_without_a_scale_sends_nothing_more() -> Result<()> {
    for (mut scaler, calls) in [(GradScaler::disabled(), 0), (GradScaler::default(), 1)] {
        let log = Log::default();
        let w = Var::new(&[1f32, 2.0], &cpu())?;
        let parameters = Parameters::named([("w", w.clone())])?;
        let parallel = DataParallel::new(Arc::new(Recording(log.clone())), &parameters)?;
        parallel.attach(&mut scaler)?;
        let mut sgd = Sharded::new(&parallel, &parameters, SgdConfig::default(), Masters::F32)?;
        scaler.scale(&ops::sum(&w)?)?.backward()?;
        log.lock().unwrap().clear();
        assert!(!scaler.step(&mut sgd)?.skipped()?);
        scaler.update()?;
        assert_eq!(*log.lock().unwrap(), vec!["all_reduce of 1"; calls]);
    }
    Ok(())
}

#[test]
fn a_bucket_travels_as_soon_as_it_is_full() -> Result<()> {
    // Of `n` parameters with `e` elements: e numbers, and 2 n flags.
    let passes = happens(1)?;
    // First in the reverse of the parameters' order: the bucket of w2 is the first, and its gradient the last.
    let first = [
        "backward of 1",
        "backward of 0",
        "backward of 2",
        "all_reduce of 5",
        "all_reduce of 4",
        "all_reduce of 3",
    ];
    assert_eq!(passes[0], first);
    // Then in the order in which gradients came: w1, w0, w2, each while backward goes on.
    let second = [
        "backward of 1",
        "all_reduce of 4",
        "backward of 0",
        "all_reduce of 3",
        "backward of 2",
        "all_reduce of 5",
    ];
    assert_eq!(passes[1], second);
    // w0 and w2 in one bucket.
    let second =
        ["backward of 1", "all_reduce of 4", "backward of 0", "backward of 2", "all_reduce of 8"];
    assert_eq!(happens(100)?[1], second);
    Ok(())
}
