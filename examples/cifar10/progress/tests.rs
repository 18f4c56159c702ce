use std::time::Duration;

use super::*;
use crate::{
    common::testing::{assert_plain, parse},
    synthetic,
};

/// A history of two epochs of four steps, one of them skipped.
fn history() -> History {
    let mut history = History::default();
    for (step, loss) in [2.5f32, 2.0, 1.5, 1.0, 0.75, 0.5, 0.25, 0.125].into_iter().enumerate() {
        history.steps.add(loss, Duration::from_millis(500), step == 2, 32768.);
        if step % 4 == 3 {
            history.epoch(4, 0.25 * step as f64 / 2.);
        }
    }
    history
}

fn options(arguments: &str) -> Options {
    parse(arguments).expect("good arguments")
}

#[test]
fn an_epoch_is_one_line_about_its_own_steps() -> anyhow::Result<()> {
    let schedule = Schedule::new(&options("--epochs 12 --batch-size 10"), 40)?;
    let line = epoch_line(&history(), &schedule, 10);
    let expected = "epoch  2/12  test 87.50 %  loss 0.406  20 images/s  scale 32768  skipped 1\n";
    assert_eq!(line, expected);
    Ok(())
}

#[test]
fn a_run_that_has_ended_says_that_it_measures_nothing() {
    assert_eq!(of_ended(&options("")), "");
    let line = of_ended(&options("--profile --trace --precision f16 --seed 3"));
    let says = "f16, seed 3 had ended: --profile and --trace need a new run, whose --out has another folder\n";
    assert_eq!(line, says);
}

#[test]
fn the_opening_names_what_runs() -> anyhow::Result<()> {
    let data = synthetic::dataset(1300, 30, 0);
    for (arguments, precision) in [
        ("", "bf16, f32 variables under autocast, loss scale none"),
        ("--precision f32", "f32, loss scale none"),
        (
            "--precision f16 --master-weights",
            "f16, f16 variables with f32 masters, loss scale dynamic",
        ),
    ] {
        let options = options(arguments);
        let schedule = Schedule::new(&options, data.train.len())?;
        let text = opening(&options, &data, &schedule, 272_474);
        assert_plain(&text);
        assert!(text.contains("model          resnet20, 272,474 parameters\n"), "{text}");
        assert!(text.contains(&format!("precision      {precision}\n")), "{text}");
        assert!(text.contains("synthetic images, 1,300 to train on, 30 to test with\n"), "{text}");
        assert!(text.contains(" steps of 128 images, "), "{text}");
    }
    Ok(())
}

#[test]
fn the_opening_says_which_of_epochs_and_steps_ends_the_run() -> anyhow::Result<()> {
    let data = synthetic::dataset(8, 2, 0);
    for (arguments, training) in [
        ("--steps 1 --batch-size 1", "1 step of 1 image, 1 epoch\n"),
        ("--steps 9 --batch-size 4", "9 steps of 4 images, 5 epochs\n"),
        ("--steps 9 --batch-size 4 --epochs 5", "9 steps of 4 images, 5 epochs\n"),
        (
            "--steps 9 --batch-size 4 --epochs 2",
            "4 steps of 4 images, 2 epochs\n               --epochs ends it before the 9 steps of --steps\n",
        ),
    ] {
        let options = options(arguments);
        let text = opening(&options, &data, &Schedule::new(&options, 8)?, 272_474);
        assert_plain(&text);
        assert!(text.ends_with(&format!("training       {training}\n")), "{text}");
    }
    Ok(())
}

#[test]
fn the_closing_tells_accuracy_by_class() {
    let report = crate::report::tests::sample();
    let names = synthetic::dataset(1, 1, 0).classes;
    let text = closing(&report, &names);
    assert_plain(&text);
    for part in [
        "test accuracy  62.50 %\n",
        "diverged       NaN for 21 test images; lower --lr\n",
        "median step    62.5 ms\n",
        "speed          250 images/s\n",
        "peak memory    123.00 MiB\n",
        "steps          216, 4 skipped, then interrupted\n",
        "\ndisc         0  ring        10  square ",
        "dots       100\n",
    ] {
        assert!(text.contains(part), "{part:?} in {text}");
    }
}

#[test]
fn the_opening_of_a_comparison_names_every_precision() -> anyhow::Result<()> {
    let data = synthetic::dataset(130, 3, 0);
    let options = options("--compare f32,f16 --master-weights --seed 3 --seeds 2");
    let schedule = Schedule::new(&options, data.train.len())?;
    let text = opening(&options, &data, &schedule, 272_474);
    assert_plain(&text);
    let precisions = "precision      f32, loss scale none
               f16, f16 variables with f32 masters, loss scale dynamic
device ";
    assert!(text.contains(precisions), "{text}");
    assert!(text.ends_with("runs           4, seeds 3 to 4\n\n"), "{text}");
    Ok(())
}

#[test]
fn the_hint_tells_of_what_was_not_tried() {
    assert!(hint(&options("--precision f32")).contains("--compare f32,bf16,f16"));
    assert!(!hint(&options("--compare f32,bf16")).contains("--compare"));
    assert!(hint(&options("")).contains("--out DIR"));
    assert!(!hint(&options("--out x")).contains("--out"));
    assert!(hint(&options("")).contains("--data DIR"));
    assert!(!hint(&options("--data x")).contains("--data"));
    assert_plain(&hint(&options("")));
}

#[test]
fn the_page_is_named_from_here() -> anyhow::Result<()> {
    let inside = std::env::current_dir()?.join("runs").join("index.html");
    assert_eq!(page(&inside), "\nA page with pictures: runs/index.html\n");
    let outside = std::env::temp_dir().join("index.html");
    assert_eq!(page(&outside), format!("\nA page with pictures: {}\n", outside.display()));
    Ok(())
}

#[test]
fn the_time_that_remains_is_that_of_the_steps_left() {
    let after = |seconds, done, left| remaining(Duration::from_secs(seconds), done, left);
    assert_eq!(after(10, 0, 100), "", "nothing to go by");
    assert_eq!(after(10, 100, 0), "");
    assert_eq!(after(10, 100, 25), "  3 s left");
    assert_eq!(after(10, 2, 12), "  1 min 0 s left");
    assert_eq!(after(100, 10, 77), "  12 min 50 s left");
    assert_eq!(after(100, 1, 76), "  2 h 6 min left");
}
