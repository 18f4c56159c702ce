//! What the command line lets one choose, and how it is spelt.

use std::{fmt, str::FromStr};

use clap::ValueEnum;

use crate::common::options::positive;

/// Which network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Architecture {
    /// 8 layers, 78 thousand parameters
    Resnet8,
    /// 20 layers, 272 thousand parameters
    Resnet20,
    /// 18 layers, 11.2 million parameters
    Resnet18,
    /// 50 layers with bottlenecks, 23.5 million parameters
    Resnet50,
    /// Two hidden layers of 512, 1.8 million parameters
    Mlp,
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Resnet8 => "resnet8",
            Self::Resnet20 => "resnet20",
            Self::Resnet18 => "resnet18",
            Self::Resnet50 => "resnet50",
            Self::Mlp => "mlp",
        })
    }
}

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
