use super::*;
use crate::report::tests::sample;

/// A complete run of 1000 images in batches of 100, at `speed` images a second.
fn run(precision: &str, seed: u64, speed: f64, test_accuracy: f64) -> Report {
    Report {
        precision: precision.to_owned(),
        seed,
        train_images: 1050,
        batch_size: 100,
        images_per_second: speed,
        test_accuracy,
        steps: 30,
        skipped_steps: seed as usize,
        weight_bytes: if precision == "f32" { 4 << 20 } else { 2 << 20 },
        peak_rss_bytes: Some((100 + seed) << 20),
        final_scale: if precision == "f32" { 1. } else { 32768. * (1 + seed) as f32 },
        interrupted: false,
        test_images_of_nan: 0,
        ..sample()
    }
}

/// Two seeds in two precisions, all that were planned.
fn comparison() -> Comparison {
    let mut comparison = Comparison::new(4);
    comparison.add(run("f32", 0, 400., 0.90));
    comparison.add(run("f16", 0, 500., 0.91));
    comparison.add(run("f32", 1, 500., 0.92));
    comparison.add(run("f16", 1, 625., 0.91));
    comparison
}

#[test]
fn a_spread_is_the_sample_standard_deviation_of_two_or_more() {
    let spread = Spread::of(&[2., 4., 9.]); // (9 + 1 + 16) / 2 = 13
    assert_eq!(spread, Spread { mean: 5., standard_deviation: Some(13f64.sqrt()) });
    assert_eq!(Spread::of(&[7.]), Spread { mean: 7., standard_deviation: None });
}

#[test]
fn a_duration_has_a_unit_that_suits_its_mean() {
    let alone = |mean| Spread { mean, standard_deviation: None }.duration();
    for (seconds, text) in [
        (0.0854, "85 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (9.99, "9.99 s"),
        (9.996, "10.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (91.6, "1 min 32 s"),
        (f64::INFINITY, "-"),
    ] {
        assert_eq!(alone(seconds), text, "{seconds}");
    }
    let spread = |mean, deviation| Spread { mean, standard_deviation: Some(deviation) }.duration();
    assert_eq!(spread(0.25, 0.0123), "250 ± 12 ms");
    assert_eq!(spread(2.5, 0.5), "2.50 ± 0.50 s");
    assert_eq!(spread(92., 1.6), "1 min 32 s ± 2 s");
}

#[test]
fn a_run_that_diverged_is_named() {
    let mut comparison = Comparison::new(1);
    comparison.add(Report { test_images_of_nan: 1234, ..run("f16", 3, 500., 0.1) });
    let note = "f16, seed 3: NaN for 1,234 test images. Training has diverged; lower --lr.";
    assert_eq!(comparison.notes(), [note]);
}

#[test]
fn the_text_has_a_column_for_each_precision() {
    // Epochs of 1000 images: 2.5 and 2 s, 2 and 1.6 s.
    let expected = "                            f32             f16
seeds                         2               2
time an epoch     2.25 ± 0.35 s   1.80 ± 0.28 s
images a second        450 ± 71        562 ± 88
weights                4.00 MiB        2.00 MiB
peak memory          101.00 MiB      101.00 MiB
test accuracy    91.00 ± 1.41 %  91.00 ± 0.00 %
skipped steps           1 of 60         1 of 60
final scale                   1  32768 to 65536
± is the standard deviation over seeds.
";
    assert_eq!(comparison().text(), expected);
}

#[test]
fn a_run_alone_has_no_spread_and_an_unknown_peak_is_a_dash() {
    let text = Comparison::of(Report { peak_rss_bytes: None, ..run("bf16", 0, 2., 0.5) }).text();
    assert_eq!(text.lines().count(), 9, "{text}");
    assert!(!text.contains('±'), "{text}");
    for part in ["8 min 20 s\n", " 2.0\n", "50.00 %\n", "peak memory               -\n"] {
        assert!(text.contains(part), "{part:?} in {text}");
    }

    let mut comparison = comparison();
    comparison.runs[0].peak_rss_bytes = None;
    let summaries = comparison.summaries();
    assert_eq!(summaries[0].peak_rss_bytes, None, "one of two is unknown");
    assert_eq!(summaries[1].peak_rss_bytes, Some(101 << 20));
}

#[test]
fn markdown_says_what_was_trained() {
    let mut comparison = Comparison::new(2);
    comparison.add(run("f32", 0, 400., 0.9));
    comparison.add(run("f16", 0, 500., 0.91));
    let expected =
        "resnet8 on synthetic images: 1,050 training images, batches of 100, 3 epochs, cpu, \
                    F32 masters of 16-bit weights.

| | f32 | f16 |
|---|--:|--:|
| seeds | 1 | 1 |
| time an epoch | 2.50 s | 2.00 s |
| images a second | 400 | 500 |
| weights | 4.00 MiB | 2.00 MiB |
| peak memory | 100.00 MiB | 100.00 MiB |
| test accuracy | 90.00 % | 91.00 % |
| skipped steps | 0 of 30 | 0 of 30 |
| final scale | 1 | 32768 |
";
    assert_eq!(comparison.markdown(), expected);
}

#[test]
fn a_run_cut_short_is_kept_but_not_in_the_table() {
    let mut comparison = Comparison::new(4);
    comparison.add(Report { interrupted: true, ..run("f32", 0, 1., 0.1) });
    assert_eq!(comparison.text(), "Cut short: 0 of 4 runs are complete.\n");
    assert!(comparison.markdown().ends_with("weights.\n\nCut short: 0 of 4 runs are complete.\n"));

    let mut comparison = super::tests::comparison();
    comparison.runs[3].interrupted = true;
    let text = comparison.text();
    assert!(text.contains("seeds                         2           1\n"), "{text}");
    assert!(text.ends_with("Cut short: 3 of 4 runs are complete.\n"), "{text}");
    let json = comparison.json();
    assert_eq!(json["runs"][3]["interrupted"], true);
    assert_eq!(json["summary"][1]["seeds"], serde_json::json!([0]));
}

#[test]
fn json_has_the_runs_and_their_summary() {
    let json = comparison().json();
    assert_eq!(json["planned_runs"], 4);
    assert_eq!(json["runs"].as_array().map(Vec::len), Some(4));
    assert_eq!(json["runs"][1]["precision"], "f16");
    let full = &json["summary"][0];
    assert_eq!(full["precision"], "f32");
    assert_eq!(full["epoch_seconds"]["mean"], 2.25);
    assert_eq!(full["images_per_second"]["mean"], 450.);
    assert_eq!(full["images_per_second"]["standard_deviation"], 5000f64.sqrt());
    assert_eq!(full["weight_bytes"], 4 << 20);
    assert_eq!((&full["steps"], &full["skipped_steps"]), (&60.into(), &1.into()));
    assert_eq!(json["summary"][1]["final_scales"], serde_json::json!([32768., 65536.]));
}

#[test]
fn only_md_is_markdown() {
    for (path, markdown) in [("a.md", true), ("a.MD", true), ("a.json", false), ("md", false)] {
        assert_eq!(is_markdown(Path::new(path)), markdown, "{path}");
    }
}
