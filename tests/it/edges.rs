//! Numbers far from zero, and sizes far from each other.

use candle_amp::ops::{self, channels_last};
use candle_core::{DType, Result, Tensor, Var};
use candle_nn::{Conv1dConfig, Conv2dConfig, ConvTranspose1dConfig, ConvTranspose2dConfig};

use crate::util::{assert_close, assert_same, random};

/// The gradients of `f` of `inputs`, weighted.
fn gradients(
    inputs: &[Tensor],
    f: impl Fn(&[Tensor]) -> Result<Tensor>,
) -> Result<(Tensor, Vec<Tensor>)> {
    let vars = inputs.iter().map(Var::from_tensor).collect::<Result<Vec<_>>>()?;
    let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let y = f(&tensors)?;
    let weights = random(99, y.shape().clone(), DType::F32).to_dtype(y.dtype())?;
    let gradients = ops::sum(&ops::mul(&y, &weights)?)?.backward()?;
    let all = vars.iter().map(|var| gradients.get(var).unwrap().clone()).collect();
    Ok((y.detach(), all))
}

/// Whole steps of 2^-4, so that scores are exact at every offset.
fn steps(seed: u64, dims: &[usize]) -> Result<Tensor> {
    (random(seed, dims, DType::F32) * 32.0)?.round()? / 16.0
}

/// A column of the keys moves all scores of a query, and neither the probabilities nor the gradients of anything else.
#[test]
fn an_offset_of_attentions_scores_does_not_matter() -> Result<()> {
    for (b, h, h_kv, t, s, d) in [(2, 4, 2, 7, 9, 5), (1, 2, 1, 67, 70, 16)] {
        let (q, k) = (steps(1, &[b, h, t, d])?, steps(2, &[b, h_kv, s, d])?);
        let v = random(3, (b, h_kv, s, 3), DType::F32);
        let q = Tensor::cat(&[&q, &q.narrow(3, 0, 1)?.ones_like()?], 3)?;
        for offset in [0f32, 100.0, 10_000.0, -10_000.0] {
            let moved = Tensor::full(2.0 * offset, (b, h_kv, s, 1), k.device())?;
            let k = Tensor::cat(&[&k, &moved], 3)?;
            for causal in [false, true] {
                let run = |dtype: DType| {
                    let inputs = [&q, &k, &v].map(|x| x.to_dtype(dtype).unwrap());
                    gradients(&inputs, |t| ops::sdpa(&t[0], &t[1], &t[2], None, causal, 0.5))
                };
                let ((ours, mine), (exact, expected)) = (run(DType::F32)?, run(DType::F64)?);
                let what = format!("{t} queries, scores + {offset}");
                assert_close(&what, &ours, &exact, DType::F32, 16.0);
                for (i, (mine, expected)) in mine.iter().zip(&expected).enumerate() {
                    // The last column of the queries' gradient has terms as large as the offset.
                    let kept = if i == 0 { d } else { mine.dim(3)? };
                    let (mine, expected) = (mine.narrow(3, 0, kept)?, expected.narrow(3, 0, kept)?);
                    assert_close(&format!("{what}, {i}"), &mine, &expected, DType::F32, 32.0);
                }
            }
        }
    }
    Ok(())
}

/// A stride beyond the image leaves one position, whatever it is: as fast and as exact as one of the image's size.
#[test]
fn a_stride_beyond_the_image_is_as_good_as_its_size() -> Result<()> {
    let (x, w) = (random(1, (2, 3, 8, 7), DType::F32), random(2, (4, 3, 3, 2), DType::F32));
    let (x1, w1) = (random(3, (2, 3, 9), DType::F32), random(4, (4, 3, 5), DType::F32));
    let (last, last1) = (x.permute((0, 2, 3, 1))?.contiguous()?, x1.transpose(1, 2)?.contiguous()?);
    let run = |stride: usize| -> Result<Vec<(Tensor, Vec<Tensor>)>> {
        let two = Conv2dConfig { stride, ..Default::default() };
        let one = Conv1dConfig { stride, dilation: 2, ..Default::default() };
        Ok(vec![
            gradients(&[x.clone(), w.clone()], |t| ops::conv2d(&t[0], &t[1], None, two))?,
            gradients(&[x1.clone(), w1.clone()], |t| ops::conv1d(&t[0], &t[1], None, one))?,
            gradients(&[last.clone(), w.clone()], |t| {
                channels_last::conv2d(&t[0], &t[1], None, two)
            })?,
            gradients(&[last1.clone(), w1.clone()], |t| {
                channels_last::conv1d(&t[0], &t[1], None, one)
            })?,
        ])
    };
    let back = |stride: usize| -> Result<Vec<(Tensor, Vec<Tensor>)>> {
        // Of one pixel, the output of a transposed convolution has the size of the kernel at every stride.
        let two = ConvTranspose2dConfig { stride, ..Default::default() };
        let one = ConvTranspose1dConfig { stride, padding: 3, dilation: 7, ..Default::default() };
        let (pixel, kernel) =
            (random(5, (2, 4, 1, 1), DType::F32), random(6, (4, 3, 3, 2), DType::F32));
        let (point, taps) = (random(7, (1, 1, 2), DType::F32), random(8, (2, 2, 2), DType::F32));
        let pixel_last = pixel.reshape((2, 1, 1, 4))?;
        Ok(vec![
            gradients(&[pixel, kernel.clone()], |t| {
                ops::conv_transpose2d(&t[0], &t[1], None, two)
            })?,
            gradients(&[pixel_last, kernel], |t| {
                channels_last::conv_transpose2d(&t[0], &t[1], None, two)
            })?,
            gradients(&[point, taps], |t| {
                channels_last::conv_transpose1d(&t[0], &t[1], None, one)
            })?,
        ])
    };
    let (expected, expected_back) = (run(9)?, back(9)?);
    for stride in [2, 3, 10, 1_000, 100_000, i32::MAX as usize] {
        // Of larger images, small strides leave several positions.
        let forward = if stride > 9 { run(stride)? } else { vec![] };
        let both = forward.iter().zip(&expected).map(|pair| ("forward", pair));
        let back = back(stride)?;
        let back = back.iter().zip(&expected_back).map(|pair| ("transposed", pair));
        for (i, (which, (ours, expected))) in both.chain(back).enumerate() {
            let what = format!("{i}, {which}, stride {stride}");
            assert_same(&what, &ours.0, &expected.0);
            for (ours, expected) in ours.1.iter().zip(&expected.1) {
                assert_close(&what, ours, expected, DType::F32, 8.0);
            }
        }
    }
    Ok(())
}
