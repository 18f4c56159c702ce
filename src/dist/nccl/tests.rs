//! Ranks that are threads, on one GPU: an emulated one, or one whose NCCL allows that.
//!
//! Each gives the bits of the engine on the host that it meets by.

use std::process::Command;
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use candle_core::{DType, Device, ModuleT, Tensor, Var};

use super::Nccl;
use crate::dist::arguments::DTYPES;
use crate::dist::host::tests::{assert_same, bits, mine};
use crate::dist::{
    Communicator, DataParallel, DataParallelConfig, Pending, ReduceOp, Sharded, Threads,
    from_environment_on, sync_batch_norm,
};
use crate::error::{DistError, Error, Result};
use crate::kernels::capture;
use crate::kernels::cuda::{Gpu, HAS_NCCL};
use crate::kernels::testing::devices::gpus;
use crate::kernels::testing::own_process::in_own_process;
use crate::optim::{AdamW, AdamWConfig, Masters, Step};
use crate::{GradScaler, Parameters, nn, ops};

const LONG: Duration = Duration::from_secs(120);
const HERE: &str = "dist::nccl::tests::";

/// What a rank of a test has: NCCL, the engine that it met by, and a device with a stream of its own.
struct Place {
    nccl: Arc<dyn Communicator>,
    host: Arc<dyn Communicator>,
    device: Device,
}

/// Runs `function` on ranks of one GPU, if there is one and NCCL.
fn on_ranks<T: Send>(
    timeout: Duration,
    size: usize,
    function: impl Fn(Place) -> Result<T> + Sync,
) -> Option<Vec<T>> {
    if !HAS_NCCL || gpus().is_empty() {
        return None;
    }
    let results = Threads::run_within(LONG, size, |host| {
        let device = Device::new_cuda_with_stream(0)?;
        // Whoever makes a stream may wait for the device.
        host.barrier()?;
        let nccl = Nccl::over_within(timeout, host.clone(), &device)?;
        function(Place { nccl, host, device })
    });
    match results {
        Err(error) if error.to_string().contains("uplicate GPU") => {
            eprintln!("skipped: this NCCL takes no two ranks on one GPU: {error}");
            None
        }
        results => Some(results.unwrap()),
    }
}

fn on_host(x: &Tensor) -> Tensor {
    if x.elem_count() == 0 {
        return mine(0, x.dims(), x.dtype());
    }
    x.to_device(&Device::Cpu).unwrap()
}

const SHAPES: [&[usize]; 7] = [&[], &[0], &[1], &[7], &[3, 0, 2], &[12, 5], &[12, 433]];

/// All calls are started before the first is waited for.
#[test]
fn all_calls_give_the_bits_of_the_host_in_every_dtype_and_shape() {
    for size in [1, 2, 4] {
        on_ranks(LONG, size, |Place { nccl, host, device }| {
            let mut started: Vec<(String, Pending, Tensor)> = Vec::new();
            for dtype in DTYPES.into_iter().filter(|dtype| *dtype != DType::F8E4M3) {
                for shape in SHAPES {
                    let x = mine(host.rank(), shape, dtype);
                    // candle cannot copy tensors without elements to a GPU.
                    let on_gpu = match (x.elem_count(), Gpu::of(&device)) {
                        (0, Some(gpu)) => gpu.empty(shape, dtype)?,
                        _ => x.to_device(&device)?,
                    };
                    for reduction in [ReduceOp::Sum, ReduceOp::Max] {
                        let what = format!("{reduction:?} of {dtype:?} {shape:?}, {size} ranks");
                        let pending = nccl.start_all_reduce(&on_gpu, reduction)?;
                        started.push((what.clone(), pending, host.all_reduce(&x, reduction)?));
                        if shape.first() == Some(&12) {
                            let pending = nccl.start_reduce_scatter(&on_gpu, reduction)?;
                            started.push((what, pending, host.reduce_scatter(&x, reduction)?));
                        }
                    }
                    let what = format!("{dtype:?} {shape:?}, {size} ranks");
                    let pending = nccl.start_all_gather(&on_gpu)?;
                    started.push((what.clone(), pending, host.all_gather(&x)?));
                    let root = size - 1;
                    let pending = nccl.start_broadcast(&on_gpu, root)?;
                    started.push((what, pending, host.broadcast(&x, root)?));
                }
            }
            for (what, pending, expected) in started {
                let got = pending.wait()?;
                assert!(got.device().is_cuda() && !got.track_op(), "{what}");
                assert_same(&on_host(&got), &expected, &what);
            }
            nccl.synchronize()
        });
    }
}

#[test]
fn strided_tensors_and_tensors_of_the_host_travel_too() {
    on_ranks(LONG, 3, |Place { nccl, host, device }| {
        let x = mine(host.rank(), &[6, 700], DType::BF16).t()?;
        let expected = host.all_reduce(&x, ReduceOp::Sum)?;
        let got = nccl.all_reduce(&x.to_device(&device)?.t()?.contiguous()?.t()?, ReduceOp::Sum)?;
        assert_same(&on_host(&got), &expected, "strided");
        let got = nccl.all_reduce(&x, ReduceOp::Sum)?;
        assert!(got.device().is_cpu());
        assert_same(&got, &expected, "of the host");
        assert_same(&nccl.all_gather(&x)?, &host.all_gather(&x)?, "of the host");
        let none = mine(0, &[3, 0], DType::F32);
        assert_same(&nccl.all_gather(&none)?, &host.all_gather(&none)?, "of no elements");
        nccl.barrier()
    });
}

/// With streams that are behind, where the GPU is emulated: whoever does not wait for another stream reads garbage.
#[test]
fn calls_and_work_on_candles_stream_wait_for_one_another() {
    let test = format!("{HERE}calls_and_work_on_candles_stream_wait_for_one_another");
    if !HAS_NCCL || gpus().is_empty() || !in_own_process(&test, &[("EMULATED_GPU_DELAY", "1")]) {
        return;
    }
    on_ranks(LONG, 2, |Place { nccl, host, device }| {
        for round in 0..30 {
            let start = Tensor::full(round as f32 + host.rank() as f32, 5000, &Device::Cpu)?;
            let twice =
                |x: &Tensor, times: usize| (0..times).try_fold(x.clone(), |x, _| ops::add(&x, &x));
            let x = Var::from_tensor(&start.to_device(&device)?)?;
            let computed = twice(&x, 3)?;
            let first = nccl.start_all_reduce(&computed, ReduceOp::Sum)?;
            let second = nccl.start_all_gather(&x)?;
            drop(nccl.start_reduce_scatter(&computed, ReduceOp::Max)?);
            // Copied before the calls returned.
            drop(computed);
            x.set(&x.zeros_like()?)?;
            let between = twice(&x.affine(0.0, 3.0)?, 4)?;
            let more = twice(&second.wait()?, 2)?;
            let sum = twice(&first.wait()?, 1)?;
            let own = round as f32;
            assert_eq!(sum.to_vec1::<f32>()?, vec![16.0 * (2.0 * own + 1.0); 5000]);
            let expected = [vec![4.0 * own; 5000], vec![4.0 * (own + 1.0); 5000]].concat();
            assert_eq!(more.to_vec1::<f32>()?, expected);
            assert_eq!(between.to_vec1::<f32>()?, vec![48.0; 5000]);
        }
        nccl.synchronize()
    });
}

/// Weights after some steps of ranks on `device` that exchange tensors by `ranks`, one of which overflows.
fn trained(ranks: Arc<dyn Communicator>, device: &Device, sharded: bool) -> Result<Vec<Tensor>> {
    let var = |seed: usize, shape: &[usize]| {
        Var::from_tensor(&mine(seed, shape, DType::F32).affine(0.01, 0.0)?.to_device(device)?)
    };
    let (first, second) = (var(50, &[9, 5])?, var(60, &[4, 9])?);
    let map = nn::VarMap::new();
    let vb = nn::var_builder(&map, DType::F32, device);
    let norm = sync_batch_norm(nn::batch_norm(9, 1e-5, vb.pp("norm"))?, ranks.clone());
    let mut named =
        vec![("first".to_owned(), first.clone()), ("second".to_owned(), second.clone())];
    let parameters = Parameters::from_varmap(&map);
    named.extend(parameters.iter().map(|(name, var)| (name.to_owned(), var.clone())));
    let parameters = Parameters::named(named)?;
    let config = DataParallelConfig {
        first_bucket_bytes: 100,
        wire_dtype: if sharded { DType::F32 } else { DType::BF16 },
        ..Default::default()
    };
    let parallel = DataParallel::with_config(ranks.clone(), &parameters, config)?;
    let mut scaler = GradScaler::default();
    parallel.attach(&mut scaler)?;
    let mut step = |optimizer: &mut dyn FnMut(&mut GradScaler) -> Result<bool>| -> Result<()> {
        for step in 0..4 {
            let x = mine(10 * step + ranks.rank(), &[6, 5], DType::U8).to_dtype(DType::F32)?;
            let hidden = ops::linear(&x.to_device(device)?, &first, None)?;
            let y = ops::linear(&ops::tanh(&norm.forward_t(&hidden, true)?)?, &second, None)?;
            let factor = if step == 1 && ranks.rank() == 1 { f32::INFINITY } else { 1.0 };
            let loss = ops::mul(&ops::mean(&ops::mul(&y, &y)?)?, &Tensor::new(factor, device)?)?;
            scaler.scale(&loss)?.backward()?;
            scaler.clip_grad_norm(0.1)?;
            assert_eq!(optimizer(&mut scaler)?, step == 1, "every rank skips the same step");
            scaler.update()?;
        }
        Ok(())
    };
    fn skipped<S: Step>(optimizer: &mut S) -> impl FnMut(&mut GradScaler) -> Result<bool> {
        |scaler| scaler.step(optimizer)?.skipped()
    }
    if sharded {
        let mut adamw = Sharded::new(&parallel, &parameters, AdamWConfig::default(), Masters::F32)?;
        step(&mut skipped(&mut adamw))?;
    } else {
        let mut adamw = AdamW::new(&parameters, AdamWConfig::default())?;
        step(&mut skipped(&mut adamw))?;
    }
    ranks.synchronize()?;
    parameters.iter().map(|(_, var)| Ok(on_host(&var.copy()?))).collect()
}

#[test]
fn ranks_train_to_the_weights_that_the_host_gives() {
    for (size, sharded) in [(2, false), (2, true), (4, true)] {
        on_ranks(LONG, size, |Place { nccl, host, device }| {
            let expected = trained(host, &device, sharded)?;
            let got = trained(nccl, &device, sharded)?;
            assert_ne!(bits(&got[0]), bits(&mine(50, &[9, 5], DType::F32).affine(0.01, 0.0)?));
            for (got, expected) in got.iter().zip(&expected) {
                assert_same(got, expected, &format!("{size} ranks, sharded: {sharded}"));
            }
            Ok(())
        });
    }
}

/// The seconds that an error says were waited, which are measured: they may be more than the timeout.
fn waited(error: &str) -> f64 {
    let seconds =
        error.split_once("no answer in ").and_then(|(_, rest)| rest.split_once(" s from"));
    seconds.and_then(|(seconds, _)| seconds.parse().ok()).unwrap_or(0.0)
}

/// The errors of ranks of a program that goes wrong, in a process of its own: nothing outside of it.
fn errors(
    name: &str,
    variables: &[(&str, &str)],
    timeout: Duration,
    size: usize,
    function: impl Fn(&Place) -> Result<()> + Sync,
) -> Option<Vec<String>> {
    let test = format!("{HERE}{name}");
    if !HAS_NCCL || gpus().is_empty() || !in_own_process(&test, variables) {
        return None;
    }
    on_ranks(timeout, size, |place| {
        Ok(function(&place).err().map_or(String::new(), |error: Error| error.to_string()))
    })
}

const SOON: Duration = Duration::from_secs(2);

#[test]
fn calls_that_differ_are_an_error_on_every_rank() {
    let name = "calls_that_differ_are_an_error_on_every_rank";
    let errors = errors(name, &[], LONG, 3, |Place { nccl, device, .. }| {
        let x = Tensor::ones(4, DType::F32, device)?;
        nccl.all_gather(&x)?;
        let reduction = if nccl.rank() == 2 { ReduceOp::Max } else { ReduceOp::Sum };
        let result = nccl.all_reduce(&x, reduction);
        // The stream's wait for the result is no error yet.
        let error = result.and_then(|_| nccl.synchronize());
        let later = nccl.all_gather(&x).unwrap_err().to_string();
        assert!(later.contains("an earlier call failed"), "{later}");
        error
    });
    let Some(errors) = errors else { return };
    for (rank, call) in ["(sum)", "(sum)", "(max)"].into_iter().enumerate() {
        let expected = format!(
            "rank {rank} of 3, call 2, all_reduce {call} of F32 [4]: the peers' call differs"
        );
        assert!(errors[rank].starts_with(&expected), "{}", errors[rank]);
    }
    assert!(errors[0].contains("rank 2 makes call 2, all_reduce (max) of F32 [4]"), "{errors:?}");
}

#[test]
fn a_rank_that_makes_no_more_calls_is_named() {
    let name = "a_rank_that_makes_no_more_calls_is_named";
    let errors = errors(name, &[], LONG, 2, |Place { nccl, device, .. }| {
        nccl.barrier()?;
        if nccl.rank() == 1 {
            return Ok(());
        }
        nccl.all_gather(&Tensor::ones(4, DType::F32, device)?)?;
        nccl.synchronize()
    });
    let Some(errors) = errors else { return };
    let expected = "rank 0 of 2, call 2, all_gather of F32 [4]: rank 1 has left, after 1 calls";
    assert_eq!(errors, [expected, ""]);
}

#[test]
fn a_rank_that_hangs_ends_the_others_in_time() {
    let name = "a_rank_that_hangs_ends_the_others_in_time";
    let (given_up, hung) = mpsc::channel();
    let hung = Mutex::new(hung);
    let errors = errors(name, &[], SOON, 2, |Place { nccl, device, .. }| {
        let x = Tensor::ones(4, DType::F64, device)?;
        nccl.all_gather(&x)?;
        nccl.synchronize()?;
        if nccl.rank() == 1 {
            hung.lock().unwrap().recv().unwrap();
            return nccl.barrier();
        }
        let result = nccl.all_reduce(&x, ReduceOp::Sum).and_then(|_| nccl.synchronize());
        given_up.send(()).unwrap();
        result
    });
    let Some(errors) = errors else { return };
    let start = "rank 0 of 2, call 2, all_reduce (sum) of F64 [4]: no answer in ";
    assert!(errors[0].starts_with(start) && waited(&errors[0]) >= 2.0, "{}", errors[0]);
    assert!(errors[0].contains("all ranks made call 1, all_gather of F64 [4]"), "{}", errors[0]);
    assert!(errors[1].starts_with("rank 1 of 2, call 2, barrier: "), "{}", errors[1]);
}

#[test]
fn an_error_of_nccls_ends_the_call() {
    let name = "an_error_of_nccls_ends_the_call";
    // Its headers are the first launch of the call.
    for fault in ["1:1", "1:2"] {
        let variables = [("EMULATED_NCCL_FAULT", fault)];
        let errors = errors(name, &variables, SOON, 2, |Place { nccl, device, .. }| {
            let x = Tensor::ones(4, DType::F16, device)?;
            nccl.barrier()?;
            nccl.all_gather(&x)?;
            nccl.synchronize()
        });
        let Some(errors) = errors else { continue };
        let expected = "rank 1 of 2, call 2, all_gather of F16 [4]: NCCL: remote process exited or there was a network \
                        error: connection closed by a peer; all ranks made call 1, barrier";
        assert_eq!(errors[1], expected);
        assert!(errors[0].contains("call 2, all_gather of F16 [4]: no answer in "), "{errors:?}");
        return;
    }
}

#[test]
fn sums_of_integers_that_do_not_fit_are_errors() {
    let name = "sums_of_integers_that_do_not_fit_are_errors";
    let errors = errors(name, &[], LONG, 2, |Place { nccl, device, .. }| {
        let half = Tensor::full(i64::MAX / 2, 3, device)?;
        nccl.all_reduce(&half, ReduceOp::Sum)?;
        nccl.synchronize()?;
        nccl.all_reduce(&(half + 1f64)?, ReduceOp::Sum)?;
        nccl.synchronize()
    });
    let Some(errors) = errors else { return };
    for error in errors {
        let expected = "call 2, all_reduce (sum) of I64 [3]: the sum of all ranks does not fit";
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn arguments_that_do_not_fit_are_errors_before_anything_is_sent() {
    on_ranks(LONG, 2, |Place { nccl, device, .. }| {
        let message = |result: Result<Tensor>| result.unwrap_err().to_string();
        let x = Tensor::ones((3, 2), DType::F32, &device)?;
        assert!(message(nccl.broadcast(&x, 2)).contains("root is 2"));
        assert!(message(nccl.reduce_scatter(&x, ReduceOp::Sum)).contains("2 ranks divide"));
        let eighths = mine(0, &[4], DType::F8E4M3);
        assert!(message(nccl.all_gather(&eighths)).contains("`Nccl` has no F8E4M3"));
        let (captured, _) = capture::record(Some((8, 0)), || nccl.all_gather(&x));
        assert!(message(captured).contains("which `dist::Nccl` does not capture"));
        nccl.barrier()
    });
}

#[test]
fn ranks_that_do_not_meet_are_an_error() {
    let name = "ranks_that_do_not_meet_are_an_error";
    let test = format!("{HERE}{name}");
    let message = Nccl::over(Arc::new(crate::dist::Single), &Device::Cpu).unwrap_err().to_string();
    assert!(message.contains("`Nccl` was given the device Cpu"), "{message}");
    if !HAS_NCCL || gpus().is_empty() {
        return;
    }
    let variables = [
        ("WORLD_SIZE", "3"),
        ("RANK", "0"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", "29417"),
        ("CANDLE_AMP_DIST_TIMEOUT", "0.5"),
    ];
    if in_own_process(&test, &variables) {
        let message = from_environment_on(&gpus()[0]).unwrap_err().to_string();
        assert!(message.contains("rank 0 of 3, at localhost port 29417"), "{message}");
        assert!(message.contains("ranks [1, 2] have not come in 0.5 s"), "{message}");
        // One rank has the id, and no other comes.
        let device = Device::new_cuda_with_stream(0).unwrap();
        let id = super::make_id().unwrap();
        let joined = super::Rank::join(Duration::from_millis(500), &device, [0, 2], id, None);
        let message = joined.err().map(|error| error.to_string()).unwrap_or_default();
        assert!(
            message.contains("rank 0 of 2: NCCL has not connected all ranks in 0.5 s"),
            "{message}"
        );
    }
}

/// The variable by which a program that ends itself knows that it is it.
const ENDS: &str = "CANDLE_AMP_TEST_ENDS";

#[test]
fn a_process_that_reads_what_never_comes_ends_with_the_error() {
    if !HAS_NCCL || gpus().is_empty() {
        return;
    }
    if std::env::var_os(ENDS).is_none() {
        let test = format!("{HERE}a_process_that_reads_what_never_comes_ends_with_the_error");
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture", &test])
            .env(ENDS, "1")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        if text.contains("skipped: ") {
            return;
        }
        assert!(!output.status.success() && output.status.code().is_none(), "{output:?}");
        let expected = "rank 0 of 2, call 1, all_reduce (sum) of F32 [4]: no answer in ";
        assert!(text.contains(expected) && text.contains("the process ends"), "{text}");
        assert!(waited(&text) >= 1.0, "{text}");
        return;
    }
    on_ranks(Duration::from_secs(1), 2, |Place { nccl, device, .. }| {
        if nccl.rank() == 0 {
            let sum = nccl.all_reduce(&Tensor::ones(4, DType::F32, &device)?, ReduceOp::Sum)?;
            let never = sum.to_vec1::<f32>()?;
            panic!("there is no sum, and this is not read: {never:?}");
        }
        loop {
            std::thread::park();
        }
        #[allow(unreachable_code)]
        Ok(())
    });
}

#[test]
fn later_calls_repeat_the_first_error() {
    let name = "later_calls_repeat_the_first_error";
    let errors = errors(name, &[("EMULATED_NCCL_FAULT", "0:0")], SOON, 1, |place| {
        let x = Tensor::ones(4, DType::F32, &place.device)?;
        let pending = place.nccl.start_all_gather(&x)?;
        match place.nccl.barrier() {
            Err(Error::Dist(DistError::Nccl { .. })) => {}
            other => panic!("{other:?}"),
        }
        pending.wait().map(drop)
    });
    let Some(errors) = errors else { return };
    let expected =
        "rank 0 of 1, all_gather of F32 [4]: an earlier call failed, and no later one can succeed";
    assert!(errors[0].starts_with(expected), "{errors:?}");
}
