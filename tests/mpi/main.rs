//! Ranks that `mpirun` starts: their results, and how they end when one of them fails, hangs or is killed.
//!
//! Started without arguments, the program starts itself under `mpirun`, once for each case. scripts/mpi.sh runs it.

mod launch;
mod log;
mod rank;
#[path = "../ranks/mod.rs"]
mod ranks;
#[path = "../it/util.rs"]
#[expect(dead_code, reason = "the integration tests use more of it")]
mod util;

use std::time::{Duration, Instant};

use launch::Launch;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use ranks::trajectory;

/// How long a test of failure lets a call wait.
const TIMEOUT: Duration = Duration::from_secs(3);

/// In this time all processes end after one failed: the timeout, the grace after it, and slow cores.
const END: Duration = Duration::from_secs(30);

fn main() {
    let mut arguments = std::env::args().skip(1);
    if arguments.next().as_deref() == Some("rank") {
        return rank::run(&arguments.next().expect("a role"));
    }
    let cases: [(&str, fn()); 11] = [
        ("results", results),
        ("training", training),
        ("resume on other ranks", resume),
        ("differing calls", differing_calls),
        ("a rank that fails", failing),
        ("a rank that has no more data", leaving),
        ("a rank that panics", panicking),
        ("a rank that hangs", hanging),
        ("a rank that goes on after an error", going_on),
        ("Ctrl-C", interrupted),
        ("a rank that is killed", killed),
    ];
    for (name, case) in cases {
        let began = Instant::now();
        case();
        println!("mpi: {name}: ok, {:.1} s", began.elapsed().as_secs_f64());
    }
}

fn results() {
    for size in [1, 2, 4] {
        let ended = Launch::new(size, "results").start().end(Duration::from_secs(120));
        assert!(ended.success, "{size} ranks: {ended:?}");
        assert_eq!(ended.output.matches("same bits as threads").count(), size, "{ended:?}");
    }
}

/// The path of one rank in every dtype, with overflows on one rank; parts of optimizers as whole ones.
fn training() {
    for size in [2, 4] {
        let ended = Launch::new(size, "training").start().end(Duration::from_secs(120));
        assert!(ended.success, "{size} ranks: {ended:?}");
        assert_eq!(ended.output.matches("the path of one, and shards as whole").count(), size);
    }
}

/// Four ranks save their parts; two go on, to where one comes without a break.
fn resume() {
    let folder = std::env::temp_dir().join(format!("candle-amp-mpi-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    for (size, role) in [(4, "save half"), (2, "go on from half")] {
        let launch = Launch::new(size, role).folder(&folder);
        let ended = launch.start().end(Duration::from_secs(120));
        assert!(ended.success, "{role}: {ended:?}");
        assert_eq!(ended.output.matches(&format!("{role}: done")).count(), size, "{ended:?}");
    }
    std::fs::remove_dir_all(&folder).expect("the folder");
}

fn differing_calls() {
    let ended = Launch::new(4, "differ").start().end(END);
    assert!(!ended.success, "{ended:?}");
    ended.says("rank 0 of 4, call 2, all_reduce (sum) of F32 [4]: the peers' call differs: rank 2 makes call 2, barrier");
}

fn failing() {
    let ended = Launch::new(2, "fail").start().end(END);
    assert!(!ended.success, "{ended:?}");
    ended.says("out of data");
}

fn leaving() {
    let ended = Launch::new(2, "leave").start().end(END);
    assert!(!ended.success, "{ended:?}");
    ended.says("rank 0 of 2, call 2, barrier: rank 1 ");
}

fn panicking() {
    let ended = Launch::new(2, "panic").start().end(END);
    assert!(!ended.success, "{ended:?}");
    ended.says("rank 1 panics on purpose");
}

fn hanging() {
    let ended = Launch::new(2, "hang").timeout(TIMEOUT).start().end(END);
    assert!(!ended.success, "{ended:?}");
    ended.says("rank 0 of 2, call 2, barrier: no answer in 3");
    ended.says("s from rank 1; all ranks made call 1, barrier");
}

fn going_on() {
    let ended = Launch::new(2, "go on").timeout(TIMEOUT).start().end(END);
    assert!(!ended.success, "{ended:?}");
    // MPI's own words depend on its installation.
    ended.says("ending all ranks");
}

fn interrupted() {
    let mut running = Launch::new(4, "exchange").start();
    let pids = running.pids(4);
    launch::signal("INT", running.id());
    let ended = running.end(END);
    assert!(!ended.success, "{ended:?}");
    launch::assert_gone(&pids);
}

/// Kills a rank at a random moment, `CANDLE_AMP_KILLS` times: between calls, within one, or while it trains or saves.
fn killed() {
    let kills = std::env::var("CANDLE_AMP_KILLS")
        .map_or(5, |kills| kills.parse().expect("CANDLE_AMP_KILLS: a number"));
    let mut rng = ChaCha8Rng::seed_from_u64(29);
    let mut left = 0;
    for kill in 0..kills {
        let (size, trains) = (if kill % 2 == 0 { 2 } else { 4 }, kill % 4 < 2);
        let folder =
            std::env::temp_dir().join(format!("candle-amp-killed-{}-{kill}", std::process::id()));
        let role = if trains { "train" } else { "exchange" };
        let mut running = Launch::new(size, role).folder(&folder).timeout(TIMEOUT).start();
        let pids = running.pids(size);
        std::thread::sleep(Duration::from_micros(rng.random_range(0..300_000)));
        let victim = rng.random_range(0..size);
        launch::signal("KILL", pids[victim]);
        let ended = running.end(END);
        assert!(!ended.success, "kill {kill}, rank {victim} of {size}: {ended:?}");
        launch::assert_gone(&pids);
        if trains {
            let saved = trajectory::check_saved(&folder, size);
            let what = format!("kill {kill}, rank {victim} of {size}: {ended:?}");
            left += u32::from(saved.unwrap_or_else(|error| panic!("{error}: {what}")));
            std::fs::remove_dir_all(&folder).expect("the folder");
        }
    }
    // Half of them train, and most have saved by then. Of a few, all may have been too early.
    assert!(left > 0 || kills < 20, "no training had saved anything when it was killed");
    println!("mpi: {kills} ranks killed, and {left} trainings go on from what they had saved");
}
