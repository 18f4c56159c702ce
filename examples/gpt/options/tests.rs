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
        ("--steps 0", "'0' for '--steps <N>': expected a whole number from 1 to 1000000"),
        ("--batch-size x", "'x' for '--batch-size <N>': expected a whole number from 1 to 1000000"),
        ("--context 0", "'0' for '--context <N>': expected a whole number from 1 to 1000000"),
        ("--heads -1", "'-1' for '--heads <N>': expected a whole number from 1 to 1000000"),
        ("--lr 0", "'0' for '--lr <X>': expected a number above zero"),
        ("--lr NaN", "'NaN' for '--lr <X>': expected a number above zero"),
        ("--clip inf", "'inf' for '--clip <X>': expected a number above zero"),
        ("--init-scale 1e39", "'1e39' for '--init-scale <X>': expected a number above zero"),
        ("--temperature 0", "'0' for '--temperature <X>': expected a number above zero"),
        ("--weight-decay -1", "'-1' for '--weight-decay <X>': expected a number not below zero"),
    ] {
        assert_eq!(refusal(arguments), format!("error: invalid value {message}"));
    }
    assert!(refusal("--report --precision f16").contains("'--report' cannot be used with"));
    assert!(refusal("--precision f8").contains("invalid value 'f8'"));
}

#[test]
fn options_that_do_not_go_together_are_usage_errors() -> anyhow::Result<()> {
    let usage = |arguments: &str| {
        let error = parse(arguments).expect("it parses").check().expect_err("it does not fit");
        assert!(error.is::<Usage>(), "{error}");
        error.to_string()
    };
    let text = usage("--width 100 --heads 3");
    assert_eq!(text, "--width is 100, not a multiple of the 3 of --heads");
    assert!(usage("--precision f32 --master-weights").starts_with("--master-weights needs"));
    if !candle_core::utils::cuda_is_available() {
        assert!(usage("--gpu").starts_with("--gpu needs a build with CUDA"));
    }
    assert!(usage("--init-scale 8").starts_with("--init-scale needs a dynamic loss scale"));
    parse("--precision f16 --init-scale 8")?.check()?;
    parse("--report --master-weights --init-scale 8")?.check()?;
    parse("--weight-decay 0 --sample 0")?.check()
}

#[test]
fn a_report_is_of_every_precision() -> anyhow::Result<()> {
    use Precision::{Bf16, F16, F32};
    assert_eq!(parse("")?.precisions(), [Bf16]);
    assert_eq!(parse("--precision f16")?.precisions(), [F16]);
    assert_eq!(parse("--report")?.precisions(), [F32, Bf16, F16]);
    for (precision, storage) in [(F32, DType::F32), (Bf16, DType::BF16), (F16, DType::F16)] {
        assert_eq!(precision.storage(false), DType::F32);
        assert_eq!(precision.storage(true), storage);
    }
    Ok(())
}

#[test]
fn smoke_shrinks_what_was_not_asked_for() -> anyhow::Result<()> {
    let sizes = |arguments| {
        let options = parse(arguments)?;
        let Size { context, layers, heads, width } = options.size();
        anyhow::Ok((options.steps(), options.tokens(), [context, layers, heads, width]))
    };
    assert_eq!(sizes("")?, (1000, 12 * 128, [128, 4, 4, 128]));
    assert_eq!(sizes("--report")?, (500, 12 * 128, [128, 4, 4, 128]));
    assert_eq!(sizes("--smoke")?, (6, 2 * 32, [32, 2, 4, 32]));
    let chosen = "--smoke --steps 9 --batch-size 3 --context 20 --layers 1 --heads 2 --width 48";
    assert_eq!(sizes(chosen)?, (9, 60, [20, 1, 2, 48]));
    Ok(())
}

#[test]
fn ranks_compare_every_option_but_where_the_text_is() -> Result<()> {
    let facts = parse("--lr 0.25")?.facts()?;
    assert_eq!(facts["--lr"], "0.25");
    for arg in <Options as clap::CommandFactory>::command().get_arguments() {
        let name = format!("--{}", arg.get_long().unwrap_or_default());
        let skipped = ["--text", "--help"].contains(&name.as_str());
        assert!(skipped || facts.contains_key(&name), "{name} is not compared");
    }
    Ok(())
}

#[test]
fn ranks_divide_the_batch_and_train_on_the_host() {
    let check = |ranks, batch_size, gpu| {
        let checked = crate::common::options::check_ranks(ranks, batch_size, gpu, ranks > 1);
        checked.err().map(|error| error.to_string())
    };
    assert_eq!([check(1, 7, true), check(2, 8, false)], [None, None]);
    let message = "--batch-size is 16, of all ranks together, and 3 ranks do not divide it";
    assert_eq!(check(3, 16, false).as_deref(), Some(message));
    let message = "--gpu trains on one device: start one process, without mpirun";
    assert_eq!(check(2, 8, true).as_deref(), Some(message));
    let error = crate::common::options::check_ranks(1, 8, false, true).expect_err("one rank");
    assert!(error.is::<Usage>() && error.to_string().starts_with("--sharded divides"), "{error}");
}
