use std::collections::BTreeMap;

use candle_amp::random;
use serde_json::Value;

use super::*;
use crate::{
    common::testing::parse,
    load,
    report::Report,
    schedule::Schedule,
    testing::Folder,
    train::{self, Run},
};

/// Every byte of a checkpoint by name, but for the times, which no two runs share, and the checksum over them.
fn contents(dir: &Path) -> Result<BTreeMap<String, Vec<u8>>> {
    let bytes = fs::read(checkpoint_file(dir))?;
    let (len, rest) = bytes.split_first_chunk().context("a length")?;
    let (header, data) = rest.split_at(u64::from_le_bytes(*len) as usize);
    let header: BTreeMap<String, Value> = serde_json::from_slice(header)?;
    let mut all = BTreeMap::new();
    for (name, value) in header {
        if name == "__metadata__" {
            let values = value.as_object().into_iter().flatten();
            all.extend(values.map(|(name, value)| (name.clone(), value.to_string().into_bytes())));
        } else {
            let at = |i: usize| value["data_offsets"][i].as_u64().unwrap_or(0) as usize;
            all.insert(name, data[at(0)..at(1)].to_vec());
        }
    }
    assert!(all.remove("checksum").is_some() && all.remove("history.nanoseconds").is_some());
    Ok(all)
}

/// Trains as `main` would, but ends where `stop` says.
fn train(options: &Options, stop: fn(usize) -> bool) -> Result<Report> {
    let _fork = random::fork_rng_guard();
    options.check()?;
    let data = load(options)?;
    let schedule = Schedule::new(options, data.train.len())?;
    if let (Some(dir), None) = (&options.out, &options.resume) {
        create(dir, options)?;
    }
    let run = Run { options, heading: None, prefix: String::new(), stop };
    train::train(run, &data, schedule, &Device::Cpu)
}

fn resumed(dir: &Path, more: &str) -> Result<Options> {
    let line = format!("cifar10 --resume {} {more}", dir.display());
    config::parse(line.split_whitespace().map(Into::into))
}

/// Trains `arguments` in one go, and cut short and resumed at each of `stops`.
fn check(arguments: &str, stops: &[fn(usize) -> bool]) -> Result<BTreeMap<String, Vec<u8>>> {
    let folder = Folder::new()?;
    let (straight, pieces) = (folder.path("straight"), folder.path("pieces"));
    let begin = |dir: &Path| parse::<Options>(&format!("{arguments} --out {}", dir.display()));
    let expected = train(&begin(&straight)?, |_| false)?;
    let mut options = begin(&pieces)?;
    for stop in stops {
        let report = train(&options, *stop)?;
        assert!(report.interrupted && report.steps < expected.steps, "{arguments}");
        options = resumed(&pieces, "")?;
    }
    let report = train(&options, |_| false)?;

    let (left, right) = (contents(&straight)?, contents(&pieces)?);
    let names = |all: &BTreeMap<String, Vec<u8>>| all.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&left), names(&right));
    let differ = left.iter().filter(|(name, bytes)| right[*name] != **bytes);
    let differ: Vec<_> = differ.map(|(name, _)| name).collect();
    assert!(differ.is_empty(), "{arguments}: {differ:?} differ");
    let told = |report: &Report| {
        let Report { losses, test_accuracy_per_epoch, test_accuracy_per_class, .. } = report;
        (losses.clone(), test_accuracy_per_epoch.clone(), *test_accuracy_per_class)
    };
    assert_eq!(told(&report), told(&expected), "{arguments}");
    assert_eq!((report.steps, report.skipped_steps), (expected.steps, expected.skipped_steps));
    Ok(left)
}

/// Two epochs of four steps and a part of a third.
const LENGTH: &str = "--model mlp --train-images 64 --smoke --epochs 3 --steps 10 --lr 0.01";

#[test]
fn a_resumed_run_ends_as_a_straight_one_bit_for_bit() -> Result<()> {
    let anywhere: [fn(usize) -> bool; 3] = [|step| step == 1, |step| step == 4, |step| step == 6];
    let all = check(&format!("{LENGTH} --precision f32"), &anywhere)?;
    assert!(all.keys().any(|name| name.starts_with("model.")), "weights");
    assert!(all.keys().any(|name| name.ends_with(".momentum_buffer")), "{:?}", all.keys());

    let all = check(&format!("{LENGTH} --precision bf16 --master-weights"), &anywhere[2..])?;
    assert!(all.keys().any(|name| name.ends_with(".master")), "{:?}", all.keys());

    // The scale falls until the gradients fit, and steps are skipped on both sides of the cut.
    let scaled = "--precision f16 --init-scale 16777216";
    let all = check(&format!("{LENGTH} {scaled}"), &[|step| step == 2, |step| step == 7])?;
    let scale = all.get("scaler.scale").map(|text| String::from_utf8_lossy(text).into_owned());
    assert!(scale.is_some_and(|scale| scale != "\"16777216\""), "the scale has moved");
    Ok(())
}

/// Batch norms have running statistics.
#[test]
fn running_statistics_are_resumed_too() -> Result<()> {
    let length = "--model resnet8 --train-images 12 --smoke --batch-size 4 --epochs 2";
    let all = check(&format!("{length} --precision bf16"), &[|step| step == 2])?;
    assert!(all.keys().any(|name| name.ends_with("running_mean")), "{:?}", all.keys());
    Ok(())
}

#[test]
fn the_generator_goes_on_where_it_stood() -> Result<()> {
    let folder = Folder::new()?;
    let dir = folder.path("run");
    let options = parse::<Options>(&format!("{LENGTH} --out {}", dir.display()))?;
    train(&options, |step| step == 1)?;
    let draws = contents(&dir)?["random.draws"].clone();
    assert_ne!(draws, b"\"0\"", "initial weights were drawn");

    let _fork = random::fork_rng_guard();
    random::manual_seed(99);
    let varmap = candle_nn::VarMap::new();
    let vb = candle_amp::nn::var_builder(&varmap, candle_core::DType::F32, &Device::Cpu);
    crate::models::Model::new(options.model, vb, false)?;
    let parameters = Parameters::from_varmap(&varmap);
    let config = candle_amp::optim::SgdConfig {
        lr: options.lr,
        momentum: options.momentum,
        weight_decay: options.weight_decay,
        ..Default::default()
    };
    let mut optimizer = Sgd::new(&parameters, config)?;
    let scheduler = Scheduler::new(crate::common::rates(10), &mut optimizer)?;
    let (scaler, history) = (GradScaler::disabled(), History::default());
    let mut on = Training { parameters, optimizer, scheduler, scaler, history };
    on.load(&dir, &options, &load(&options)?)?;
    assert_eq!(random::state().seed, 0);
    assert_eq!(format!("\"{}\"", random::state().draws).into_bytes(), draws);
    assert_eq!((on.scheduler.taken(), on.history.unfinished()), (1, 1));
    Ok(())
}

#[test]
fn a_run_that_has_ended_is_only_tested_again() -> Result<()> {
    let folder = Folder::new()?;
    let dir = folder.path("run");
    let options = parse::<Options>(&format!("{LENGTH} --out {}", dir.display()))?;
    let report = train(&options, |_| false)?;
    let before = contents(&dir)?;
    let again = train(&resumed(&dir, "")?, |_| false)?;
    assert!(!again.interrupted && again.steps == 10);
    assert_eq!(again.test_accuracy_per_class, report.test_accuracy_per_class);
    assert_eq!(contents(&dir)?, before);
    Ok(())
}

#[test]
fn a_run_goes_on_as_it_began_or_not_at_all() -> Result<()> {
    let folder = Folder::new()?;
    let dir = folder.path("run");
    let options = parse::<Options>(&format!("{LENGTH} --out {}", dir.display()))?;
    train(&options, |step| step == 1)?;
    let shown = dir.display().to_string();
    for (more, message) in [
        ("--lr 0.2", "--lr 0.2 does not go with --resume DIR: that run has --lr 0.01"),
        (
            "--model resnet8",
            "--model resnet8 does not go with --resume DIR: that run has --model mlp",
        ),
        (
            "--loss-scale 8",
            "--loss-scale 8 does not go with --resume DIR: that run has no --loss-scale",
        ),
        ("--smoke=false", "--smoke false does not go with --resume DIR: that run has --smoke true"),
        (
            "--epochs 9",
            "--epochs 9 does not go with --resume DIR: that run has --epochs 3; its learning rate \
             falls to zero by its last step, so a longer or shorter run is another one, from its \
             first step on",
        ),
    ] {
        let error = resumed(&dir, more).expect_err("another run");
        assert!(error.is::<Usage>(), "{error:?}");
        assert_eq!(error.to_string().replace(&shown, "DIR"), message);
    }
    // What is the same may be said again.
    let options = resumed(&dir, "--lr 1e-2 --epochs 3 --report other.json")?;
    assert_eq!(options.report, Some("other.json".into()));
    assert_eq!((&options.out, &options.resume), (&Some(dir.clone()), &Some(dir.clone())));

    let error = train(&parse(&format!("{LENGTH} --out {shown}"))?, |_| false).expect_err("taken");
    assert!(error.to_string().contains("there is a run in this folder"), "{error}");
    Ok(())
}

#[test]
fn a_folder_that_is_none_is_told_so() -> Result<()> {
    let folder = Folder::new()?;
    let error = resumed(&folder.path("nothing"), "").expect_err("no folder");
    assert!(
        error.is::<Usage>() && error.to_string().contains(": not a folder of --out"),
        "{error}"
    );

    let dir = folder.path("run");
    let options = parse::<Options>(&format!("{LENGTH} --out {}", dir.display()))?;
    create(&dir, &options)?;
    let error = train(&resumed(&dir, "")?, |_| false).expect_err("no checkpoint");
    assert!(error.to_string().contains("the run ended before its first epoch"), "{error}");

    fs::remove_file(options_file(&dir))?;
    train(&options, |step| step == 1)?;
    // Of another version, of the same length.
    let bytes = fs::read(checkpoint_file(&dir))?;
    let saved = Checkpoint::open(checkpoint_file(&dir))?;
    let mut run = State::default();
    saved.load(&mut [("run", &mut run)])?;
    let old = run.with("version of candle-amp", "0.0.9");
    Checkpoint::new(1).with("run", &old)?.save(checkpoint_file(&dir))?;
    let error = train(&resumed(&dir, "")?, |_| false).expect_err("another version");
    assert!(
        error
            .to_string()
            .ends_with("the version of candle-amp of that run is 0.0.9, and here it is 0.1.0"),
        "{error}"
    );
    // Of other images.
    let old = old.with("version of candle-amp", env!("CARGO_PKG_VERSION")).with("data", "none");
    Checkpoint::new(1).with("run", &old)?.save(checkpoint_file(&dir))?;
    let error = train(&resumed(&dir, "")?, |_| false).expect_err("other images");
    assert!(error.to_string().contains("the data of that run is none"), "{error}");
    // Cut off.
    fs::write(checkpoint_file(&dir), &bytes[..bytes.len() / 2])?;
    let error = train(&resumed(&dir, "")?, |_| false).expect_err("damaged");
    assert!(error.to_string().contains("is not a whole checkpoint"), "{error}");
    Ok(())
}

#[test]
fn advice_can_be_pasted_into_a_shell() -> Result<()> {
    let advice_of = |dir: &str| {
        let mut options = parse::<Options>("")?;
        options.out = Some(dir.into());
        anyhow::Ok(advice(&options))
    };
    assert!(advice_of("runs/a-1")?.ends_with("cifar10 -- --resume runs/a-1\n"));
    assert!(advice_of("my run's")?.ends_with("-- --resume 'my run'\\''s'\n"));
    assert!(advice(&parse("")?).starts_with("\nNothing was saved to go on from"));
    Ok(())
}
