//! The vectors of processors with AVX2 or AVX-512.

mod avx2;
mod avx512;
mod products;
mod sets;

pub(in crate::kernels) use avx2::Avx2;
pub(in crate::kernels) use avx512::Avx512;
pub(in crate::kernels) use products::add_products;
pub(in crate::kernels) use sets::Vectors;

/// See [`super`].
macro_rules! with_vectors {
    ($vectors:expr, $V:ident => $body:expr) => {
        match $vectors {
            $crate::kernels::cpu::vector::Vectors::Avx512 => {
                #[allow(dead_code)]
                type $V = $crate::kernels::cpu::vector::Avx512;
                <$V>::run(
                    #[inline(always)]
                    || $body,
                )
            }
            $crate::kernels::cpu::vector::Vectors::Avx2 => {
                #[allow(dead_code)]
                type $V = $crate::kernels::cpu::vector::Avx2;
                <$V>::run(
                    #[inline(always)]
                    || $body,
                )
            }
        }
    };
}
pub(in crate::kernels) use with_vectors;

/// See [`super`]. Only tests compile the body for AVX2.
macro_rules! with_bf16_vectors {
    ($V:ident => $body:expr) => {
        match $crate::kernels::cpu::vector::Vectors::for_bf16() {
            $crate::kernels::cpu::vector::Vectors::Avx2 if cfg!(test) => {
                #[allow(dead_code)]
                type $V = $crate::kernels::cpu::vector::Avx2;
                <$V>::run(
                    #[inline(always)]
                    || $body,
                )
            }
            _ => {
                #[allow(dead_code)]
                type $V = $crate::kernels::cpu::vector::Avx512;
                <$V>::run(
                    #[inline(always)]
                    || $body,
                )
            }
        }
    };
}
pub(in crate::kernels) use with_bf16_vectors;

/// See [`super`].
macro_rules! with_ftz_vectors {
    ($V:ident => $body:expr) => {{
        #[allow(dead_code)]
        type $V = $crate::kernels::cpu::vector::Avx512;
        <$V>::run_ftz(
            #[inline(always)]
            || $body,
        )
    }};
}
pub(in crate::kernels) use with_ftz_vectors;
