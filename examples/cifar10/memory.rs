//! The memory of this process, where Linux tells.

use std::{fs, hint::black_box, thread::sleep, time::Duration};

/// The most memory this process ever held, or held since `reset_peak_rss`.
pub(crate) fn peak_rss_bytes() -> Option<u64> {
    parse_peak_rss(&fs::read_to_string("/proc/self/status").ok()?)
}

/// Makes `peak_rss_bytes` start again at the memory held now, and returns that. `None` where the
/// system refuses.
pub(crate) fn reset_peak_rss() -> Option<u64> {
    fs::write("/proc/self/clear_refs", "5").ok()?;
    peak_rss_bytes()
}

/// Makes the allocator return free memory, so that the peak of the next run is not that of the last.
pub(crate) fn return_free_memory() {
    // It returns what has been free for a second, when a block of memory comes or goes.
    sleep(Duration::from_millis(1200));
    drop(black_box(vec![1u8; 8 << 20]));
}

/// Returns true if `peak` is that of a run that began with `held`. What was held may be free memory
/// that the run did not need, so it must be less than half.
pub(crate) fn is_of_run(peak: u64, held: Option<u64>) -> bool {
    held.is_some_and(|held| held < peak / 2)
}

fn parse_peak_rss(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peak_memory_is_read_from_the_status_of_the_process() {
        let status = "VmPeak:\t  999 kB\nVmHWM:\t    1234 kB\nVmRSS:\t 55 kB\n";
        assert_eq!(parse_peak_rss(status), Some(1234 * 1024));
        assert_eq!(parse_peak_rss("VmHWM:\t many kB\n"), None);
        assert_eq!(parse_peak_rss(""), None);
    }

    #[test]
    fn a_reset_forgets_memory_that_was_returned() -> anyhow::Result<()> {
        const ALONE: &str = "CANDLE_AMP_ALONE";
        if std::env::var_os(ALONE).is_none() {
            // In a process without the memory of other tests.
            let test = "memory::tests::a_reset_forgets_memory_that_was_returned";
            let mut alone = std::process::Command::new(std::env::current_exe()?);
            let output = alone.args([test, "--exact"]).env(ALONE, "1").output()?;
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && text.contains("1 passed"), "{text}");
            return Ok(());
        }
        if reset_peak_rss().is_none() {
            return Ok(()); // not on this system
        }
        let block = black_box(vec![1u8; 200 << 20]);
        let held = reset_peak_rss().unwrap_or(0) >> 20;
        drop(block);
        return_free_memory();
        let peak = peak_rss_bytes().unwrap_or(0) >> 20;
        // A few pages may be touched between the two readings.
        assert!((held..=held + 1).contains(&peak), "a peak stays: {held} MiB, then {peak} MiB");
        let left = reset_peak_rss().unwrap_or(u64::MAX) >> 20;
        assert!(held >= 200 && left < 100, "{held} MiB, then {left} MiB");
        Ok(())
    }

    #[test]
    fn a_peak_near_what_was_held_before_is_unknown() {
        assert!(is_of_run(100, Some(49)));
        assert!(!is_of_run(100, Some(50)));
        assert!(!is_of_run(100, None));
    }
}
