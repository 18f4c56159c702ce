//! Names of instruction sets: in the variable that limits them, and in traces.

/// What instruction sets are called.
pub(in crate::kernels) struct Names {
    /// As [`VARIABLE`](crate::kernels::cpu::limit::VARIABLE) has it.
    pub(in crate::kernels) set: &'static str,
    /// As a trace shows it, of each algorithm.
    pub(in crate::kernels) packed: &'static str,
    pub(in crate::kernels) blocked: &'static str,
    pub(in crate::kernels) winograd: &'static str,
    pub(in crate::kernels) large_tiles: &'static str,
    pub(in crate::kernels) few_channels: &'static str,
    pub(in crate::kernels) depthwise: &'static str,
}

/// The [`Names`] of an instruction set.
macro_rules! names {
    ($set:literal) => {
        crate::kernels::cpu::vector::names::Names {
            set: $set,
            packed: concat!("packed, ", $set),
            blocked: concat!("blocked, ", $set),
            winograd: concat!("winograd, ", $set),
            large_tiles: concat!("winograd 4x4, ", $set),
            few_channels: concat!("few channels, ", $set),
            depthwise: concat!("depthwise, ", $set),
        }
    };
}
#[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
pub(super) use names;
