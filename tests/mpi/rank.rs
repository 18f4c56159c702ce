//! What the processes do that `mpirun` starts.

use std::path::PathBuf;
use std::time::Duration;

use candle_amp::Result;
use candle_amp::dist::{Communicator, Mpi, ReduceOp, Threads, from_environment};
use candle_core::{DType, Device, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::launch::FOLDER;
use crate::log::Errors;
use crate::ranks::{sharded, trajectory};

pub(crate) fn run(role: &str) {
    tracing::subscriber::set_global_default(Errors).expect("the first subscriber");
    // As a `main` that returns an error does: the communicator is dropped before the message is printed.
    if let Err(error) = play(role) {
        eprintln!("Error: {error}");
        std::process::exit(1);
    }
}

fn play(role: &str) -> Result<()> {
    let ranks = from_environment()?;
    let rank = ranks.rank();
    // In one write, as the lines of all processes share a stream.
    println!("pid {rank} {}", std::process::id());
    let x = Tensor::ones(4, DType::F32, &Device::Cpu)?;
    match role {
        "results" => {
            let mine = results(&*ranks)?;
            let threads = Threads::run(ranks.size(), |ranks| results(&*ranks))?;
            assert_eq!(mine, threads[rank]);
            if ranks.size() > 1 {
                let again = Mpi::init().unwrap_err().to_string();
                assert!(again.contains("call `Mpi::init` once"), "{again}");
            }
            println!("same bits as threads");
        }
        "training" => {
            for dtype in trajectory::DTYPES {
                trajectory::compare(&ranks, dtype, &trajectory::alone(dtype)?)?;
            }
            sharded::compare(&ranks)?;
            sharded::one_infinity_skips_everywhere(&ranks)?;
            println!("the path of one, and shards as whole");
        }
        "save half" => {
            for dtype in trajectory::DTYPES {
                trajectory::save_half(&ranks, dtype, &folder())?;
            }
            println!("{role}: done");
        }
        "go on from half" => {
            for dtype in trajectory::DTYPES {
                trajectory::go_on(&ranks, dtype, &folder(), 4)?;
            }
            println!("{role}: done");
        }
        "differ" => {
            ranks.barrier()?;
            let result = match rank {
                2 => ranks.barrier(),
                _ => ranks.all_reduce(&x, ReduceOp::Sum).map(drop),
            };
            // So that each can say so before mpirun ends all.
            eprintln!("{}", result.as_ref().unwrap_err());
            std::thread::sleep(Duration::from_secs(1));
            result?;
        }
        "fail" => {
            ranks.barrier()?;
            if rank == 1 {
                Err(candle_core::Error::Msg("out of data".to_owned()))?;
            }
            ranks.barrier()?;
        }
        "panic" => {
            ranks.barrier()?;
            assert!(rank != 1, "rank 1 panics on purpose");
            ranks.barrier()?;
        }
        "hang" => {
            ranks.barrier()?;
            if rank == 1 {
                std::thread::sleep(Duration::from_secs(3600));
            }
            ranks.barrier()?;
        }
        "go on" => {
            let shape = if rank == 1 { x.narrow(0, 0, 2)? } else { x };
            assert!(ranks.all_gather(&shape).is_err());
            std::thread::sleep(Duration::from_secs(3600));
        }
        "leave" => {
            ranks.barrier()?;
            if rank == 0 {
                ranks.barrier()?;
            }
        }
        "train" => trajectory::train_and_save(&ranks, &folder(), usize::MAX)?,
        "exchange" => loop {
            // Several calls at once, as gradients are reduced.
            let gradient = Tensor::ones(100_000, DType::F32, &Device::Cpu)?;
            let pending: Vec<_> = (0..4)
                .map(|_| ranks.start_all_reduce(&gradient, ReduceOp::Sum))
                .collect::<Result<_>>()?;
            for pending in pending {
                pending.wait()?;
            }
            ranks.barrier()?;
        },
        other => panic!("no role `{other}`"),
    }
    Ok(())
}

fn folder() -> PathBuf {
    std::env::var_os(FOLDER).expect(FOLDER).into()
}

/// The bytes of every call's result, in every dtype and in sizes that travel in one and in two exchanges.
fn results(ranks: &dyn Communicator) -> Result<Vec<Vec<u8>>> {
    let mut rng = ChaCha8Rng::seed_from_u64(ranks.rank() as u64);
    let mut results = Vec::new();
    let dtypes = [
        DType::F32,
        DType::F64,
        DType::F16,
        DType::BF16,
        DType::U8,
        DType::U32,
        DType::I16,
        DType::I32,
        DType::I64,
    ];
    for dtype in dtypes {
        for shape in [&[][..], &[0], &[4, 3], &[12, 1031], &[8, 6007]] {
            let mut values: Vec<f32> =
                (0..shape.iter().product()).map(|_| rng.random_range(-20f32..20.0)).collect();
            if !dtype.is_float() {
                values.iter_mut().for_each(|value| *value = value.abs());
            } else if ranks.rank() == 0 && values.len() > 2 {
                values[1] = f32::INFINITY;
                values[2] = f32::NAN;
            }
            let x = Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)?;
            let mut pending = Vec::new();
            for reduction in [ReduceOp::Sum, ReduceOp::Max] {
                pending.push(ranks.start_all_reduce(&x, reduction)?);
                if shape.len() == 2 {
                    pending.push(ranks.start_reduce_scatter(&x, reduction)?);
                }
            }
            pending.push(ranks.start_all_gather(&x)?);
            for root in 0..ranks.size() {
                pending.push(ranks.start_broadcast(&x, root)?);
            }
            ranks.barrier()?;
            for pending in pending {
                let result = pending.wait()?;
                results.push(safetensors::View::data(&result).into_owned());
            }
        }
    }
    Ok(results)
}
