use super::*;

/// An outcome in which no two numbers are alike.
pub(crate) fn sample(precision: Precision) -> Outcome {
    let (train_loss, skipped, scale) = match precision {
        Precision::F32 => (1.5, 0, 1.),
        Precision::Bf16 => (1.5015, 0, 1.),
        Precision::F16 => (1.4985, 2, 16384.),
    };
    Outcome {
        precision,
        train_loss,
        held_out_loss: train_loss + 0.25,
        seconds: 61.25,
        tokens_per_second: 12_345.6,
        steps: 500,
        skipped,
        scale,
        interrupted: false,
    }
}

fn report(edit: impl Fn(&mut Outcome)) -> Report {
    let mut report = Report::default();
    for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
        let mut outcome = sample(precision);
        edit(&mut outcome);
        report.add(outcome);
    }
    report
}

#[test]
fn the_table_compares_with_f32() {
    let text = report(|_| {}).table();
    let expected = "\
precision  train loss   off f32  held-out loss   off f32       time  skipped
f32            1.5000                   1.7500               61.2 s        0
bf16           1.5015   +0.10 %         1.7515   +0.09 %     61.2 s        0
f16            1.4985   -0.10 %         1.7485   -0.09 %     61.2 s        2
";
    assert_eq!(text, expected);
}

#[test]
fn a_half_too_far_off_is_an_error() {
    report(|_| {}).judge().expect("close enough");
    let wrong = |loss: fn(&mut Outcome) -> &mut f64, factor| {
        let report = report(|outcome| {
            if outcome.precision == Precision::F16 {
                *loss(outcome) *= factor;
            }
        });
        report.judge().expect_err("too far").to_string()
    };
    let text = wrong(|outcome| &mut outcome.train_loss, 1.03);
    assert_eq!(text, "the training loss of f16 is +2.90 % off that of f32, more than 2 %");
    let text = wrong(|outcome| &mut outcome.held_out_loss, 0.97);
    assert_eq!(text, "the held-out loss of f16 is -3.08 % off that of f32, more than 2 %");
    let text = wrong(|outcome| &mut outcome.train_loss, f64::NAN);
    assert!(text.starts_with("the training loss of f16 is NaN"), "{text}");
    // No number is within 2 % of a loss that is none.
    let nan = report(|outcome| outcome.train_loss = f64::NAN);
    nan.judge().expect_err("f32 has failed too");
}

#[test]
fn a_report_cut_short_is_an_error() {
    let mut short = Report::default();
    short.add(sample(Precision::F32));
    assert!(short.table().contains("f32            1.5000 "));
    assert!(short.judge().expect_err("one of three").to_string().starts_with("interrupted"));
    let cut = report(|outcome| outcome.interrupted = outcome.precision == Precision::F16);
    assert!(cut.judge().expect_err("cut short").to_string().starts_with("interrupted"));
}
