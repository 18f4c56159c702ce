//! The instructions, by name: the standard library has none that are stable.
//!
//! All are unsafe: tiles are configured, 16 rows `stride` bytes apart can be read or written, and no other
//! code uses the registers.

macro_rules! load {
    ($register:literal, $at:expr, $stride:expr) => {
        std::arch::asm!(
            concat!("tileloadd ", $register, ", [{at} + {stride}]"),
            at = in(reg) $at,
            stride = in(reg) $stride,
            options(nostack, readonly),
        )
    };
}

macro_rules! store {
    ($register:literal, $at:expr, $stride:expr) => {
        std::arch::asm!(
            concat!("tilestored [{at} + {stride}], ", $register),
            at = in(reg) $at,
            stride = in(reg) $stride,
            options(nostack),
        )
    };
}

/// Pairs of BF16 of `$rows` times those of `$columns`, added to `$sum`.
macro_rules! product {
    ($sum:literal, $rows:literal, $columns:literal) => {
        std::arch::asm!(
            concat!("tdpbf16ps ", $sum, ", ", $rows, ", ", $columns),
            options(nostack, nomem),
        )
    };
}

/// Zeros in the registers of sums.
macro_rules! zero {
    () => {
        std::arch::asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            options(nostack, nomem),
        )
    };
}

pub(super) use {load, product, store, zero};
