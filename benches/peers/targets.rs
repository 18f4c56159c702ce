//! What is wanted of a processor, by the instruction sets that the crate uses on it.

use candle_amp::backend::instruction_sets;

/// Ratios to PyTorch's time, or to that of what a name says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Targets {
    /// ResNets in F32, and in BF16.
    pub(crate) resnets: [f64; 2],
    /// Their BF16 over the crate's own F32.
    pub(crate) bf16_over_f32: f64,
    /// Products in F32.
    pub(crate) products: f64,
    /// Steps in F32.
    pub(crate) mlp: f64,
    pub(crate) gpt_block: f64,
}

impl Targets {
    pub(crate) fn of_this_processor() -> Self {
        let sets = instruction_sets();
        Self::of(sets.f32_convolutions, sets.bf16_convolutions)
    }

    /// Without BF16 instructions PyTorch takes several times as long in BF16 as in F32.
    fn of(f32: &str, bf16: &str) -> Self {
        let (resnets, bf16_over_f32, [products, mlp, gpt_block]) = match (f32, bf16) {
            (_, "amx") => ([0.75, 0.65], 0.55, [0.95, 0.80, 0.90]),
            (_, "avx512-bf16") => ([0.80, 0.70], 0.62, [1.00, 1.00, 0.95]),
            ("avx512", _) => ([0.80, 0.25], 0.90, [1.00, 1.00, 0.95]),
            _ => ([0.85, 0.15], 1.00, [1.00, 1.00, 1.00]),
        };
        Self { resnets, bf16_over_f32, products, mlp, gpt_block }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_those_of_the_best_instructions() {
        let all =
            [("avx2", "avx2"), ("avx512", "avx512"), ("avx512", "avx512-bf16"), ("avx512", "amx")];
        let ratios = all.map(|(f32, bf16)| Targets::of(f32, bf16).bf16_over_f32);
        assert_eq!(ratios, [1.00, 0.90, 0.62, 0.55]);
    }
}
