//! One model, many threads: each in scopes and with a scaler of its own.

use candle_amp::{Autocast, GradScaler, Result, no_grad, ops};
use candle_core::{DType, Tensor, Var};

use crate::util::{assert_same, random};

/// The gradients of the two weights, forward in the scope that is active.
fn gradients(weights: &[Var; 2], x: &Tensor) -> Result<Vec<Tensor>> {
    let h = ops::relu(&ops::matmul(x, &weights[0])?)?;
    let loss = ops::mean(&ops::matmul(&h, &weights[1])?.to_dtype(DType::F32)?)?;
    let mut scaler = GradScaler::default();
    scaler.scale(&loss)?.backward()?;
    scaler.unscale()?;
    weights.iter().map(|w| Ok(scaler.grad(w)?.expect("a gradient"))).collect()
}

#[test]
fn threads_that_share_a_model_do_not_see_each_other() -> Result<()> {
    let weights = [(1, (5, 7)), (2, (7, 3))]
        .map(|(seed, shape)| Var::from_tensor(&random(seed, shape, DType::F32)).unwrap());
    let dtypes = [DType::F32, DType::BF16, DType::F16];
    let input = |i: usize| random(10 + i as u64, (4, 5), DType::F32);
    let alone = |i: usize| Autocast::new(dtypes[i % 3]).scope(|| gradients(&weights, &input(i)));
    let expected = (0..8).map(alone).collect::<Result<Vec<_>>>()?;
    std::thread::scope(|scope| {
        let work = |i: usize| {
            let (weights, expected) = (&weights, &expected[i]);
            move || -> Result<()> {
                for round in 0..25 {
                    let outer = Autocast::new(dtypes[(i + round) % 3]);
                    let inner = Autocast::new(dtypes[i % 3]);
                    // Nested, abandoned by a panic, and with an evaluation in between.
                    let got = outer.scope(|| inner.scope(|| gradients(weights, &input(i))))?;
                    let panicked = std::panic::catch_unwind(|| {
                        outer.scope(|| std::panic::resume_unwind(Box::new("on purpose")))
                    });
                    assert!(panicked.is_err());
                    assert_eq!(Autocast::current(), Autocast::disabled());
                    no_grad(|| outer.scope(|| ops::matmul(&input(i), &weights[0])))?;
                    for (got, expected) in got.iter().zip(expected) {
                        assert_same("a gradient", got, expected);
                    }
                }
                Ok(())
            }
        };
        let threads: Vec<_> = (0..8).map(|i| scope.spawn(work(i))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("no thread panics"))
    })
}
