//! Passes that read operands where they lie: images as one row, of a single tap, and the gradient of wgrad.

use half::bf16;

use super::*;
use crate::kernels::conv::algorithm::Algorithm;
use crate::kernels::cuda::PassKind;
use crate::kernels::gemm::micro::InstructionSet;

/// Images, output channels, kernel, geometry: rows of images that are not whole tiles, parts of one row, groups, and blocks
/// of output channels that are not whole.
const SIZES: [([usize; 4], usize, usize, [usize; 4]); 14] = [
    ([3, 8, 5, 5], 17, 1, [1, 0, 1, 1]),
    ([37, 8, 8, 8], 16, 1, [1, 0, 1, 1]),
    ([2, 32, 7, 10], 40, 1, [1, 0, 1, 2]),
    ([2, 24, 40, 34], 20, 1, [1, 0, 1, 1]),
    ([1, 8, 1, 2_100], 5, 1, [1, 0, 1, 1]),
    ([2, 5, 6, 31], 70, 1, [1, 0, 1, 1]),
    ([1, 136, 24, 26], 9, 1, [1, 0, 1, 1]),
    ([5, 9, 6, 6], 33, 1, [2, 0, 1, 1]),
    ([3, 16, 18, 32], 24, 1, [2, 0, 1, 2]),
    ([3, 5, 9, 16], 20, 3, [2, 1, 1, 1]),
    ([2, 12, 20, 34], 18, 5, [1, 2, 1, 1]),
    ([2, 7, 3, 1_300], 6, 3, [3, 1, 1, 1]),
    // Runs of several images.
    ([70, 5, 6, 6], 20, 1, [2, 0, 1, 1]),
    ([50, 6, 5, 8], 9, 3, [2, 1, 1, 1]),
];

#[test]
fn operands_of_the_type_of_words() -> Result<()> {
    let mut rng = generator(31);
    let of_bf16 = [InstructionSet::Avx512Bf16].into_iter().filter(|isa| isa.is_runnable());
    for (dims, c_out, kernel, [stride, padding, dilation, groups]) in SIZES {
        let weight_dims = [c_out, dims[1] / groups, kernel, kernel];
        let shape = Shape::new(&dims, &weight_dims, geometry(stride, padding, dilation, groups))?;
        for isa in InstructionSet::of_f32().chain(of_bf16.clone()) {
            let dtype = if isa.is_f32() { DType::F32 } else { DType::BF16 };
            let x = random(&mut rng, &dims, dtype);
            let weight = random(&mut rng, &weight_dims, dtype);
            let grad = random(&mut rng, &shape.out_dims(), dtype);
            let bias = random(&mut rng, &[c_out], DType::F32);
            let (xs, ws, gs, bs) = (doubles(&x), doubles(&weight), doubles(&grad), doubles(&bias));
            let [mut y, dx, dw] = plain_loops(&shape, [&xs, &ws, &gs]);
            y.iter_mut().enumerate().for_each(|(i, y)| y.add(bs[i / shape.pixels() % c_out]));
            let sums = tolerant([&y, &dx, &dw], [&xs, &ws, &gs], &shape);
            let [y, dx, dw] = winograd::tolerant_of_large(sums, [&xs, &ws, &gs], &shape, isa);
            let (inputs, what) = ([dtype, DType::F32], format!("{isa:?} {shape:?}"));
            let single = packed::forward::<f32>(&x, &weight, Some(&bias), &shape, isa)?;
            check(&single, &y, &inputs, &what);
            let back = packed::dgrad::<f32>(&grad, &weight, None, &shape, isa)?;
            check(&back, &dx, &inputs, &what);
            if dtype == DType::BF16 {
                let half = packed::forward::<bf16>(&x, &weight, Some(&bias), &shape, isa)?;
                check(&half, &y, &inputs, &what);
            }
            check(&packed::wgrad(&x, &grad, &shape, isa)?, &dw, &inputs, &what);
        }
    }
    Ok(())
}

/// wgrad of a pointwise convolution is a product where packed GEMM cannot read its operands as they lie, or would add up few
/// pixels at a time.
#[test]
fn wgrad_is_a_product_where_it_copies() {
    let of = |dims: [usize; 4], dtype| Tensor::zeros(&dims, dtype, &Device::Cpu).unwrap();
    for (image, c_in, dtype) in [
        ([7, 7], 16, DType::F32),
        ([4, 4], 16, DType::F32),
        ([5, 5], 12, DType::F32),
        ([6, 6], 16, DType::BF16),
        ([5, 5], 16, DType::BF16),
        ([6, 6], 16, DType::F16),
        ([8, 8], 12, DType::F32),
        ([14, 14], 12, DType::BF16),
    ] {
        let dims = [2, c_in, image[0], image[1]];
        let shape = Shape::new(&dims, &[20, c_in, 1, 1], geometry(1, 0, 1, 1)).unwrap();
        let (x, grad) = (of(dims, dtype), of(shape.out_dims(), dtype));
        let algorithm = Algorithm::of(PassKind::Wgrad, [&x, &grad], None, &shape);
        let is_product = matches!(algorithm, Algorithm::Product);
        let isa = InstructionSet::of([&x, &grad]);
        let reads = isa.is_some_and(|isa| {
            let word = if isa.is_f32() { DType::F32 } else { DType::BF16 };
            let whole = (image[0] * image[1]).is_multiple_of(isa.per_word());
            let by_terms = isa.is_f32() && InstructionSet::AmxBf16x3.is_available();
            dtype == word && !isa.is_amx() && !by_terms && whole && c_in == 16 && image != [4, 4]
        });
        let few = image[0] < 8 || (dtype == DType::BF16 && image[0] < 16);
        assert_eq!(is_product, few && !reads, "{isa:?}, {image:?} of {c_in} channels in {dtype:?}");
    }
}
