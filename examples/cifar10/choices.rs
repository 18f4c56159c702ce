//! What the command line lets one choose, and how it is spelt.

use std::{fmt, str::FromStr};

use serde::{Serialize, Serializer};

use crate::common::options::positive;

/// How the loss is scaled before the backward pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum LossScale {
    Dynamic,
    None,
    Constant(f32),
}

impl FromStr for LossScale {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "dynamic" => Ok(Self::Dynamic),
            "none" => Ok(Self::None),
            number => positive(number)
                .map(|scale| Self::Constant(scale as f32))
                .map_err(|_| "expected dynamic, none or a number above zero".to_owned()),
        }
    }
}

impl fmt::Display for LossScale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dynamic => f.write_str("dynamic"),
            Self::None => f.write_str("none"),
            Self::Constant(scale) if (1e-3..1e7).contains(scale) => scale.fmt(f),
            Self::Constant(scale) => write!(f, "{scale:e}"),
        }
    }
}

impl Serialize for LossScale {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
