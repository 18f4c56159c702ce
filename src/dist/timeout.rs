//! How long a call waits for its peers.

use std::time::Duration;

use crate::error::{DistError, Result};

/// The environment variable, in seconds.
const VARIABLE: &str = "CANDLE_AMP_DIST_TIMEOUT";

/// PyTorch's for gloo.
const DEFAULT: Duration = Duration::from_secs(30 * 60);

/// The time that the environment sets, or 30 minutes.
pub(super) fn timeout() -> Result<Duration> {
    parse(std::env::var(VARIABLE).ok().as_deref())
}

fn parse(text: Option<&str>) -> Result<Duration> {
    let Some(text) = text else { return Ok(DEFAULT) };
    let seconds = text.trim().parse().ok().filter(|seconds: &f64| *seconds > 0.0);
    match seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()) {
        Some(duration) => Ok(duration),
        None => Err(DistError::Start {
            reason: format!("{VARIABLE} is `{text}`, expected seconds above 0, such as 1800"),
        }
        .into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_sets_seconds_and_nonsense_is_an_error() {
        assert_eq!(parse(None).unwrap(), DEFAULT);
        assert_eq!(parse(Some("2.5")).unwrap(), Duration::from_millis(2500));
        for wrong in ["", "0", "-1", "NaN", "inf", "5m"] {
            let message = parse(Some(wrong)).unwrap_err().to_string();
            assert!(message.contains(VARIABLE), "{wrong}: {message}");
        }
    }
}
