//! The devices that the kernels' tests run on.

use candle_core::Device;

/// The GPUs there are: none without the feature `cuda`, or the first. `REQUIRE_CUDA=1` makes it a
/// failure that there is none.
pub(crate) fn gpus() -> Vec<Device> {
    match Device::new_cuda(0) {
        Ok(gpu) => vec![gpu],
        Err(error) if std::env::var("REQUIRE_CUDA").is_ok_and(|set| set == "1") => {
            panic!("REQUIRE_CUDA=1, and there is no CUDA device: {error}")
        }
        Err(_) => Vec::new(),
    }
}

/// The CPU, and [`gpus`].
pub(crate) fn devices() -> Vec<Device> {
    [vec![Device::Cpu], gpus()].concat()
}
