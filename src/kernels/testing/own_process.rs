//! Tests that need a process of their own.

/// Runs the test `test`, by its whole path, once more in a process of its own with these variables, and fails if that
/// does. `true` in that process. For what another test beside it would disturb, or must not share.
pub(crate) fn in_own_process(test: &str, variables: &[(&str, &str)]) -> bool {
    const MARK: &str = "CANDLE_AMP_TEST_PROCESS";
    if std::env::var(MARK).is_ok_and(|marked| marked == test) {
        return true;
    }
    let program = std::env::current_exe().expect("a test is a program");
    let output = std::process::Command::new(program)
        .args(["--exact", "--nocapture", test])
        .env(MARK, test)
        .envs(variables.iter().copied())
        .output()
        .expect("it runs a second time");
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{test}: {text}");
    false
}
