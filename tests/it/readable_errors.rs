//! What an error says where backtraces are asked for.

use candle_amp::{GradScaler, ops};
use candle_core::{DType, Device, Result, Tensor};

use crate::util::random;

/// Run by the next test, in a process whose errors of candle's have backtraces.
#[test]
fn errors_are_a_few_lines() -> Result<()> {
    let x = random(11, (3, 5), DType::F32);
    let errors = [
        ops::matmul(&x, &x).unwrap_err(),
        ops::cross_entropy(&x, &Tensor::new(&[9i64, 0, 0], &Device::Cpu)?).unwrap_err(),
        ops::conv2d(&random(1, (1, 3, 4, 4), DType::F32), &x, None, Default::default())
            .unwrap_err(),
        ops::conv2d(
            &random(2, (1, 1, 2, 2), DType::F32),
            &random(3, (1, 1, 3, 3), DType::F32),
            None,
            Default::default(),
        )
        .unwrap_err(),
        ops::embedding(&Tensor::new(&[9i64], &Device::Cpu)?, &x).unwrap_err(),
        candle_core::Error::from(GradScaler::default().update().unwrap_err()),
    ];
    for error in errors {
        let message = error.to_string();
        assert!(!message.contains(".rs:") && message.lines().count() < 4, "{message}");
    }
    Ok(())
}

#[test]
fn errors_have_no_frames_where_backtraces_are_asked_for() {
    let mut tests = std::process::Command::new(std::env::current_exe().expect("this program"));
    let output = tests
        .args(["--exact", "readable_errors::errors_are_a_few_lines"])
        .env("RUST_BACKTRACE", "1")
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}
