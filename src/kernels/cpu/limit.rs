//! The instruction sets that the environment allows.

use std::env;
use std::fmt;
use std::sync::LazyLock;

/// The variable that names the best one.
pub(crate) const VARIABLE: &str = "CANDLE_AMP_CPU";

/// The best instruction set that may be used; each has those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Limit {
    /// What every processor of the target has.
    Baseline,
    Avx2,
    Avx512,
    Avx512Bf16,
    Amx,
}

impl Limit {
    const ALL: [Self; 5] = [Self::Baseline, Self::Avx2, Self::Avx512, Self::Avx512Bf16, Self::Amx];

    /// [`VARIABLE`]'s, read once; the best there is where it is unset, empty or unknown.
    pub(crate) fn get() -> Self {
        static LIMIT: LazyLock<Limit> = LazyLock::new(|| {
            let best = Limit::Amx;
            let Some(value) = env::var_os(VARIABLE).filter(|value| !value.is_empty()) else {
                return best;
            };
            let value = value.to_string_lossy();
            Limit::parse(&value).unwrap_or_else(|| {
                let known = Limit::ALL.map(Limit::name).join(", ");
                tracing::warn!(
                    target: "candle_amp::backend",
                    "{VARIABLE}={value} is ignored: it is none of {known}",
                );
                best
            })
        });
        *LIMIT
    }

    fn parse(value: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|limit| limit.name().eq_ignore_ascii_case(value.trim()))
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Baseline => "baseline",
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
        for limit in Limit::ALL {
            assert_eq!(
                Limit::parse(&format!(" {} ", limit.to_string().to_uppercase())),
                Some(limit)
            );
        }
        assert!(Limit::ALL.is_sorted());
        assert_eq!(Limit::parse("avx"), None);
    }
}
