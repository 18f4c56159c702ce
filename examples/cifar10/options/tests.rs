use candle_core::DType;

use super::*;
use crate::common::testing;

fn parse(arguments: &str) -> Result<Options, clap::Error> {
    testing::parse(arguments)
}

fn refusal(arguments: &str) -> String {
    testing::refusal::<Options>(arguments)
}

#[test]
fn numbers_out_of_range_are_refused_by_name() {
    for (arguments, message) in [
        ("--batch-size 0", "'0' for '--batch-size <N>': expected a whole number above zero"),
        ("--epochs 0", "'0' for '--epochs <N>': expected a whole number above zero"),
        ("--steps x", "'x' for '--steps <N>': expected a whole number above zero"),
        (
            "--train-images 0",
            "'0' for '--train-images <N>': expected a whole number from 1 to 1000000",
        ),
        ("--lr -0.1", "'-0.1' for '--lr <X>': expected a number above zero"),
        ("--lr 0", "'0' for '--lr <X>': expected a number above zero"),
        ("--lr inf", "'inf' for '--lr <X>': expected a number above zero"),
        ("--lr NaN", "'NaN' for '--lr <X>': expected a number above zero"),
        ("--init-scale 0", "'0' for '--init-scale <X>': expected a number above zero"),
        ("--momentum 1", "'1' for '--momentum <X>': expected a number from 0 to below 1"),
        ("--ema 1", "'1' for '--ema <X>': expected a number from 0 to below 1"),
        ("--shift 17", "'17' for '--shift <N>': expected a whole number from 0 to 16"),
        ("--shift -1", "'-1' for '--shift <N>': expected a whole number from 0 to 16"),
        ("--bias-lr 0", "'0' for '--bias-lr <X>': expected a number above zero"),
        ("--weight-decay -1", "'-1' for '--weight-decay <X>': expected a number from 0 to below 1"),
    ] {
        assert_eq!(refusal(arguments), format!("error: invalid value {message}"));
    }
    for scale in ["0", "-8", "inf", "NaN", "1e39", "often", ""] {
        let message = format!(
            "error: invalid value '{scale}' for '--loss-scale <SCALE>': expected dynamic, none or \
             a number above zero"
        );
        let error = Options::try_parse_from(["cifar10", &format!("--loss-scale={scale}")]);
        let text = error.expect_err("bad scale").to_string();
        assert!(text.starts_with(&message) || scale.is_empty(), "{text}");
    }
}

#[test]
fn options_that_do_not_go_together_are_usage_errors() -> anyhow::Result<()> {
    let error = parse("--precision f32 --master-weights")?.check().expect_err("nothing to master");
    assert!(error.is::<Usage>());
    assert!(error.to_string().starts_with("--master-weights needs --precision f16 or bf16"));
    if !candle_core::utils::cuda_is_available() {
        let error = parse("--gpu")?.check().expect_err("no CUDA");
        assert!(error.is::<Usage>());
        assert!(error.to_string().starts_with("--gpu needs a build with CUDA"));
    }
    let error = parse("--model mlp --channels-last")?.check().expect_err("no channels");
    assert!(error.to_string().starts_with("--channels-last needs a network with convolutions"));
    let error = parse("--compare bf16,f32,bf16")?.check().expect_err("one twice");
    assert!(error.is::<Usage>());
    assert_eq!(error.to_string(), "--compare has bf16 twice");
    let error = parse("--compare f32 --master-weights")?.check().expect_err("nothing to master");
    assert!(error.to_string().starts_with("--master-weights needs --precision f16 or bf16"));
    let error = parse("--nesterov --momentum 0")?.check().expect_err("nothing to look along");
    assert!(error.is::<Usage>() && error.to_string() == "--nesterov needs --momentum above 0");
    for arguments in [
        "",
        "--compare f32,bf16",
        "--precision f16 --loss-scale none",
        "--precision f16 --loss-scale 8",
    ] {
        let error =
            parse(&format!("{arguments} --init-scale 8"))?.check().expect_err("no such scale");
        assert!(error.is::<Usage>(), "{error}");
        assert!(
            error.to_string().starts_with("--init-scale needs a dynamic loss scale"),
            "{error}"
        );
    }
    for arguments in ["--precision f16", "--compare bf16,f16", "--loss-scale dynamic"] {
        parse(&format!("{arguments} --init-scale 8"))?.check()?;
    }
    let download = parse("--data hub")?.check();
    match cfg!(feature = "hub") {
        true => download?,
        false => {
            let error = download.expect_err("cannot download");
            assert!(error.is::<Usage>());
            assert!(error.to_string().starts_with("--data hub needs a build that can download"));
        }
    }
    parse("--compare f32,bf16 --master-weights")?.check()?;
    parse("--precision bf16 --master-weights")?.check()
}

#[test]
fn a_comparison_is_refused_where_it_is_misspelt() {
    assert_eq!(
        refusal("--compare f32 --precision bf16"),
        "error: the argument '--compare <LIST>' cannot be used with '--precision <PRECISION>'"
    );
    let error = "error: invalid value 'f64' for '--compare <LIST>'";
    assert_eq!(refusal("--compare f32,f64"), error);
    let error =
        "error: invalid value '0' for '--seeds <N>': expected a whole number from 1 to 1000000";
    assert_eq!(refusal("--seeds 0"), error);
}

#[test]
fn precisions_alternate_and_every_one_gets_the_same_seeds() -> anyhow::Result<()> {
    let runs = |arguments| {
        let options = parse(arguments)?;
        let each = options.runs().map(|run| (run.precision, run.seed, run.master_weights));
        anyhow::Ok(each.collect::<Vec<_>>())
    };
    let (full, half) = (Precision::F32, Precision::F16);
    assert_eq!(
        runs("--compare f32,f16 --seed 7 --seeds 2 --master-weights")?,
        [(full, 7, false), (half, 7, true), (full, 8, false), (half, 8, true)]
    );
    assert_eq!(runs("--seeds 2")?, [(Precision::Bf16, 0, false), (Precision::Bf16, 1, false)]);
    assert!(!parse("--seeds 1")?.compares() && parse("--compare f16")?.compares());
    Ok(())
}

#[test]
fn an_unknown_model_is_refused_with_the_nearest_names() {
    for (name, near) in
        [("resnet19", "resnet18, resnet8, "), ("ResNet20", "resnet20, "), ("vgg", "vgg")]
    {
        let line = refusal(&format!("--model {name}"));
        let start = "error: invalid value";
        let start = format!("{start} '{name}' for '--model <NAME>': the nearest are {near}");
        assert!(line.starts_with(&start), "{line}");
        assert!(line.ends_with("; --list-models has all") && line.len() < 130, "{line}");
    }
}

#[test]
fn only_f16_scales_its_loss_by_default() -> anyhow::Result<()> {
    for (arguments, expected) in [
        ("", LossScale::None),
        ("--precision f32", LossScale::None),
        ("--precision f16", LossScale::Dynamic),
        ("--precision f16 --loss-scale none", LossScale::None),
        ("--precision bf16 --loss-scale dynamic", LossScale::Dynamic),
        ("--loss-scale 1.5e3", LossScale::Constant(1500.)),
        ("--loss-scale 1e30", LossScale::Constant(1e30)),
    ] {
        let scale = parse(arguments)?.loss_scale();
        assert_eq!(scale, expected, "{arguments}");
        assert_eq!(scale.to_string().parse(), Ok(expected));
    }
    Ok(())
}

#[test]
fn only_master_weights_store_the_model_in_half() -> anyhow::Result<()> {
    for (arguments, dtype) in [
        ("--precision bf16", DType::F32),
        ("--precision bf16 --master-weights", DType::BF16),
        ("--precision f16 --master-weights", DType::F16),
    ] {
        let options = parse(arguments)?;
        assert_eq!(options.precision.storage(options.master_weights), dtype, "{arguments}");
    }
    Ok(())
}

#[test]
fn smoke_shrinks_what_was_not_asked_for() -> anyhow::Result<()> {
    let sizes = |arguments| {
        let options = parse(arguments)?;
        anyhow::Ok((options.batch_size(), options.synthetic_images()))
    };
    assert_eq!(sizes("")?, (128, (5_000, 1_000)));
    assert_eq!(sizes("--smoke")?, (16, (64, 40)));
    assert_eq!(sizes("--smoke --batch-size 4 --train-images 20")?, (4, (20, 40)));
    Ok(())
}

#[test]
fn help_has_headings_and_fits_its_width() {
    use clap::CommandFactory;
    let mut command = Options::command();
    for arg in command.get_arguments() {
        assert!(arg.get_help_heading().is_some() && arg.get_help().is_some(), "{arg}");
    }
    let help = command.render_help().to_string();
    for line in help.lines() {
        assert!(line.chars().count() <= 100, "{line}");
    }
    for part in
        ["\nData:\n", "\nTraining:\n", "\nExamples, ", "--resume runs/a", "\nExit codes: 0 "]
    {
        assert!(help.contains(part), "{part:?} in {help}");
    }
}

#[test]
fn the_examples_of_help_are_good_options() -> anyhow::Result<()> {
    let lines = MORE.lines().skip(1).take_while(|line| !line.is_empty());
    let examples: Vec<_> = lines.filter_map(|line| line.trim().split("   ").next()).collect();
    assert_eq!(examples.len(), 8);
    for example in examples {
        parse(example)?.check()?;
    }
    Ok(())
}

#[test]
fn a_profile_in_one_file_is_refused_for_several_runs() -> anyhow::Result<()> {
    let error = parse("--compare f32,f16 --profile=x")?.check().expect_err("several runs");
    let message = "--profile=FILE has room for one run: leave --compare and --seeds out";
    assert!(error.is::<Usage>() && error.to_string() == message, "{error}");
    parse("--compare f32,f16 --profile --trace")?.check()?;
    parse("--compare f32,f16 --profile --seeds 2 --out x")?.check()?;
    let file = |arguments: &str| anyhow::Ok(parse(arguments)?.profile_file());
    assert_eq!(file("--profile")?, None);
    assert_eq!(file("--profile=a.json --out x")?, Some("a.json".into()));
    assert_eq!(file("--profile --out x")?, Some("x/bf16-seed-0/profile.json".into()));
    Ok(())
}
