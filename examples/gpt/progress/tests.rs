use std::time::Duration;

use super::*;
use crate::common::testing::{assert_plain, parse};

fn history() -> Steps {
    let mut history = Steps::default();
    for (step, loss) in [2.5f32, 2.0, 1.5, 1.0].into_iter().enumerate() {
        history.add(loss, Duration::from_millis(500), step == 2, 32768.);
    }
    history
}

fn options(arguments: &str) -> Options {
    parse(arguments).expect("good arguments")
}

#[test]
fn a_line_tells_where_training_stands() {
    assert_eq!(
        line(&history(), 500, 100, None),
        "step   4/500  loss 1.750  200 tokens/s  scale 32768  skipped 1\n"
    );
    let text = line(&history(), 500, 100, Some(2.0625));
    assert!(text.contains("loss 1.750  held-out 2.062  200 tokens/s"), "{text}");
    assert_plain(&text);
}

#[test]
fn the_opening_names_what_runs() -> anyhow::Result<()> {
    let corpus = Corpus::shakespeare(128)?;
    for (arguments, chosen, precision) in [
        ("", Precision::Bf16, "bf16, f32 variables under autocast, loss scale none"),
        ("", Precision::F32, "f32, loss scale none"),
        (
            "--master-weights",
            Precision::F16,
            "f16, f16 variables with f32 masters, loss scale dynamic",
        ),
    ] {
        let text = opening(&options(arguments), &corpus, chosen, 818_432);
        assert_plain(&text);
        for part in [
            "model          4 layers of 128, 4 heads, 818,432 parameters\n",
            &format!("precision      {precision}\n"),
            "text           Shakespeare, 62 different characters\n",
            "training       1,000 steps of 12 windows of 128 characters\n",
        ] {
            assert!(text.contains(part), "{part:?} in {text}");
        }
    }
    Ok(())
}

#[test]
fn the_closing_has_the_losses() {
    let outcome = Outcome { interrupted: true, ..crate::report::tests::sample(Precision::F16) };
    let text = closing(&outcome);
    assert_plain(&text);
    for part in [
        "train loss     1.4985\n",
        "held-out loss  1.7485\n",
        "speed          12346 tokens/s\n",
        "steps          500, 2 skipped, scale 16384, then interrupted\n",
    ] {
        assert!(text.contains(part), "{part:?} in {text}");
    }
}

#[test]
fn the_hint_speaks_of_what_was_not_tried() {
    assert!(hint(&options("")).contains("--text FILE"));
    assert!(!hint(&options("--text x")).contains("--text"));
    assert_plain(&hint(&options("")));
}
