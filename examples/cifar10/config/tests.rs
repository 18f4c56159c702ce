use std::path::PathBuf;

use super::*;
use crate::{common::testing::parse as plain, testing::Folder};

/// What a command line and `--config` with this file say.
fn with_file(file: &str, line: &str) -> Result<Options> {
    let folder = Folder::new()?;
    let path = folder.path("options.toml");
    fs::write(&path, file)?;
    let line = format!("cifar10 --config {} {line}", path.display());
    super::parse(line.split_whitespace().map(Into::into))
}

/// What is wrong with a file, after its name.
fn wrong(file: &str, line: &str) -> String {
    let error = with_file(file, line).expect_err("bad options");
    assert!(error.is::<Usage>(), "{error:?}");
    let text = error.to_string();
    assert!(!text.contains('\n'), "{text}");
    text.split_once("options.toml: ").map_or(text.clone(), |(_, rest)| rest.to_owned())
}

fn same(options: &Options, line: &str) -> Result<()> {
    assert_eq!(table(options)?, table(&plain::<Options>(line)?)?, "{line}");
    Ok(())
}

#[test]
fn every_option_is_written_and_read_again() -> Result<()> {
    let folder = Folder::new()?;
    let mut seen: Vec<String> = Vec::new();
    for line in [
        "--data /no/such --model vgg11 --precision f16 --seeds 3 --master-weights --channels-last \
         --loss-scale 512 --init-scale 1.5e-5 --epochs 3 --steps 7 --batch-size 4 --lr 0.3 \
         --momentum 0.123456789 --weight-decay 0 --seed 18446744073709551615 --gpu \
         --report x.json --train-images 70 --smoke --schedule triangle --nesterov --bias-lr 64 \
         --label-smoothing 0.2 --ema 0.95 --shift 2 --alternate-flips --flip-test",
        "--compare f32,bf16",
        "",
    ] {
        let options = plain::<Options>(line)?;
        let path = folder.path("options.toml");
        save(&options, &path)?;
        let again = format!("cifar10 --config {}", path.display());
        let again = super::parse(again.split_whitespace().map(Into::into))?;
        same(&again, line)?;
        assert_eq!(again.config, Some(path));
        seen.extend(table(&options)?.keys().cloned());
    }
    for option in Options::command().get_arguments().filter_map(Arg::get_long) {
        let is_written = seen.iter().any(|key| key == option);
        assert_ne!(is_written, NOT_IN_FILES.contains(&option), "--{option}");
    }
    Ok(())
}

#[test]
fn the_command_line_wins() -> Result<()> {
    let file = "lr = 0.5\nsmoke = true\nmodel = \"mlp\"\nepochs = 2\n";
    same(&with_file(file, "")?, "--lr 0.5 --smoke --model mlp --epochs 2")?;
    same(&with_file(file, "--lr 0.1 --epochs 3")?, "--smoke --model mlp --epochs 3")?;
    same(&with_file(file, "--smoke=false")?, "--lr 0.5 --model mlp --epochs 2")?;
    same(&with_file("smoke = false", "--smoke")?, "--smoke")?;
    // Also over what it does not go with, in either direction.
    let compare = "compare = [\"f32\", \"f16\"]";
    same(&with_file(compare, "")?, "--compare f32,f16")?;
    same(&with_file(compare, "--precision f32")?, "--precision f32")?;
    same(&with_file("precision = \"f32\"", "--compare f32,bf16")?, "--compare f32,bf16")
}

#[test]
fn an_error_in_a_file_is_reported_with_its_name() {
    for (file, message) in [
        ("weight-deacy = 1", "no option is called weight-deacy; the nearest is weight-decay"),
        ("epoch = 1", "no option is called epoch; the nearest is epochs"),
        ("batch_size = 1", "no option is called batch_size; the nearest is batch-size"),
        ("lr = -1", "invalid value '-1' for '--lr <X>': expected a number above zero"),
        ("smoke = 3", "invalid value '3' for '--smoke[=<SMOKE>]'"),
        ("resume = \"x\"", "resume belongs on the command line"),
        ("lr = {}", "lr is of type table, expected a text, number or yes or no"),
        ("lr = 1\nlr = 2", "line 2: duplicate key"),
        ("lr = 1\n\nepochs 2", "line 3: "),
        ("lr =", "line 1: lr has no value"),
        ("epochs = 2\nlr = # later\nmodel = \"mlp\"\n", "line 2: lr has no value"),
        (
            "precision = \"f64\"",
            "invalid value 'f64' for '--precision <PRECISION>' [possible values: ",
        ),
    ] {
        let text = wrong(file, "");
        assert!(text.starts_with(message), "{text}");
    }
    // What the command line replaces must be right all the same.
    assert!(wrong("lr = -1", "--lr 1").starts_with("invalid value '-1'"));
    let error = super::parse(["cifar10", "--config", "/no/such.toml"].map(Into::into));
    let text = error.expect_err("no file").to_string();
    assert!(text.starts_with("--config /no/such.toml: "), "{text}");
}

#[test]
fn recipes_are_files_of_options() -> Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/cifar10/recipes");
    let mut models = Vec::new();
    for file in fs::read_dir(&folder)? {
        let line = format!("cifar10 --compare f32,bf16 --config {}", file?.path().display());
        let options = super::parse(line.split_whitespace().map(Into::into))?;
        options.check()?;
        assert_ne!(options.recipe, plain::<Options>("")?.recipe, "{line}");
        models.push(options.model.to_string());
    }
    models.sort();
    assert_eq!(models, ["airbench", "resnet18", "resnet20"]);
    Ok(())
}

#[test]
fn a_download_is_written_as_a_download() -> Result<()> {
    let folder = Folder::new()?;
    let path = folder.path("options.toml");
    save(&plain::<Options>("--data hub")?, &path)?;
    assert_eq!(fs::read_to_string(&path)?.parse::<Table>()?["data"].as_str(), Some("hub"));
    Ok(())
}

#[test]
fn a_relative_folder_of_data_is_written_as_an_absolute_one() -> Result<()> {
    let folder = Folder::new()?;
    let path = folder.path("options.toml");
    save(&plain::<Options>("--data examples")?, &path)?;
    let data = fs::read_to_string(&path)?.parse::<Table>()?["data"].clone();
    let data = PathBuf::from(data.as_str().unwrap_or_default());
    assert!(data.is_absolute() && data.ends_with("examples"), "{data:?}");
    Ok(())
}

#[test]
fn help_shows_switches_without_values_and_errors_are_claps() {
    let help = super::parse(["cifar10", "--help"].map(Into::into)).expect_err("help");
    let help = help.downcast_ref::<clap::Error>().map(ToString::to_string).unwrap_or_default();
    assert!(help.contains("--smoke ") && !help.contains("--smoke[="), "{help}");
    let error = super::parse(["cifar10", "--nothing"].map(Into::into)).expect_err("no option");
    assert_eq!(error.downcast_ref::<clap::Error>().map(clap::Error::exit_code), Some(2));
}

#[test]
fn ranks_compare_every_option_but_where_files_are() -> Result<()> {
    let facts = super::facts(&plain("--lr 0.25 --out runs/a")?)?;
    assert_eq!((facts["--lr"].as_str(), facts["--out"].as_str()), ("0.25", "runs/a"));
    for arg in Options::command().get_arguments() {
        let name = format!("--{}", arg.get_long().unwrap_or_default());
        let apart = ["--data", "--report", "--compare", "--config", "--help"];
        // Without a default, and not given.
        let unset = ["--loss-scale", "--epochs", "--steps", "--batch-size", "--train-images"];
        let skipped = [&apart[..], &unset].concat().contains(&name.as_str());
        assert!(skipped || facts.contains_key(&name), "{name} is not compared");
    }
    let facts = super::facts(&plain("--steps 3 --compare f32,bf16")?)?;
    assert_eq!((facts["--steps"].as_str(), facts["--compare"].as_str()), ("3", "f32,bf16"));
    Ok(())
}
