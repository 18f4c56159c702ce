//! The instruction sets that the environment allows.

use std::env;
use std::fmt;
use std::sync::LazyLock;

/// The variable that names the best one.
pub(crate) const VARIABLE: &str = "CANDLE_AMP_CPU";

/// The best instruction set that may be used; each has those of its target before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Limit {
    /// What every processor of the target has.
    Baseline,
    /// On ARM, where loops use it anyway, also convolutions.
    Neon,
    Avx2,
    Avx512,
    Avx512Bf16,
    Amx,
}

impl Limit {
    /// Those that processors of this target may have, the best one last.
    const ALL: &[Self] = if cfg!(target_arch = "x86_64") {
        &[Self::Baseline, Self::Avx2, Self::Avx512, Self::Avx512Bf16, Self::Amx]
    } else if cfg!(target_arch = "aarch64") {
        &[Self::Baseline, Self::Neon]
    } else {
        &[Self::Baseline]
    };
    pub(crate) const BEST: Self = Self::ALL[Self::ALL.len() - 1];

    /// [`VARIABLE`]'s, read once; the best there is where it is unset, empty or unknown.
    pub(crate) fn get() -> Self {
        static LIMIT: LazyLock<Limit> = LazyLock::new(|| {
            let Some(value) = env::var_os(VARIABLE).filter(|value| !value.is_empty()) else {
                return Limit::BEST;
            };
            let value = value.to_string_lossy();
            Limit::parse(&value).unwrap_or_else(|| {
                let known: Vec<_> = Limit::ALL.iter().map(|limit| limit.name()).collect();
                let known = known.join(", ");
                tracing::warn!(
                    target: "candle_amp::backend",
                    "{VARIABLE}={value} is ignored: it is none of {known}",
                );
                Limit::BEST
            })
        });
        *LIMIT
    }

    fn parse(value: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|limit| limit.name().eq_ignore_ascii_case(value.trim()))
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Baseline => "baseline",
            Self::Neon => "neon",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512-bf16",
            Self::Amx => "amx",
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::Limit;

    #[test]
    fn every_name_is_read_back() {
        for &limit in Limit::ALL {
            assert_eq!(
                Limit::parse(&format!(" {} ", limit.to_string().to_uppercase())),
                Some(limit)
            );
        }
        assert!(Limit::ALL.is_sorted());
        assert_eq!(Limit::parse("avx"), None);
        let [x86, arm] = [cfg!(target_arch = "x86_64"), cfg!(target_arch = "aarch64")];
        for (name, known) in [("baseline", true), ("avx2", x86), ("amx", x86), ("neon", arm)] {
            assert_eq!(Limit::parse(name).is_some(), known, "{name}");
        }
    }
}
