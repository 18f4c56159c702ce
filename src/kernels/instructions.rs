//! Which instruction sets the CPU's kernels use, and why.

use std::fmt;

use super::cpu::limit::{Limit, VARIABLE};
use super::cpu::vector::Vectors;
use super::gemm::micro::InstructionSet;

/// The instruction sets that the CPU's kernels use in this process.
///
/// Names are those of the variable `CANDLE_AMP_CPU`: `baseline`, `avx2`, `avx512`, `avx512-bf16` and `amx`, or on ARM
/// `baseline` and `neon`. The baseline is what every processor of the target has; there, and where it says `gemm crate`, that
/// crate computes products with the instructions that it finds itself. Products that are too small or too thin for the
/// set that is named are the `gemm` crate's as well: with `avx2` those of fewer than 128 columns or 2¹⁹ terms in all, and
/// most of those of fewer than 8 rows; with `avx512` most of those without a transposed side too. What is displayed says why
/// each was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct InstructionSets {
    /// Of loops over elements: element by element, norms, optimizers, conversions.
    pub loops: &'static str,
    /// Of convolutions of F32 and F16, summed in F32.
    pub f32_convolutions: &'static str,
    /// Of convolutions of BF16, summed in F32.
    pub bf16_convolutions: &'static str,
    /// Of matrix products of F32 and F16, summed in F32.
    pub f32_products: &'static str,
    /// Of matrix products of BF16, summed in F32.
    pub bf16_products: &'static str,
    bf16_reason: String,
}

/// The instruction sets that the CPU's kernels use in this process. The first call, or the first operator that asks,
/// looks at the processor and the environment, and takes some 100 µs where it has to measure.
///
/// The best are taken: AMX where the system grants it, then AVX-512, then AVX2; on ARM NEON. AVX512-BF16 is measured, as on some
/// processors its instruction takes as long as two of F32. The environment variable `CANDLE_AMP_CPU` names the best
/// that may be taken, so that one machine can run and compare the paths of others; `avx512-bf16` is then taken without
/// measuring. Results differ from set to set by rounding. Set it before the process starts: it is read once.
///
/// # Examples
///
/// ```
/// let sets = candle_amp::backend::instruction_sets();
/// println!("{sets}");
/// assert!(["baseline", "neon", "avx2", "avx512"].contains(&sets.loops));
/// ```
///
/// # References
///
/// PyTorch: `torch.backends.cpu.get_cpu_capability()`, and the environment variable `ATEN_CPU_CAPABILITY`.
pub fn instruction_sets() -> InstructionSets {
    let [f32, bf16] = [InstructionSet::best_for_f32(), InstructionSet::best_for_bf16()];
    let tiles = Some(InstructionSet::AmxBf16x3).filter(|isa| isa.is_available());
    let widened = InstructionSets::in_blocks().unwrap_or(GEMM_CRATE);
    InstructionSets {
        loops: Vectors::widest().map_or(BASELINE, |vectors| vectors.names().set),
        f32_convolutions: f32.map_or(BASELINE, InstructionSet::set),
        bf16_convolutions: bf16.map_or(BASELINE, InstructionSet::set),
        f32_products: tiles.map_or(widened, InstructionSet::set),
        bf16_products: bf16.filter(|isa| isa.is_bf16()).map_or(widened, InstructionSet::set),
        bf16_reason: InstructionSet::bf16_reason(),
    }
}

impl InstructionSets {
    /// Of large products in F32 that are computed in blocks.
    fn in_blocks() -> Option<&'static str> {
        let vectors = Vectors::widest().filter(|vectors| vectors.multiply_in_blocks());
        vectors.map(|vectors| vectors.names().set)
    }
}

const BASELINE: &str = "baseline";
const GEMM_CRATE: &str = "gemm crate";

impl fmt::Display for InstructionSets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limit = Limit::get();
        let why = match limit == Limit::BEST {
            true => "the best of this processor".to_owned(),
            false => format!("the best that {VARIABLE}={limit} allows"),
        };
        let own = format!("its own choice, which {VARIABLE} does not bound");
        let blocked = format!("large ones; {VARIABLE} does not bound the `gemm` crate's others");
        let in_blocks = Self::in_blocks();
        let of_products = |set, why: &String| match set {
            GEMM_CRATE => own.clone(),
            _ if in_blocks == Some(set) => blocked.clone(),
            _ => why.clone(),
        };
        let rows = [
            ("loops", self.loops, why.clone()),
            ("F32 convolutions", self.f32_convolutions, why.clone()),
            ("BF16 convolutions", self.bf16_convolutions, self.bf16_reason.clone()),
            ("F32 products", self.f32_products, of_products(self.f32_products, &why)),
            (
                "BF16 products",
                self.bf16_products,
                of_products(self.bf16_products, &self.bf16_reason),
            ),
        ];
        for (row, (what, set, why)) in rows.iter().enumerate() {
            let end = if row + 1 < rows.len() { "\n" } else { "" };
            write!(f, "{what:<18}{set:<13}{why}{end}")?;
        }
        Ok(())
    }
}
