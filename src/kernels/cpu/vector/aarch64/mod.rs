//! The vectors of ARM's processors of 64 bits, which all have NEON.

mod neon;
mod sets;

pub(in crate::kernels) use neon::Neon;
pub(in crate::kernels) use sets::Vectors;

/// See [`super`].
macro_rules! with_vectors {
    ($vectors:expr, $V:ident => $body:expr) => {
        match $vectors {
            $crate::kernels::cpu::vector::Vectors::Neon => {
                #[allow(dead_code)]
                type $V = $crate::kernels::cpu::vector::Neon;
                <$V>::run(
                    #[inline(always)]
                    || $body,
                )
            }
        }
    };
}
pub(in crate::kernels) use with_vectors;

/// See [`super`].
macro_rules! with_bf16_vectors {
    ($V:ident => $body:expr) => {
        $crate::kernels::cpu::vector::with_vectors!(
            $crate::kernels::cpu::vector::Vectors::for_bf16(), $V => $body
        )
    };
}
pub(in crate::kernels) use {with_bf16_vectors, with_bf16_vectors as with_ftz_vectors};
