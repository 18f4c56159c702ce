use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use candle_amp::{checkpoints::Checkpointer, random};
use serde_json::Value;

use super::*;
use crate::{
    common::testing::parse, config, out::tests::rows_without_times, report::Report, run_until,
    testing::Folder,
};

/// The folder of the run in a folder with one.
fn run_folder(dir: &Path) -> Result<PathBuf> {
    let entries = fs::read_dir(dir)?.map(|entry| anyhow::Ok(entry?.path()));
    let entries = entries.collect::<Result<Vec<_>>>()?;
    let mut runs = entries.into_iter().filter(|path| path.join("checkpoints").is_dir());
    runs.next().context("a run")
}

fn latest(dir: &Path) -> Result<PathBuf> {
    let saved = Checkpointer::new(run_folder(dir)?.join("checkpoints"))?.latest()?;
    Ok(saved.context("a checkpoint")?.path().to_owned())
}

/// Every byte of a checkpoint by name, but for the times, which no two runs share, and the checksum over them.
fn contents(dir: &Path) -> Result<BTreeMap<String, Vec<u8>>> {
    let bytes = fs::read(latest(dir)?)?;
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

/// Trains as `main` would, but ends where `stop` says. What is in the folder of the run then.
fn train(options: &Options, stop: fn(usize) -> bool) -> Result<Report> {
    {
        let _fork = random::fork_rng_guard();
        run_until(options, stop)?;
    }
    let dir = options.out.as_deref().context("a folder")?;
    Ok(serde_json::from_slice(&fs::read(run_folder(dir)?.join("report.json"))?)?)
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
    let reported = |report: &Report| {
        let Report { losses, test_accuracy_per_epoch, test_accuracy_per_class, .. } = report;
        (losses.clone(), test_accuracy_per_epoch.clone(), *test_accuracy_per_class)
    };
    assert_eq!(reported(&report), reported(&expected), "{arguments}");
    assert_eq!((report.steps, report.skipped_steps), (expected.steps, expected.skipped_steps));

    let rows = |dir: &Path| rows_without_times(&run_folder(dir)?);
    assert_eq!(rows(&pieces)?, rows(&straight)?, "{arguments}");
    assert_eq!(rows(&straight)?.len(), report.steps + report.epochs);
    let saved =
        |dir: &Path| anyhow::Ok(fs::read_dir(run_folder(dir)?.join("checkpoints"))?.count());
    assert_eq!(saved(&pieces)?, saved(&straight)?, "{arguments}");
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

/// The average, its running statistics, and two groups of the optimizer.
#[test]
fn a_recipe_is_resumed_too() -> Result<()> {
    let length = "--model resnet8 --train-images 12 --smoke --batch-size 4 --epochs 2";
    let recipe = "--ema 0.9 --schedule triangle --nesterov --bias-lr 4 --label-smoothing 0.1 \
                  --alternate-flips --flip-test";
    let all = check(&format!("{length} {recipe}"), &[|step| step == 2])?;
    let has =
        |part: &str| all.keys().any(|name| name.starts_with("average.") && name.contains(part));
    assert!(has("head.weight") && has("running_mean"), "{:?}", all.keys());
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
    let mut optimizer = crate::recipe::optimizer(&options, &parameters, None)?;
    let scheduler = Scheduler::new(options.recipe.rates(10), &mut optimizer)?;
    let (scaler, history) = (GradScaler::disabled(), History::default());
    let mut on = Training { parameters, optimizer, average: None, scheduler, scaler, history };
    on.load(&Checkpoint::open(latest(&dir)?)?)?;
    assert_eq!(random::state().seed, 0);
    assert_eq!(format!("\"{}\"", random::state().draws).into_bytes(), draws);
    assert_eq!((on.scheduler.taken(), on.history.unfinished()), (1, 1));
    Ok(())
}

#[test]
fn a_run_that_has_ended_is_taken_as_it_is() -> Result<()> {
    let folder = Folder::new()?;
    let dir = folder.path("run");
    let options = parse::<Options>(&format!("{LENGTH} --out {}", dir.display()))?;
    let report = train(&options, |_| false)?;
    let before = contents(&dir)?;
    let file = run_folder(&dir)?.join("report.json");
    let text = fs::read_to_string(&file)?;
    fs::write(&file, text.replace("\"final_scale\": 1.0", "\"final_scale\": 3.0"))?;
    fs::remove_file(dir.join("index.html"))?;
    let again = train(&resumed(&dir, "")?, |_| panic!("a step"))?;
    assert_eq!(again.final_scale, 3., "what the file says");
    let all: Value = serde_json::from_slice(&fs::read(dir.join("report.json"))?)?;
    assert_eq!(all["runs"][0]["final_scale"], 3.);
    assert!(dir.join("index.html").exists(), "the page is written again");

    // Ended by a crash in or after its last checkpoint: it is only tested again.
    fs::write(&file, &text[..text.len() / 2])?;
    let error =
        format!("{:#}", train(&resumed(&dir, "")?, |_| panic!("a step")).expect_err("half a file"));
    let says =
        "report.json: no report of a run; without this file, the last checkpoint is tested again";
    assert!(error.contains(says), "{error}");
    fs::remove_file(&file)?;
    let again = train(&resumed(&dir, "")?, |_| panic!("a step"))?;
    assert!(!again.interrupted && again.steps == 10 && again.final_scale == 1.);
    assert_eq!(again.test_accuracy_per_class, report.test_accuracy_per_class);
    assert_eq!(contents(&dir)?, before);
    Ok(())
}

/// The first run had ended, the second was cut short, and the third was not begun.
#[test]
fn a_comparison_goes_on_with_what_has_not_ended() -> Result<()> {
    let folder = Folder::new()?;
    let (straight, pieces) = (folder.path("straight"), folder.path("pieces"));
    let compare = "--compare f32,bf16,f16 --init-scale 16777216";
    let begin =
        |dir: &Path| parse::<Options>(&format!("{LENGTH} {compare} --out {}", dir.display()));
    let run = |options: &Options, stop| {
        let _fork = random::fork_rng_guard();
        run_until(options, stop)
    };
    run(&begin(&straight)?, |_| false)?;
    // Each step of the first run, and seven of the second.
    let stop: fn(usize) -> bool = |_| {
        static STEPS: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
        STEPS.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 1 == 17
    };
    run(&begin(&pieces)?, stop)?;
    let runs = |dir: &Path| -> Result<Vec<Value>> {
        let all: Value = serde_json::from_slice(&fs::read(dir.join("report.json"))?)?;
        Ok(all["runs"].as_array().context("runs")?.clone())
    };
    let ended: Vec<_> = runs(&pieces)?.iter().map(|run| run["interrupted"].clone()).collect();
    assert_eq!(ended, [false, true]);
    assert!(!pieces.join("f16-seed-0").exists());
    let first = fs::read(pieces.join("f32-seed-0/report.json"))?;

    run(&resumed(&pieces, "")?, |_| false)?;
    assert_eq!(fs::read(pieces.join("f32-seed-0/report.json"))?, first, "the first ran once");
    let (left, right) = (runs(&straight)?, runs(&pieces)?);
    assert_eq!((left.len(), right.len()), (3, 3));
    for (left, right) in left.iter().zip(&right) {
        for key in
            ["precision", "losses", "test_accuracy_per_epoch", "skipped_steps", "interrupted"]
        {
            assert_eq!(left[key], right[key], "{key}");
        }
    }
    assert!(right[2]["skipped_steps"].as_u64() > Some(0), "which this test is for");
    for run in ["f32-seed-0", "bf16-seed-0", "f16-seed-0"] {
        let (left, right) = (straight.join(run), pieces.join(run));
        assert_eq!(rows_without_times(&left)?, rows_without_times(&right)?, "{run}");
    }
    let html = fs::read_to_string(pieces.join("index.html"))?;
    assert!(html.contains("f16, seed 0") && !html.contains("interrupted"));
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
             follows a schedule of that length, so a longer or shorter run is another one, from its \
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
    assert!(error.to_string().contains("this folder holds a run"), "{error}");

    // Nor does it go on as somebody edits it. A changed end of line is a change, too.
    let file = dir.join("options.toml");
    let text = fs::read_to_string(&file)?;
    for changed in [
        text.replace("lr = 0.01", "lr = 0.3"),
        text.replace("precision = \"bf16\"", "precision = \"f32\""),
        text.replace('\n', "\r\n"),
        text.lines().filter(|line| !line.starts_with('#')).collect::<Vec<_>>().join("\n"),
    ] {
        assert_ne!(changed, text);
        fs::write(&file, changed)?;
        let error = resumed(&dir, "").expect_err("a changed file");
        assert!(error.to_string().contains("options.toml was changed"), "{error}");
    }
    fs::write(&file, text)?;
    resumed(&dir, "")?;
    Ok(())
}

#[test]
fn a_folder_without_a_run_is_reported() -> Result<()> {
    let folder = Folder::new()?;
    let error = resumed(&folder.path("nothing"), "").expect_err("no folder");
    assert!(error.is::<Usage>() && error.to_string().ends_with(": no such folder"), "{error}");
    fs::create_dir(folder.path("nothing"))?;
    let error = resumed(&folder.path("nothing"), "").expect_err("an empty folder").to_string();
    assert!(error.ends_with(": no folder of --out, for it has no options.toml"), "{error}");
    fs::write(folder.path("file"), "")?;
    let error = resumed(&folder.path("file"), "").expect_err("a file").to_string();
    assert!(error.ends_with(": this is a file, no folder of --out"), "{error}");

    let dir = folder.path("run");
    let options = parse::<Options>(&format!("{LENGTH} --out {}", dir.display()))?;
    train(&options, |step| step == 1)?;
    let path = latest(&dir)?;
    let again = |what: &str| -> Result<String> {
        let before = fs::read(run_folder(&dir)?.join("history.jsonl"))?;
        let error = train(&resumed(&dir, "")?, |_| panic!("a step")).expect_err(what);
        assert_eq!(fs::read(run_folder(&dir)?.join("history.jsonl"))?, before, "{what}");
        Ok(error.to_string())
    };
    let bytes = fs::read(&path)?;
    let mut run = State::default();
    Checkpoint::open(&path)?.load(&mut [("run", &mut run)])?;
    let old = run.with("version of candle-amp", "0.0.9");
    Checkpoint::new(1).with("run", &old)?.save(&path)?;
    let error = again("another version")?;
    let message = "the version of candle-amp of that run is 0.0.9, and here it is 0.1.0";
    assert_eq!(error, format!("{}: {message}", path.display()));
    let old = old.with("version of candle-amp", env!("CARGO_PKG_VERSION")).with("data", "none");
    Checkpoint::new(1).with("run", &old)?.save(&path)?;
    let error = again("other images")?;
    assert!(error.contains("the data of that run is none"), "{error}");
    fs::write(&path, &bytes[..bytes.len() / 2])?;
    let error = again("cut off")?;
    assert!(error.contains("is not a whole checkpoint"), "{error}");
    // Rows that the checkpoint counts are lost.
    fs::write(&path, &bytes)?;
    fs::write(run_folder(&dir)?.join("history.jsonl"), "")?;
    let error = again("no rows")?;
    assert!(error.contains("rows of 0 steps and 0 epochs, expected those of 1 and 0"), "{error}");
    assert!(error.contains(&format!("delete {}", run_folder(&dir)?.display())), "{error}");
    // Which is what it says to do.
    fs::remove_dir_all(run_folder(&dir)?)?;
    assert_eq!(train(&resumed(&dir, "")?, |step| step == 2)?.steps, 2);
    Ok(())
}

/// A crash before the first checkpoint, with rows; and one that left the last checkpoint damaged.
#[test]
fn a_run_goes_on_from_the_last_whole_checkpoint_or_begins_anew() -> Result<()> {
    let folder = Folder::new()?;
    let (straight, pieces) = (folder.path("straight"), folder.path("pieces"));
    let begin = |dir: &Path| parse::<Options>(&format!("{LENGTH} --out {}", dir.display()));
    train(&begin(&straight)?, |_| false)?;
    train(&begin(&pieces)?, |step| step == 3)?;
    let check = |what: &str| -> Result<()> {
        assert_eq!(contents(&pieces)?, contents(&straight)?, "{what}");
        let rows = |dir: &Path| rows_without_times(&run_folder(dir)?);
        assert_eq!(rows(&pieces)?, rows(&straight)?, "{what}");
        Ok(())
    };
    let own = run_folder(&pieces)?;
    fs::remove_file(latest(&pieces)?)?;
    train(&resumed(&pieces, "")?, |_| false)?;
    check("anew")?;

    // The best and the last one are there, unless they are the same.
    let first = own.join("checkpoints").join("step-00000004.safetensors");
    fs::remove_dir_all(&own)?;
    train(&resumed(&pieces, "")?, |step| step == 4)?;
    let bytes = fs::read(&first)?;
    train(&resumed(&pieces, "")?, |step| step == 6)?;
    let later = latest(&pieces)?;
    assert!(later.ends_with("step-00000006.safetensors"), "{later:?}");
    fs::write(&first, bytes)?;
    fs::write(&later, "damaged")?;
    train(&resumed(&pieces, "")?, |_| false)?;
    check("from the one before")
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
    // The build that can go on is that which was interrupted.
    let gpu = if cfg!(feature = "cudnn") { "cudnn" } else { "cuda" };
    for (line, ranks, expected) in [
        ("", 1, String::new()),
        ("--data hub", 1, " --features hub".to_owned()),
        ("--gpu", 1, format!(" --features {gpu}")),
        ("--data hub", 2, " --features mpi,hub".to_owned()),
    ] {
        assert_eq!(features(&parse(line)?, ranks), expected);
    }
    Ok(())
}
