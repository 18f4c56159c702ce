//! `CANDLE_AMP_CPU` names the best instruction set that may be used, and results hardly depend on it.

use std::process::Command;

use candle_amp::{Autocast, backend, ops};
use candle_core::{DType, Result, Var};
use candle_nn::Conv2dConfig;

use crate::util::random;

const SETS: [&str; 5] = ["baseline", "avx2", "avx512", "avx512-bf16", "amx"];

/// What a process says that may use `best`: its instruction sets, and a convolution's algorithms and results.
fn elsewhere(best: &str) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "instructions::convolving", "--nocapture"]);
    let output = command.env("CANDLE_AMP_CPU", best).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
#[ignore = "the other half of the tests below, which run it"]
fn convolving() -> Result<()> {
    println!("\n{}", backend::instruction_sets());
    let w = Var::from_tensor(&random(1, (6, 5, 3, 3), DType::F32))?;
    let x = Var::from_tensor(&random(2, (4, 5, 16, 16), DType::F32))?;
    let config = Conv2dConfig { padding: 1, ..Default::default() };
    let (y, trace) = Autocast::disabled().trace(|| ops::conv2d(&x, &w, None, config));
    let y = y?;
    println!("algorithm {}", trace.rows()[0].algorithm.unwrap_or("none"));
    let gradients = y.sqr()?.sum_all()?.backward()?;
    let [dx, dw] = [&x, &w].map(|var| gradients.get(var).expect("a gradient").clone());
    for tensor in [y, dx, dw] {
        let values = tensor.flatten_all()?.to_vec1::<f32>()?;
        println!("values {values:?}");
    }
    Ok(())
}

/// The tensors that [`convolving`] printed.
fn values(said: &str) -> Vec<Vec<f32>> {
    let lines = said.lines().filter_map(|line| line.strip_prefix("values ["));
    let numbers = |line: &str| {
        let numbers = line.trim_end_matches(']').split(", ");
        numbers.map(|number| number.parse().unwrap()).collect()
    };
    lines.map(numbers).collect()
}

#[test]
fn the_environment_bounds_what_is_chosen() {
    let plain = elsewhere("baseline");
    assert!(
        plain.contains("loops             baseline") && plain.contains("algorithm im2col"),
        "{plain}"
    );
    let expected = values(&plain);
    assert_eq!(expected.len(), 3);
    for (most, best) in SETS.into_iter().enumerate() {
        let said = elsewhere(best);
        for (what, chosen) in said.lines().filter_map(|line| line.split_at_checked(18)) {
            let known = SETS.iter().position(|set| chosen.split_whitespace().next() == Some(*set));
            assert!(known.is_none_or(|set| set <= most), "{best}: {what} {chosen}");
        }
        let actual = values(&said);
        assert_eq!(actual.len(), expected.len());
        for (actual, expected) in actual.into_iter().zip(&expected) {
            assert_eq!(actual.len(), expected.len());
            let largest = expected.iter().fold(0f32, |largest, x| largest.max(x.abs()));
            // Of up to 1024 terms, whose roundings add up like a random walk; Winograd's double them.
            let bound = 64.0 * f32::EPSILON * largest;
            for (actual, expected) in actual.iter().zip(expected) {
                assert!((actual - expected).abs() <= bound, "{best}: {actual} {expected}");
            }
        }
    }
}

#[test]
fn a_set_that_does_not_exist_is_ignored() {
    let [unknown, unset] = ["avx3", ""].map(|best| {
        let said = elsewhere(best);
        let sets = said.lines().skip_while(|line| !line.starts_with("loops ")).take(5);
        // What is measured differs from one process to another.
        sets.map(|line| line.split(" takes ").next().unwrap_or(line).to_owned()).collect::<Vec<_>>()
    });
    assert_eq!(unknown.len(), 5);
    assert!(unknown[0].contains("the best of this processor"), "{unknown:?}");
    assert_eq!(unknown, unset);
}

#[test]
fn the_sets_are_said() {
    let sets = backend::instruction_sets();
    assert!(SETS.contains(&sets.loops) && SETS.contains(&sets.bf16_convolutions), "{sets:?}");
    let shown = sets.to_string();
    assert_eq!(shown.lines().count(), 5, "{shown}");
    assert!(shown.lines().all(|line| line.len() > 32), "every line has a reason: {shown}");
    let lines: Vec<&str> = shown.lines().collect();
    if sets.bf16_products == sets.bf16_convolutions && sets.bf16_products != sets.loops {
        assert_eq!(lines[4][31..], lines[2][31..], "of one set, one reason: {shown}");
    }
}
