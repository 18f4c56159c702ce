use candle_amp::random;
use clap::Parser;

use super::*;

/// The report of a short training with `arguments`.
fn train(name: &str, arguments: &str) -> Result<serde_json::Value> {
    let _fork = random::fork_rng_guard();
    let file = format!("candle-amp-{}-{name}.json", std::process::id());
    let path = std::env::temp_dir().join(file);
    let fixed = ["cifar10", "--smoke", "--report"].map(Into::into);
    let arguments = arguments.split_whitespace().map(Into::into);
    let options = fixed.into_iter().chain([path.clone().into_os_string()]).chain(arguments);
    run(&Options::parse_from(options))?;
    let report = serde_json::from_slice(&std::fs::read(&path)?)?;
    std::fs::remove_file(&path)?;
    Ok(report)
}

#[test]
fn one_loop_trains_in_every_precision() -> Result<()> {
    // Norms, 672 parameters, stay in F32.
    let (single, half) = (4 * 78_042, 2 * (78_042 + 672));
    for (arguments, weight_bytes, scale) in [
        ("--precision f32", single, 1.),
        ("--precision bf16", single, 1.),
        ("--precision bf16 --master-weights", half, 1.),
        ("--precision f16", single, 65536.),
        ("--precision f16 --master-weights --loss-scale 512", half, 512.),
    ] {
        let report =
            train("every", &format!("--model resnet8 --steps 2 --batch-size 4 {arguments}"))?;
        assert_eq!(report["steps"], 2, "{arguments}");
        assert_eq!(report["skipped_steps"], 0, "{arguments}");
        assert_eq!(report["weight_bytes"], weight_bytes, "{arguments}");
        assert_eq!(report["final_scale"], scale, "{arguments}");
        assert_eq!(report["interrupted"], false, "{arguments}");
        let loss = report["final_loss"].as_f64().unwrap_or(f64::NAN);
        assert!((1.5..4.).contains(&loss), "{arguments}: {loss}");
    }
    Ok(())
}

#[test]
fn a_seed_gives_the_same_losses_again() -> Result<()> {
    let losses = |seed: u64| {
        let report = train("seed", &format!("--model mlp --steps 3 --seed {seed}"))?;
        anyhow::Ok(report["losses"].clone())
    };
    assert_eq!(losses(5)?, losses(5)?);
    assert_ne!(losses(5)?, losses(6)?);
    Ok(())
}

#[test]
fn a_seed_gives_nearly_the_same_losses_with_channels_last() -> Result<()> {
    for (precision, tolerance) in [("f32", 1e-4), ("bf16", 0.05)] {
        let loss = |order: &str| {
            let arguments = "--model resnet8 --steps 2 --batch-size 4 --seed 3";
            let arguments = format!("{arguments} --precision {precision} {order}");
            Ok::<_, anyhow::Error>(train("order", &arguments)?["final_loss"].as_f64())
        };
        let (Some(first), Some(last)) = (loss("")?, loss("--channels-last")?) else {
            anyhow::bail!("no losses in {precision}")
        };
        assert!((first - last).abs() < tolerance, "{precision}: {first} and {last}");
    }
    Ok(())
}

#[test]
fn a_step_that_overflows_is_skipped_and_halves_the_scale() -> Result<()> {
    let report = train("overflow", "--model mlp --precision f16 --init-scale 16777216 --steps 3")?;
    assert_eq!(report["skipped_steps"], 3);
    assert_eq!(report["final_scale"], 2097152.);
    Ok(())
}

#[test]
fn a_comparison_reports_every_run_and_a_summary_of_each_precision() -> Result<()> {
    let report =
        train("compare", "--model mlp --lr 0.001 --compare f32,bf16 --seeds 2 --seed 5 --steps 3")?;
    let runs = report["runs"].as_array().map_or(&[][..], Vec::as_slice);
    let names: Vec<_> =
        runs.iter().map(|run| (run["precision"].as_str(), run["seed"].as_u64())).collect();
    let (full, half) = (Some("f32"), Some("bf16"));
    assert_eq!(names, [(full, Some(5)), (half, Some(5)), (full, Some(6)), (half, Some(6))]);
    let loss = |run: usize| runs[run]["final_loss"].as_f64().unwrap_or(f64::NAN);
    assert!((loss(0) - loss(1)).abs() < 0.05, "one seed: {} and {}", loss(0), loss(1));
    assert_ne!(loss(0), loss(2), "two seeds");
    for (index, precision) in ["f32", "bf16"].into_iter().enumerate() {
        let summary = &report["summary"][index];
        assert_eq!(summary["precision"], precision);
        assert_eq!(summary["seeds"], serde_json::json!([5, 6]));
        assert_eq!(summary["steps"], 6);
        assert!(summary["epoch_seconds"]["standard_deviation"].is_number(), "{summary}");
    }

    let alone = train("alone", "--model mlp --lr 0.001 --precision f32 --seed 5 --steps 3")?;
    assert_eq!(alone["losses"], runs[0]["losses"], "a comparison trains as a run alone does");
    Ok(())
}

#[test]
fn a_report_in_markdown_is_a_table() -> Result<()> {
    let _fork = random::fork_rng_guard();
    let file = format!("candle-amp-{}-table.md", std::process::id());
    let path = std::env::temp_dir().join(file);
    let fixed =
        ["cifar10", "--smoke", "--model", "mlp", "--steps", "1", "--report"].map(Into::into);
    run(&Options::parse_from(fixed.into_iter().chain([path.clone().into_os_string()])))?;
    let text = std::fs::read_to_string(&path)?;
    std::fs::remove_file(&path)?;
    assert!(text.contains("\n| | bf16 |\n|---|--:|\n| seeds | 1 |\n"), "{text}");
    Ok(())
}
