//! Whether a tensor has been written: a number that changes with its elements.

use candle_core::{Device, Result, Tensor};

use crate::kernels::cast;
use crate::kernels::cpu::dtype::{Elements, Real, with_element};
use crate::kernels::cpu::lane::Lane;
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::simd::vectorise;

/// Elements whose sum is one task's.
const CHUNK: usize = 1 << 16;

/// A checksum of the tensor's bits: two tensors that differ have the same one by a chance of 2^-32. `None` for a tensor that is
/// not on a CPU, as reading it would wait.
pub(crate) fn fingerprint(x: &Tensor) -> Result<Option<u64>> {
    if !x.device().is_cpu() || !x.is_contiguous() || x.elem_count() == 0 {
        return Ok(None);
    }
    let chunks = with_element!(x.dtype(), T => of_chunks(&Elements::<T>::of(x)?));
    Ok(Some(chunks.into_iter().fold(0, |all, chunk| {
        (all ^ u64::from(chunk)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    })))
}

/// Whether `rounded` is `exact` in its own dtype, on any device: reading from a GPU waits.
pub(crate) fn is_rounded(rounded: &Tensor, exact: &Tensor) -> Result<bool> {
    let expected = cast(exact, rounded.dtype())?.to_device(&Device::Cpu)?;
    let found = rounded.detach().to_device(&Device::Cpu)?.contiguous()?;
    Ok(fingerprint(&expected)? == fingerprint(&found)?)
}

fn of_chunks<T: Lane>(x: &[T]) -> Vec<u32> {
    let chunks: Vec<&[T]> = x.chunks(CHUNK).collect();
    parallel::map_items(chunks, |chunk: &[T]| {
        let mut sum = 0u32;
        vectorise(
            #[inline(always)]
            || {
                let mut weight = 1u32;
                for x in chunk {
                    let bits = x.widened().to_double().to_bits();
                    let bits = (bits >> 32) as u32 ^ (bits as u32).rotate_left(16);
                    sum = sum.wrapping_add(bits.wrapping_mul(weight));
                    weight = weight.wrapping_add(2); // odd, so that no bit is lost
                }
            },
        );
        sum
    })
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;
    use crate::kernels::elementwise::testing::{DTYPES, of, random, values};

    #[test]
    fn the_last_bit_of_any_element_counts() {
        for dtype in DTYPES {
            let count = CHUNK + 700;
            let before = values(&random(&[count], dtype, 1));
            let of_values =
                |x: &[f64]| fingerprint(&of(x.to_vec(), &[count], dtype)).unwrap().unwrap();
            let same = of_values(&before);
            assert_eq!(of_values(&before), same);
            for at in [0, 1, 31, 500, CHUNK - 1, CHUNK, count - 1] {
                let mut after = before.clone();
                after[at] *= 1.0 + 2.0 * crate::kernels::elementwise::testing::epsilon(dtype);
                assert_ne!(of_values(&after), same, "{dtype:?} {at}");
                after[at] = -before[at];
                assert_ne!(of_values(&after), same, "{dtype:?} {at}, the sign");
                after.swap(at, (at + 64) % count);
                assert_ne!(of_values(&after), same, "{dtype:?} {at}, another place");
            }
        }
        assert_eq!(
            fingerprint(&Tensor::zeros(0, DType::F32, &Device::Cpu).unwrap()).unwrap(),
            None
        );
    }
}
