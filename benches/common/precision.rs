//! What a workload computes in.

use std::fmt;

use candle_amp::{Autocast, GradScaler, backend::set_allow_tf32};
use candle_core::DType;
use serde::{Deserialize, Serialize};

/// Dtypes, and what training in them needs.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// F32 throughout.
    F32,
    /// F32, but that a GPU may round to TF32 what it multiplies.
    Tf32,
    /// Autocast over F32 variables.
    Bf16,
    /// BF16 variables with F32 masters.
    Bf16Masters,
    /// Autocast over F32 variables, and a dynamic loss scale.
    F16,
}

impl Precision {
    /// The dtype of activations.
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 | Self::Tf32 => DType::F32,
            Self::Bf16 | Self::Bf16Masters => DType::BF16,
            Self::F16 => DType::F16,
        }
    }

    /// The dtype of the variables.
    pub fn storage(self) -> DType {
        if self == Self::Bf16Masters { DType::BF16 } else { DType::F32 }
    }

    /// Disabled in F32. What F32 products may do on a GPU is as this precision has it, from now on.
    pub fn autocast(self) -> Autocast {
        set_allow_tf32(self == Self::Tf32);
        match self {
            Self::F32 | Self::Tf32 => Autocast::disabled(),
            half => Autocast::new(half.dtype()),
        }
    }

    /// Disabled but in F16.
    pub fn scaler(self) -> GradScaler {
        if self == Self::F16 { GradScaler::default() } else { GradScaler::disabled() }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Tf32 => "tf32",
            Self::Bf16 => "bf16",
            Self::Bf16Masters => "bf16 masters",
            Self::F16 => "f16",
        })
    }
}
