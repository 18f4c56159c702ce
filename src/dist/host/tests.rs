//! Ranks that are threads against sums computed here, rank after rank.

use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use candle_core::{D, DType, Device, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::dist::arguments::{DTYPES, wide};
use crate::dist::{Communicator, ReduceOp, Single, Threads};
use crate::error::{DistError, Error, Result};

const CPU: &Device = &Device::Cpu;

/// What `rank` brings: some elements not finite, where the dtype knows such.
pub(in crate::dist) fn mine(rank: usize, shape: &[usize], dtype: DType) -> Tensor {
    let mut rng = ChaCha8Rng::seed_from_u64(rank as u64 * 31 + 7);
    let count: usize = shape.iter().product();
    let values: Vec<f32> = (0..count)
        .map(|i| {
            let value = rng.random_range(-30f32..30.0);
            match (dtype.is_float() && dtype != DType::F8E4M3, i) {
                (true, 3) if rank == 1 => f32::NAN,
                (true, 4) if rank == 0 => f32::INFINITY,
                (true, 5) if rank == 0 => f32::NEG_INFINITY,
                (false, _) => value.abs(),
                _ => value,
            }
        })
        .collect();
    Tensor::from_vec(values, shape, CPU).unwrap().to_dtype(dtype).unwrap()
}

/// Bits, so that NaN equals NaN and 0 is not -0.
pub(in crate::dist) fn bits(x: &Tensor) -> Vec<u64> {
    let x = x.flatten_all().unwrap();
    match x.dtype() {
        DType::F64 => x
            .to_vec1::<f64>()
            .unwrap()
            .into_iter()
            .map(|x| if x.is_nan() { 1 } else { x.to_bits() })
            .collect(),
        dtype if dtype.is_float() => {
            let x = x.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
            x.into_iter().map(|x| if x.is_nan() { 1 } else { u64::from(x.to_bits()) }).collect()
        }
        _ => x
            .to_dtype(DType::I64)
            .unwrap()
            .to_vec1::<i64>()
            .unwrap()
            .into_iter()
            .map(|x| x as u64)
            .collect(),
    }
}

#[track_caller]
pub(in crate::dist) fn assert_same(got: &Tensor, expected: &Tensor, what: &str) {
    assert_eq!((got.dims(), got.dtype()), (expected.dims(), expected.dtype()), "{what}");
    assert_eq!(bits(got), bits(expected), "{what}");
}

/// The parts combined by candle's operators, in the order of the ranks, in the dtype in which ranks add.
fn expected(parts: &[Tensor], reduction: ReduceOp) -> Tensor {
    let sum_dtype = wide(parts[0].dtype());
    let mut parts = parts.iter().map(|part| part.to_dtype(sum_dtype).unwrap());
    let first = parts.next().unwrap();
    parts.fold(first, |so_far, part| match reduction {
        ReduceOp::Sum => (so_far + part).unwrap(),
        ReduceOp::Max if !sum_dtype.is_float() => so_far.maximum(&part).unwrap(),
        ReduceOp::Max => {
            let is_nan = |x: &Tensor| x.ne(x).unwrap();
            let larger = so_far.maximum(&part).unwrap();
            let larger = is_nan(&part).where_cond(&part, &larger).unwrap();
            is_nan(&so_far).where_cond(&so_far, &larger).unwrap()
        }
    })
}

fn combinable() -> impl Iterator<Item = DType> {
    DTYPES.into_iter().filter(|dtype| *dtype != DType::F8E4M3)
}

fn both(check: impl Fn(ReduceOp)) {
    [ReduceOp::Sum, ReduceOp::Max].into_iter().for_each(check);
}

/// Runs on one rank alone, and on 1 to 4 threads.
fn on_all_sizes(check: impl Fn(&dyn Communicator) -> Result<()> + Sync) {
    check(&Single).unwrap();
    for size in 1..=4 {
        Threads::run(size, |communicator| check(&*communicator)).unwrap();
    }
}

#[test]
fn reductions_add_in_the_order_of_ranks_in_every_dtype_and_shape() {
    // Beyond 4096 bytes ranks add pieces.
    let shapes: [&[usize]; 7] = [&[], &[0], &[1], &[7], &[3, 0, 2], &[12, 5], &[12, 433]];
    on_all_sizes(|ranks| {
        for dtype in combinable() {
            for shape in shapes {
                let parts: Vec<_> =
                    (0..ranks.size()).map(|rank| mine(rank, shape, dtype)).collect();
                both(|reduction| {
                    let what = format!("{reduction:?} of {dtype:?} {shape:?}, {ranks:?}");
                    let x = &parts[ranks.rank()];
                    let wide = expected(&parts, reduction);
                    let got = ranks.all_reduce(x, reduction).unwrap();
                    assert_same(&got, &wide.to_dtype(dtype).unwrap(), &what);
                    if shape.first() == Some(&12) {
                        let share = 12 / ranks.size();
                        let got = ranks.reduce_scatter(x, reduction).unwrap();
                        let wide = wide.narrow(0, share * ranks.rank(), share).unwrap();
                        assert_same(&got, &wide, &what);
                    }
                });
            }
        }
        Ok(())
    });
}

#[test]
fn gathers_and_broadcasts_keep_every_dtype_and_shape() {
    let shapes: [&[usize]; 5] = [&[], &[0], &[3], &[2, 0, 2], &[5, 1031]];
    on_all_sizes(|ranks| {
        for dtype in DTYPES {
            for shape in shapes {
                let parts: Vec<_> =
                    (0..ranks.size()).map(|rank| mine(rank, shape, dtype)).collect();
                let what = format!("{dtype:?} {shape:?}, {ranks:?}");
                let x = &parts[ranks.rank()];
                let joined = if shape.is_empty() {
                    Tensor::stack(&parts, 0)?
                } else {
                    Tensor::cat(&parts, 0)?
                };
                assert_same(&ranks.all_gather(x)?, &joined, &what);
                for (root, theirs) in parts.iter().enumerate() {
                    assert_same(&ranks.broadcast(x, root)?, theirs, &what);
                }
            }
        }
        ranks.barrier()
    });
}

#[test]
fn a_strided_tensor_is_read_in_the_order_of_its_shape() {
    on_all_sizes(|ranks| {
        let x = mine(0, &[5, 4], DType::F32).t()?;
        let sum = expected(&vec![x.contiguous()?; ranks.size()], ReduceOp::Sum);
        assert_same(&ranks.all_reduce(&x, ReduceOp::Sum)?, &sum, "all_reduce");
        assert_same(&ranks.broadcast(&x, 0)?, &x.contiguous()?, "broadcast");
        Ok(())
    });
}

#[test]
fn a_result_is_no_part_of_the_graph_and_shares_no_memory() {
    on_all_sizes(|ranks| {
        let var = candle_core::Var::from_tensor(&mine(0, &[4], DType::F32))?;
        let before = ranks.broadcast(&var, 0)?;
        let kept = bits(&before);
        assert!(!before.track_op());
        var.set(&var.zeros_like()?)?;
        assert_eq!(bits(&before), kept);
        Ok(())
    });
}

#[test]
fn calls_that_have_started_run_beside_each_other_and_may_be_dropped() {
    on_all_sizes(|ranks| {
        let x = |i: usize| Tensor::full(i as f32, 3000, CPU);
        let pending: Vec<_> = (0..20)
            .map(|i| ranks.start_all_reduce(&x(i)?, ReduceOp::Sum))
            .collect::<Result<_>>()?;
        drop(ranks.start_all_gather(&x(1)?)?);
        // Waited for in another order than started.
        for (i, pending) in pending.into_iter().enumerate().rev() {
            assert_same(&pending.wait()?, &x(i * ranks.size())?, "sum");
        }
        Ok(())
    });
}

#[test]
fn what_is_larger_than_a_segment_goes_in_several() {
    for size in 1..=4 {
        Threads::run_with(Duration::from_secs(60), 64, size, |ranks| {
            let parts: Vec<_> = (0..size).map(|rank| mine(rank, &[36, 7], DType::BF16)).collect();
            let x = &parts[ranks.rank()];
            both(|reduction| {
                let wide = expected(&parts, reduction);
                let got = ranks.all_reduce(x, reduction).unwrap();
                assert_same(&got, &wide.to_dtype(DType::BF16).unwrap(), "all_reduce");
                let share = 36 / size;
                let got = ranks.reduce_scatter(x, reduction).unwrap();
                assert_same(
                    &got,
                    &wide.narrow(0, share * ranks.rank(), share).unwrap(),
                    "reduce_scatter",
                );
            });
            assert_same(&ranks.all_gather(x)?, &Tensor::cat(&parts, 0)?, "all_gather");
            assert_same(&ranks.broadcast(x, size - 1)?, &parts[size - 1], "broadcast");
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn sums_of_integers_that_do_not_fit_are_errors() {
    let error =
        Threads::run(2, |ranks| ranks.all_reduce(&Tensor::full(200u8, 3, CPU)?, ReduceOp::Sum));
    let message = error.unwrap_err().to_string();
    assert!(
        message.contains("call 1, all_reduce (sum) of U8 [3]: the sum of all ranks does not fit"),
        "{message}"
    );
}

#[test]
fn arguments_that_do_not_fit_are_errors_on_every_engine() {
    on_all_sizes(|ranks| {
        let message = |result: Result<Tensor>| result.unwrap_err().to_string();
        let x = mine(0, &[5, 2], DType::F8E4M3);
        assert!(
            message(ranks.all_reduce(&x, ReduceOp::Sum))
                .contains("all_reduce: x is F8E4M3, expected F64")
        );
        assert!(
            message(ranks.reduce_scatter(&x, ReduceOp::Sum))
                .contains("reduce_scatter: x is F8E4M3")
        );
        assert!(message(ranks.broadcast(&x, 9)).contains("root is 9"));
        let scalar = mine(0, &[], DType::F32);
        assert!(
            message(ranks.reduce_scatter(&scalar, ReduceOp::Sum))
                .contains("a first dimension that")
        );
        if ranks.size() > 1 {
            let x = mine(0, &[25, 2], DType::F32);
            let message = message(ranks.reduce_scatter(&x.narrow(0, 0, 23)?, ReduceOp::Sum));
            assert!(
                message.contains(&format!(
                    "shape [23, 2], expected a first dimension that {}",
                    ranks.size()
                )),
                "{message}"
            );
        }
        let deep = Tensor::zeros(vec![1; 15], DType::F32, CPU)?;
        if ranks.size() > 1 {
            assert!(message(ranks.all_gather(&deep)).contains("at most 14 dimensions"));
        }
        // None of them reached the others.
        ranks.barrier()
    });
    let message = Threads::run(0, |_| Ok(())).unwrap_err().to_string();
    assert!(message.contains("size is 0, expected at least 1 rank"), "{message}");
}

/// The errors of all ranks of a program that goes wrong, each rank's own.
fn errors(size: usize, run: impl Fn(&Arc<dyn Communicator>) -> Result<()> + Sync) -> Vec<String> {
    errors_within(Duration::from_secs(60), size, run)
}

fn errors_within(
    timeout: Duration,
    size: usize,
    run: impl Fn(&Arc<dyn Communicator>) -> Result<()> + Sync,
) -> Vec<String> {
    let message = |error: Error| error.to_string();
    let run = |ranks| Ok(run(&ranks).err().map_or(String::new(), message));
    Threads::run_within(timeout, size, run).unwrap()
}

#[test]
fn calls_that_differ_are_an_error_on_every_rank() {
    let x = |shape: &[usize], dtype| mine(0, shape, dtype);
    let f32 = DType::F32;
    type Differing<'a> = &'a (dyn Fn(&dyn Communicator) -> Result<()> + Sync);
    let cases: [(Differing<'_>, &str); 6] = [
        (
            &|ranks| ranks.all_reduce(&x(&[4], f32), ReduceOp::Max).map(drop),
            "all_reduce (max) of F32 [4]",
        ),
        (
            &|ranks| ranks.all_reduce(&x(&[2, 2], f32), ReduceOp::Sum).map(drop),
            "all_reduce (sum) of F32 [2, 2]",
        ),
        (
            &|ranks| ranks.all_reduce(&x(&[4], DType::F16), ReduceOp::Sum).map(drop),
            "all_reduce (sum) of F16 [4]",
        ),
        (&|ranks| ranks.all_gather(&x(&[4], f32)).map(drop), "all_gather of F32 [4]"),
        (&|ranks| ranks.broadcast(&x(&[4], f32), 1).map(drop), "broadcast from rank 1 of F32 [4]"),
        (&|ranks| ranks.barrier(), "barrier"),
    ];
    for (differing, call) in cases {
        let errors = errors(3, |ranks| {
            ranks.barrier()?;
            match ranks.rank() {
                2 => differing(&**ranks),
                _ => ranks.all_reduce(&x(&[4], f32), ReduceOp::Sum).map(drop),
            }
        });
        let peer = format!("rank 2 makes call 2, {call}. Every rank");
        for (rank, error) in errors[..2].iter().enumerate() {
            let this = format!(
                "rank {rank} of 3, call 2, all_reduce (sum) of F32 [4]: the peers' call differs"
            );
            assert!(error.contains(&this) && error.contains(&peer), "{error}");
        }
        let peers =
            "differs: rank 0 makes call 2, all_reduce (sum) of F32 [4]; rank 1 makes call 2, all";
        assert!(
            errors[2].contains(&format!("rank 2 of 3, call 2, {call}"))
                && errors[2].contains(peers),
            "{}",
            errors[2]
        );
    }
}

#[test]
fn no_call_succeeds_after_one_failed() {
    let after = errors(2, |ranks| {
        let x = mine(0, &[ranks.rank()], DType::F32);
        let later = ranks.start_all_reduce(&x, ReduceOp::Sum)?;
        // By itself it would do.
        let queued = ranks.start_all_gather(&mine(0, &[3], DType::F32));
        assert!(later.wait().is_err());
        let queued = queued.and_then(|queued| queued.wait()).unwrap_err().to_string();
        assert!(queued.contains("all_gather of F32"), "{queued}");
        ranks.barrier()
    });
    for (rank, error) in after.iter().enumerate() {
        let expected = format!(
            "rank {rank} of 2, barrier: an earlier call failed, and no later one can succeed: rank"
        );
        assert!(error.contains(&expected) && error.contains("the peers' call differs"), "{error}");
    }
}

#[test]
fn a_rank_that_fails_ends_the_others_with_its_error() {
    let error = Threads::run(4, |ranks| {
        ranks.barrier()?;
        if ranks.rank() == 2 {
            Err(candle_core::Error::Msg("out of data".to_owned()))?;
        }
        ranks.barrier()
    });
    let error = error.unwrap_err();
    assert_eq!(error.to_string(), "rank 2 of 4 failed: out of data");
    assert!(matches!(error, Error::Dist(DistError::Rank { rank: 2, size: 4, .. })), "{error:?}");
}

#[test]
fn a_rank_that_panics_ends_the_others_with_its_message() {
    let error = Threads::run(3, |ranks| {
        assert!(ranks.rank() != 1, "one of {}", ranks.size());
        ranks.barrier()
    });
    assert_eq!(error.unwrap_err().to_string(), "rank 1 of 3 panicked: one of 3");
}

#[test]
fn a_rank_that_leaves_early_is_named() {
    let errors = errors(3, |ranks| {
        ranks.barrier()?;
        if ranks.rank() == 1 { Ok(()) } else { ranks.barrier() }
    });
    for rank in [0, 2] {
        let expected = format!("rank {rank} of 3, call 2, barrier: rank ");
        assert!(errors[rank].starts_with(&expected), "{}", errors[rank]);
    }
    // One of them may see the other fail first.
    assert!(
        errors.iter().any(|error| error.contains("rank 1 has left, after 1 calls")),
        "{errors:?}"
    );
}

#[test]
fn a_rank_that_hangs_ends_the_others_in_time() {
    // It makes no call until the others have given up.
    let (given_up, hung) = mpsc::channel();
    let hung = Mutex::new(hung);
    let began = Instant::now();
    let errors = errors_within(Duration::from_secs(3), 3, |ranks| {
        let gathered = ranks.all_gather(&mine(0, &[2], DType::F64));
        if ranks.rank() == 1 {
            (0..2).for_each(|_| hung.lock().unwrap().recv().unwrap());
            return Ok(());
        }
        let result = gathered.and_then(|_| ranks.barrier());
        given_up.send(()).unwrap();
        result
    });
    assert!(began.elapsed() < Duration::from_secs(40));
    for rank in [0, 2] {
        assert!(
            errors[rank].starts_with(&format!("rank {rank} of 3, call 2, barrier: ")),
            "{}",
            errors[rank]
        );
    }
    let expected = " s from rank 1; all ranks made call 1, all_gather of F64 [2]. A rank hangs";
    assert!(errors.iter().any(|error| error.contains(expected)), "{errors:?}");
}

#[test]
fn a_communicator_outlives_the_function_that_returns_it() {
    let all = Threads::run(3, |ranks| {
        ranks.barrier()?;
        Ok(ranks)
    });
    assert_eq!(all.unwrap().iter().map(|ranks| ranks.rank()).collect::<Vec<_>>(), [0, 1, 2]);
}

#[test]
fn the_sum_of_ranks_is_the_sum_over_a_new_dimension() {
    let parts: Vec<_> = (0..4).map(|rank| mine(rank + 2, &[6], DType::F64)).collect();
    let sum = Tensor::stack(&parts, D::Minus1).unwrap().sum(D::Minus1).unwrap();
    let sums =
        Threads::run(4, |ranks| ranks.all_reduce(&parts[ranks.rank()], ReduceOp::Sum)).unwrap();
    let difference =
        (&sums[0] - sum).unwrap().abs().unwrap().max(0).unwrap().to_scalar::<f64>().unwrap();
    assert!(difference < 1e-12, "{difference}");
}
