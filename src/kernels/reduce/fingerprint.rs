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
    same_bits(&cast(exact, rounded.dtype())?, rounded)
}

/// Whether two tensors of one shape and dtype, of any float, have the same bits. Reading from a GPU waits.
pub(crate) fn same_bits(a: &Tensor, b: &Tensor) -> Result<bool> {
    let on_host = |x: &Tensor| x.detach().to_device(&Device::Cpu)?.contiguous();
    let (a, b) = (on_host(a)?, on_host(b)?);
    if a.shape() != b.shape() || a.dtype() != b.dtype() {
        return Ok(false);
    }
    with_element!(a.dtype(), T => {
        let (a, b) = (Elements::<T>::of(&a)?, Elements::<T>::of(&b)?);
        Ok(a.iter().zip(b.iter()).all(|(a, b)| bits(*a) == bits(*b)))
    })
}

#[inline(always)]
fn bits<T: Lane>(x: T) -> u64 {
    x.widened().to_double().to_bits()
}

fn of_chunks<T: Lane>(x: &[T]) -> Vec<u32> {
    let chunks: Vec<&[T]> = x.chunks(CHUNK).collect();
    parallel::map_items(chunks, |chunk: &[T]| {
        let mut sum = 0u32;
        vectorise(
            #[inline(always)]
            || {
                let mut place = 0u32;
                for x in chunk {
                    let bits = bits(*x);
                    // Multiplied by odd numbers and shifted, as hashes are: a sum of the bits alone would be the same for
                    // doubled numbers, and for two other signs.
                    let mut mixed = ((bits >> 32) as u32 ^ place).wrapping_mul(0x85eb_ca6b);
                    mixed ^= mixed >> 15;
                    mixed = (mixed ^ (bits as u32).rotate_left(7)).wrapping_mul(0xc2b2_ae35);
                    mixed ^= mixed >> 13;
                    sum = sum.wrapping_add(mixed.wrapping_mul(0x27d4_eb2f) ^ mixed >> 16);
                    place = place.wrapping_add(0x9e37_79b9);
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

    /// A sum of bits by odd weights cannot tell these apart.
    #[test]
    fn doubled_and_negated_numbers_are_others() {
        for dtype in DTYPES {
            for count in [64, 1024, CHUNK, CHUNK + 64] {
                let x = random(&[count], dtype, 7);
                let constant = Tensor::ones(count, dtype, &Device::Cpu).unwrap();
                for x in [x, constant] {
                    for by in [2.0, 0.25, -1.0] {
                        let other = (&x * by).unwrap();
                        assert_ne!(fingerprint(&other).unwrap(), fingerprint(&x).unwrap());
                        assert!(!same_bits(&other, &x).unwrap() && same_bits(&x, &x).unwrap());
                    }
                    let mut signs = vec![1.0; count];
                    (signs[3], signs[40]) = (-1.0, -1.0);
                    let other = (&x * of(signs, &[count], dtype)).unwrap();
                    assert_ne!(fingerprint(&other).unwrap(), fingerprint(&x).unwrap());
                    assert!(!is_rounded(&other, &x).unwrap() && is_rounded(&x, &x).unwrap());
                }
            }
        }
    }

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
